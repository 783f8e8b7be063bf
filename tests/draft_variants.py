"""Toy drafts of every variant: published configs and tensors, with what each variant adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.toy_pair import Config, Random, Tensors, draft_parts, save, trunk_parts

ATTENTION = ("q_proj", "k_proj", "v_proj")
FULL = {"draft_vocab_size": None}  # the trunk's vocabulary


@dataclass(frozen=True)
class Variant:
    """What to change in a toy draft: keys of its config, and which tensors to add or drop."""

    keys: dict[str, Any] = field(default_factory=dict)
    norms: tuple[str, ...] = ()  # of input_norm, fc_norm, qk
    biases: tuple[str, ...] = ()  # names of products
    embedding: bool = False
    head: bool = True
    fc: bool = True
    absolute: bool = False
    aux: tuple[int, ...] = (1, 3, 4)
    tied_trunk: bool = False


QKV = tuple(f"midlayer.self_attn.{name}" for name in ATTENTION)
MLP = tuple(f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down"))
OUT = "midlayer.self_attn.o_proj"
NORMED = {"norm_output": True, "fc_norm": True}
NARROW = {"hidden_size": 48, "target_hidden_size": 64}  # than the trunk

VARIANTS = {
    "norm before residual": Variant({"norm_before_residual": True}),
    "norm before fc": Variant({"norm_before_fc": True}, ("input_norm",)),
    "EAGLE 3.1": Variant(NORMED, ("fc_norm",)),
    "norm output alone": Variant({"norm_output": True}),
    "qwen3": Variant({"model_type": "qwen3"}, ("qk",)),
    "attention bias": Variant({"attention_bias": True}, biases=(*QKV, OUT)),
    "bias of fc": Variant({"bias": True}, biases=("fc",)),
    "mlp bias": Variant({"mlp_bias": True}, biases=MLP),
    "another width": Variant(NARROW, embedding=True),
    "another width, its embedding as head": Variant(
        NARROW | FULL | {"tie_word_embeddings": True}, embedding=True, head=False
    ),
    "own embedding": Variant(embedding=True),
    "trunk's head": Variant(FULL, head=False),
    "tied trunk's head": Variant(FULL, head=False, tied_trunk=True),
    "trunk's embedding as head": Variant(FULL | {"tie_word_embeddings": True}, head=False),
    "absolute d2t": Variant(absolute=True),
    "four aux layers": Variant(NORMED, ("fc_norm",), aux=(1, 3, 4, 7)),
    "one aux layer": Variant(aux=(3,)),
    "no fc": Variant({"norm_before_fc": True}, ("input_norm",), fc=False, aux=(3,)),
    "logit scale": Variant({"logit_scale": 0.25}),
    "everything": Variant(
        NORMED
        | NARROW
        | {"norm_before_residual": True, "model_type": "qwen3", "head_dim": 24, "logit_scale": 2.0}
        | {"attention_bias": True, "mlp_bias": True, "bias": True},
        ("fc_norm", "qk"),
        ("fc", *QKV, OUT, *MLP),
        embedding=True,
        absolute=True,
        aux=(0, 2, 5, 7),
    ),
}


def variant_parts(trunk: Config, variant: Variant, **options: Any) -> tuple[Config, Tensors]:
    """Config and tensors of a toy draft of this variant."""
    sizes = dict(variant.keys)
    if FULL.items() <= sizes.items():
        sizes["draft_vocab_size"] = trunk.get("text_config", trunk)["vocab_size"]
    config, tensors = draft_parts(trunk, aux=list(variant.aux), **options, **sizes)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": None}
    config["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in variant.aux]
    random, hidden = Random(7, options.get("dtype", "fp32")), config["hidden_size"]
    width = config["target_hidden_size"]

    def norm(size: int) -> torch.Tensor:
        return random.normal(size, scale=0.3, shift=1.0)

    if "input_norm" in variant.norms:
        tensors["input_norm.weight"] = norm(len(variant.aux) * width)
    if "fc_norm" in variant.norms:
        tensors |= {f"fc_norm.{i}.weight": norm(width) for i in range(len(variant.aux))}
    if "qk" in variant.norms:
        for part in "qk":
            tensors[f"midlayer.self_attn.{part}_norm.weight"] = norm(config["head_dim"])
    for name in variant.biases:
        size = len(tensors[f"{name}.weight"])
        tensors[f"{name}.bias"] = random.normal(size, scale=0.5)
    if variant.embedding:
        tensors["embed_tokens.weight"] = random.matrix(config["vocab_size"], hidden)
    if not variant.head:
        del tensors["lm_head.weight"]
    if not variant.fc:
        del tensors["fc.weight"]
    if variant.absolute:
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    return config, tensors


def write_variant(
    folder: Path, variant: Variant, dtype: str = "fp32", **trunk: Any
) -> tuple[Path, Path]:
    """Write `folder`/trunk and `folder`/draft; `trunk` are options of `trunk_parts`."""
    config, tensors = trunk_parts(tied=variant.tied_trunk, extras=False, dtype=dtype, **trunk)
    return (
        save(folder / "trunk", config, tensors),
        save(folder / "draft", *variant_parts(config, variant, dtype=dtype)),
    )
