"""An MLP in fp16 with its products in several forms, to see what TensorRT 8.6 makes of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
from numpy.typing import NDArray

from eagle_chain.engines.spec import EngineSpec, TensorSpec

ROWS = 5
SIZES = (4096, 12288)  # hidden and intermediate, of the 9B
FORMS = {
    "gemm": "{y} = Gemm <transB = 1> ({x}, {w})",  # as exported
    "in-out": "{y} = MatMul ({x}, {w})",
    "swapped": """{y}_x = Transpose <perm = [1, 0]> ({x})
        {y}_y = MatMul ({w}, {y}_x)
        {y} = Transpose <perm = [1, 0]> ({y}_y)""",
    "padded": """{y}_x = Pad ({x}, pad)
        {y}_y = Gemm <transB = 1> ({y}_x, {w})
        {y} = Slice ({y}_y, none, rows, none)""",
    "gathered": """{y}_x = Gather <axis = 0> ({x}, order)
        {y} = Gemm <transB = 1> ({y}_x, {w})""",  # what makes a fused region of the q, k, v product
}


def mlp(form: str) -> tuple[onnx.ModelProto, EngineSpec, tuple[TensorSpec, ...]]:
    """The sum of x and down(silu(gate(x)) * up(x)), both in fp32; its spec, and its weights."""
    hidden, inner = SIZES
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if form == "in-out":
        shapes = {name: (k, n) for name, (n, k) in shapes.items()}
    weights = tuple(TensorSpec(name, "fp16", shape) for name, shape in shapes.items())
    x, y = (TensorSpec(name, "fp32", (ROWS, hidden)) for name in "xy")
    order = TensorSpec("order", "int32", (ROWS,))
    inputs = (x, order) if form == "gathered" else (x,)
    product = FORMS[form].format
    return (
        onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        mlp ({", ".join(map(_declared, (*inputs, *weights)))}) => ({_declared(y)})
        <int64[4] pad = {{0, 0, 3, 0}}, int64[1] none = {{0}}, int64[1] rows = {{{ROWS}}}> {{
        a = Cast <to = 10> (x)
        {product(y="g", x="a", w="gate")}
        {product(y="u", x="a", w="up")}
        s = Sigmoid (g)
        h = Mul (g, s)
        m = Mul (h, u)
        {product(y="d", x="m", w="down")}
        r = Add (a, d)
        y = Cast <to = 1> (r)
        }}"""),
        EngineSpec("mlp", inputs, (y,)),
        weights,
    )


def _declared(tensor: TensorSpec) -> str:
    """A tensor as ONNX's text form declares it."""
    word = {"fp32": "float", "fp16": "float16", "int32": "int32"}[tensor.dtype]
    return f"{word}[{','.join(map(str, tensor.shape))}] {tensor.name}"


def error(form: str, got: dict[str, NDArray[Any]]) -> float:
    """How far y is from float64 arithmetic on the same x and weights, over what the MLP adds."""
    wide = {name: values.astype(np.float64) for name, values in got.items()}
    gate, up, down = (wide[n].T if form != "in-out" else wide[n] for n in ("gate", "up", "down"))
    x = wide["x"]
    inner = x @ gate
    added = inner / (1 + np.exp(-inner)) * (x @ up) @ down
    return float(np.linalg.norm(wide["y"] - x - added) / np.linalg.norm(added))
