"""ONNX Runtime's CUDA provider acted out on the host, over the stand-in for cuda-python.

A session is one of the CPU provider with the kernels of `ort-fused` on fibres; what it runs is
queued on the stand-in's stream, so that it is recorded while that is captured. For tests of what
drives sessions on a GPU; such engines are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from eagle_chain.runtime import ort_cuda
from tests.standin import standins


class Binding:
    """An I/O binding whose device is the host."""

    def __init__(self, session: Any) -> None:
        self.own = session.io_binding()

    def bind_input(self, name: str, device: str, *rest: Any) -> None:
        """As ONNX Runtime's."""
        assert device == "cuda"
        self.own.bind_input(name, "cpu", *rest)

    def bind_output(self, name: str, device: str, *rest: Any) -> None:
        """As ONNX Runtime's."""
        assert device == "cuda"
        self.own.bind_output(name, "cpu", *rest)


def on_host(runtime: ModuleType) -> Any:
    """A module with what `runtime.ort_cuda` uses of onnxruntime; runs count in `runs`."""

    class Session:
        def __init__(self, model: bytes, options: Any, providers: Any) -> None:
            ((name, told),) = providers
            assert name == "CUDAExecutionProvider"
            self.told, self.options = told, options
            self.stream = int(told["user_compute_stream"])
            options.intra_op_num_threads = 1
            cpu = ["CPUExecutionProvider"]
            self.own = ort.InferenceSession(model, options, providers=cpu)
            self.get_inputs, self.get_outputs = self.own.get_inputs, self.own.get_outputs

        def get_providers(self) -> list[str]:
            return ["CUDAExecutionProvider"]

        def io_binding(self) -> Binding:
            return Binding(self.own)

        def run_with_iobinding(self, binding: Binding, options: Any) -> None:
            runtime.queue(self.stream, lambda: self.own.run_with_iobinding(binding.own))

    return SimpleNamespace(
        __version__=ort.__version__,
        get_available_providers=lambda: ["CUDAExecutionProvider"],
        SessionOptions=ort.SessionOptions,
        RunOptions=ort.RunOptions,
        InferenceSession=Session,
    )


@contextmanager
def gpu_on_host(library: Path, **environment: str) -> Iterator[ModuleType]:
    """Yield the stand-in for `cuda.bindings.runtime`, under which ONNX Runtime "has a GPU"."""
    with standins(**environment) as runtime, pytest.MonkeyPatch.context() as patch:
        acted = on_host(runtime)
        patch.setattr(ort_cuda, "onnxruntime", lambda: acted)
        patch.setattr(ort_cuda, "build_cuda", lambda *_: library)
        yield runtime
