"""The TensorRT flavours and what differs between them: the one place that knows their versions."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.kv import is_quantised
from eagle_chain.engines.spec import Options

TENSORRT, RTX = "tensorrt", "tensorrt-rtx"
FLAVOURS = (TENSORRT, RTX)

_MODULES = {TENSORRT: "tensorrt", RTX: "tensorrt_rtx"}
_SUPPORTED = {TENSORRT: ("8.6", "10", "11"), RTX: ("1",)}
_INDEX = "--extra-index-url https://pypi.nvidia.com"
_INSTALL = {
    TENSORRT: (
        "TensorRT 8.6, 10 and 11 are supported, with Python 3.10 to 3.14. CUDA 13 (driver 580 or "
        f"newer): pip install 'tensorrt-cu13>=10.13,<12' {_INDEX}. CUDA 12 (driver 535 or newer): "
        f"pip install 'tensorrt-cu12>=10,<12' {_INDEX}. JetPack 6 brings TensorRT with its system "
        "Python 3.10: make the virtual environment with --system-site-packages"
    ),
    RTX: (
        "TensorRT-RTX 1 is supported, with Python 3.10 to 3.13 and CUDA 13 or 12: "
        f"pip install 'tensorrt-rtx-cu13>=1.7,<1.8' {_INDEX}, or tensorrt-rtx-cu12"
    ),
}


@dataclass(frozen=True)
class Flavour:
    """One installed TensorRT library."""

    name: str  # tensorrt or tensorrt-rtx
    version: str
    trt: Any  # the module

    @property
    def ahead_of_time(self) -> bool:
        """It builds on any machine for named compute capabilities."""
        return self.name == RTX

    @property
    def strongly_typed(self) -> bool:
        """Dtypes are those of the graph; otherwise the builder chooses unless layers are pinned."""
        return not is_weakly_typed(self.version)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Compute capabilities that an ahead-of-time build can name, "8.9" and so on."""
        found = (re.fullmatch(r"SM(\d+)(\d)", name) for name in dir(self.trt.ComputeCapability))
        pairs = sorted((int(m[1]), int(m[2])) for m in found if m)
        return tuple(f"{major}.{minor}" for major, minor in pairs)

    def refuse_baked(self, stored: set[str]) -> None:
        """Raise an `InputError` if weights stored in these dtypes cannot be baked into a plan."""
        if "BF16" in stored and not self.strongly_typed:
            raise InputError(
                f"TensorRT {self.version} cannot read the checkpoint's bf16 weights: "
                "build with --weights bound, then they are converted when they are uploaded"
            )

    def refuse(self, options: Options) -> None:
        """Raise an `InputError` for a bundle that this version cannot read."""
        if self.strongly_typed:
            return
        if options.dtype == "bf16":
            raise InputError(f"TensorRT {self.version} has no bf16: export with --dtype fp16")
        if options.kv_type == "bf16":
            raise InputError(f"TensorRT {self.version} has no bf16: export with --kv fp16")
        if is_quantised(options.kv_type):
            raise InputError(
                f"TensorRT {self.version} takes int8 only for a quantisation of its own, and KV in "
                f"{options.kv_type} is int8: export with --kv fp16"
            )
        if options.profile != "portable":
            raise InputError(
                f"TensorRT {self.version} reads opset 17 and the profile {options.profile!r} is "
                "newer: export with --profile portable"
            )


def is_weakly_typed(version: str) -> bool:
    """Whether a TensorRT of this version chooses the types of layers: its graphs go in pieces."""
    return version.startswith("8.")


def is_installed(name: str) -> bool:
    """Whether there is such a library at all; loading it may still fail."""
    spec = importlib.util.find_spec(_MODULES[name])
    return spec is not None and spec.origin is not None  # no origin: a folder of that name


def load_flavour(name: str) -> Flavour:
    """Import a TensorRT library; an `InputError` says how to install it."""
    title = "TensorRT-RTX" if name == RTX else "TensorRT"
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    try:
        trt = importlib.import_module(_MODULES[name])
    except ModuleNotFoundError:
        raise InputError(f"{title} is not installed in this {python}. {_INSTALL[name]}") from None
    except Exception as error:  # a package without its libraries, or with those of another version
        raise InputError(
            f"{title} is in this {python} but cannot be loaded ({error}). {_INSTALL[name]}"
        ) from error
    if not hasattr(trt, "__version__"):  # a folder of that name on the path
        raise InputError(f"{title} is not installed in this {python}. {_INSTALL[name]}")
    version = str(trt.__version__)
    if not any(f"{version}.".startswith(f"{known}.") for known in _SUPPORTED[name]):
        raise InputError(f"{title} {version} is not supported. {_INSTALL[name]}")
    return Flavour(name, version, trt)


def dtype_names(trt: Any) -> dict[Any, str]:
    """TensorRT's dtypes by our names; whatever else it has keeps its own."""
    ours = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT32": "int32", "INT8": "int8"}
    return {dtype: ours.get(name, name) for name, dtype in trt.DataType.__members__.items()}


def logger(trt: Any, note: Callable[[str], None]) -> Any:
    """A TensorRT logger that passes warnings and errors to `note` and remembers errors."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            serious = severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR)
            if serious:
                self.errors.append(message)
            if serious or severity == trt.ILogger.WARNING:
                note(f"{severity.name}: {message}")

        def last_errors(self) -> str:
            """The errors since they were last cleared, in one line."""
            return " | ".join(dict.fromkeys(self.errors[-4:])) or "it does not say why"

    return Log()
