"""What TensorRT 8.6 must be told so that products of fp16 numbers are summed up in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def pin_products(trt: Any, network: Any) -> int:
    """Let every matrix product read fp16 and leave fp32; returns how many there are.

    Left to itself, 8.6 takes kernels that add fp16 up in fp16. One whose result is fp32 adds in
    fp32, and rounding the result is the business of whoever reads it.
    """
    count = 0
    for layer in products(trt, network):
        layer.precision = trt.DataType.HALF
        layer.set_output_type(0, trt.DataType.FLOAT)
        count += 1
    return count


def products(trt: Any, network: Any) -> Iterator[Any]:
    """The matrix products of a network."""
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        if layer.type == trt.LayerType.MATRIX_MULTIPLY:
            yield layer
