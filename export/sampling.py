"""Sampling inside the graph: a row draws from its softmax by the number that is its position's.

One uniform number per position makes drafting lossless: what the trunk would draw after a prefix
is settled before anyone guesses it. A draft is accepted when it is that token, and text decoded
with drafts is the text decoded without them for the same numbers. A guess q is accepted with
probability p(q), as in rejection sampling for a draft distribution of one token (Leviathan et al.,
arXiv:2211.17192).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.lowering import Portable

BLOCK = 512  # the vocabulary in blocks: sums up to a place are two small products, not a scan
NEVER = -1e30  # the logit of a padded place
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


def sample(
    low: Portable,
    logits: ir.Value,
    size: tuple[int, int],
    share: ir.Value,
    temperature: ir.Value,
) -> ir.Value:
    """Draw one id per row by the inverse of the cumulated softmax, int32 [R].

    Args:
        low: The profile.
        logits: fp32 [R, V].
        size: R and V.
        share: fp32 [R], in [0, 1): the place in the cumulated distribution.
        temperature: fp32 [1]; what comes out for 0 is of no use.
    """
    g, (rows, vocab) = low.g, size
    blocks = -(-vocab // BLOCK)
    scaled = g.Div(g.Sub(logits, low.largest(logits)), temperature)
    if blocks * BLOCK > vocab:
        blank = np.full((rows, blocks * BLOCK - vocab), NEVER, np.float32)
        scaled = g.Concat(scaled, g.constant(blank), axis=-1)
    mass = g.reshape(g.Exp(scaled), rows, blocks, BLOCK)  # not normalised
    masses = g.ReduceSum(mass, g.ints(-1), keepdims=0)  # [R, N]
    up_to = cumulated(g, masses, blocks)
    total = last(g, up_to, blocks)
    wanted = within(g, g.Mul(g.Unsqueeze(share, g.ints(1)), total), total)
    block = first(low, g.Greater(up_to, wanted), masses)  # [R, 1]

    before = g.Sub(g.GatherElements(up_to, block, axis=1), g.GatherElements(masses, block, axis=1))
    index = g.Expand(g.Unsqueeze(block, g.ints(2)), g.ints(rows, 1, BLOCK))
    inside = g.reshape(g.GatherElements(mass, index, axis=1), rows, BLOCK)
    up_to = cumulated(g, inside, BLOCK)
    wanted = within(g, g.Max(g.Sub(wanted, before), g.scalar(0.0)), last(g, up_to, BLOCK))
    place = first(low, g.Greater(up_to, wanted), inside)
    found = g.Add(g.Mul(block, g.ints(BLOCK)), place)
    return g.cast(g.reshape(found, rows), "int32")


def cumulated(g: GraphBuilder, x: ir.Value, size: int) -> ir.Value:
    """Sums up to and with each column of `x` [R, size]."""
    return g.MatMul(x, g.constant(np.triu(np.ones((size, size), np.float32))))


def last(g: GraphBuilder, x: ir.Value, size: int) -> ir.Value:
    """The last column of `x` [R, size], [R, 1]."""
    return g.Slice(x, g.ints(size - 1), g.ints(size), g.ints(1))


def within(g: GraphBuilder, wanted: ir.Value, total: ir.Value) -> ir.Value:
    """`wanted`, kept below `total`, which rounding may have carried it to."""
    return g.Min(wanted, g.Mul(total, g.scalar(BELOW_ONE)))


def first(low: Portable, passed: ir.Value, mass: ir.Value) -> ir.Value:
    """The first place that is passed and has a mass, int64 [R, 1]; if none, the heaviest one."""
    g = low.g
    has = g.And(passed, g.Greater(mass, g.scalar(0.0)))
    share = g.Div(mass, g.Add(low.largest(mass), g.scalar(1e-30)))
    return g.ArgMax(g.Where(has, g.scalar(2.0), share), axis=-1, keepdims=1)
