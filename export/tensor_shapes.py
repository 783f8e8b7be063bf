"""Every tensor of a trunk, of its own draft head and of a draft: its canonical name and its shape.

Trunk names are `embed_tokens.weight`, `layers.N.*` as in Hugging Face, `norm.weight` and
`lm_head.weight` (absent when tied). Draft names are the 15 of an original EAGLE-3 file,
`fc.weight`, `midlayer.*`, `norm.weight`, `lm_head.weight`, `d2t`, `t2d`, and those of its variants.
"""

from __future__ import annotations

from dataclasses import replace

from eagle_chain.engines.config import DraftConfig, TrunkConfig

Shape = tuple[int, ...]
CONV = "linear_attn.conv1d.weight"


def trunk_shapes(config: TrunkConfig) -> dict[str, Shape]:
    """Every tensor of a trunk and its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
    values = config.linear_value_heads * config.linear_value_dim
    channels, heads = config.conv_channels, config.linear_value_heads
    mixers: dict[str, dict[str, Shape]] = {
        "linear_attention": {
            "linear_attn.in_proj_qkv.weight": (channels, hidden),
            "linear_attn.in_proj_z.weight": (values, hidden),
            "linear_attn.in_proj_b.weight": (heads, hidden),
            "linear_attn.in_proj_a.weight": (heads, hidden),
            CONV: (channels, 1, config.conv_kernel),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (config.linear_value_dim,),
            "linear_attn.out_proj.weight": (hidden, values),
        },
        "full_attention": {
            "self_attn.q_proj.weight": (2 * queries, hidden),  # per head: query, then gate
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        },
    }
    shapes: dict[str, Shape] = {"embed_tokens.weight": (config.vocab_size, hidden)}
    for i, kind in enumerate(config.layer_types):
        layer = {"input_layernorm.weight": (hidden,), **mixers[kind], **_mlp_shapes(hidden, inner)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["norm.weight"] = (hidden,)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def mtp_shapes(config: TrunkConfig) -> dict[str, Shape]:
    """Every tensor of the trunk's own draft head and its shape: fc, one full layer, three norms."""
    hidden = config.hidden_size
    layer = trunk_shapes(replace(config, layer_types=("full_attention",)))
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        **{f"mtp.{name}": shape for name, shape in layer.items() if name.startswith("layers.0.")},
        "mtp.norm.weight": (hidden,),
    }


def draft_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Every tensor of a draft and its shape."""
    hidden = config.hidden_size
    queries, keys = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),  # of the embedding
        "hidden_norm.weight": (hidden,),  # of the feature or the recurrence
        "self_attn.q_proj.weight": (queries, 2 * hidden),
        "self_attn.k_proj.weight": (keys, 2 * hidden),
        "self_attn.v_proj.weight": (keys, 2 * hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        **_mlp_shapes(hidden, config.intermediate_size),
    }
    if config.qk_norm:
        layer |= {f"self_attn.{part}_norm.weight": (config.head_dim,) for part in "qk"}
    shapes: dict[str, Shape] = {}
    if config.embedding.startswith("draft."):
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (config.feature_size,)
    if config.fc_norm:
        width = config.trunk_hidden_size
        shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(len(config.aux_layers))}
    if config.fc:
        shapes["fc.weight"] = (hidden, config.feature_size)
    shapes |= {f"midlayer.{name}": shape for name, shape in layer.items()}
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in config.biases}
    shapes["norm.weight"] = (hidden,)
    if config.head == "draft.lm_head.weight":
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    return shapes | {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}


def _mlp_shapes(hidden: int, inner: int) -> dict[str, Shape]:
    return {
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
