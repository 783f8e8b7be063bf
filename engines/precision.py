"""Layer precisions for TensorRT 8.6, whose builder otherwise runs fp32 parts of a graph in fp16."""

from __future__ import annotations

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


def pin_precisions(trt: Any, network: Any, dtypes: dict[str, str]) -> int:
    """Give every floating-point layer the dtypes that the graph has there; returns how many.

    The parser names a tensor as the graph does. Layers it adds of its own accord (constants,
    broadcasts) take the dtype of what they read. Casts keep theirs: they are the borders.
    """
    kinds = {"fp32": trt.DataType.FLOAT, "fp16": trt.DataType.HALF}
    known: dict[str, Any] = {name: kinds[dtype] for name, dtype in dtypes.items()}
    pinned = 0
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        read = [layer.get_input(i) for i in range(layer.num_inputs)]
        read_types = [known[t.name] for t in read if t is not None and t.name in known]
        written = [layer.get_output(i) for i in range(layer.num_outputs)]
        for tensor in written:
            if tensor.name not in known and tensor.dtype in kinds.values():
                own = layer.type in (trt.LayerType.CONSTANT, trt.LayerType.CAST)
                known[tensor.name] = tensor.dtype if own or not read_types else read_types[0]
        written_types = [known.get(tensor.name) for tensor in written]
        floats = [*read_types, *(t for t in written_types if t is not None)]
        if not floats or layer.type == trt.LayerType.SHAPE:
            continue
        if layer.type != trt.LayerType.CAST:
            layer.precision = kinds["fp32"] if kinds["fp32"] in floats else kinds["fp16"]
        for i, dtype in enumerate(written_types):
            if dtype is not None:
                layer.set_output_type(i, dtype)
        pinned += 1
    return pinned
