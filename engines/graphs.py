"""The graphs of a bundle as TensorRT gets them, and the weights they want."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from eagle_chain.engines.bound import as_exported, bound_weights, with_bound_weights
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.spec import EngineSpec, TensorSpec

if TYPE_CHECKING:
    import onnx

_DTYPES = {1: "fp32", 6: "int32", 10: "fp16", 16: "bf16"}  # onnx.TensorProto's numbers


def load_graph(folder: Path, engine: str) -> onnx.ModelProto:
    """One graph of a bundle, its weights left where they are."""
    import onnx

    path = folder / f"{engine}.onnx"
    with as_exported(path):
        model = onnx.load(str(path), load_external_data=False)
        _check_places(path, model)
        _check_texts(model)
        for node in model.graph.node:
            if node.domain not in ("", "ai.onnx"):
                raise InputError(
                    f"{engine}.onnx: TensorRT has no operator {node.domain}.{node.op_type} "
                    f"(node {node.name!r}): export with --profile portable or standard"
                )
    return model


def _check_places(path: Path, model: onnx.ModelProto) -> None:
    """The weights of a graph lie in files of the bundle."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            place = PurePosixPath(entry.value)
            if entry.key == "location" and (place.parts[:1] != ("weights",) or ".." in place.parts):
                raise InputError(
                    f"{path}: a weight lies in {entry.value!r}, expected a file of weights/; "
                    "export the bundle again"
                )


def _check_texts(model: onnx.ModelProto) -> None:
    """Names are text: protobuf hands over bytes that are none."""
    graph = model.graph
    names = [value.name for value in (*graph.initializer, *graph.input, *graph.output)]
    for node in graph.node:
        names += [node.name, node.op_type, node.domain, *node.input, *node.output]
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"the name {name!r} is no text")


def bound_graph(
    model: onnx.ModelProto, spec: EngineSpec, dtype: str
) -> tuple[onnx.ModelProto, list[TensorSpec]]:
    """The graph with its weights as inputs, and what must be uploaded to them.

    A weight enters in the dtype it is computed in, `dtype` or fp32, whatever the checkpoint stores.

    Raises:
        InputError: A weight is of a dtype that no export has.
    """
    bound = with_bound_weights(model, converted=dtype)
    states = {t.name for t in spec.all_inputs}
    weights = []
    for value in bound.graph.input:
        if value.name in states:
            continue
        kind = value.type.tensor_type
        if kind.elem_type not in _DTYPES:
            raise InputError(
                f"{spec.name}.onnx: {value.name} is of ONNX's dtype {kind.elem_type}, expected "
                f"{', '.join(_DTYPES.values())}; export the bundle again"
            )
        shape = tuple(axis.dim_value for axis in kind.shape.dim)
        weights.append(TensorSpec(value.name, _DTYPES[kind.elem_type], shape))
    return bound, weights


def baked_weights(model: onnx.ModelProto, manifest: Manifest) -> list[TensorSpec]:
    """The weights that become part of a plan, as if all were of the compute dtype."""
    dtype = manifest.options.dtype
    names = dict.fromkeys(bound_weights(model))
    return [TensorSpec(name, dtype, manifest.weights[name].shape) for name in names]
