"""The libraries that a user may lack, and what to type to get each."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

EXTRAS = {  # library -> the extra that brings it; "" if every installation has it
    **dict.fromkeys(("numpy", "rich", "tokenizers", "jinja2"), ""),
    **dict.fromkeys(("onnx", "onnx_ir", "ml_dtypes"), "export"),
    "matplotlib": "plot",
    "onnxruntime": "cpu",
    "torch": "parity",
    "polygraphy": "parity",
}
_VENV = Path(__file__).resolve().parent.parent / ".venv"  # the scripts' own, in a clone
_DEMO = ("", "export", "cpu")  # what every script puts there


def require(*libraries: str) -> None:
    """Fail now, before the work that leads to them, if a library is missing; none is imported.

    Raises:
        ModuleNotFoundError: As the import would, for the command line to say what to install.
    """
    for name in libraries:
        there = sys.modules[name] if name in sys.modules else importlib.util.find_spec(name)
        if there is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def install(extra: str) -> str:
    """How to get what an extra brings into the Python that runs."""
    if Path(sys.prefix).resolve() == _VENV and extra in _DEMO:  # it was there
        return f"rm -rf {_VENV}, then run the script again"
    if not extra:
        return "install eagle-chain again: pip install . in its clone"
    return f"install the extra {extra}: pip install '.[{extra}]' in the clone of eagle-chain"
