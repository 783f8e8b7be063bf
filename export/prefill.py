"""The graphs that read a prompt: P rows of the trunk at once, and the draft's KV rows for them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.spec import ATTENTION_SCORES, Options
from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.chunked import ChunkRows, Sizes, delta_rule
from eagle_chain.export.draft import LAYER, encoded, product
from eagle_chain.export.kv import Rows
from eagle_chain.export.lowering import Heads, Portable
from eagle_chain.export.trunk import TrunkGraph


class PrefillRows(TrunkGraph):
    """What differs from a trunk call for any profile: `engines.contract.prefill_spec`.

    Rows behind the valid ones enter no state: their keys and values are written as zeros, and the
    delta rule sees zeros. Selected and not multiplied: they may hold anything, NaN included.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.width = self.options.prefill

    @cached_property
    def is_valid(self) -> ir.Value:
        """Which rows are part of the prompt, bool [P]."""
        return self.g.Less(self.g.int32(*range(self.width)), self.g.input("rows"))

    def valid(self, x: ir.Value, axes: int = 2) -> ir.Value:
        """`x` [P, ...] with `axes` further axes, zero in the rows that are not valid."""
        return self.masked(x, axes, self.g.compute_scalar(0.0))

    def masked(self, x: ir.Value, axes: int, otherwise: ir.Value) -> ir.Value:
        """`x` [P, ...] with `axes` further axes, `otherwise` in the rows that are not valid."""
        g = self.g
        return g.Where(g.reshape(self.is_valid, self.width, *[1] * axes), x, otherwise)

    def window_columns(self, window: ir.Value) -> ir.Value:
        """The inputs of the last valid rows first, then zeros, [3 + W, C]."""
        g, config = self.g, self.config
        history = config.conv_kernel - 1
        last = g.Gather(window, g.Add(g.input("rows"), g.int32(*range(history))), axis=0)
        blank = np.zeros((self.options.width, config.conv_channels), g.numpy_dtype)
        return g.Concat(last, g.constant(blank), axis=0)

    def blank_log(self, i: int) -> None:
        """The log of this call: zeros, of which the next call keeps none."""
        for pair in self.g.spec.states:
            if pair.input.startswith(f"layers.{i}.log_"):
                kind = np.float32 if pair.dtype == "fp32" else self.g.numpy_dtype
                self.g.output(pair.output, self.g.constant(np.zeros(pair.shape, kind)))

    def attention(self, query: ir.Value, cache: tuple[Rows, Rows], heads: Heads) -> ir.Value:
        """Attention over the whole KV buffers, in pieces of rows that bound its memory."""
        g, slots = self.g, self.options.kv_rows
        key, value = self.low.read_rows(cache, heads, slots)
        cache = Rows(g.dtype, (key,)), Rows(g.dtype, (value,))
        rows = self.width
        while rows * slots * heads.query > ATTENTION_SCORES and rows > 8:
            rows //= 2
        pieces = self.width // rows
        sizes = [rows] * pieces
        mixed = [
            self.low.attention(part, cache, places, rows, heads, slots)
            for part, places in zip(
                g.split(query, 0, *sizes), g.split(self.positions, 0, *sizes), strict=True
            )
        ]
        return mixed[0] if pieces == 1 else g.Concat(*mixed, axis=0)

    def verify(self, hidden: ir.Value) -> None:
        """The choice after the last valid row, the only one that sees the head."""
        g = self.g
        last = g.Gather(hidden, g.Sub(g.input("rows"), g.int32(1)), axis=0)
        logits = g.fp32(g.linear(last, self.config.head))
        g.output("pending", self.low.greedy(logits))
        g.output("next_kept", g.int32(0))
        g.output("next_position", g.Add(self.position, g.input("rows")))
        if g.wants("logits"):
            g.output("logits", logits)


class Prefill(PrefillRows):
    """In the operators of any profile of standard ONNX."""

    def linear_mixer(self, x: ir.Value, i: int) -> ir.Value:
        """Gated DeltaNet over P rows, on the state with the last call's kept rows folded in."""
        g, config = self.g, self.config
        prefix = f"layers.{i}.linear_attn"
        S = self.committed_state(i)
        query, key, value, log_decay, beta = self.delta_inputs(x, self.conv(x, i), prefix)
        value = g.reshape(value, self.width, config.linear_value_heads, config.linear_value_dim)
        rows = ChunkRows(
            *(self.masked(t, 2, g.scalar(0.0)) for t in (query, key, value)),
            *(self.masked(t, 1, g.scalar(0.0)) for t in (log_decay, beta)),
        )
        sizes = Sizes(
            self.width,
            config.linear_key_heads,
            config.linear_value_heads,
            config.linear_key_dim,
            config.linear_value_dim,
        )
        mixed, S = delta_rule(g, S, rows, sizes)
        g.output(f"layers.{i}.S.next", g.reshape(S, *self.state_shape()))
        self.blank_log(i)
        return self.gated(mixed, x, prefix)


def record_draft_prefill(
    g: GraphBuilder, low: Portable, config: DraftConfig, options: Options
) -> None:
    """The draft's keys and values for P rows: all that its later calls read of a prompt."""
    heads = Heads.of(config)
    rows = options.prefill
    is_valid = valid_rows(g, rows)

    def norm(x: ir.Value, weight: str) -> ir.Value:
        return low.rms_norm(x, f"{LAYER}.{weight}.weight", config.norm_eps, centred=False)

    embedded = norm(low.embed(g.input("ids"), config.embedding), "input_layernorm")
    feature = low.shaped(encoded(g, low, config), rows, config.hidden_size)
    joined = g.Concat(embedded, norm(feature, "hidden_norm"), axis=-1)  # [P, 2H]
    key, value = (
        g.reshape(
            product(g, joined, f"midlayer.self_attn.{part}_proj", config), rows, heads.kv, heads.dim
        )
        for part in "kv"
    )
    if config.qk_norm:
        key = norm(low.shaped(key, rows, heads.kv, heads.dim), "self_attn.k_norm")
    write_prompt_rows(low, "draft", key, value, is_valid, config, options)


def valid_rows(g: GraphBuilder, rows: int) -> ir.Value:
    """Which of P rows are part of the prompt, bool [P, 1, 1]."""
    return g.reshape(g.Less(g.int32(*range(rows)), g.input("rows")), rows, 1, 1)


def write_prompt_rows(
    low: Portable,
    layer: str,
    key: ir.Value,
    value: ir.Value,
    is_valid: ir.Value,
    config: TrunkConfig | DraftConfig,
    options: Options,
) -> None:
    """Keys, which are rotated here, and values [P, Hkv, head_dim] into a draft layer's KV."""
    g, rows, heads, position = low.g, options.prefill, Heads.of(config), low.g.input("position")
    places = g.Add(position, g.int32(*range(rows)))
    key = low.rotate(key, low.rotary_rows(places, options.kv_rows, config), heads.dim)
    for name, update in ((f"{layer}.key", key), (f"{layer}.value", value)):
        update = g.Where(is_valid, update, g.compute_scalar(0.0))
        low.write_rows(name, update, position, rows, heads)
