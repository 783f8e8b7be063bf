"""Engines whose weights are bound like any other input: a test may change one between runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from eagle_chain.engines.bound import with_bound_weights
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.spec import EngineSpec
from eagle_chain.export.teacher import stored_tensors
from eagle_chain.runtime.buffers import Buffer, HostBuffer, HostMemory
from eagle_chain.runtime.session import check_tensors

Array = np.ndarray[Any, Any]
Buffers = Mapping[str, HostBuffer]


class BoundSession:
    """One graph on ONNX Runtime's CPU provider.

    Attributes:
        weights: What is bound to each weight of the graph, by its name in the manifest.
        after: Called with all buffers when a run has ended.
    """

    def __init__(self, model: onnx.ModelProto, spec: EngineSpec, weights: Mapping[str, Array]):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        content = with_bound_weights(model).SerializeToString()
        self.session = ort.InferenceSession(content, options, ["CPUExecutionProvider"])
        self.spec = spec
        self.memory = HostMemory()
        known = {t.name for t in spec.all_inputs}
        names = [i.name for i in self.session.get_inputs() if i.name not in known]
        self.weights = {name: weights[name] for name in names}
        self.after: Callable[[Buffers], None] = lambda buffers: None

    def bind(self, tensors: Mapping[str, Buffer]) -> BoundBinding:
        """As in the protocol."""
        check_tensors(self.spec, self.memory, tensors)
        return BoundBinding(self, {n: b for n, b in tensors.items() if isinstance(b, HostBuffer)})


class BoundBinding:
    """One session with its buffers."""

    def __init__(self, session: BoundSession, buffers: Buffers) -> None:
        self.session, self.buffers = session, buffers
        self.outputs = [t.name for t in session.spec.all_outputs]

    def run(self) -> None:
        """Run once."""
        session = self.session
        feeds = {t.name: self.buffers[t.name].array for t in session.spec.all_inputs}
        outputs = session.session.run(self.outputs, {**feeds, **session.weights})
        for name, values in zip(self.outputs, outputs, strict=True):
            self.buffers[name].array[...] = values
        session.after(self.buffers)


def stored_arrays(bundle: Path, manifest: Manifest) -> dict[str, Array]:
    """The weights of a bundle by their names in the manifest, memory-mapped."""
    arrays = {}
    for prefix in ("", "draft."):
        checkpoint = stored_tensors(bundle, manifest, prefix)
        arrays |= {f"{prefix}{name}": checkpoint.array(name) for name in checkpoint.tensors}
    return arrays


def read_graph(bundle: Path, engine: str) -> onnx.ModelProto:
    """A graph of a bundle without its weights."""
    return onnx.load(str(bundle / f"{engine}.onnx"), load_external_data=False)
