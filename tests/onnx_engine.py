"""An exported graph run by ONNX Runtime with NumPy in and out, for tests of the graphs alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from eagle_chain.engines.spec import Options
from eagle_chain.export.bundle import Pair, read_pair, weight_table
from eagle_chain.export.graph import build_graphs

Arrays = dict[str, np.ndarray[Any, Any]]
NUMPY_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
}


def open_pair(trunk: Path, draft: Path) -> Pair:
    """A pair without the trunk's own head."""
    return read_pair(trunk, draft, mtp=False)


class OnnxEngine:
    """One graph; `run` takes the plain inputs and the states and returns everything by name."""

    def __init__(self, model: onnx.ModelProto, folders: Mapping[str, Path]) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        names = sorted(
            {
                entry.value
                for tensor in model.graph.initializer
                for entry in tensor.external_data
                if entry.key == "location"
            }
        )
        files = [
            np.memmap(folders[name.split("/")[1]] / name.split("/")[2], np.uint8, mode="r")
            for name in names
        ]
        sizes = [len(file) for file in files]
        options.add_external_initializers_from_files_in_memory(names, files, sizes)
        self.session = ort.InferenceSession(model.SerializeToString(), options)
        self.inputs = {
            i.name: np.zeros(i.shape, NUMPY_TYPES[i.type]) for i in self.session.get_inputs()
        }
        self.outputs = [o.name for o in self.session.get_outputs()]
        self.width = len(self.inputs["ids"]) if "ids" in self.inputs else 0

    def run(self, states: Arrays, **inputs: Any) -> tuple[Arrays, Arrays]:
        """One call from `states` (by input name, {} for zeros) -> all outputs, the next states."""
        feeds = {name: zero for name, zero in self.inputs.items() if name not in inputs} | states
        for name, value in inputs.items():
            feeds[name] = np.asarray(value, self.inputs[name].dtype).reshape(
                self.inputs[name].shape
            )
        outputs = dict(zip(self.outputs, self.session.run(None, feeds), strict=True))
        after = {n.removesuffix(".next"): a for n, a in outputs.items() if n.endswith(".next")}
        return outputs, after


def engines(
    trunk: Path, draft: Path, options: Options, only: tuple[str, ...] = ()
) -> dict[str, OnnxEngine]:
    """The graphs of a pair (all of them, or those in `only`), ready to run."""
    pair = open_pair(trunk, draft)
    graphs = build_graphs(pair.trunk_config, pair.draft_config, weight_table(pair), options)
    folders = {"trunk": trunk, "draft": draft}
    return {
        name: OnnxEngine(model, folders)
        for name, model in graphs.items()
        if not only or name in only
    }
