"""The graphs of a bundle as TensorRT gets them, and the weights they want."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from eagle_chain.engines.bound import as_exported, bound_weights, tensor_spec, with_bound_weights
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.spec import EngineSpec, TensorSpec

if TYPE_CHECKING:
    import onnx

WEIGHT_DTYPES = ("fp32", "int32", "fp16", "bf16")  # in which weights enter


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
    weights = [tensor_spec(value) for value in bound.graph.input if value.name not in states]
    for weight in weights:
        if weight.dtype not in WEIGHT_DTYPES:
            raise InputError(
                f"{spec.name}.onnx: {weight.name} is of {weight.dtype}, expected "
                f"{', '.join(WEIGHT_DTYPES)}; export the bundle again"
            )
    return bound, weights


def baked_weights(model: onnx.ModelProto, manifest: Manifest) -> list[TensorSpec]:
    """The weights that become part of a plan, as if all were of the compute dtype."""
    dtype = manifest.options.dtype
    names = dict.fromkeys(bound_weights(model))
    return [TensorSpec(name, dtype, manifest.weights[name].shape) for name in names]
