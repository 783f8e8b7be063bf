"""TensorRT 8.6's compiler process with other precisions in half pieces, to see what they cost.

    python tests/gpu/trt_series.py OUT ... --pins sums none

starts this in the place of `eagle_chain.engines.compiler`. What the builder is told:

    build     what `build` does: the first of sums, outputs and none that leaves weights as they are
    sums      matrix products read fp16 and leave fp32
    outputs   matrix products leave fp32; what they compute in is not said
    none      nothing: fp16 may be used, and fp32
    weights   as sums, for products of weights alone
    all       as sums, and every other layer leaves fp16
"""

from __future__ import annotations

import sys
from typing import Any

from eagle_chain.engines import compiler, precision
from eagle_chain.engines.precision import PINS, pin_products, products


def pin_weights(trt: Any, network: Any) -> None:
    """As `pin_products`, for products that read an input of the network."""
    names = {network.get_input(i).name for i in range(network.num_inputs)}
    for layer in products(trt, network):
        if names & {layer.get_input(i).name for i in range(layer.num_inputs)}:
            layer.precision = trt.DataType.HALF
            layer.set_output_type(0, trt.DataType.FLOAT)


def pin_all(trt: Any, network: Any) -> None:
    """As `pin_products`, and fp16 for what other layers leave inside the piece."""
    own = ("SHAPE", "CONSTANT", "CAST", "MATRIX_MULTIPLY")
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        for i in range(layer.num_outputs if layer.type.name not in own else 0):
            tensor = layer.get_output(i)
            if tensor.dtype.name in ("FLOAT", "HALF") and not tensor.is_network_output:
                layer.set_output_type(i, trt.DataType.HALF)
    pin_products(trt, network)


VARIANTS = {
    "build": PINS,
    **{name: {name: pin} for name, pin in PINS.items()},
    "weights": {"weights": pin_weights},
    "all": {"all": pin_all},
}


def main(pins: str, request: str, descriptor: str) -> int:
    """Serve one request with this variant."""
    precision.PINS = VARIANTS[pins]
    return compiler.main(request, descriptor)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
