"""The published shapes of Qwen3.5-9B and its EAGLE-3 draft, with weights that lie nowhere."""

from __future__ import annotations

from collections.abc import Mapping

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.manifest import Weight
from eagle_chain.export.checkpoint import draft_shapes, trunk_shapes


def configs(layers: int = 32) -> tuple[TrunkConfig, DraftConfig]:
    """Trunk and draft; with fewer layers the features come from the first three."""
    trunk = TrunkConfig(
        vocab_size=248320,
        hidden_size=4096,
        intermediate_size=12288,
        layer_types=tuple(
            "full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)
        ),
        attention_heads=16,
        kv_heads=4,
        head_dim=256,
        linear_key_heads=16,
        linear_value_heads=32,
        linear_key_dim=128,
        linear_value_dim=128,
        conv_kernel=4,
        norm_eps=1e-6,
        rope_theta=1e7,
        rotary_dim=64,
        tied_head=False,
        max_positions=262144,
        eos_ids=(248044,),
    )
    draft = DraftConfig(
        hidden_size=4096,
        intermediate_size=12288,
        attention_heads=16,
        kv_heads=4,
        head_dim=256,
        norm_eps=1e-6,
        rope_theta=1e7,
        rotary_dim=64,
        draft_vocab_size=32000,
        vocab_size=248320,
        trunk_hidden_size=4096,
        aux_layers=(1, 15, 28) if layers == 32 else (0, 1, 2),
    )
    return trunk, draft


def weights(trunk: TrunkConfig, draft: DraftConfig) -> Mapping[str, Weight]:
    """Every tensor as bf16 in a file that does not exist: enough for graphs with bound weights."""
    shapes = {**trunk_shapes(trunk), **{f"draft.{n}": s for n, s in draft_shapes(draft).items()}}
    stored = {"draft.d2t": "I64", "draft.t2d": "BOOL"}
    return {
        name: Weight("weights/none.safetensors", 8, stored.get(name, "BF16"), shape)
        for name, shape in shapes.items()
    }
