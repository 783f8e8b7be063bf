"""What TensorRT 8.6 is told about the matrix products of fp16 numbers, the strictest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from eagle_chain.engines.spec import TensorSpec

Pin = Callable[[Any, Any], None]  # of the module and a network
CONVERTED = 2  # bytes of fp32 for a byte of fp16
ALIKE = 1.5  # scratch memories that differ by less are of the same kind


def pin_products(trt: Any, network: Any) -> None:
    """Let every matrix product read fp16 and leave fp32.

    Left to itself, 8.6 takes kernels that add fp16 up in fp16. One whose result is fp32 adds in
    fp32, and rounding the result is the business of whoever reads it.
    """
    for layer in products(trt, network):
        layer.precision = trt.DataType.HALF
        layer.set_output_type(0, trt.DataType.FLOAT)


def pin_results(trt: Any, network: Any) -> None:
    """Only let every matrix product leave fp32: fused regions take no precision of a layer."""
    for layer in products(trt, network):
        layer.set_output_type(0, trt.DataType.FLOAT)


def pin_nothing(trt: Any, network: Any) -> None:
    """Leave all to the builder."""


PINS: dict[str, Pin] = {"sums": pin_products, "outputs": pin_results, "none": pin_nothing}


def products(trt: Any, network: Any) -> Iterator[Any]:
    """The matrix products of a network."""
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        if layer.type == trt.LayerType.MATRIX_MULTIPLY:
            yield layer


def converts(scratch: int, inputs: Iterable[TensorSpec]) -> bool:
    """Whether a plan with so many bytes of scratch may hold its largest fp16 input in fp32.

    A fused region has one type: if that is fp32, all that enters as fp16 is converted in each call.
    """
    largest = max((t.nbytes for t in inputs if t.dtype == "fp16"), default=0)
    return largest > 0 and scratch >= CONVERTED * largest


def best(scratches: dict[str, int]) -> str:
    """Of plans built with these pins, the strictest among those that need least scratch memory."""
    return next(pins for pins, size in scratches.items() if size <= ALIKE * min(scratches.values()))
