"""Puts the stand-ins for TensorRT and cuda-python where an import finds them, for one test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent / "standins"
NAMES = ("tensorrt", "cuda", "cuda.bindings", "cuda.bindings.runtime")


@contextmanager
def standins(**environment: str) -> Iterator[ModuleType]:
    """Yield the stand-in for `cuda.bindings.runtime`; what was imported before comes back after."""
    kept = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        for name, value in environment.items():
            patch.setenv(name, value)
        from cuda.bindings import runtime

        try:
            yield runtime
        finally:
            for name in NAMES:
                sys.modules.pop(name, None)
    sys.modules.update(kept)
