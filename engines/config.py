"""Typed configs read from `config.json`: every key that changes the maths is read or refused.

A key we do not implement is an error, a missing key is never guessed, and two places that disagree
are both named. All problems of one file come in one error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

from eagle_chain.engines.aux_layers import read_aux
from eagle_chain.engines.draft_keys import draft_places, read_variant
from eagle_chain.engines.fields import Place, Reader, is_integer, is_number, raise_all
from eagle_chain.engines.limits import (
    EMBEDDINGS,
    HEADS,
    KEYS,
    LAYER_KINDS,
    LAYERS,
    NORM_EPS,
    SIZES,
    draft_problems,
    size_problems,
    trunk_problems,
)
from eagle_chain.engines.overrides import NONE, ROPE_THETA, DraftOverrides

TRUNK_TYPES = ("qwen3_5", "qwen3_5_text")


@dataclass(frozen=True)
class TrunkConfig:
    """The text part of a Qwen3.5 checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]  # "linear_attention" or "full_attention", one per layer
    attention_heads: int
    kv_heads: int
    head_dim: int  # explicit: never hidden_size / attention_heads
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int  # per head
    linear_value_dim: int  # per head
    conv_kernel: int
    norm_eps: float
    rope_theta: float
    rotary_dim: int  # leading dims of each head that rotate
    tied_head: bool
    max_positions: int
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse values that no checkpoint can have, wherever they come from."""
        raise_all("trunk config", trunk_problems(vars(self)))

    @property
    def head(self) -> str:
        """The weight that turns hidden states into logits."""
        return "embed_tokens.weight" if self.tied_head else "lm_head.weight"

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: q, k and v of all heads."""
        return (
            2 * self.linear_key_heads * self.linear_key_dim
            + self.linear_value_heads * self.linear_value_dim
        )

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str) -> TrunkConfig:
        """Read a `config.json`, nested under `text_config` as published or flat as in fine-tunes.

        Args:
            data: The parsed file.
            where: What to call it in errors.

        Raises:
            InputError: Something is missing, contradictory, out of range or not implemented.
        """
        read = Reader(where, data)
        text = data.get("text_config")
        if isinstance(text, Mapping):
            read.places.insert(0, ("text_config.", text))
        elif text is not None:
            read.note("text_config", text, "an object", "restore the published file")
        _check_model_type(read, TRUNK_TYPES)
        read.finish()  # for another kind of model the rest of the list would be noise

        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "attention_heads",
            "kv_heads",
            "head_dim",
            "linear_key_heads",
            "linear_value_heads",
            "linear_key_dim",
            "linear_value_dim",
            "conv_kernel",
            "max_positions",
        ):
            read.integer(field, KEYS.get(field, field), SIZES[field])
        read.number("norm_eps", "rms_norm_eps", limits=NORM_EPS)
        places = _rope_places(read)
        read.number("rope_theta", "rope_theta", limits=ROPE_THETA, places=places)
        _read_rotary_dim(read, places)
        _read_layer_types(read)
        _read_eos(read)
        read.flag("tied_head", "tie_word_embeddings", default=False)

        read.pin("hidden_act", "silu", "swish", because="only SiLU is implemented")
        read.pin("output_gate_type", "swish", "silu", because="only SiLU is implemented")
        read.pin("attn_output_gate", True, because="attention without a gate is not implemented")
        read.pin("attention_bias", False, because="projections with a bias are not implemented")
        read.pin("mlp_bias", False, because="projections with a bias are not implemented")
        read.pin("use_sliding_window", False, because="sliding windows are not implemented")
        read.pin("num_experts", 0, because="mixtures of experts are not implemented")
        for key in ("quantization_config", "quantization"):  # transformers and MLX
            read.pin(key, because="use the original, unquantised checkpoint")
        read.problems += size_problems(read.values, KEYS)
        read.finish()
        return TrunkConfig(**read.values)


@dataclass(frozen=True)
class DraftConfig:
    """An EAGLE-3 draft: encoder fc, one Llama-style layer, a head over a reduced vocabulary."""

    hidden_size: int
    intermediate_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rotary_dim: int
    draft_vocab_size: int
    vocab_size: int  # of the trunk, whose ids it reads and proposes
    trunk_hidden_size: int
    aux_layers: tuple[int, ...]  # trunk layers whose *outputs* are the features, ascending
    aux_source: str = ""  # where aux_layers come from and how the ids were read, for people
    norm_before_fc: bool = False  # one norm over the features, `input_norm`
    fc_norm: bool = False  # a norm per aux layer, `fc_norm.N` (EAGLE 3.1)
    norm_before_residual: bool = False  # the residual is the normed g
    norm_output: bool = False  # the recurrence is the normed output (EAGLE 3.1)
    qk_norm: bool = False  # norms on the heads of queries and keys, as Qwen3 has
    fc: bool = True  # False: the one aux layer enters as it is
    biases: tuple[str, ...] = ()  # of LINEARS, in that order
    embedding: str = EMBEDDINGS[0]  # in the bundle's table of weights
    head: str = HEADS[0]  # in the bundle's table of weights
    absolute_d2t: bool = False  # `d2t` holds ids of the trunk instead of offsets to them
    logit_scale: float = 1.0
    # Where the flags come from, for people.
    sources: tuple[str, ...] = dataclass_field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Refuse values that no checkpoint can have, wherever they come from."""
        raise_all("draft config", draft_problems(vars(self)))

    @property
    def feature_size(self) -> int:
        """Width of a feature: the outputs of all aux layers side by side."""
        return len(self.aux_layers) * self.trunk_hidden_size

    @staticmethod
    def from_json(
        data: Mapping[str, Any],
        trunk: TrunkConfig,
        where: str,
        overrides: DraftOverrides = NONE,
    ) -> DraftConfig:
        """Read the `config.json` of a draft made for `trunk`, flat or nested as speculators has it.

        What only the tensors tell (`biases`, `qk_norm`, `fc`, `embedding`, `head`, `absolute_d2t`)
        is left for `export.checkpoint.open_draft` to settle.

        Args:
            data: The parsed file.
            trunk: The trunk whose features and embedding the draft reads.
            where: What to call the file in errors.
            overrides: What to take instead of the file's values. Many drafts were trained with full
                rotation, for one, while their config says 0.25.

        Raises:
            InputError: Something is missing, contradictory, out of range or not implemented.
        """
        read = Reader(where, data)
        everywhere = draft_places(read)
        depth = len(trunk.layer_types)
        _read_draft_sizes(read)
        overrides.check(read.values.get("head_dim"), depth)
        _read_draft_rotation(read, overrides)
        read_variant(read, everywhere, overrides)
        if read.values.get("draft_vocab_size", -1) == read.values.get("vocab_size"):
            tied = read.find("tie_word_embeddings")
            if tied is not None and tied[1] is True:  # a part of a vocabulary cannot be tied
                read.values["head"] = EMBEDDINGS[0]
        _check_same_trunk(read, trunk)
        read_aux(read, everywhere, depth, overrides)
        read.problems += size_problems(read.values, KEYS)
        read.finish()
        return DraftConfig(**read.values)


def _check_model_type(read: Reader, supported: tuple[str, ...]) -> None:
    """Every model_type that stands in the file must be a supported one."""
    wanted, action = " or ".join(supported), "only these model types are supported"
    found = [(prefix, place.get("model_type")) for prefix, place in read.places]
    if all(kind is None for _, kind in found):
        read.note("model_type", None, wanted, action)
    for prefix, kind in found:
        if kind is not None and kind not in supported:
            read.note(f"{prefix}model_type", kind, wanted, action)


def _read_draft_sizes(read: Reader) -> None:
    """The sizes of a draft; what a Llama config may leave out, by Llama's own rules."""
    for name in ("vocab_size", "hidden_size", "intermediate_size", "attention_heads"):
        read.integer(name, KEYS.get(name, name), SIZES[name])
    known = read.values
    if read.present("head_dim") or not {"hidden_size", "attention_heads"} <= known.keys():
        read.integer("head_dim", "head_dim", SIZES["head_dim"])
    elif known["hidden_size"] % known["attention_heads"]:
        read.note("head_dim", None, "the width of a head, as heads do not divide hidden_size")
    else:
        known["head_dim"] = known["hidden_size"] // known["attention_heads"]
    for name, same in (
        ("kv_heads", "attention_heads"),
        ("draft_vocab_size", "vocab_size"),
        ("trunk_hidden_size", "hidden_size"),
    ):
        if same in known or read.present(KEYS.get(name, name)):
            read.integer(name, KEYS.get(name, name), SIZES[name], known.get(same))
    read.number("norm_eps", "rms_norm_eps", limits=NORM_EPS)


def _read_draft_rotation(read: Reader, overrides: DraftOverrides) -> None:
    """Rotary dims and base, as a user has them or else the file."""
    places = _rope_places(read)
    if overrides.rotary_dim is None:
        _read_rotary_dim(read, places, default=1.0)
    else:
        read.values["rotary_dim"] = overrides.rotary_dim
    if overrides.rope_theta is None:
        keys = ("rope_theta", "rotary_emb_base")
        read.number("rope_theta", *keys, limits=ROPE_THETA, places=places)
    else:
        read.values["rope_theta"] = float(overrides.rope_theta)


def _rope_places(read: Reader) -> list[Place]:
    """Where rotary keys may stand: flat, in `rope_parameters` or in `rope_scaling`."""
    inner: list[Place] = []
    for prefix, place in read.places:
        for key in ("rope_parameters", "rope_scaling"):
            value = place.get(key)
            if isinstance(value, Mapping):
                inner.append((f"{prefix}{key}.", value))
            elif value is not None:
                read.note(f"{prefix}{key}", value, "an object or null")
    for scaling in inner:
        for key in ("rope_type", "type"):  # mrope is plain rotation when there is only text
            why = "scaled rotary positions are not implemented"
            read.pin(key, "default", "mrope", because=why, places=[scaling])
    return [*read.places, *inner]


def _read_rotary_dim(read: Reader, places: list[Place], default: float | None = None) -> None:
    """The width of the rotation, from the partial factor of a head."""
    keys = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
    wanted = "a number above 0 and at most 1"
    if default is not None and not read.present(*keys, places=places):
        found: tuple[str, Any] | None = (keys[0], default)
    else:
        found = read.require(*keys, wanted=wanted, places=places)
    if found is not None and not is_number(found[1], (1e-6, 1.0)):
        read.note(*found, wanted)
    elif found is not None and "head_dim" in read.values:
        read.values["rotary_dim"] = int(read.values["head_dim"] * found[1])


def _read_layer_types(read: Reader) -> None:
    """Layer kinds, listed or by the interval; both may be there if they agree."""
    read.integer("layers", "num_hidden_layers", LAYERS)
    read.integer("interval", "full_attention_interval", LAYERS, 0)
    layers, interval = read.values.pop("layers", 0), read.values.pop("interval", 0)
    by_rule = tuple(LAYER_KINDS[(i + 1) % interval == 0] for i in range(layers if interval else 0))
    found = read.find("layer_types")
    if found is None:
        if by_rule:
            read.values["layer_types"] = by_rule
        elif not read.present("layer_types", "full_attention_interval"):
            read.note("layer_types", None, "the kind of each layer, or full_attention_interval")
        return
    name, kinds = found
    if not isinstance(kinds, list) or not all(kind in LAYER_KINDS for kind in kinds):
        unknown = [k for k in kinds if k not in LAYER_KINDS] if isinstance(kinds, list) else kinds
        wanted = f"a list of {' and '.join(LAYER_KINDS)}"
        read.note(name, unknown, wanted, "other kinds of layer are not implemented")
    elif layers and len(kinds) != layers:
        wanted = f"{layers} kinds, as num_hidden_layers says"
        read.note(name, f"{len(kinds)} kinds", wanted, "make them agree")
    elif by_rule and tuple(kinds) != by_rule:
        at = next(i for i in range(layers) if kinds[i] != by_rule[i])
        wanted = f"{by_rule[at]}, as full_attention_interval {interval} says"
        read.note(f"{name}[{at}]", kinds[at], wanted, "make them agree")
    else:
        read.values["layer_types"] = tuple(kinds)


def _read_eos(read: Reader) -> None:
    """End-of-sequence ids of both levels, without repeats; none at all is fine."""
    ids: dict[int, None] = {}
    limits = (0, read.values.get("vocab_size", SIZES["vocab_size"][1]) - 1)
    for prefix, place in read.places:
        value = place.get("eos_token_id")
        several = value if isinstance(value, list) else [] if value is None else [value]
        if all(is_integer(i, limits) for i in several):
            ids |= dict.fromkeys(several)
        else:
            read.note(f"{prefix}eos_token_id", value, f"ids from 0 to {limits[1]}")
    read.values["eos_ids"] = tuple(ids)


def _check_same_trunk(read: Reader, trunk: TrunkConfig) -> None:
    """The draft reads the trunk's tokens and features, so their sizes must be the trunk's."""
    other = "is this draft made for this trunk?"
    vocabulary, width = read.values.get("vocab_size"), read.values.get("trunk_hidden_size")
    if vocabulary is not None and vocabulary != trunk.vocab_size:
        read.note("vocab_size", vocabulary, f"{trunk.vocab_size}, as in the trunk", other)
    if width is not None and width != trunk.hidden_size:
        key = "target_hidden_size" if read.present("target_hidden_size") else "hidden_size"
        read.note(key, width, f"{trunk.hidden_size}, as in the trunk", other)
