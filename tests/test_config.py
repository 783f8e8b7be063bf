"""Configs: every shape in which they are published is read, everything else is one sentence."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.fields import read_json
from eagle_chain.engines.overrides import DraftOverrides
from eagle_chain.engines.strict_json import decode, dumps, encode
from tests.toy_pair import draft_config, trunk_config

TRUNK = TrunkConfig.from_json(trunk_config(), "config.json")
DRAFT = DraftConfig.from_json(draft_config(trunk_config()), TRUNK, "config.json")
AUX = "eagle_aux_hidden_state_layer_ids"

ROPE_9B = {
    "rope_type": "default",
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
# hidden, ffn, layers, heads, kv heads, linear key heads, linear value heads, tied
FAMILY = {
    "0.8B": (1024, 3584, 24, 8, 2, 16, 16, True),
    "2B": (2048, 6144, 24, 8, 2, 16, 16, True),
    "4B": (2560, 9216, 32, 16, 4, 16, 32, True),
    "9B": (4096, 12288, 32, 16, 4, 16, 32, False),
    "27B": (5120, 17408, 64, 24, 4, 16, 48, False),
}


def published(size: str, **changes: Any) -> dict[str, Any]:
    """The config of a published trunk, the toy's with the family's sizes."""
    hidden, ffn, layers, heads, kv, key_heads, value_heads, tied = FAMILY[size]
    return trunk_config(
        layers,
        tied=tied,
        vocab_size=248320,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=256,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
        rope_parameters=ROPE_9B,
        eos_token_id=248044,
        **changes,
    )


def trunk(config: dict[str, Any]) -> TrunkConfig:
    return TrunkConfig.from_json(config, "config.json")


def draft(trunk: TrunkConfig = TRUNK, overrides: Any = None, **keys: Any) -> DraftConfig:
    config = draft_config(trunk_config()) | keys
    config = {key: value for key, value in config.items() if value != "absent"}
    given = DraftOverrides(**(overrides or {}))
    return DraftConfig.from_json(config, trunk, "config.json", given)


def message(action: Any, *arguments: Any, **keywords: Any) -> str:
    """The text of the InputError that a call must raise."""
    with pytest.raises(InputError) as caught:
        action(*arguments, **keywords)
    return str(caught.value)


@pytest.mark.parametrize("size", FAMILY)
def test_family(size: str) -> None:
    config = trunk(published(size))
    hidden, ffn, layers, heads, kv, key_heads, value_heads, tied = FAMILY[size]
    assert (config.hidden_size, config.intermediate_size) == (hidden, ffn)
    assert (config.attention_heads, config.kv_heads, config.head_dim) == (heads, kv, 256)
    assert (config.linear_key_heads, config.linear_value_heads) == (key_heads, value_heads)
    assert (config.rotary_dim, config.rope_theta, config.norm_eps) == (64, 1e7, 1e-6)
    assert config.conv_channels == 128 * (2 * key_heads + value_heads)
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == list(range(3, layers, 4))
    assert config.tied_head is tied
    assert config.eos_ids == (248044,)


def flat_rope(text: dict[str, Any]) -> None:
    text |= {k: text["rope_parameters"][k] for k in ("rope_theta", "partial_rotary_factor")}
    del text["rope_parameters"]


def rope_in_rope_scaling(text: dict[str, Any]) -> None:
    text["rope_scaling"] = text.pop("rope_parameters") | {"type": "mrope"}


def rope_at_both_places(text: dict[str, Any]) -> None:
    text |= {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_scaling": None}


def old_names(text: dict[str, Any]) -> None:
    text["torch_dtype"] = text.pop("dtype")
    del text["layer_types"]


def no_interval(text: dict[str, Any]) -> None:
    del text["full_attention_interval"]


def more_keys(text: dict[str, Any]) -> None:
    text |= {"output_gate_type": "swish", "hidden_act": "swish", "num_experts": 0, "new_key": [1]}
    del text["attention_bias"], text["attn_output_gate"], text["hidden_act"]


@pytest.mark.parametrize(
    "change",
    [flat_rope, rope_in_rope_scaling, rope_at_both_places, old_names, no_interval, more_keys],
)
@pytest.mark.parametrize("flat", [False, True])
def test_same_trunk_in_other_words(change: Any, flat: bool) -> None:
    config = trunk_config(flat=flat)
    change(config if flat else config["text_config"])
    assert trunk(config) == TRUNK


@pytest.mark.parametrize(
    ("text", "top", "tied"),
    [(None, None, False), (None, True, True), (True, None, True), (True, True, True)],
)
def test_tied_head_is_read_at_both_levels(text: Any, top: Any, tied: bool) -> None:
    config = trunk_config(tie_word_embeddings=text)
    config["tie_word_embeddings"] = top
    assert trunk(config).tied_head is tied


def test_end_tokens_of_both_levels() -> None:
    config = trunk_config(eos_token_id=[3, 4])
    config["eos_token_id"] = 4
    assert trunk(config).eos_ids == (3, 4)
    config["eos_token_id"] = 5
    assert trunk(config).eos_ids == (3, 4, 5)
    config["text_config"]["eos_token_id"] = None
    assert trunk(config).eos_ids == (5,)


REFUSED_TRUNKS: dict[str, tuple[dict[str, Any], str]] = {
    "rope_theta": ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "got nothing, wanted a n"),
    "partial_rotary_factor": ({"rope_parameters": {"rope_theta": 1e7}}, "got nothing"),
    "rope_parameters.rope_theta": (
        {"rope_theta": 10000},
        "got 10000000, wanted the same as text_config.rope_theta, which is 10000",
    ),
    "rope_parameters.rope_type": (
        {"rope_parameters": ROPE_9B | {"rope_type": "yarn"}},
        'got "yarn", wanted "default" or "mrope"; scaled rotary positions are not implemented',
    ),
    "hidden_act": ({"hidden_act": "gelu"}, 'got "gelu", wanted "silu"'),
    "output_gate_type": ({"output_gate_type": "sigmoid"}, 'got "sigmoid"'),
    "attn_output_gate": ({"attn_output_gate": False}, "got false, wanted true"),
    "attention_bias": ({"attention_bias": True}, "got true, wanted false"),
    "mlp_bias": ({"mlp_bias": True}, "got true, wanted false"),
    "use_sliding_window": ({"use_sliding_window": True}, "got true, wanted false"),
    "num_experts": ({"num_experts": 256}, "got 256, wanted 0; mixtures of experts"),
    "quantization_config": ({"quantization_config": {"bits": 4}}, "wanted no such key"),
    "quantization": ({"quantization": {"group_size": 32}}, "use the original, unquantised"),
    "layer_types": ({"layer_types": ["linear_attention"] * 7}, 'got "7 kinds", wanted 8 kinds'),
    "layer_types[3]": (
        {"layer_types": ["linear_attention"] * 8},
        "wanted full_attention, as full_attention_interval 4 says",
    ),
    "layer_types ": (
        {"layer_types": ["mamba"] * 8},
        "wanted a list of linear_attention and full_attention",
    ),
    "num_attention_heads": ({"num_key_value_heads": 3}, "got 4, wanted a multiple of num_key_v"),
    "linear_num_value_heads": ({"linear_num_key_heads": 3}, "got 4, wanted a multiple of linear"),
    "rotary_dim": (
        {"rope_parameters": ROPE_9B | {"partial_rotary_factor": 0.1}},
        "got 3, wanted an even number from 2 to head_dim, which is 32",
    ),
    "eos_token_id": ({"eos_token_id": 512}, "got 512, wanted ids from 0 to 511"),
    "rms_norm_eps": ({"rms_norm_eps": 0}, "got 0, wanted a number from 1e-12 to 0.1"),
    "tie_word_embeddings": ({"tie_word_embeddings": "no"}, 'got "no", wanted true or false'),
}


@pytest.mark.parametrize("key", REFUSED_TRUNKS)
def test_refused_trunks(key: str) -> None:
    changes, words = REFUSED_TRUNKS[key]
    config = trunk_config()
    config["text_config"] |= changes
    del config["tie_word_embeddings"]
    text = message(trunk, config)
    assert text.startswith("config.json: ") and "\n" not in text
    assert f"{key.strip()}: " in text and words in text


def test_contradictions_between_the_levels() -> None:
    config = trunk_config(tie_word_embeddings=True)
    text = message(trunk, config)
    assert "tie_word_embeddings: got false" in text and "text_config.tie_word_embeddings" in text
    config = trunk_config()
    config["hidden_size"] = 65
    assert "the same as text_config.hidden_size, which is 64" in message(trunk, config)


@pytest.mark.parametrize(
    ("kind", "place"),
    [("qwen3_next", "top"), ("qwen3_5_moe", "top"), ("llama", "text"), (None, "both"), (5, "top")],
)
def test_unsupported_model_types_name_the_supported_ones(kind: Any, place: str) -> None:
    config = trunk_config()
    if place != "text":
        config["model_type"] = kind
    if place != "top":
        config["text_config"]["model_type"] = kind
    text = message(trunk, config)
    assert "wanted qwen3_5 or qwen3_5_text; only these model types are supported" in text


SIZE_KEYS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
]
BAD_SIZES = ["64", 64.0, True, -1, 0, 10**12, 10**400, [64], {}, float("nan"), None]


@pytest.mark.parametrize("bad", BAD_SIZES, ids=[repr(b)[:12] for b in BAD_SIZES])
@pytest.mark.parametrize("key", SIZE_KEYS)
def test_bad_sizes(key: str, bad: Any) -> None:
    config = trunk_config()
    config["text_config"][key] = bad
    text = message(trunk, config)
    assert f"{key}: got " in text and "wanted an integer from " in text
    shared = draft_config(trunk_config()).keys() - {"max_position_embeddings"}  # too small there
    if key in shared and bad is not None:
        assert f"{key}: got " in message(draft, **{key: bad})


def test_all_problems_come_in_one_error() -> None:
    config = trunk_config(hidden_size="64", head_dim=None, num_experts=8, hidden_act="relu")
    lines = message(trunk, config).splitlines()
    assert lines[0] == "config.json: 4 problems"
    assert [line.split(":")[0].split(".")[-1].strip() for line in lines[1:]] == [
        "hidden_size",
        "head_dim",
        "hidden_act",
        "num_experts",
    ]
    lines = message(draft, norm_output=1, num_hidden_layers=2, vocab_size=100).splitlines()
    assert len(lines) == 4


def test_draft_as_published() -> None:
    assert dataclasses.replace(DRAFT, aux_source="") == DraftConfig(
        hidden_size=64,
        intermediate_size=128,
        attention_heads=8,
        kv_heads=4,
        head_dim=16,
        norm_eps=1e-6,
        rope_theta=1e7,
        rotary_dim=4,
        draft_vocab_size=96,
        vocab_size=512,
        trunk_hidden_size=64,
        aux_layers=(1, 3, 4),
    )
    assert DRAFT.feature_size == 192


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": None, "rope_theta": 10000000.0},
        {"rope_parameters": None, "rope_scaling": {"rope_theta": 1e7, "rope_type": "default"}},
        {"rope_parameters": None, "rotary_emb_base": 1e7},
        {"rope_theta": 1e7, "rope_scaling": None},
        {"partial_rotary_factor": None, "rotary_pct": 0.25},
        {"partial_rotary_factor": "absent", "rope_parameters": ROPE_9B},
        {"target_hidden_size": "absent", "attention_bias": "absent", "hidden_act": "absent"},
        {"max_position_embeddings": "absent", "num_aux_hidden_states": 3},
        {"norm_output": False, "fc_norm": False, "norm_before_fc": False, "logit_scale": 1.0},
        {"eagle_config": {AUX: [1, 3, 4], "norm_before_residual": False, "bias": False}},
        {"tie_word_embeddings": True},  # nothing to tie to in a reduced vocabulary
    ],
)
def test_same_draft_in_other_words(keys: dict[str, Any]) -> None:
    assert draft(**keys) == DRAFT


def test_what_a_llama_config_may_leave_out() -> None:
    config = draft(
        head_dim="absent",
        num_key_value_heads="absent",
        draft_vocab_size=None,
        partial_rotary_factor="absent",
    )
    assert (config.head_dim, config.kv_heads, config.draft_vocab_size) == (8, 8, 512)
    assert config.rotary_dim == 8  # the whole head


# flag -> the keys that say it
FLAGS = {
    "norm_before_residual": ["norm_before_residual"],
    "norm_before_fc": ["norm_before_fc"],
    "fc_norm": ["fc_norm", "use_aux_norm"],
    "norm_output": ["norm_output", "return_hidden_post_norm"],
}


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_from_every_place(flag: str) -> None:
    assert getattr(DRAFT, flag) is False
    assert f"{flag} false, as nothing says otherwise" in DRAFT.sources
    for key in FLAGS[flag]:
        inside = {"eagle_config": {AUX: [1, 3, 4], key: True}}
        for keys, place in (({key: True}, key), (inside, f"eagle_config.{key}")):
            config = draft(**keys)
            assert config == dataclasses.replace(DRAFT, **{flag: True})
            assert f"{flag} true, from {place}" in config.sources
        assert getattr(draft(**({key: True} | inside)), flag)
        both = message(draft, **({FLAGS[flag][0]: False} | inside))
        assert f"eagle_config.{key}: got true, wanted the same as {FLAGS[flag][0]}, wh" in both
        assert "got 1, wanted true or false" in message(draft, **{key: 1})


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias", "bias"])
def test_keys_of_biases_are_true_or_false(key: str) -> None:
    """What they mean is settled with the tensors."""
    assert draft(**{key: True}) == DRAFT
    assert f"{key}: got 1, wanted true or false" in message(draft, **{key: 1})


def speculators(**changes: Any) -> dict[str, Any]:
    """The toy draft's config as speculators writes it: the layer's own config nested."""
    flat = draft_config(trunk_config())
    outer = {"draft_vocab_size": flat.pop("draft_vocab_size"), "norm_before_residual": False}
    flat = {k: v for k, v in flat.items() if k not in ("eagle_config", "target_hidden_size")}
    told = {"algorithm": "eagle3", "proposal_methods": [], "verifier": {"architectures": []}}
    data = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": told,
        "target_hidden_size": None,
        AUX: [2, 4, 5],
        "transformer_layer_config": flat,
        **outer,
        **changes,
    }
    return {k: v for k, v in data.items() if v != "absent"}


def test_speculators() -> None:
    def read(**changes: Any) -> DraftConfig:
        given = DraftOverrides(**changes.pop("overrides", {}))
        return DraftConfig.from_json(speculators(**changes), TRUNK, "c", given)

    assert dataclasses.replace(read(), aux_source="") == dataclasses.replace(DRAFT, aux_source="")
    assert read(**{AUX: None}).aux_layers == (1, 3, 4)
    assert read(norm_output=True).norm_output and read(fc_norm=True).fc_norm
    words = "norm_before_residual: got nothing, wanted true or false; vLLM takes true and specul"
    assert words in message(read, norm_before_residual="absent")
    given = {"norm_before_residual": True}
    assert read(norm_before_residual="absent", overrides=given).norm_before_residual
    for key, value, words in (
        ("speculators_model_type", "dflash", 'got "dflash", wanted "eagle3"; only EAGLE-3'),
        ("speculators_config", {"algorithm": "mtp"}, 'speculators_config.algorithm: got "mtp"'),
        ("transformer_layer_config", "absent", "transformer_layer_config: got nothing, wanted th"),
        ("transformer_layer_config", [], "transformer_layer_config: got [], wanted an object"),
        ("transformer_layer_config", {}, "transformer_layer_config.model_type: got nothing"),
        ("hidden_size", 32, "transformer_layer_config.hidden_size: got 64, wanted the same as"),
    ):
        assert words in message(read, **{key: value})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"residual_multiplier": 0.5}, "residual_multiplier: got 0.5, wanted a key that is known"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: got 30.0"),
        ({"eagle_config": {AUX: [1, 3, 4], "use_shared_mlp_norm": True}}, "eagle_config.use_shar"),
        ({"kv_lora_rank": 512}, "is it part of the maths? if not, remove it from the file"),
        ({"rope_interleaved": True}, "rope_interleaved: got true, wanted false; rotary pairs"),
    ],
)
def test_unknown_keys_that_may_change_the_maths(keys: dict[str, Any], words: str) -> None:
    assert words in message(draft, **keys)
    assert "\n" not in message(draft, **keys)
    (key,) = keys
    if key != "eagle_config":
        assert draft(**{key: None}) == draft(**{key: False}) == DRAFT
    assert draft(my_run_name="x", learning_rate=1e-4) == DRAFT


def test_keys_of_modelopt() -> None:
    """As its exporter fills its template, null where nothing was set."""
    eagle = {
        AUX: [1, 3, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    }
    assert draft(eagle_config=eagle, pretraining_tp=1, mlp_bias=None) == DRAFT
    usual = draft(eagle_config=eagle | {AUX: []})  # what it writes for the usual layers
    assert usual.aux_layers == DRAFT.aux_layers and "usual" in usual.aux_source
    for key, bad in (
        ("use_last_layernorm", False),
        ("use_input_layernorm_in_first_layer", False),
        ("use_mtp_layernorm", True),
        ("next_layer_regular", False),
        ("parallel_draft_step", 4),
        ("eh_proj_before_attn", True),
    ):
        assert f"eagle_config.{key}: got " in message(draft, eagle_config=eagle | {key: bad})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers: got 2, wanted 1; engines disagree on"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config: got nothing, wanted"),
        ({"model_type": "deepseek_v3"}, 'model_type: got "deepseek_v3", wanted llama or qwen3'),
        ({"fc_norm": True, "norm_before_fc": True}, "norm_before_fc: got true, wanted false besi"),
        ({"layer_types": ["sliding_attention"]}, "other kinds of layer are not supported"),
        ({"use_sliding_window": True}, "use_sliding_window: got true, wanted false; a sliding"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "without auxiliary features (EAGLE-1)"),
        ({"eagle_config": [1, 3, 4]}, "eagle_config: got [1, 3, 4], wanted an object"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta: got nothing"),
        ({"rope_theta": 10000}, "rope_parameters.rope_theta: got 10000000, wanted the same as"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e7}}, 'got "llama3"'),
        ({"hidden_act": "gelu"}, "only SiLU"),
        ({"logit_scale": 0}, "logit_scale: got 0, wanted a number above 0"),
        ({"quantization_config": {"bits": 4}}, "unquantised"),
        ({"vocab_size": 500}, "vocab_size: got 500, wanted 512, as in the trunk; is this draft"),
        ({"target_hidden_size": 128}, "target_hidden_size: got 128, wanted 64, as in the trunk"),
        ({"hidden_size": 128, "target_hidden_size": None}, "hidden_size: got 128, wanted 64, as"),
        ({"draft_vocab_size": 513}, "draft_vocab_size: got 513, wanted at most vocab_size"),
        ({"num_aux_hidden_states": 2}, "num_aux_hidden_states: got 2, wanted 3"),
        ({"head_dim": None, "num_attention_heads": 7, "num_key_value_heads": 7}, "head_dim: got n"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: got 1.5"),
    ],
)
def test_refused_drafts(keys: dict[str, Any], words: str) -> None:
    assert words in message(draft, **keys)


TRUNK_32 = trunk(trunk_config(32))


@pytest.mark.parametrize(
    ("keys", "outputs", "source"),
    [
        ({"eagle_config": {AUX: [1, 15, 28]}}, (1, 15, 28), "layer outputs"),
        ({"eagle_config": {AUX: [2, 16, 29]}}, (1, 15, 28), "boundaries"),
        ({"eagle_config": {AUX: [1, 9, 20]}}, (1, 9, 20), "layer outputs"),
        ({"eagle_config": {AUX: [2, 9, 20]}}, (1, 8, 19), "boundaries"),
        ({"eagle_config": {AUX: [8, 16, 32]}}, (7, 15, 31), "boundaries"),
        ({"eagle_config": {}, AUX: [1, 15, 28]}, (0, 14, 27), "boundaries"),
        ({"eagle_config": None, AUX: [2, 16, 29]}, (1, 15, 28), "boundaries"),
        ({"eagle_config": "absent"}, (1, 15, 28), "usual"),
        ({"eagle_config": {AUX: None}}, (1, 15, 28), "usual"),
        ({"eagle_config": {AUX: [2]}}, (1,), "boundaries"),
        ({"eagle_config": {AUX: []}}, (1, 15, 28), "usual"),
    ],
)
def test_aux_layers_resolve_to_outputs(keys: Any, outputs: tuple[int, ...], source: str) -> None:
    config = draft(TRUNK_32, **keys)
    assert config.aux_layers == outputs
    assert source in config.aux_source


@pytest.mark.parametrize(
    "keys",
    [
        {"eagle_config": {AUX: [3, 15, 28]}},  # neither convention
        {"eagle_config": {AUX: [1, 15, 32]}},  # both at once
        {"eagle_config": {AUX: [1, 15, 15]}},
        {"eagle_config": {AUX: [15, 1, 28]}},
        {"eagle_config": {AUX: [1, 15, 33]}},
        {"eagle_config": {AUX: [1, 15, -1]}},
        {"eagle_config": {AUX: ["1", "15", "28"]}},
        {"eagle_config": {AUX: [True, 15, 28]}},
        {"eagle_config": {AUX: 3}},
        {"eagle_config": {}, AUX: [0, 15, 28]},  # boundary 0 is the embedding
        {"eagle_config": {AUX: [1, 15, 28]}, AUX: [2, 16, 29]},
        {"eagle_config": {"layer_ids": [1, 15, 28]}},
        {"eagle_config": {}, "target_layer_ids": [1, 15, 28]},
    ],
)
def test_aux_layers_that_are_not_clear(keys: Any) -> None:
    text = message(draft, TRUNK_32, **keys)
    assert "\n" not in text
    given = draft(TRUNK_32, {"aux_layers": (3, 9, 31)}, **keys)
    assert given.aux_layers == (3, 9, 31) and "--aux-layers [3, 9, 31] given" in given.aux_source


def test_no_usual_aux_layers_in_a_short_trunk() -> None:
    short = trunk(trunk_config(4))
    assert "the layers that the features come from" in message(draft, short, eagle_config=None)


@pytest.mark.parametrize("given", [[], [1, 1], [2, 1], [0, 8], [-1], ["1"], [1.0]])
def test_given_aux_layers_are_checked(given: list[Any]) -> None:
    assert "options for the draft: --aux-layers: got" in message(
        draft, TRUNK, {"aux_layers": tuple(given)}
    )


def test_overrides() -> None:
    config = draft(TRUNK, {"rope_theta": 10000, "rotary_dim": 16}, rope_parameters=None)
    assert (config.rope_theta, config.rotary_dim) == (1e4, 16)
    for name, bad in (("rotary_dim", 3), ("rotary_dim", 18), ("rope_theta", 0), ("rotary_dim", 0)):
        option = f"--{name.replace('_', '-')}"
        assert f"options for the draft: {option}: got {bad}, wanted" in message(
            draft, TRUNK, {name: bad}
        )


@pytest.mark.parametrize(
    ("keys", "given", "outputs"),
    [
        ({"eagle_config": {AUX: [3, 15, 28]}}, {"aux_convention": "outputs"}, (3, 15, 28)),
        ({"eagle_config": {AUX: [3, 15, 28]}}, {"aux_convention": "boundaries"}, (2, 14, 27)),
        ({"eagle_config": {}, AUX: [1, 15, 28]}, {"aux_convention": "outputs"}, (1, 15, 28)),
        ({}, {"aux_convention": "boundaries", "aux_layers": (1, 16, 32)}, (0, 15, 31)),
        ({}, {"aux_convention": "outputs", "aux_layers": (0, 15, 31)}, (0, 15, 31)),
    ],
)
def test_the_convention_can_be_given(keys: Any, given: Any, outputs: tuple[int, ...]) -> None:
    assert draft(TRUNK_32, given, **keys).aux_layers == outputs


def test_bad_conventions() -> None:
    for options, words in (
        ({"aux_convention": "inputs"}, '--aux-convention: got "inputs", wanted outputs or bound'),
        ({"aux_convention": "boundaries", "aux_layers": (0, 2)}, "wanted layers from 1 to 32"),
        ({"aux_layers": (0, 32)}, "--aux-layers: got [0, 32], wanted layers from 0 to 31"),
    ):
        assert words in message(draft, TRUNK_32, options)
    none = message(draft, TRUNK_32, {"aux_convention": "outputs"}, eagle_config=None)
    assert "ids that --aux-convention can be about; give --aux-layers" in none


def test_overrides_of_flags() -> None:
    """They beat the file, and even a file that contradicts itself."""
    given = {"norm_output": False, "norm_before_residual": True}
    config = draft(TRUNK, given, norm_output=True, eagle_config={AUX: [1, 3, 4]})
    assert (config.norm_output, config.norm_before_residual) == (False, True)
    assert "norm_output false, given as an option" in config.sources
    torn = {"norm_output": True, "eagle_config": {AUX: [1, 3, 4], "norm_output": False}}
    assert "make them agree" in message(draft, **torn)
    assert draft(TRUNK, given, **torn).norm_output is False


def test_overrides_as_they_are_typed() -> None:
    given = DraftOverrides((1, 3, 4), "outputs", 1e4, 16, True, False)
    assert given.words() == (
        *("--aux-layers", "1,3,4", "--aux-convention", "outputs", "--rope-theta", "10000"),
        *("--rotary-dim", "16", "--norm-output", "true", "--norm-before-residual", "false"),
    )
    assert DraftOverrides().words() == ()


@pytest.mark.parametrize("config", [TRUNK, DRAFT], ids=["trunk", "draft"])
def test_plain_data_and_back(config: Any) -> None:
    plain = json.loads(dumps(encode(config)))
    assert decode(type(config), plain) == config
    for key in plain:
        lacking = {k: v for k, v in plain.items() if k != key}
        assert f"lacks {key}" in message(decode, type(config), lacking)
        for bad in (None, "x", -1, [], [[]], {}, float("inf"), 10**13):
            if (key == "aux_source" and bad == "x") or (
                key in ("eos_ids", "biases", "sources") and bad == []
            ):
                continue
            assert message(decode, type(config), plain | {key: bad})
    assert "unknown key more" in message(decode, type(config), plain | {"more": 1})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_nothing_but_input_errors(data: st.DataObject) -> None:
    """Whatever value a key has, the answer is a config or an InputError."""
    config: Any = copy.deepcopy(trunk_config())
    small: Any = copy.deepcopy(draft_config(config))
    text = config["text_config"]
    for place in (config, text, text["rope_parameters"], small, small["eagle_config"]):
        keys = data.draw(st.lists(st.sampled_from(sorted(place)), max_size=2, unique=True))
        place |= {key: data.draw(VALUES) for key in keys}
    for read in (
        lambda: TrunkConfig.from_json(config, "c"),
        lambda: DraftConfig.from_json(small, TRUNK, "c"),
    ):
        try:
            read()
        except InputError as error:
            assert str(error).startswith("c: ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1, 2]", "got [1, 2], wanted a JSON object"),
        (b'{"a": 1, "a": 2}', "key given twice: a"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "not valid JSON"),
    ],
    ids=["empty", "cut", "list", "twice", "encoding", "deep", "digits"],
)
def test_bad_json_files(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    text = message(read_json, path)
    assert words in text and str(path) in text and "download the file again" in text


def test_json_that_is_not_a_file(tmp_path: Path) -> None:
    assert "no such file" in message(read_json, tmp_path / "config.json")
    assert "cannot be read" in message(read_json, tmp_path)
