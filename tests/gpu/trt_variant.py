"""TensorRT 8.6's compiler process with other precisions in half pieces, to see what they cost.

    python tests/gpu/trt_series.py OUT ... --pins sums none

starts this in the place of `eagle_chain.engines.compiler`. What the builder is told:

    sums      matrix products read fp16 and leave fp32, as `build` does
    outputs   matrix products leave fp32; what they compute in is not said
    none      nothing: fp16 may be used, and fp32
    all       as sums, and every other layer leaves fp16
"""

from __future__ import annotations

import sys
from typing import Any

from eagle_chain.engines import compiler, precision
from eagle_chain.engines.precision import pin_products, products


def pin_outputs(trt: Any, network: Any) -> int:
    """What matrix products leave is fp32."""
    found = list(products(trt, network))
    for layer in found:
        layer.set_output_type(0, trt.DataType.FLOAT)
    return len(found)


def pin_nothing(trt: Any, network: Any) -> int:
    """Leave all to the builder."""
    return 0


def pin_all(trt: Any, network: Any) -> int:
    """As `pin_products`, and fp16 for what other layers leave inside the piece."""
    own = ("SHAPE", "CONSTANT", "CAST", "MATRIX_MULTIPLY")
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        for i in range(layer.num_outputs if layer.type.name not in own else 0):
            tensor = layer.get_output(i)
            if tensor.dtype.name in ("FLOAT", "HALF") and not tensor.is_network_output:
                layer.set_output_type(i, trt.DataType.HALF)
    return pin_products(trt, network)


PINS = {"sums": pin_products, "outputs": pin_outputs, "none": pin_nothing, "all": pin_all}


def main(pins: str, request: str, descriptor: str) -> int:
    """Serve one request with this variant."""
    precision.pin_products = PINS[pins]
    return compiler.main(request, descriptor)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
