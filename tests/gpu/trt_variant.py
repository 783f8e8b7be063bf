"""TensorRT 8.6's compiler process with other precisions in half pieces, to see what they cost.

    python tests/gpu/trt_series.py OUT ... --pins sums none

starts this in the place of `eagle_chain.engines.compiler`. What the builder is told:

    build     what `build` does: the first of sums, outputs and none that leaves weights as they are
    sums      matrix products read fp16 and leave fp32
    outputs   matrix products leave fp32; what they compute in is not said
    none      nothing: fp16 may be used, and fp32
"""

from __future__ import annotations

import sys

from eagle_chain.engines import compiler, precision
from eagle_chain.engines.precision import PINS

VARIANTS = {"build": PINS} | {name: {name: pin} for name, pin in PINS.items()}


def main(pins: str, request: str, descriptor: str) -> int:
    """Serve one request with this variant."""
    precision.PINS = VARIANTS[pins]
    return compiler.main(request, descriptor)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
