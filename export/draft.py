"""The encoder graph and the draft graph of EAGLE-3: fc over the features, one layer, a small head.

Op sequence (vLLM llama_eagle3.py, layer 0, no optional norms): g = fc(features);
C = [norm(embed); norm(g)]; x1 = o_proj(attention(C)) + g; g' = mlp(norm(x1)) + x1;
logits = lm_head(norm(g')); trunk id = draft id + d2t[draft id].
"""

from __future__ import annotations

import onnx_ir as ir

from eagle_chain.engines.config import DraftConfig
from eagle_chain.engines.spec import Options
from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.lowering import Heads, Portable


def record_encoder(g: GraphBuilder) -> None:
    """`features` [W, A*Ht] -> `g` [W, H]."""
    g.output("g", g.linear(g.input("features"), "draft.fc.weight"))


def record_draft(
    g: GraphBuilder, low: Portable, config: DraftConfig, rows: int, options: Options
) -> None:
    """One draft call over R rows.

    Every row writes its KV; only row `row` is asked for a token, so query, MLP and head run on that
    row alone.
    """
    heads = Heads(config.attention_heads, config.kv_heads, config.head_dim)
    layer = "draft.midlayer"
    position, row = g.input("position"), g.input("row")

    def norm(x: ir.Value, weight: str) -> ir.Value:
        return low.rms_norm(x, weight, config.norm_eps, centred=False)

    def rotated(x: ir.Value, positions: ir.Value) -> ir.Value:
        table = low.rotary_rows(positions, options.kv_rows, config.rope_theta, config.rotary_dim)
        return low.rotate(x, table, heads.dim)

    embedded = norm(
        low.embed(g.input("ids"), "embed_tokens.weight"), f"{layer}.input_layernorm.weight"
    )
    joined = g.Concat(
        embedded, norm(g.input("g"), f"{layer}.hidden_norm.weight"), axis=-1
    )  # [R, 2H]

    key = g.reshape(g.linear(joined, f"{layer}.self_attn.k_proj.weight"), rows, heads.kv, heads.dim)
    value = g.linear(joined, f"{layer}.self_attn.v_proj.weight")
    value = g.reshape(value, rows, heads.kv, heads.dim)
    key = rotated(key, g.Add(position, g.int32(*range(rows))))
    cache = (
        low.write_rows("draft.key", key, position, rows, heads),
        low.write_rows("draft.value", value, position, rows, heads),
    )

    here = g.Add(position, row)  # int32 [1]: where the wanted row stands
    query = g.linear(g.Gather(joined, row, axis=0), f"{layer}.self_attn.q_proj.weight")
    query = rotated(g.reshape(query, 1, heads.query, heads.dim), here)
    mixed = low.attention(query, cache, here, 1, heads, options.kv_rows)
    residual = g.Gather(g.input("g"), row, axis=0)
    x = g.Add(g.linear(mixed, f"{layer}.self_attn.o_proj.weight"), residual)
    z = norm(x, f"{layer}.post_attention_layernorm.weight")
    recurrence = g.Add(low.swiglu(z, f"{layer}.mlp"), x)  # before the final norm
    logits = g.fp32(g.linear(norm(recurrence, "draft.norm.weight"), "draft.lm_head.weight"))

    g.output("token", trunk_id(g, low.greedy(logits)))
    g.output("g_next", recurrence)
    g.output("next_position", g.Add(here, g.int32(1)))
    if g.wants("logits"):
        g.output("logits", logits)


def trunk_id(g: GraphBuilder, draft_id: ir.Value) -> ir.Value:
    """The trunk's id of a drafted id [1]; -1 (no draft) stays -1."""
    if not g.has_weight("draft.d2t"):  # both vocabularies are the same
        return draft_id
    offset = g.cast(g.Gather(g.stored("draft.d2t"), g.Max(draft_id, g.int32(0)), axis=0), "int32")
    return g.Where(g.Less(draft_id, g.int32(0)), draft_id, g.Add(draft_id, offset))
