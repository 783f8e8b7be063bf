"""The `standard` profile: what ONNX itself names since opset 24 (norms, rotary, attention, KV)."""

from __future__ import annotations

import onnx_ir as ir

from eagle_chain.export.kv import Rows
from eagle_chain.export.lowering import Heads, Portable, Rotary


class Standard(Portable):
    """RMSNormalization, RotaryEmbedding, Attention with an explicit mask, TensorScatter.

    The mask is always given: TensorRT-RTX 1.7 ignores Attention's `nonpad_kv_seqlen` without a
    word. It refuses `softmax_precision` (its fused attention sums in fp32 anyway) and cannot build
    Attention in fp32, which therefore stays in primitives.
    """

    opset = 24
    int8_by_index = True  # TensorRT-RTX refuses a TensorScatter of int8

    def reduce_mean(self, x: ir.Value) -> ir.Value:
        """Mean over the last axis, which stays with extent 1."""
        return self.g.ReduceMean(x, self.g.ints(-1), keepdims=1)

    def smallest(self, x: ir.Value) -> ir.Value:
        """Minimum of a vector, [1]."""
        return self.g.ReduceMin(x, self.g.ints(0), keepdims=1)

    def largest(self, x: ir.Value) -> ir.Value:
        """Maximum over the last axis, which stays with extent 1."""
        return self.g.ReduceMax(x, self.g.ints(-1), keepdims=1)

    def rms_norm(self, x: ir.Value, weight: str, eps: float, *, centred: bool) -> ir.Value:
        """RMSNormalization in fp32 with one rounding at the end."""
        g = self.g
        scale = g.weight(weight, "fp32")
        if centred:
            scale = g.Add(scale, g.scalar(1.0))
        return g.lower(g.RMSNormalization(g.fp32(x), scale, axis=-1, epsilon=eps))

    def rotate(self, x: ir.Value, rotary: Rotary, head_dim: int) -> ir.Value:
        """RotaryEmbedding over x [R, heads, head_dim] with the rows' own cos and sin."""
        g = self.g
        tables = (g.Transpose(t, perm=[1, 0, 2]) for t in (rotary.cos, rotary.sin))
        batch = g.Unsqueeze(g.Transpose(x, perm=[1, 0, 2]), g.ints(0))  # [1, heads, R, head_dim]
        turned = g.RotaryEmbedding(batch, *tables, rotary_embedding_dim=rotary.rotary_dim)
        return g.Transpose(g.Squeeze(turned, g.ints(0)), perm=[1, 0, 2])

    def write_plane(
        self, plane: str, update: ir.Value, position: ir.Value, rows: int, heads: Heads
    ) -> ir.Value:
        """TensorScatter, which TensorRT turns into an update in place."""
        g = self.g
        if g.input(plane).dtype == ir.DataType.INT8 and self.int8_by_index:
            return super().write_plane(plane, update, position, rows, heads)
        start = g.Cast(position, to=ir.DataType.INT64.value)
        return g.TensorScatter(g.input(plane), update, start, axis=-2, mode="linear")

    def attention(
        self,
        query: ir.Value,
        cache: tuple[Rows, Rows],
        positions: ir.Value,
        rows: int,
        heads: Heads,
        slots: int,
    ) -> ir.Value:
        """Attention with a boolean mask over the whole buffer; see `Portable.attention`."""
        if self.g.dtype == "fp32":
            return super().attention(query, cache, positions, rows, heads, slots)
        g = self.g
        batch = g.Unsqueeze(g.Transpose(query, perm=[1, 0, 2]), g.ints(0))
        seen = g.LessOrEqual(g.int32(*range(slots)), g.Unsqueeze(positions, g.ints(1)))
        mask = g.reshape(seen, 1, 1, rows, slots)
        key, value = self.read_rows(cache, heads, slots)
        mixed = g.Attention(batch, key, value, mask, scale=heads.dim**-0.5)
        return g.reshape(g.Transpose(mixed, perm=[0, 2, 1, 3]), rows, heads.query * heads.dim)
