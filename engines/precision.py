"""Dtypes pinned for TensorRT 8.6, whose builder may run the fp32 parts of a graph in fp16."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx


def float_dtypes(model: onnx.ModelProto) -> dict[str, str]:
    """Name -> "fp32" or "fp16" of every floating-point tensor of a graph."""
    import onnx

    names = {onnx.TensorProto.FLOAT: "fp32", onnx.TensorProto.FLOAT16: "fp16"}
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    values = [*graph.input, *graph.value_info, *graph.output]
    dtypes = {v.name: v.type.tensor_type.elem_type for v in values}
    dtypes |= {t.name: t.data_type for t in graph.initializer}
    return {name: names[dtype] for name, dtype in dtypes.items() if dtype in names}


def pin_fp32(trt: Any, network: Any, dtypes: dict[str, str]) -> int:
    """Keep every tensor that the graph has in fp32 in fp32; returns how many."""
    return pin_outputs(trt, network, dtypes, "fp32", trt.DataType.FLOAT)


def pin_outputs(
    trt: Any,
    network: Any,
    dtypes: dict[str, str],
    dtype: str,
    pin: Any,
    kinds: Collection[Any] | None = None,
) -> int:
    """Pin what layers write and the graph has in `dtype`; returns how many tensors.

    The parser names a tensor as the graph does. What a layer writes is pinned and not the layer's
    own precision: 8.6.0 finds no implementation for a fused region with a layer pinned like that.
    Constants and casts keep their dtypes anyway.

    Args:
        trt: The module.
        network: As it was parsed.
        dtypes: Of the graph, by the name of a tensor.
        dtype: Which of them.
        pin: TensorRT's name for it.
        kinds: Types of the layers; None are all.
    """
    own = (trt.LayerType.SHAPE, trt.LayerType.CONSTANT, trt.LayerType.CAST)
    pinned = 0
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        if layer.type in own or (kinds is not None and layer.type not in kinds):
            continue
        for i in range(layer.num_outputs):
            if dtypes.get(layer.get_output(i).name) == dtype:
                layer.set_output_type(i, pin)
                pinned += 1
    return pinned
