"""Graphs in the sizes of a published pair without its weights, for `eagle-chain bench --shapes`.

`python -m eagle_chain.export.shapes NAME -o FOLDER` writes the graphs and `shapes.json`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.kv import KV_TYPES
from eagle_chain.engines.manifest import Weight
from eagle_chain.engines.spec import DTYPES, PROFILES, Options
from eagle_chain.engines.strict_json import encode
from eagle_chain.export.graph import build_graphs
from eagle_chain.export.tensor_shapes import draft_shapes, mtp_shapes, trunk_shapes

NAMES = ("qwen3.5-9b",)


def configs(name: str) -> tuple[TrunkConfig, DraftConfig]:
    """Trunk and draft of a published pair."""
    assert name in NAMES, "the parser lets no other name through"
    kinds = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
    trunk = TrunkConfig(
        vocab_size=248320,
        hidden_size=4096,
        intermediate_size=12288,
        layer_types=kinds * 8,
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
        aux_layers=(1, 15, 28),
    )
    return trunk, draft


def stored(trunk: TrunkConfig, draft: DraftConfig) -> dict[str, Weight]:
    """Every tensor as bf16 in a file that does not exist."""
    shapes = {**trunk_shapes(trunk), **mtp_shapes(trunk)}
    shapes |= {f"draft.{name}": shape for name, shape in draft_shapes(draft).items()}
    kinds = {"draft.d2t": "I64", "draft.t2d": "BOOL"}
    return {
        name: Weight("weights/none.safetensors", 8, kinds.get(name, "BF16"), shape)
        for name, shape in shapes.items()
    }


def main() -> None:
    """Write one folder."""
    parser = argparse.ArgumentParser(description="Write graphs that have no weights.")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("-o", dest="folder", type=Path, required=True)
    parser.add_argument("--width", type=int, default=5)
    parser.add_argument("--capacity", type=int, default=4096)
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--kv", choices=KV_TYPES)
    parser.add_argument("--profile", choices=PROFILES, default="ort-fused")
    parser.add_argument("--drafter", choices=("eagle", "mtp"), default="eagle")
    given = parser.parse_args()
    options = Options(
        given.width,
        given.capacity,
        given.dtype,
        given.profile,
        kv=given.kv,
        prefill=given.prefill,
    )
    trunk, eagle = configs(given.name)
    weights, mtp = stored(trunk, eagle), given.drafter == "mtp"
    draft = None if mtp else eagle
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, model in build_graphs(trunk, draft, weights, options, mtp).items():
        (given.folder / f"{name}.onnx").write_bytes(model.SerializeToString())
    plain = {
        "options": asdict(options),
        "trunk": encode(trunk),
        "draft": encode(draft),
        "mtp": mtp,
    }
    (given.folder / "shapes.json").write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
