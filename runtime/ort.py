"""ONNX Runtime sessions over preallocated buffers; the only file here that imports onnxruntime."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eagle_chain.engines.bound import ONNX_NUMBERS
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.extras import install
from eagle_chain.engines.spec import EngineSpec, TensorSpec
from eagle_chain.runtime.buffers import NUMPY_DTYPES, Buffer, Memory
from eagle_chain.runtime.session import check_tensors

CPU = ("CPUExecutionProvider",)
NEEDS = "1.24.1 or newer, which needs Python 3.11"
# What a binding calls them: NumPy's, or ONNX's number.
ELEMENT_TYPES: dict[str, Any] = {**NUMPY_DTYPES, "bf16": ONNX_NUMBERS["bf16"]}
SPEC_DTYPES = {
    "tensor(float)": "fp32",
    "tensor(float16)": "fp16",
    "tensor(bfloat16)": "bf16",
    "tensor(int32)": "int32",
    "tensor(int8)": "int8",
}


class OrtSession:
    """One engine of a bundle on ONNX Runtime.

    Args:
        graph: The .onnx file.
        spec: What the manifest says it takes and gives.
        memory: Where its buffers live; its device must be the provider's.
        weights: The external-data locations of the graph, relative to its folder.
        threads: Of one operator; None leaves it to ONNX Runtime.

    Raises:
        InputError: onnxruntime is missing, cannot load the graph, or finds another interface in it.
    """

    def __init__(
        self,
        graph: Path,
        spec: EngineSpec,
        memory: Memory,
        weights: Iterable[str],
        *,
        threads: int | None = None,
    ) -> None:
        ort = onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or 0
        # idle threads of one session would spin on the cores that the next session needs
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3  # warnings are about our choice of operators
        graph = graph.resolve()
        linked = {name: _mapped(graph.parent / name) for name in weights if _is_linked(graph, name)}
        options.add_external_initializers_from_files_in_memory(
            list(linked), list(linked.values()), [len(m) for m in linked.values()]
        )
        try:
            self._session = ort.InferenceSession(str(graph), options, providers=CPU)
        except Exception as error:  # onnxruntime's own types have no common base
            raise InputError(f"{graph}: ONNX Runtime cannot load it: {error}") from error
        self.spec = spec
        self.memory = memory
        check_interface(graph, spec, self._session.get_inputs(), self._session.get_outputs())

    def bind(self, tensors: Mapping[str, Buffer]) -> OrtBinding:
        """Settle the address of every input and output."""
        check_tensors(self.spec, self.memory, tensors)
        return OrtBinding(self._session, self.spec, tensors)


class OrtBinding:
    """A session with all its addresses; keeps the buffers alive."""

    def __init__(self, session: Any, spec: EngineSpec, tensors: Mapping[str, Buffer]) -> None:
        self._session = session
        self._buffers = tuple(tensors.values())
        self._binding = session.io_binding()
        for tensor in spec.all_inputs:
            self._binding.bind_input(tensor.name, *placed(tensor, tensors[tensor.name]))
        for tensor in spec.all_outputs:
            self._binding.bind_output(tensor.name, *placed(tensor, tensors[tensor.name]))

    def run(self) -> None:
        """Run once; returns when the outputs are written."""
        self._session.run_with_iobinding(self._binding)


def onnxruntime() -> Any:
    """The module, imported when first needed; its telemetry is off unless the user sets it.

    Raises:
        InputError: It is not installed, or too old.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read once, as its library starts
    try:
        import onnxruntime as module  # type: ignore[import-untyped]
    except ImportError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Ctrl-C while its library starts
            raise KeyboardInterrupt from None
        raise InputError(
            f"onnxruntime {NEEDS}, cannot be imported ({error}): {install('cpu')}"
        ) from None
    options = getattr(module, "SessionOptions", None)
    if not hasattr(options, "add_external_initializers_from_files_in_memory"):
        version = getattr(module, "__version__", "(without a version)")
        raise InputError(f"onnxruntime {version} is too old: {NEEDS}; {install('cpu')}")
    return module


def check_interface(
    graph: Path, spec: EngineSpec, inputs: Iterable[Any], outputs: Iterable[Any]
) -> None:
    """Compare what ONNX Runtime found in a graph with the manifest's spec.

    Raises:
        InputError: Any name, dtype or shape differs; all of them are listed.
    """
    faults = []
    for side, found, wanted in (
        ("input", inputs, spec.all_inputs),
        ("output", outputs, spec.all_outputs),
    ):
        got = {t.name: _spec(t) for t in found}
        want = {t.name: t for t in wanted}
        for name in sorted(got.keys() | want.keys()):
            if got.get(name) != want.get(name):
                is_, should = _words(got.get(name)), _words(want.get(name))
                faults.append(f"{side} {name} is {is_}, expected {should}")
    if faults:
        raise InputError(
            f"{graph}: not the graph of this manifest, export again: {'; '.join(faults)}"
        )


def _words(tensor: TensorSpec | None) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else "absent"


def _spec(found: Any) -> TensorSpec:
    """What ONNX Runtime says of an input or output."""
    return TensorSpec(found.name, SPEC_DTYPES.get(found.type, found.type), tuple(found.shape))


def weight_inputs(session: Any, spec: EngineSpec) -> tuple[TensorSpec, ...]:
    """The inputs of a loaded graph that are not in its spec: the weights it wants."""
    known = {t.name for t in spec.all_inputs}
    return tuple(_spec(t) for t in session.get_inputs() if t.name not in known)


def placed(tensor: TensorSpec, buffer: Buffer) -> tuple[str, int, Any, list[int], int]:
    """Device, its index, element type, shape and address, as a binding takes them."""
    device, _, index = buffer.device.partition(":")
    shape = list(tensor.shape)
    return device, int(index or 0), ELEMENT_TYPES[tensor.dtype], shape, buffer.address


def _is_linked(graph: Path, location: str) -> bool:
    """Whether a location passes a symbolic link, which ONNX Runtime refuses.

    Such a file is mapped here and handed over, and ONNX Runtime copies it; files that really lie in
    the bundle it maps itself, and shares between sessions.
    """
    path = graph.parent / location
    return path.resolve() != path


def _mapped(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: the weights cannot be read: {error}") from error
