"""What every test relies on."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # some tests import onnxruntime on their own

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that: the tests that
    # interrupt a command would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of the profile ort-fused, compiled for the CPU once for all tests."""
    from eagle_chain.engines.kernel_library import build_emulated

    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("no C++ compiler to build the kernels with")
    return build_emulated(tmp_path_factory.mktemp("kernels"))
