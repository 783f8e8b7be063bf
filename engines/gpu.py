"""The GPUs of this machine, asked through cuda-python: name, compute capability, memory."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.extras import install


class NoDevice(InputError):
    """There is no GPU here that can be used."""


@dataclass(frozen=True)
class Device:
    """One GPU."""

    index: int
    name: str
    compute_capability: str  # "8.9"
    total_bytes: int


def cuda_runtime() -> Any:
    """The module `cuda.bindings.runtime`; importing it touches no device."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise NoDevice(
            f"a GPU needs the Python package cuda-python ({error}): {install('gpu')}, or for "
            "TensorRT tensorrt or tensorrt-rtx in its place"
        ) from None


def device_info(index: int = 0) -> Device:
    """One GPU; an `InputError` says why there is none."""
    lib = cuda_runtime()
    code, count = lib.cudaGetDeviceCount()
    if code != lib.cudaError_t.cudaSuccess:
        said = error_text(lib, code)
        if code == getattr(lib.cudaError_t, "cudaErrorInsufficientDriver", None):  # or none at all
            said = f"no NVIDIA driver was found, or one too old for this CUDA (nvidia-smi; {said})"
        raise NoDevice(f"no CUDA device: {said}")
    if not 0 <= index < count:
        raise InputError(f"no CUDA device {index}: this machine has {count}, counted from 0")
    code, found = lib.cudaGetDeviceProperties(index)
    if code != lib.cudaError_t.cudaSuccess:
        raise InputError(f"CUDA device {index} does not answer: {error_text(lib, code)}")
    name = bytes(found.name).split(b"\0")[0].decode()
    return Device(index, name, f"{found.major}.{found.minor}", int(found.totalGlobalMem))


def error_text(lib: Any, code: Any) -> str:
    """CUDA's own words for an error."""
    text = lib.cudaGetErrorString(code)[1]
    return text.decode() if isinstance(text, bytes) else str(text)
