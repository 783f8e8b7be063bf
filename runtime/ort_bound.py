"""ONNX Runtime on the CPU with weights as inputs: one converted copy of each, for large graphs.

`OrtSession` lets ONNX Runtime fold and repack the weights, which is faster in every run and takes
twice their memory while it loads. Here they are converted once, tables stay mapped from their
files, and engines share what they have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_chain.engines.bound import read_bound
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.progress import progress
from eagle_chain.engines.spec import EngineSpec, TensorSpec
from eagle_chain.runtime.buffers import Buffer, HostMemory
from eagle_chain.runtime.ort import CPU, ELEMENT_TYPES, OrtBinding, onnxruntime, weight_inputs
from eagle_chain.runtime.session import Session, check_tensors
from eagle_chain.runtime.weights import UNCHANGED, blocks


class BoundSession:
    """One engine whose weights are inputs.

    Args:
        model: The graph, serialised.
        spec: What it takes and gives besides.
        memory: Where its buffers live.
        threads: Of one operator; None leaves it to ONNX Runtime.

    Raises:
        InputError: onnxruntime is missing or refuses the graph.
    """

    def __init__(
        self, model: bytes, spec: EngineSpec, memory: HostMemory, threads: int | None
    ) -> None:
        ort = onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or 0
        options.enable_cpu_mem_arena = False  # it grows by powers of two
        options.log_severity_level = 3
        try:
            self.session = ort.InferenceSession(model, options, providers=CPU)
        except Exception as error:  # onnxruntime's own types have no common base
            raise InputError(f"{spec.name}: ONNX Runtime cannot load it: {error}") from error
        self.spec = spec
        self.memory = memory
        self.weights = weight_inputs(self.session, spec)
        self.bound: dict[str, NDArray[Any]] = {}  # by name; filled by `open_bound`

    def bind(self, tensors: Mapping[str, Buffer]) -> OrtBinding:
        """Settle the address of every input and output, those of the weights included."""
        check_tensors(self.spec, self.memory, tensors)
        return BoundBinding(self, tensors)


class BoundBinding(OrtBinding):
    """A session with all its addresses; keeps buffers and weights alive."""

    def __init__(self, session: BoundSession, tensors: Mapping[str, Buffer]) -> None:
        super().__init__(session.session, session.spec, tensors)
        self._weights = session.bound
        for tensor in session.weights:
            address = session.bound[tensor.name].ctypes.data
            kind, shape = ELEMENT_TYPES[tensor.dtype], list(tensor.shape)
            self._binding.bind_input(tensor.name, "cpu", 0, kind, shape, address)


def open_bound(
    folder: Path, manifest: Manifest, threads: int | None
) -> tuple[HostMemory, dict[str, Session]]:
    """Load every engine of a bundle over one copy of the weights.

    Raises:
        InputError: As `BoundSession`.
    """
    memory, dtype = HostMemory(), manifest.options.dtype
    tables = {name for name, weight in manifest.weights.items() if _is_table(manifest, name)}
    sessions = {
        name: BoundSession(
            read_bound(folder / f"{name}.onnx", dtype, stored=tables), spec, memory, threads
        )
        for name, spec in manifest.specs.items()
    }
    wanted = {tensor: None for session in sessions.values() for tensor in session.weights}
    made: dict[TensorSpec, NDArray[Any]] = {}
    with progress("converting weights", sum(tensor.nbytes for tensor in wanted)) as advance:
        for tensor in wanted:
            made[tensor] = _array(folder, manifest, tensor)
            advance(tensor.nbytes)
    for session in sessions.values():
        session.bound = {tensor.name: made[tensor] for tensor in session.weights}
    return memory, dict(sessions)


def _is_table(manifest: Manifest, name: str) -> bool:
    """Whether only rows of a weight are read: an embedding that is nobody's head."""
    draft = manifest.draft
    heads = {manifest.trunk.head, *([draft.head] if draft is not None else [])}
    return name.endswith("embed_tokens.weight") and name not in heads


def _array(folder: Path, manifest: Manifest, tensor: TensorSpec) -> NDArray[Any]:
    """A weight in the dtype of the graph, mapped from its file if that is how it is stored."""
    weight = manifest.weights[tensor.name]
    if UNCHANGED.get(weight.dtype) == tensor.dtype and weight.offset % 4 == 0:
        kind = np.uint16 if tensor.dtype in ("bf16", "fp16") else np.float32
        return np.memmap(folder / weight.file, kind, "r", weight.offset, tensor.shape)
    buffer = HostMemory().allocate(tensor)
    flat = buffer.array.reshape(-1)
    for start, values in blocks(folder, weight, tensor):
        first = start // flat.itemsize
        flat[first : first + values.size] = values
    return buffer.array
