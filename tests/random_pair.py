"""Writes the first layers of a pair in the 9B's published sizes, random weights in bf16.

    python -m tests.random_pair FOLDER [LAYERS]

Tensor by tensor and in pieces, so that it needs little memory: 4 layers are 7 GB on disk. Embedding
and head have the published vocabulary.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eagle_chain.engines.config import TrunkConfig
from eagle_chain.export.shapes import configs
from eagle_chain.export.tensor_shapes import trunk_shapes
from tests.toy_pair import TRUNK_PREFIX, draft_parts, save, trunk_config, write_tokenizer

PIECE = 1 << 24  # values made at a time


def trunk_sizes(config: TrunkConfig) -> dict[str, Any]:
    """Sizes as keys of a `text_config`."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "linear_num_key_heads": config.linear_key_heads,
        "linear_num_value_heads": config.linear_value_heads,
        "linear_key_head_dim": config.linear_key_dim,
        "linear_value_head_dim": config.linear_value_dim,
        "layer_types": list(config.layer_types),
        "eos_token_id": 248044,
    }


def values(name: str, shape: tuple[int, ...], random: np.random.Generator) -> Iterator[bytes]:
    """A tensor in bf16, in pieces: norms around 0 or 1, decays spread, matrices that keep sizes."""
    scale, shift = 1.2 * shape[-1] ** -0.5, 0.0
    if len(shape) == 1:
        scale = 0.3
        shift = 1.0 if "linear_attn.norm" in name else 0.0
    if "conv1d" in name:
        scale = 0.5
    if name.endswith("A_log"):
        scale, shift = 1.0, 0.0
    left = math.prod(shape)
    while left:
        piece = random.standard_normal(min(left, PIECE), np.float32) * np.float32(scale)
        bits = (piece + np.float32(shift)).view(np.uint32)
        yield ((bits + 0x8000) >> 16).astype(np.uint16).tobytes()
        left -= len(piece)


def write_trunk(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """One safetensors file."""
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        stored = name if name == "lm_head.weight" else f"{TRUNK_PREFIX}{name}"
        header[stored] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    random = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for name, shape in shapes.items():
            file.writelines(values(name, shape, random))


def main(folder: Path, layers: int) -> None:
    """Both checkpoints."""
    published, draft = configs("qwen3.5-9b")
    trunk = replace(published, layer_types=published.layer_types[:layers])
    plain = trunk_config(layers, **trunk_sizes(trunk))
    write_trunk(folder / "trunk" / "model.safetensors", trunk_shapes(trunk))
    (folder / "trunk" / "config.json").write_text(json.dumps(plain, indent=1))
    write_tokenizer(folder / "trunk")
    sizes = {
        "intermediate_size": draft.intermediate_size,
        "num_attention_heads": draft.attention_heads,
        "num_key_value_heads": draft.kv_heads,
        "head_dim": draft.head_dim,
        "draft_vocab_size": draft.draft_vocab_size,
    }
    save(folder / "draft", *draft_parts(plain, dtype="bf16", aux=[1, 2, 3], **sizes))
    print(f"wrote {folder}/trunk and {folder}/draft")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int((*sys.argv[2:], 4)[0]))
