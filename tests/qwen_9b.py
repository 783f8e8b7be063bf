"""The published shapes of Qwen3.5-9B and its EAGLE-3 draft, cut to a few layers or small sizes."""

from __future__ import annotations

from dataclasses import replace

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.export.shapes import configs as published
from eagle_chain.export.shapes import stored as weights

__all__ = ["configs", "tiny", "weights"]

TINY = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64},
    **{"attention_heads": 2, "kv_heads": 1, "head_dim": 64, "rotary_dim": 16},
}
LINEAR = {
    **{"linear_key_heads": 1, "linear_value_heads": 2},
    **{"linear_key_dim": 16, "linear_value_dim": 8},
}


def configs(layers: int = 32) -> tuple[TrunkConfig, DraftConfig]:
    """Trunk and draft; with fewer layers the features come from the first three."""
    trunk, draft = published("qwen3.5-9b")
    if layers == len(trunk.layer_types):
        return trunk, draft
    return (
        replace(trunk, layer_types=trunk.layer_types[:layers]),
        replace(draft, aux_layers=(0, 1, 2)),
    )


def tiny() -> tuple[TrunkConfig, DraftConfig]:
    """Four layers in sizes that every operator takes."""
    trunk, draft = configs(4)
    sizes = TINY | {"trunk_hidden_size": 64, "draft_vocab_size": 64}
    return replace(trunk, **TINY, **LINEAR), replace(draft, **sizes)
