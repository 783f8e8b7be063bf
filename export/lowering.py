"""How each building block becomes ONNX operators: the one place where profiles differ.

Shapes: R rows of the call, H hidden, T = C + W rows of a KV buffer. Values are of the compute dtype
unless a comment says fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.kv import names
from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.kv import Rows, decoded, encoded, kind_of

MASKED = -1e30  # a score that softmax turns into exactly 0 in fp32
UNIT_EPS = 1e-6  # inside the root, on the sum of squares (not the mean): qwen's l2norm


@dataclass(frozen=True)
class Heads:
    """Sizes of a grouped attention."""

    query: int
    kv: int
    dim: int

    @staticmethod
    def of(config: TrunkConfig | DraftConfig) -> Heads:
        """Those of a model."""
        return Heads(config.attention_heads, config.kv_heads, config.head_dim)


@dataclass(frozen=True)
class Rotary:
    """Cos and sin [R, 1, rotary_dim / 2] at the rows' positions."""

    cos: ir.Value
    sin: ir.Value
    rotary_dim: int


@dataclass(frozen=True)
class DeltaRows:
    """What the gated delta rule reads, one entry per row, all fp32.

    Of Hv value heads, each with the query and key of its key head: `asked` [1, Hv, 2, dk] is query
    over key, key [1, Hv, dk, 1], value [1, Hv, 1, dv]; decay, beta and query times key
    [1, Hv, 1, 1].
    """

    asked: list[ir.Value]
    key: list[ir.Value]
    value: list[ir.Value]
    decay: list[ir.Value]
    beta: list[ir.Value]
    overlap: list[ir.Value]


def rotary_tables(
    rows: int, config: TrunkConfig | DraftConfig
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cos and sin [rows, rotary_dim / 2] of every position, angles in fp32 as transformers has."""
    dims = config.rotary_dim
    exponent = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    frequency = (np.float32(1.0) / np.float32(config.rope_theta) ** exponent).astype(np.float32)
    angle = np.arange(rows, dtype=np.float32)[:, None] * frequency
    return np.cos(angle), np.sin(angle)


class Portable:
    """Opset 17 primitives: TensorRT 8.6 to 11, TensorRT-RTX and any ONNX Runtime."""

    opset = 17

    def __init__(self, g: GraphBuilder) -> None:
        self.g = g

    def reduce_mean(self, x: ir.Value) -> ir.Value:
        """Mean over the last axis, which stays with extent 1."""
        return self.g.ReduceMean(x, axes=[-1], keepdims=1)

    def smallest(self, x: ir.Value) -> ir.Value:
        """Minimum of a vector, [1]."""
        return self.g.ReduceMin(x, axes=[0], keepdims=1)

    def shaped(self, x: ir.Value, *shape: int) -> ir.Value:
        """`x`, of the compute dtype, with its shape: a note that only custom operators need."""
        return x

    def largest(self, x: ir.Value) -> ir.Value:
        """Maximum over the last axis, which stays with extent 1."""
        return self.g.ReduceMax(x, axes=[-1], keepdims=1)

    def rms(self, x: ir.Value, eps: float) -> ir.Value:
        """`x` (fp32) over its root mean square along the last axis, fp32."""
        g = self.g
        mean = self.reduce_mean(g.Mul(x, x))
        return g.Div(x, g.Sqrt(g.Add(mean, g.scalar(eps))))

    def rms_norm(self, x: ir.Value, weight: str, eps: float, *, centred: bool) -> ir.Value:
        """RMSNorm in fp32 with one rounding at the end; `centred` weights mean 1 + w (Qwen3.5)."""
        g = self.g
        scale = g.weight(weight, "fp32")
        if centred:
            scale = g.Add(scale, g.scalar(1.0))
        return g.lower(g.Mul(self.rms(g.fp32(x), eps), scale))

    def unit(self, x: ir.Value) -> ir.Value:
        """`x` (fp32) scaled to length one along the last axis."""
        g = self.g
        total = g.ReduceSum(g.Mul(x, x), g.ints(-1), keepdims=1)
        return g.Div(x, g.Sqrt(g.Add(total, g.scalar(UNIT_EPS))))

    def silu(self, x: ir.Value) -> ir.Value:
        """`x` times its sigmoid."""
        return self.g.Mul(x, self.g.Sigmoid(x))

    def swiglu(self, x: ir.Value, prefix: str) -> ir.Value:
        """down(silu(gate(x)) * up(x)), x [R, H]."""
        g = self.g
        gate = g.linear(x, f"{prefix}.gate_proj.weight")
        up = g.linear(x, f"{prefix}.up_proj.weight")
        return g.linear(g.Mul(self.silu(gate), up), f"{prefix}.down_proj.weight")

    def embed(self, ids: ir.Value, table: str) -> ir.Value:
        """Rows of the embedding [R, H]; an id below 0 (no token) reads row 0."""
        g = self.g
        rows = g.Gather(g.stored(table), g.Max(ids, g.int32(0)), axis=0)
        return g.to_compute(rows, table)

    def rotary_rows(
        self, positions: ir.Value, slots: int, config: TrunkConfig | DraftConfig
    ) -> Rotary:
        """Cos and sin for int32 `positions` [R], which are below `slots`."""
        g = self.g
        cos, sin = (
            g.lower(g.Gather(g.constant(table[:, None, :]), positions, axis=0))
            for table in rotary_tables(slots, config)
        )
        return Rotary(cos, sin, config.rotary_dim)

    def rotate(self, x: ir.Value, rotary: Rotary, head_dim: int) -> ir.Value:
        """Rotate the leading dims of x [R, heads, head_dim]; pairs are (i, i + rotary_dim / 2)."""
        g = self.g
        half = rotary.rotary_dim // 2
        tail = [head_dim - 2 * half] if head_dim > 2 * half else []
        a, b, *rest = g.split(x, -1, half, half, *tail)
        turned_a = g.Sub(g.Mul(a, rotary.cos), g.Mul(b, rotary.sin))
        turned_b = g.Add(g.Mul(b, rotary.cos), g.Mul(a, rotary.sin))
        return g.Concat(turned_a, turned_b, *rest, axis=-1)

    def write_cache(
        self,
        layer: str,
        key: ir.Value,
        value: ir.Value,
        position: ir.Value,
        rows: int,
        heads: Heads,
    ) -> tuple[Rows, Rows]:
        """Keys and values of an attention layer with those of this call; see `write_rows`."""
        return (
            self.write_rows(f"{layer}.key", key, position, rows, heads),
            self.write_rows(f"{layer}.value", value, position, rows, heads),
        )

    def write_rows(
        self, cache: str, update: ir.Value, position: ir.Value, rows: int, heads: Heads
    ) -> Rows:
        """Write `update` [R, Hkv, head_dim] into the keys or values called `cache`.

        Row r goes to slot position + r of every plane of their KV type, and the outputs of these
        are set. Nothing else may read the inputs: they can be the same buffers as the outputs.
        """
        g = self.g
        kind = kind_of(g.spec, cache)
        update = g.Unsqueeze(g.Transpose(update, perm=[1, 0, 2]), g.ints(0))
        parts = encoded(g, update, kind, (1, heads.kv, rows, heads.dim), self.largest)
        planes = []
        for name, part in zip(names(kind, cache), parts, strict=True):
            planes.append(self.write_plane(name, part, position, rows, heads))
            g.output(f"{name}.next", planes[-1])
        return Rows(kind, tuple(planes))

    def write_plane(
        self, plane: str, update: ir.Value, position: ir.Value, rows: int, heads: Heads
    ) -> ir.Value:
        """The KV input `plane` [1, Hkv, T, columns] with `update` [1, Hkv, R, columns] in it."""
        g = self.g
        slots = np.zeros((1, heads.kv, rows, 3), dtype=np.int64)
        slots[..., 1] = np.arange(heads.kv)[:, None]
        slots[..., 2] = np.arange(rows)
        start = g.Mul(g.Cast(position, to=ir.DataType.INT64.value), g.ints(0, 0, 1))
        return g.ScatterND(g.input(plane), g.Add(g.constant(slots), start), update)

    def read_rows(
        self, cache: tuple[Rows, Rows], heads: Heads, slots: int
    ) -> tuple[ir.Value, ir.Value]:
        """Keys and values [1, Hkv, T, head_dim] in the compute dtype."""
        shape = (1, heads.kv, slots, heads.dim)
        key, value = (decoded(self.g, rows, shape) for rows in cache)
        return key, value

    def attention(
        self,
        query: ir.Value,
        cache: tuple[Rows, Rows],
        positions: ir.Value,
        rows: int,
        heads: Heads,
        slots: int,
    ) -> ir.Value:
        """Grouped attention over the whole buffer, slots past a row's position masked.

        query [R, Hq, head_dim], cache = keys and values of T slots, positions int32 [R] ->
        [R, Hq * head_dim]. Always T columns, so that a row's sums run in the same order wherever it
        stands. Scores and softmax in fp32.
        """
        g = self.g
        key, value = self.read_rows(cache, heads, slots)
        group_rows = heads.query // heads.kv * rows
        scaled = g.Mul(query, g.compute_scalar(heads.dim**-0.5))
        grouped = g.reshape(g.Transpose(scaled, perm=[1, 0, 2]), 1, heads.kv, group_rows, heads.dim)
        scores = g.fp32(g.MatMul(grouped, g.Transpose(key, perm=[0, 1, 3, 2])))
        scores = g.reshape(scores, heads.query, rows, slots)
        seen = g.LessOrEqual(g.int32(*range(slots)), g.Unsqueeze(positions, g.ints(1)))
        weights = g.Softmax(g.Where(seen, scores, g.scalar(MASKED)), axis=-1)
        weights = g.reshape(g.lower(weights), 1, heads.kv, group_rows, slots)
        mixed = g.reshape(g.MatMul(weights, value), heads.query, rows, heads.dim)
        return g.reshape(g.Transpose(mixed, perm=[1, 0, 2]), rows, heads.query * heads.dim)

    def conv(self, window: ir.Value, weight: str, rows: int, kernel: int) -> ir.Value:
        """Depthwise causal convolution and silu: window [kernel - 1 + R, C] -> [R, C].

        Tap `kernel - 1` meets the newest row. Multiply-adds in fp32, rounded once.
        """
        g = self.g
        channels = g.weight_shape(weight)[0]
        taps = g.Transpose(g.reshape(g.weight(weight, "fp32"), channels, kernel), perm=[1, 0])
        window = g.fp32(window)
        total = None
        for j, tap in enumerate(g.split(taps, 0, *[1] * kernel)):
            term = g.Mul(g.Slice(window, g.ints(j), g.ints(j + rows), g.ints(0)), tap)
            total = term if total is None else g.Add(total, term)
        assert total is not None, "a convolution has at least one tap"
        return self.silu(g.lower(total))

    def softplus(self, x: ir.Value) -> ir.Value:
        """log(1 + exp(x)) from primitives.

        TensorRT 8.6 cannot fuse Softplus with its neighbours, and what it made of the recurrence
        behind one was not always a number.
        """
        g = self.g
        tail = g.Log(g.Add(g.scalar(1.0), g.Exp(g.Neg(g.Abs(x)))))
        return g.Add(g.Max(x, g.scalar(0.0)), tail)

    def fold(
        self, S: ir.Value, log: tuple[list[ir.Value], list[ir.Value], list[ir.Value]]
    ) -> ir.Value:
        """Apply the rank-1 log (keys, deltas, decays, masked by the caller) to S, row by row."""
        g = self.g
        for key, delta, decay in zip(*log, strict=True):
            S = g.Add(g.Mul(S, decay), g.Mul(key, delta))
        return S

    def delta_rule(
        self, S: ir.Value, rows: DeltaRows
    ) -> tuple[list[ir.Value], list[ir.Value], list[ir.Value]]:
        """The gated delta rule over S [1, Hv, dk, dv] fp32, one row after the other.

        S <- decay S; delta = beta (value - S^T key); S <- S + key delta^T; out = S^T query, which
        is (decay S)^T query + (query key) delta: one product reads S for both. Returns the outputs
        and deltas [1, Hv, 1, dv] and S after every row. The two lines that change S are those of
        `fold`, so a folded log gives the same bits.
        """
        g = self.g
        outputs, deltas, states = [], [], []
        for asked, key, value, decay, beta, overlap in zip(
            rows.asked, rows.key, rows.value, rows.decay, rows.beta, rows.overlap, strict=True
        ):
            decayed = g.Mul(S, decay)
            found, recalled = g.split(g.MatMul(asked, decayed), 2, 1, 1)
            delta = g.Mul(beta, g.Sub(value, recalled))
            S = g.Add(decayed, g.Mul(key, delta))
            outputs.append(g.Add(found, g.Mul(overlap, delta)))
            deltas.append(delta)
            states.append(S)
        return outputs, deltas, states

    def greedy(self, logits: ir.Value) -> ir.Value:
        """Argmax per row of fp32 logits [R, V] -> int32 [R]; -1 where a row is not finite."""
        g = self.g
        best = g.cast(g.ArgMax(logits, axis=-1, keepdims=0, select_last_index=0), "int32")
        total = g.Abs(g.ReduceSum(logits, g.ints(-1), keepdims=0))
        return g.Where(g.Less(total, g.scalar(3e38)), best, g.int32(-1))
