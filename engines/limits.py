"""What the fields of a config may hold, and how they must fit each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_chain.engines.fields import Reader, is_ascending, is_integer, is_number, show
from eagle_chain.engines.overrides import ROPE_THETA

# The sizes of both models: field -> lowest and highest value that makes sense.
SIZES = {
    "vocab_size": (2, 1 << 24),
    "hidden_size": (1, 1 << 17),
    "intermediate_size": (1, 1 << 20),
    "attention_heads": (1, 1 << 10),
    "kv_heads": (1, 1 << 10),
    "head_dim": (2, 1 << 12),
    "linear_key_heads": (1, 1 << 10),
    "linear_value_heads": (1, 1 << 10),
    "linear_key_dim": (1, 1 << 12),
    "linear_value_dim": (1, 1 << 12),
    "conv_kernel": (2, 16),
    "rotary_dim": (2, 1 << 12),
    "max_positions": (1, (1 << 31) - 1),
    "draft_vocab_size": (2, 1 << 24),
    "trunk_hidden_size": (1, 1 << 17),
}
LAYERS = (1, 1 << 12)
NORM_EPS = (1e-12, 0.1)
# How the fields are called in a config.json, where the name differs.
KEYS = {
    "attention_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_key_dim": "linear_key_head_dim",
    "linear_value_dim": "linear_value_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
    "max_positions": "max_position_embeddings",
    "trunk_hidden_size": "target_hidden_size",
}
LAYER_KINDS = ("linear_attention", "full_attention")
DRAFT_FLAGS = (
    "norm_before_fc",
    "fc_norm",
    "norm_before_residual",
    "norm_output",
    "qk_norm",
    "fc",
    "absolute_d2t",
)
# Weights of a draft that may be the trunk's; own ones have `draft.` before the name.
EMBEDDINGS = ("embed_tokens.weight", "draft.embed_tokens.weight")
HEADS = ("draft.lm_head.weight", "lm_head.weight", *EMBEDDINGS)
# The products of a draft that may have a bias.
LINEARS = (
    "fc",
    *(f"midlayer.self_attn.{part}_proj" for part in "qkvo"),
    *(f"midlayer.mlp.{part}_proj" for part in ("gate", "up", "down")),
)


def size_problems(values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> list[str]:
    """Values out of range and sizes that do not fit each other, among those that are there."""
    read = Reader("", values)

    def name(field: str) -> str:
        return (names or {}).get(field, field)

    good = {field for field, limits in SIZES.items() if is_integer(values.get(field), limits)}
    for field in sorted(values.keys() & SIZES.keys() - good):
        low, high = SIZES[field]
        read.note(name(field), values[field], f"an integer from {low} to {high}")
    for field, limits in (("norm_eps", NORM_EPS), ("rope_theta", ROPE_THETA)):
        if field in values and not is_number(values[field], limits):
            read.note(name(field), values[field], f"a number from {limits[0]:g} to {limits[1]:g}")

    for whole, part in (
        ("attention_heads", "kv_heads"),
        ("linear_value_heads", "linear_key_heads"),
    ):
        if {whole, part} <= good and values[whole] % values[part]:
            wanted = f"a multiple of {name(part)}, which is {values[part]}"
            read.note(name(whole), values[whole], wanted)
    if {"rotary_dim", "head_dim"} <= good:
        rotary, dim = values["rotary_dim"], values["head_dim"]
        if rotary % 2 or rotary > dim:
            wanted = f"an even number from 2 to head_dim, which is {dim}"
            read.note("rotary_dim", rotary, wanted, "check head_dim and partial_rotary_factor")
    if {"draft_vocab_size", "vocab_size"} <= good:
        small, whole_vocabulary = values["draft_vocab_size"], values["vocab_size"]
        if small > whole_vocabulary:
            wanted = f"at most vocab_size, which is {whole_vocabulary}"
            read.note("draft_vocab_size", small, wanted)
    return read.problems


def trunk_problems(values: Mapping[str, Any]) -> list[str]:
    """What no trunk can have, in the values of all its fields."""
    problems = size_problems(values)
    kinds, ids = values["layer_types"], values["eos_ids"]
    if not isinstance(kinds, tuple) or not kinds or any(k not in LAYER_KINDS for k in kinds):
        problems.append(_wrong("layer_types", kinds, " and ".join(LAYER_KINDS)))
    limits = (0, SIZES["vocab_size"][1])
    if not isinstance(ids, tuple) or not all(is_integer(i, limits) for i in ids):
        problems.append(_wrong("eos_ids", ids, "token ids"))
    return problems + _not_flags(values, "tied_head")


def draft_problems(values: Mapping[str, Any]) -> list[str]:
    """What no draft can have, in the values of all its fields."""
    problems = size_problems(values)
    layers = values["aux_layers"]
    if not isinstance(layers, tuple) or not is_ascending(layers, (0, LAYERS[1] - 1)):
        problems.append(_wrong("aux_layers", layers, "ascending layers"))
    if not isinstance(values["aux_source"], str):
        problems.append(_wrong("aux_source", values["aux_source"], "text"))
    problems += _not_flags(values, *DRAFT_FLAGS)
    for name, allowed in (("embedding", EMBEDDINGS), ("head", HEADS)):
        if values[name] not in allowed:
            problems.append(_wrong(name, values[name], f"one of {', '.join(allowed)}"))
    biases, sources = values["biases"], values["sources"]
    if not isinstance(biases, tuple) or biases != tuple(n for n in LINEARS if n in biases):
        problems.append(_wrong("biases", biases, f"some of {', '.join(LINEARS)}"))
    if not isinstance(sources, tuple) or not all(isinstance(s, str) for s in sources):
        problems.append(_wrong("sources", sources, "texts"))
    if not is_number(values["logit_scale"], (1e-6, 1e6)):
        problems.append(_wrong("logit_scale", values["logit_scale"], "a number above 0"))
    return problems


def _not_flags(values: Mapping[str, Any], *names: str) -> list[str]:
    return [
        _wrong(name, values[name], "true or false")
        for name in names
        if not isinstance(values[name], bool)
    ]


def _wrong(name: str, value: Any, wanted: str) -> str:
    return f"{name}: got {show(value)}, wanted {wanted}"
