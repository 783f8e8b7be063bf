"""Build the custom operators of the `ort-fused` profile into a library that ONNX Runtime loads."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from eagle_chain.engines.errors import InputError

SOURCES = Path(__file__).parent / "kernels"
SOURCE = "library.cu"
SHARED = ("-std=c++17", "-O3", "-shared")


def cache_folder() -> Path:
    """Where libraries of this user are kept: never in a bundle, whose files may be anybody's.

    Raises:
        InputError: The folder is somebody else's, or others may write into it.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "eagle-chain"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise InputError(
            f"{folder}: others may write into it, and compiled kernels are loaded from there; "
            f"run chmod 700 on it, or set XDG_CACHE_HOME to a folder of your own"
        )
    return folder


def source_hash() -> str:
    """SHA-256 over all sources, by name."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build_cuda(folder: Path, compute_capability: str) -> Path:
    """The library for one GPU in `folder`; built with nvcc unless it is there already.

    Args:
        folder: Where libraries are kept.
        compute_capability: "9.0".

    Raises:
        InputError: nvcc is missing or fails.
    """
    architecture = f"sm_{compute_capability.replace('.', '')}"
    target = folder / f"libeagle_chain-{architecture}-{source_hash()[:16]}.so"
    if target.exists():
        return target
    flags = (f"-arch={architecture}", "-Xcompiler", "-fPIC,-fvisibility=hidden")
    compiler = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if compiler is None:
        raise InputError(
            "the profile ort-fused needs nvcc, the compiler of the CUDA toolkit, once: install the "
            "toolkit, or export with --profile ort-cuda"
        )
    return _build(target, [compiler, *SHARED, *flags, str(SOURCES / SOURCE)])


def build_emulated(folder: Path) -> Path:
    """The same operators for the CPU provider: every GPU thread a fibre. For tests; slow.

    Raises:
        InputError: There is no C++ compiler, or it fails.
    """
    target = folder / f"libeagle_chain-emulated-{source_hash()[:16]}.so"
    # -O1: half the time to compile, which is most of it in the tests
    flags = ("-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-x", "c++")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise InputError("building the emulated kernels needs a C++ compiler")
    return _build(target, [compiler, *SHARED, *flags, str(SOURCES / SOURCE)])


def _build(target: Path, command: list[str]) -> Path:
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        result = subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise InputError(f"{command[0]} failed:\n{result.stderr.strip()[-2000:]}")
        os.replace(made, target)
    finally:
        made.unlink(missing_ok=True)
    return target
