"""The encoder graph and the draft graph of EAGLE-3: fc over the features, one layer, a small head.

Op sequence (vLLM llama_eagle3.py, layer 0): g = fc(features); C = [norm(embed); norm(g)];
x1 = o_proj(attention(C)) + g; g' = mlp(norm(x1)) + x1; logits = lm_head(norm(g')); trunk id = draft
id + d2t[draft id]. The flags of `DraftConfig` say what is different: norms in front of fc, the
residual norm(g) instead of g, norm(g') instead of g' as the next g, norms on queries and keys.
"""

from __future__ import annotations

import onnx_ir as ir

from eagle_chain.engines.config import DraftConfig
from eagle_chain.engines.spec import Options
from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.lowering import Heads, Portable

LAYER, ATTENTION, MLP = "draft.midlayer", "draft.midlayer.self_attn", "draft.midlayer.mlp"


def record_encoder(g: GraphBuilder, low: Portable, config: DraftConfig) -> None:
    """`features` [W, A*Ht] -> `g` [W, H]."""
    g.output("g", encoded(g, low, config))


def encoded(g: GraphBuilder, low: Portable, config: DraftConfig) -> ir.Value:
    """What the draft makes of the input `features` [R, A*Ht]: g [R, H]."""
    x = normed_features(g, low, config)
    return product(g, x, "fc", config) if config.fc else x


def record_draft(
    g: GraphBuilder, low: Portable, config: DraftConfig, rows: int, options: Options
) -> None:
    """One draft call over R rows.

    Every row writes its KV; only row `row` is asked for a token, so query, MLP and head run on that
    row alone.
    """
    heads = Heads.of(config)
    position, row = g.input("position"), g.input("row")

    def norm(x: ir.Value, weight: str) -> ir.Value:
        return low.rms_norm(x, weight, config.norm_eps, centred=False)

    def projected(x: ir.Value, part: str, *shape: int) -> ir.Value:
        return g.reshape(product(g, x, f"midlayer.self_attn.{part}_proj", config), *shape)

    def rotated(x: ir.Value, part: str, positions: ir.Value) -> ir.Value:
        if config.qk_norm:
            x = norm(x, f"{ATTENTION}.{part}_norm.weight")
        return low.rotate(x, low.rotary_rows(positions, options.kv_rows, config), heads.dim)

    embedded = norm(low.embed(g.input("ids"), config.embedding), f"{LAYER}.input_layernorm.weight")
    normed = norm(g.input("g"), f"{LAYER}.hidden_norm.weight")
    joined = g.Concat(embedded, normed, axis=-1)  # [R, 2H]

    key = projected(joined, "k", rows, heads.kv, heads.dim)
    value = projected(joined, "v", rows, heads.kv, heads.dim)
    key = rotated(key, "k", g.Add(position, g.int32(*range(rows))))
    cache = low.write_cache("draft", key, value, position, rows, heads)

    here = g.Add(position, row)  # int32 [1]: where the wanted row stands
    query = projected(g.Gather(joined, row, axis=0), "q", 1, heads.query, heads.dim)
    query = rotated(query, "q", here)
    mixed = low.attention(query, cache, here, 1, heads, options.kv_rows)
    residual = g.Gather(normed if config.norm_before_residual else g.input("g"), row, axis=0)
    x = g.Add(product(g, mixed, "midlayer.self_attn.o_proj", config), residual)
    z = norm(x, f"{LAYER}.post_attention_layernorm.weight")
    total = g.Add(swiglu(g, low, z, config), x)
    last = norm(total, "draft.norm.weight")
    logits = scaled(g, g.fp32(g.linear(last, config.head)), config)

    g.output("token", trunk_id(g, low.greedy(logits), config))
    g.output("g_next", last if config.norm_output else total)
    g.output("next_position", g.Add(here, g.int32(1)))
    if g.wants("logits"):
        g.output("logits", logits)


def normed_features(g: GraphBuilder, low: Portable, config: DraftConfig) -> ir.Value:
    """The features as fc reads them, normed together or chunk by chunk if the draft does that."""
    x, eps = g.input("features"), config.norm_eps
    if config.norm_before_fc:
        return low.rms_norm(x, "draft.input_norm.weight", eps, centred=False)
    if not config.fc_norm:
        return x
    width, rows = config.trunk_hidden_size, _rows(x)
    chunks = g.split(x, -1, *[width] * len(config.aux_layers))
    normed = [
        low.rms_norm(
            low.shaped(chunk, rows, width), f"draft.fc_norm.{i}.weight", eps, centred=False
        )
        for i, chunk in enumerate(chunks)
    ]
    return g.Concat(*normed, axis=-1) if len(normed) > 1 else normed[0]


def product(g: GraphBuilder, x: ir.Value, name: str, config: DraftConfig) -> ir.Value:
    """`x` times a weight of the draft, with its bias if it has one."""
    bias = f"draft.{name}.bias" if name in config.biases else None
    return g.linear(x, f"draft.{name}.weight", bias)


def swiglu(g: GraphBuilder, low: Portable, z: ir.Value, config: DraftConfig) -> ir.Value:
    """The gated MLP over z [R, H]; biases have no operator of their own anywhere."""
    if not any(name.startswith("midlayer.mlp.") for name in config.biases):
        return low.swiglu(z, MLP)
    gate = product(g, z, "midlayer.mlp.gate_proj", config)
    up = product(g, z, "midlayer.mlp.up_proj", config)
    inner = g.Mul(g.Mul(gate, g.Sigmoid(gate)), up)
    return product(g, inner, "midlayer.mlp.down_proj", config)


def scaled(g: GraphBuilder, logits: ir.Value, config: DraftConfig) -> ir.Value:
    """Logits (fp32) times the draft's scale."""
    return logits if config.logit_scale == 1 else g.Mul(logits, g.scalar(config.logit_scale))


def trunk_id(g: GraphBuilder, draft_id: ir.Value, config: DraftConfig) -> ir.Value:
    """The trunk's id of a drafted id [1]; -1 (no draft) stays -1."""
    if not g.has_weight("draft.d2t"):  # both vocabularies are the same
        return draft_id
    stored = g.cast(g.Gather(g.stored("draft.d2t"), g.Max(draft_id, g.int32(0)), axis=0), "int32")
    target = stored if config.absolute_d2t else g.Add(draft_id, stored)
    return g.Where(g.Less(draft_id, g.int32(0)), draft_id, target)


def _rows(x: ir.Value) -> int:
    """The first extent of a graph input."""
    assert x.shape is not None and isinstance(x.shape[0], int), "graph inputs are static"
    return x.shape[0]
