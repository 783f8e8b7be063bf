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

from eagle_chain.engines.config import DraftConfig, TrunkConfig, read_json
from eagle_chain.engines.errors import InputError
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
    return DraftConfig.from_json(config, trunk, "config.json", **(overrides or {}))


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
    lines = message(draft, norm_output=True, num_hidden_layers=2, vocab_size=100).splitlines()
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


FLAGS = [
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "attention_bias",
    "mlp_bias",
    "bias",
]


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_that_are_not_implemented(flag: str) -> None:
    inside = {"eagle_config": {AUX: [1, 3, 4], flag: True}}
    alone = {flag: "absent"} | inside
    for keys, place in (({flag: True}, flag), (alone, f"eagle_config.{flag}")):
        text = message(draft, **keys)
        assert f"config.json: {place}: got true, wanted false; " in text
        assert text.endswith("is not supported yet")
    both = message(draft, **({flag: False} | inside))
    assert f"eagle_config.{flag}: got true, wanted the same as {flag}, which is false" in both
    assert "got 1, wanted false" in message(draft, **{flag: 1})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers: got 2, wanted 1; a draft of several"),
        ({"speculators_model_type": "eagle3"}, "the speculators format is not supported yet"),
        ({"transformer_layer_config": {}}, "the speculators format is not supported yet"),
        ({"model_type": "qwen3"}, 'model_type: got "qwen3", wanted llama'),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "norms on queries and keys"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "without auxiliary features (EAGLE-1)"),
        ({"eagle_config": {"return_hidden_post_norm": True}}, "recurrence taken after the last"),
        ({"eagle_config": [1, 3, 4]}, "eagle_config: got [1, 3, 4], wanted an object"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta: got nothing"),
        ({"rope_theta": 10000}, "rope_parameters.rope_theta: got 10000000, wanted the same as"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e7}}, 'got "llama3"'),
        ({"hidden_act": "gelu"}, "only SiLU"),
        ({"logit_scale": 0.5}, "logit_scale: got 0.5"),
        ({"quantization_config": {"bits": 4}}, "unquantised"),
        ({"vocab_size": 500}, "vocab_size: got 500, wanted 512, as in the trunk; is this draft"),
        ({"target_hidden_size": 128}, "target_hidden_size: got 128, wanted 64, as in the trunk"),
        ({"hidden_size": 128, "target_hidden_size": 64}, "needs its own embedding: not supported"),
        ({"hidden_size": 128, "target_hidden_size": None}, "hidden_size: got 128, wanted 64, as"),
        ({"draft_vocab_size": 513}, "draft_vocab_size: got 513, wanted at most vocab_size"),
        ({"draft_vocab_size": 512, "tie_word_embeddings": True}, "a head tied to the embedding"),
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
        {"eagle_config": {AUX: []}},
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
    assert draft(TRUNK_32, {"aux_layers": [3, 9, 31]}, **keys).aux_layers == (3, 9, 31)


def test_no_usual_aux_layers_in_a_short_trunk() -> None:
    short = trunk(trunk_config(4))
    assert "the layers that the features come from" in message(draft, short, eagle_config=None)


@pytest.mark.parametrize("given", [[], [1, 1], [2, 1], [0, 8], [-1], ["1"], [1.0]])
def test_given_aux_layers_are_checked(given: list[Any]) -> None:
    assert "options for the draft: --aux-layers: got" in message(
        draft, TRUNK, {"aux_layers": given}
    )


def test_overrides() -> None:
    config = draft(TRUNK, {"rope_theta": 10000, "rotary_dim": 16}, rope_parameters=None)
    assert (config.rope_theta, config.rotary_dim) == (1e4, 16)
    for name, bad in (("rotary_dim", 3), ("rotary_dim", 18), ("rope_theta", 0), ("rotary_dim", 0)):
        option = f"--{name.replace('_', '-')}"
        assert f"options for the draft: {option}: got {bad}, wanted" in message(
            draft, TRUNK, {name: bad}
        )


BAD_VALUES: list[Any] = [None, "x", -1, [], [[]], {}, float("inf"), 10**13]


@pytest.mark.parametrize("config", [TRUNK, DRAFT], ids=["trunk", "draft"])
def test_plain_data_and_back(config: Any) -> None:
    kind = type(config)
    plain = json.loads(json.dumps(config.to_plain()))
    assert kind.from_plain(plain, "manifest.json") == config
    assert decode(kind, json.loads(dumps(encode(config)))) == config
    for key in plain:
        lacking = {k: v for k, v in plain.items() if k != key}
        assert f"missing ['{key}']" in message(kind.from_plain, lacking, "manifest.json")
        for bad in (None, "x", -1, [], [[]], {}, float("inf"), 10**13):
            if (key == "aux_source" and bad == "x") or (key == "eos_ids" and bad == []):
                continue
            text = message(kind.from_plain, plain | {key: bad}, "manifest.json")
            assert text.startswith("manifest.json: ")
    assert "unknown ['more']" in message(kind.from_plain, plain | {"more": 1}, "manifest.json")


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
