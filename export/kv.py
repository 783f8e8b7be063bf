"""KV rows as ONNX operators: values into the planes of their KV type, and back.

Only operators that TensorRT, TensorRT-RTX and ONNX Runtime's CUDA provider all have: bits are taken
apart by floor arithmetic in fp32, which is exact here. Codes and scales have the bits of ggml's
reference; `engines.kv` says what the planes are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from eagle_chain.engines.kv import BLOCK, is_quantised, names
from eagle_chain.engines.spec import EngineSpec
from eagle_chain.export.builder import GraphBuilder

HALF = BLOCK // 2  # one byte holds dims j and j + 16 of a block

Largest = Callable[[ir.Value], ir.Value]  # maximum of the last axis, which stays with extent 1


@dataclass(frozen=True)
class Rows:
    """Keys or values as they lie in the cache: planes [1, Hkv, T, columns]."""

    kind: str  # fp32, fp16, bf16, q8_0 or q5_1
    planes: tuple[ir.Value, ...]


def kind_of(spec: EngineSpec, cache: str) -> str:
    """How an engine stores the keys or values called `cache` ("layers.3.key")."""
    dtypes = {pair.input: pair.dtype for pair in spec.states}
    if cache in dtypes:
        return dtypes[cache]
    return next(kind for kind in ("q8_0", "q5_1") if names(kind, cache)[0] in dtypes)


def encoded(
    g: GraphBuilder, x: ir.Value, kind: str, shape: tuple[int, ...], largest: Largest
) -> tuple[ir.Value, ...]:
    """The planes of x [..., dim], a value of the compute dtype and of this shape."""
    if not is_quantised(kind):
        return (x if kind == g.dtype else g.cast(x, kind),)
    *lead, dim = shape
    blocks = g.reshape(g.fp32(x), *lead, dim // BLOCK, BLOCK)
    if kind == "q8_0":
        parts = _q8_0(g, blocks, largest)
    else:
        parts = _q5_1(g, blocks, (*lead, dim // BLOCK), largest)
    return tuple(g.reshape(part, *lead, -1) for part in parts)


def decoded(g: GraphBuilder, rows: Rows, shape: tuple[int, ...]) -> ir.Value:
    """Rows of a cache as values of the compute dtype [..., dim]."""
    if not is_quantised(rows.kind):
        (x,) = rows.planes
        return x if rows.kind == g.dtype else g.cast(x, g.dtype)
    *lead, dim = shape
    blocks = (*lead, dim // BLOCK)

    def wide(plane: ir.Value, *tail: int) -> ir.Value:
        return g.cast(g.reshape(plane, *blocks, *tail), "fp32")

    if rows.kind == "q8_0":
        codes, scale = rows.planes
        x = g.Mul(wide(codes, BLOCK), wide(scale, 1))
    else:
        nibbles, high, scale, least = rows.planes
        byte = wide(nibbles, HALF)
        upper = _floor(g, byte, 1 / 16)
        lower = g.Sub(byte, g.Mul(upper, g.scalar(16.0)))
        upper = _low_bits(g, upper, 16)  # the byte is signed
        bits = _low_bits(g, g.Floor(g.Mul(wide(high, BLOCK // 8, 1), _powers(g, -1))), 2)
        codes = g.Add(
            g.Concat(lower, upper, axis=-1),
            g.Mul(g.reshape(bits, *blocks, BLOCK), g.scalar(16.0)),
        )
        x = g.Add(g.Mul(codes, wide(scale, 1)), wide(least, 1))
    return g.lower(g.reshape(x, *shape))


def _q8_0(g: GraphBuilder, x: ir.Value, largest: Largest) -> tuple[ir.Value, ...]:
    """Codes and scale of x [..., blocks, 32]: x over its scale, rounded half away from zero."""
    scale = g.Div(largest(g.Abs(x)), g.scalar(127.0))
    x = g.Mul(x, _inverse(g, scale))
    size = g.Abs(x)
    whole = g.Floor(size)  # adding 0.5 first would round 0.49999997 up
    size = g.Add(whole, g.Floor(g.Mul(g.Sub(size, whole), g.scalar(2.0))))
    code = g.Where(g.Less(x, g.scalar(0.0)), g.Neg(size), size)
    return g.cast(code, "int8"), g.cast(scale, "fp16")


def _q5_1(
    g: GraphBuilder, x: ir.Value, blocks: tuple[int, ...], largest: Largest
) -> tuple[ir.Value, ...]:
    """Nibbles, high bits, scale and minimum of x [..., blocks, 32]."""
    least = g.Neg(largest(g.Neg(x)))
    scale = g.Div(g.Sub(largest(x), least), g.scalar(31.0))
    code = g.Mul(g.Sub(x, least), _inverse(g, scale))
    code = g.Min(g.Floor(g.Add(code, g.scalar(0.5))), g.scalar(31.0))
    bit = _floor(g, code, 1 / 16)
    low, high = g.split(g.Sub(code, g.Mul(bit, g.scalar(16.0))), -1, HALF, HALF)
    nibbles = _signed(g, g.Add(low, g.Mul(high, g.scalar(16.0))))
    bit = g.Mul(g.reshape(bit, *blocks, BLOCK // 8, 8), _powers(g, 1))
    bits = _signed(g, g.ReduceSum(bit, g.ints(-1), keepdims=0))
    return nibbles, bits, g.cast(scale, "fp16"), g.cast(least, "fp16")


def _inverse(g: GraphBuilder, scale: ir.Value) -> ir.Value:
    """1 / scale, and 0 where the scale is 0."""
    zero, one = g.scalar(0.0), g.scalar(1.0)
    return g.Where(g.Equal(scale, zero), zero, g.Div(one, scale))


def _floor(g: GraphBuilder, x: ir.Value, factor: float) -> ir.Value:
    return g.Floor(g.Mul(x, g.scalar(factor)))


def _low_bits(g: GraphBuilder, x: ir.Value, modulus: int) -> ir.Value:
    """`x` modulo a power of two, as two's complement has it."""
    return g.Sub(x, g.Mul(_floor(g, x, 1 / modulus), g.scalar(float(modulus))))


def _signed(g: GraphBuilder, byte: ir.Value) -> ir.Value:
    """A number 0..255 as the int8 of the same bits."""
    return g.cast(g.Sub(byte, g.Mul(_floor(g, byte, 1 / 128), g.scalar(256.0))), "int8")


def _powers(g: GraphBuilder, sign: int) -> ir.Value:
    """2 ** (sign * i) for the eight bits of a byte, fp32 [8]."""
    return g.constant(np.exp2(sign * np.arange(8, dtype=np.float32)))
