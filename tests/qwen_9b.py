"""The published shapes of Qwen3.5-9B and its EAGLE-3 draft, cut to a few layers where asked."""

from __future__ import annotations

from dataclasses import replace

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.export.shapes import configs as published
from eagle_chain.export.shapes import stored as weights

__all__ = ["configs", "weights"]


def configs(layers: int = 32) -> tuple[TrunkConfig, DraftConfig]:
    """Trunk and draft; with fewer layers the features come from the first three."""
    trunk, draft = published("qwen3.5-9b")
    if layers == len(trunk.layer_types):
        return trunk, draft
    return (
        replace(trunk, layer_types=trunk.layer_types[:layers]),
        replace(draft, aux_layers=(0, 1, 2)),
    )
