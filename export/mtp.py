"""The graph of the trunk's own draft head (MTP): two norms, fc, one layer of the trunk, its head.

Op sequence (vLLM qwen3_5_mtp.py): h = fc([norm(embed); norm(hidden)]); h += attention(norm(h));
h += mlp(norm(h)); g' = norm(h); logits = head(g'). All norms use 1 + w; embedding and head are the
trunk's; `hidden` is the trunk's after its final norm, and so is g', which enters the next step.
"""

from __future__ import annotations

import onnx_ir as ir

from eagle_chain.engines.config import TrunkConfig
from eagle_chain.engines.spec import Options
from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.fused import Fused
from eagle_chain.export.lowering import Heads, Portable
from eagle_chain.export.prefill import valid_rows, write_prompt_rows

LAYER = "mtp.layers.0"
ATTENTION = f"{LAYER}.self_attn"


def record_mtp(
    g: GraphBuilder, low: Portable, config: TrunkConfig, rows: int, options: Options
) -> None:
    """One call over R rows; as in a draft, only row `row` goes further than its KV."""
    heads = Heads.of(config)
    position, row = g.input("position"), g.input("row")

    def norm(x: ir.Value, name: str) -> ir.Value:
        return low.rms_norm(x, f"{name}.weight", config.norm_eps, centred=True)

    def rotated(x: ir.Value, positions: ir.Value) -> ir.Value:
        return low.rotate(x, low.rotary_rows(positions, options.kv_rows, config), heads.dim)

    embedded = norm(low.embed(g.input("ids"), "embed_tokens.weight"), "mtp.pre_fc_norm_embedding")
    joined = g.Concat(embedded, norm(g.input("g"), "mtp.pre_fc_norm_hidden"), axis=-1)  # [R, 2H]
    h = g.linear(joined, "mtp.fc.weight")
    x = norm(h, f"{LAYER}.input_layernorm")

    key = g.reshape(g.linear(x, f"{ATTENTION}.k_proj.weight"), rows, heads.kv, heads.dim)
    value = g.reshape(g.linear(x, f"{ATTENTION}.v_proj.weight"), rows, heads.kv, heads.dim)
    key = rotated(norm(key, f"{ATTENTION}.k_norm"), g.Add(position, g.int32(*range(rows))))
    cache = low.write_cache("mtp", key, value, position, rows, heads)

    here = g.Add(position, row)  # int32 [1]: where the wanted row stands
    fused = g.linear(g.Gather(x, row, axis=0), f"{ATTENTION}.q_proj.weight")
    fused = g.reshape(fused, 1, heads.query, 2 * heads.dim)  # per head: query rows, then gate rows
    query, gate = g.split(fused, -1, heads.dim, heads.dim)
    query = rotated(norm(query, f"{ATTENTION}.q_norm"), here)
    mixed = low.attention(query, cache, here, 1, heads, options.kv_rows)
    mixed = g.Mul(mixed, g.Sigmoid(g.reshape(gate, 1, heads.query * heads.dim)))
    h = g.Add(g.Gather(h, row, axis=0), g.linear(mixed, f"{ATTENTION}.o_proj.weight"))
    h = g.Add(h, low.swiglu(norm(h, f"{LAYER}.post_attention_layernorm"), f"{LAYER}.mlp"))
    last = norm(h, "mtp.norm")
    logits = g.fp32(g.linear(last, config.head))

    g.output("token", low.greedy(logits))
    g.output("g_next", last)
    g.output("next_position", g.Add(here, g.int32(1)))
    if g.wants("logits"):
        g.output("logits", logits)


def record_fused_mtp(
    g: GraphBuilder, low: Fused, config: TrunkConfig, rows: int, options: Options
) -> None:
    """The same in the operators of `ort-fused`."""
    heads = Heads.of(config)
    eps, position, row = config.norm_eps, g.input("position"), g.input("row")

    def norm(x: ir.Value, name: str) -> ir.Value:
        return low.rms_norm(x, f"{name}.weight", eps, centred=True)

    def add_norm(h: ir.Value, delta: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
        return low.add_norm(h, delta, f"{name}.weight", eps, centred=True)

    def chosen(x: ir.Value) -> ir.Value:
        if rows == 1:
            return x
        return low.shaped(g.Gather(x, row, axis=0), 1, config.hidden_size)

    embedded = norm(low.embed(g.input("ids"), "embed_tokens.weight"), "mtp.pre_fc_norm_embedding")
    normed = norm(g.input("g"), "mtp.pre_fc_norm_hidden")
    joined = low.shaped(g.Concat(embedded, normed, axis=-1), rows, 2 * config.hidden_size)
    h = low.linear(joined, "mtp.fc.weight")
    x = norm(h, f"{LAYER}.input_layernorm")
    names = [f"{ATTENTION}.{part}_proj.weight" for part in "qkv"]
    if rows == 1:
        query = kv = low.linear(x, *names)
        kv_offset = 2 * heads.query * heads.dim
    else:
        query, kv, kv_offset = low.linear(chosen(x), names[0]), low.linear(x, *names[1:]), 0
    here = g.Add(position, row)
    mixed = low.attend(
        query,
        kv,
        ("mtp.key", "mtp.value"),
        (position, here),
        heads,
        low.whole_rotary(options.kv_rows, config),
        options.kv_rows,
        norms=(f"{ATTENTION}.q_norm.weight", f"{ATTENTION}.k_norm.weight"),
        gated=True,
        eps=eps,
        kv_offset=kv_offset,
    )
    mixed = low.linear(mixed, f"{ATTENTION}.o_proj.weight")
    h, z = add_norm(chosen(h), mixed, f"{LAYER}.post_attention_layernorm")
    _, last = add_norm(h, low.swiglu(z, f"{LAYER}.mlp"), "mtp.norm")
    logits = low.linear(last, config.head)
    g.output("token", low.pick(logits))
    g.output("g_next", last)
    g.output("next_position", g.Add(here, g.int32(1)))
    if g.wants("logits"):
        g.output("logits", g.fp32(logits))


def record_mtp_prefill(
    g: GraphBuilder, low: Portable, config: TrunkConfig, options: Options
) -> None:
    """The head's keys and values for P rows of a prompt: all that its later calls read of it."""
    heads, rows = Heads.of(config), options.prefill
    is_valid = valid_rows(g, rows)

    def norm(x: ir.Value, name: str) -> ir.Value:
        return low.rms_norm(x, f"{name}.weight", config.norm_eps, centred=True)

    embedded = norm(low.embed(g.input("ids"), "embed_tokens.weight"), "mtp.pre_fc_norm_embedding")
    joined = g.Concat(embedded, norm(g.input("hidden"), "mtp.pre_fc_norm_hidden"), axis=-1)
    h = low.shaped(g.linear(joined, "mtp.fc.weight"), rows, config.hidden_size)
    x = norm(h, f"{LAYER}.input_layernorm")
    key, value = (
        g.reshape(g.linear(x, f"{ATTENTION}.{part}_proj.weight"), rows, heads.kv, heads.dim)
        for part in "kv"
    )
    key = norm(low.shaped(key, rows, heads.kv, heads.dim), f"{ATTENTION}.k_norm")
    write_prompt_rows(low, "mtp", key, value, is_valid, config, options)
