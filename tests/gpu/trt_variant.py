"""TensorRT 8.6's compiler process with other pins or tactics, to find what a step is slow with.

    python tests/gpu/trt_series.py OUT ... --pins products --cublas

starts this in the place of `eagle_chain.engines.compiler`. `--pins` says which outputs of layers
get the dtype that the graph has: the fp32 ones (as `build` does), those of products too, or all.
`--cublas` allows the tactics that need cuBLAS 12; `cublas_shim.sh` makes one of a cuBLAS 13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from eagle_chain.engines import compiler, precision
from eagle_chain.engines.precision import pin_fp32, pin_outputs


def pin_also(*kinds: str) -> Callable[[Any, Any, dict[str, str]], int]:
    """`pin_fp32`, then fp16 outputs of layers of these kinds to fp16; no kinds are all kinds."""

    def pin(trt: Any, network: Any, dtypes: dict[str, str]) -> int:
        wanted = [getattr(trt.LayerType, kind) for kind in kinds] or None
        half = pin_outputs(trt, network, dtypes, "fp16", trt.DataType.HALF, wanted)
        return pin_fp32(trt, network, dtypes) + half

    return pin


PINS = {"fp32": pin_fp32, "products": pin_also("MATRIX_MULTIPLY"), "all": pin_also()}
CUBLAS = ("CUBLAS", "CUBLAS_LT")


def main(pins: str, tactics: str, request: str, descriptor: str) -> int:
    """Serve one request with this variant."""
    precision.pin_fp32 = PINS[pins]
    if tactics == "cublas":
        compiler.TACTICS_8 = (*compiler.TACTICS_8, *CUBLAS)
    return compiler.main(request, descriptor)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
