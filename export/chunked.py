"""The gated delta rule over many rows at once, in chunks (the WY form), all of it in fp32.

Within a chunk of c rows, with decay products D[i, j] = exp(sum of log decay over j < l <= i):

    A[i, j] = beta[i] (k[i] . k[j]) D[i, j]  for j < i,    T = (I + A)^-1
    delta   = T (beta v) - T (beta D[., -1] k) S
    out     = (D[., -1] q) S + [(q[i] . k[j]) D[i, j], j <= i] delta
    S'      = D[c - 1, -1] S + (D[c - 1, .] k)^T delta

(Yang et al., "Gated Delta Networks", 2024). Only the last three lines wait for the chunk before;
everything else is done for all chunks in the same products.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from eagle_chain.export.builder import GraphBuilder

CHUNKS = (64, 32)  # rows of a chunk: the first that divides the rows of a call


@dataclass(frozen=True)
class ChunkRows:
    """What the delta rule reads for P rows, fp32; a row with all zeros changes nothing.

    Hk key heads, G value heads per key head.
    """

    query: ir.Value  # [P, Hk, dk], scaled
    key: ir.Value  # [P, Hk, dk]
    value: ir.Value  # [P, Hk * G, dv]
    log_decay: ir.Value  # [P, Hk * G], at most 0
    beta: ir.Value  # [P, Hk * G]


@dataclass(frozen=True)
class Sizes:
    """Rows of a call and of a chunk, and the heads of a layer."""

    rows: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def chunk(self) -> int:
        """Rows of a chunk."""
        return next(c for c in CHUNKS if self.rows % c == 0)

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.key_heads


def delta_rule(
    g: GraphBuilder, S: ir.Value, rows: ChunkRows, sizes: Sizes
) -> tuple[ir.Value, ir.Value]:
    """Outputs [P, Hv, dv] and S after the rows, both fp32.

    Args:
        g: Of the graph.
        S: The state before the rows, [1, Hv, dk, dv] fp32.
        rows: Of the call.
        sizes: See there.

    Products never broadcast a batch axis, for which ONNX Runtime's CUDA provider would need tables
    of pointers that a captured graph does not keep.
    """
    c, count, heads = sizes.chunk, sizes.rows // sizes.chunk, sizes.value_heads
    dk, dv = sizes.key_dim, sizes.value_dim

    def by_chunk(x: ir.Value, per_head: int, dim: int) -> ir.Value:
        """[P, Hk * per_head * dim] -> [count, Hk, per_head, c, dim]."""
        x = g.reshape(x, count, c, sizes.key_heads, per_head, dim)
        return g.Transpose(x, perm=[0, 2, 3, 1, 4])

    def flat(x: ir.Value, dim: int) -> ir.Value:
        return g.reshape(x, count, heads, c, dim)

    query, key = (by_chunk(x, 1, dk) for x in (rows.query, rows.key))
    value = by_chunk(rows.value, sizes.group, dv)
    beta = by_chunk(rows.beta, sizes.group, 1)
    log_decay = by_chunk(rows.log_decay, sizes.group, 1)

    reach, decays = _decays(g, log_decay, c)  # [..., c, 1], [..., c, c]
    turned = g.Transpose(key, perm=[0, 1, 2, 4, 3])
    among = g.Mul(g.MatMul(key, turned), g.constant(np.tri(c, k=-1, dtype=np.float32)))
    solve = _inverse(g, flat(g.Mul(g.Mul(beta, among), decays), c), c)
    known = g.Concat(g.Mul(beta, value), g.Mul(g.Mul(beta, reach), key), axis=-1)
    fresh, recall = g.split(g.MatMul(solve, flat(known, dv + dk)), -1, dv, dk)
    asked = flat(g.Mul(reach, query), dk)
    seen = flat(g.Mul(g.MatMul(query, turned), decays), c)
    last = g.Gather(decays, g.ints(c - 1), axis=-2)  # [..., 1, c]
    left = g.Transpose(g.Mul(key, g.Transpose(last, perm=[0, 1, 2, 4, 3])), perm=[0, 1, 2, 4, 3])
    left = g.reshape(left, count, heads, dk, c)
    whole = g.reshape(g.Gather(reach, g.ints(c - 1), axis=-2), count, heads, 1, 1)

    per_chunk = [g.split(x, 0, *[1] * count) for x in (fresh, recall, asked, seen, left, whole)]
    outputs = []
    for fresh, recall, asked, seen, left, whole in zip(*per_chunk, strict=True):
        delta = g.Sub(fresh, g.MatMul(recall, S))
        outputs.append(g.Add(g.MatMul(asked, S), g.MatMul(seen, delta)))
        S = g.Add(g.Mul(S, whole), g.MatMul(left, delta))
    mixed = g.Transpose(g.Concat(*outputs, axis=0), perm=[0, 2, 1, 3])  # [count, c, Hv, dv]
    return g.reshape(mixed, sizes.rows, heads, dv), S


def _decays(g: GraphBuilder, log_decay: ir.Value, c: int) -> tuple[ir.Value, ir.Value]:
    """Decay since the chunk began [..., c, 1], and between its rows [..., c, c], 0 where j > i.

    Every sum is taken on its own: the difference of two running sums would lose the digits that
    they share.
    """
    upto = np.tri(c, dtype=np.float32)  # [i, l]: l <= i
    after = np.tri(c, k=-1, dtype=np.float32)  # [l, j]: l > j
    shares = np.concatenate([np.ones((c, 1), np.float32), after], axis=1)
    by_row = g.Mul(g.Transpose(log_decay, perm=[0, 1, 2, 4, 3]), g.constant(upto))
    every = g.Exp(g.MatMul(by_row, g.constant(shares)))
    reach, decays = g.split(every, -1, 1, c)
    return reach, g.Mul(decays, g.constant(upto))


def _inverse(g: GraphBuilder, A: ir.Value, c: int) -> ir.Value:
    """(I + A)^-1 for strictly lower triangular A [count, Hv, c, c].

    Forward substitution by blocks that double: with the blocks of size b on the diagonal inverted
    (T), those of size 2b are T - T B T, where B holds the part of A between them. The powers of A
    that a product form needs would grow past fp32 for rows with equal keys.
    """
    row, column = np.indices((c, c))
    T, size = None, 1
    while size < c:
        between = (row // size % 2 == 1) & (column // size == row // size - 1)
        B = g.Mul(A, g.constant(between.astype(np.float32)))
        if T is None:
            T = g.Sub(g.constant(np.eye(c, dtype=np.float32)), B)
        else:
            T = g.Sub(T, g.MatMul(T, g.MatMul(B, T)))
        size *= 2
    assert T is not None, "a chunk has more than one row"
    return T
