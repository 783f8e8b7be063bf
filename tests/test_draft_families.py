"""The shipped draft in every published format: identical tokens and acceptance, or a sentence.

Each family is made from the demo draft by renaming and reshaping. A wrong reading that no file can
tell from a right one lowers acceptance, and the override that corrects it brings it back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.overrides import NONE, DraftOverrides
from eagle_chain.engines.spec import Options
from eagle_chain.engines.strict_json import encode
from eagle_chain.export.bundle import export_bundle, read_pair
from eagle_chain.runtime import Tokenizer, open_engines
from tests.test_demo_pair import DEMO, read_json
from tests.toy_pair import Config, Tensors, save

AUX = "eagle_aux_hidden_state_layer_ids"
ATTENTION = "midlayer.self_attn"
PROMPT = "<|doc|>.. _plotting:\n\nPlotting a histogram\n--------------------\n\nA histogram shows"
TOKENS = 48
Outcome = tuple[list[int], list[int], list[int]]  # tokens; drafts accepted and judged, by position
Parts = tuple[Config, Tensors]


def decode(folder: Path, draft: Path, overrides: DraftOverrides = NONE) -> Outcome:
    """Export the demo trunk with this draft and decode the prompt."""
    manifest = export_bundle(
        DEMO / "trunk", draft, folder / "bundle", Options(5, 256), overrides=overrides
    )
    assert manifest.overrides == overrides and manifest.arguments == overrides.words()
    chain = open_engines(folder / "bundle", threads=1).chain()
    prompt = Tokenizer(folder / "bundle").encode(PROMPT)
    result = chain.generate(prompt, max_new_tokens=TOKENS)
    return result.tokens, result.stats.accepted_at, result.stats.judged_at


def demo_draft() -> Parts:
    """Config and tensors of the shipped draft, to change."""
    return read_json(DEMO / "draft/config.json"), load_file(DEMO / "draft/model.safetensors")


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = decode(tmp_path_factory.mktemp("usual"), DEMO / "draft")
    assert sum(outcome[1]) > 20, "the draft is of use on this prompt"
    return outcome


def renamed(tensors: Tensors, prefix: str, layer: str) -> Tensors:
    """Under `prefix`, but for the head and the maps, the layer called `layer`."""

    def name(n: str) -> str:
        bare = n.startswith(("lm_head", "d2t", "t2d"))
        return n if bare else prefix + n.replace("midlayer.", f"{layer}.")

    return {name(n): t for n, t in tensors.items()}


def embedding() -> torch.Tensor:
    return load_file(DEMO / "trunk/model.safetensors")["model.language_model.embed_tokens.weight"]


def original(config: Config, tensors: Tensors) -> Parts:
    """As EAGLE itself writes it: its own copy of the embedding, no flags."""
    for flag in ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output"):
        del config[flag]
    return config, tensors | {"embed_tokens.weight": embedding()}


def speculators(config: Config, tensors: Tensors) -> Parts:
    flags = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
    outer = {key: config.pop(key) for key in ("draft_vocab_size", *flags)}
    ids = [i + 1 for i in config.pop("eagle_config")[AUX]]
    nested = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
        "target_hidden_size": None,
        "transformer_layer_config": {k: v for k, v in config.items() if k != "target_hidden_size"},
        AUX: ids,
    }
    unused = {"verifier_lm_head.weight": torch.zeros(2, 2), "verifier_norm.weight": torch.zeros(2)}
    return nested | outer, renamed(tensors, "", "layers.0") | unused


def modelopt(config: Config, tensors: Tensors) -> Parts:
    config["eagle_config"] |= {
        AUX: [2, 4, 7],  # boundaries, as the drafts for gpt-oss and Kimi have them
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    }
    del tensors["t2d"]
    return config, renamed(tensors, "", "layers.0")


def fused(config: Config, tensors: Tensors) -> Parts:
    qkv = [tensors.pop(f"{ATTENTION}.{part}_proj.weight") for part in "qkv"]
    tensors[f"{ATTENTION}.qkv_proj.weight"] = torch.cat(qkv)
    both = [tensors.pop(f"midlayer.mlp.{part}_proj.weight") for part in ("gate", "up")]
    tensors["midlayer.mlp.gate_up_proj.weight"] = torch.cat(both)
    return config, tensors


def absolute(config: Config, tensors: Tensors) -> Parts:
    """As llama.cpp stores it."""
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    return config, tensors


def absolute_without_t2d(config: Config, tensors: Tensors) -> Parts:
    config, tensors = absolute(config, tensors)
    del tensors["t2d"]
    return config, tensors


def whole_vocabulary(config: Config, tensors: Tensors) -> Parts:
    """A token that could not be drafted repeats the row of a lower one, which wins the tie."""
    targets = tensors.pop("d2t") + torch.arange(config["draft_vocab_size"])
    del tensors["t2d"]
    rows = torch.searchsorted(targets, torch.arange(config["vocab_size"]), right=True) - 1
    assert targets[0] == 0, "there is a lower one"
    tensors["lm_head.weight"] = tensors["lm_head.weight"][rows]
    config["draft_vocab_size"] = None
    return config, tensors


def biased(config: Config, tensors: Tensors) -> Parts:
    """Biases of zero everywhere."""
    config |= {"attention_bias": True, "mlp_bias": True, "bias": True}
    linear = [n for n in tensors if "_proj." in n or n == "fc.weight"]
    assert len(linear) == 8
    for name in linear:
        tensors[name.replace("weight", "bias")] = torch.zeros(len(tensors[name]))
    return config, tensors


def fourth_feature(config: Config, tensors: Tensors) -> Parts:
    """One more aux layer that nothing is read from."""
    config["eagle_config"][AUX] = [1, 3, 6, 7]
    hidden = config["hidden_size"]
    more = torch.zeros(hidden, hidden, dtype=torch.bfloat16)
    tensors["fc.weight"] = torch.cat([tensors["fc.weight"], more], 1)
    return config, tensors


def wider(config: Config, tensors: Tensors) -> Parts:
    """A hidden size of 200 on a trunk of 192: eight dims that hold nothing, norms to match."""
    old, new = config["hidden_size"], 200
    share = old / new  # a mean over 200 is that much smaller
    config |= {"hidden_size": new, "rms_norm_eps": config["rms_norm_eps"] * share}
    tensors["embed_tokens.weight"] = embedding()
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}

    def pad(t: torch.Tensor, axis: int) -> torch.Tensor:
        shape = list(t.shape)
        shape[axis] = new - old
        return torch.cat([t, torch.zeros(shape)], axis)

    for name, t in tensors.items():
        if "norm" in name:
            tensors[name] = pad(t * share**0.5, 0)
        elif "q_proj" in name or "k_proj" in name or "v_proj" in name:
            tensors[name] = torch.cat([pad(half, 1) for half in t.split(old, 1)], 1)
        elif (
            "gate_proj" in name
            or "up_proj" in name
            or name in ("lm_head.weight", "embed_tokens.weight")
        ):
            tensors[name] = pad(t, 1)
        elif "o_proj" in name or "down_proj" in name or name == "fc.weight":
            tensors[name] = pad(t, 0)
    return config, tensors


def longer_heads(config: Config, tensors: Tensors) -> Parts:
    """Heads of 80 dims, 16 of them empty; the scores are over the root of 80."""
    old, new, rotary = config["head_dim"], 80, 16
    config |= {"head_dim": new, "partial_rotary_factor": rotary / new}
    config["rope_parameters"]["partial_rotary_factor"] = rotary / new
    for part in "qkvo":
        name = f"{ATTENTION}.{part}_proj.weight"
        t = tensors[name].float() * ((new / old) ** 0.5 if part == "q" else 1)
        axis = 1 if part == "o" else 0
        heads = t.split(old, axis)
        shape = list(heads[0].shape)
        shape[axis] = new - old
        tensors[name] = torch.cat([torch.cat([h, torch.zeros(shape)], axis) for h in heads], axis)
    return config, tensors


def renamed_biased(config: Config, tensors: Tensors) -> Parts:
    config, tensors = biased(*fourth_feature(config, tensors))
    return config, renamed(tensors, "", "layers.0")


FAMILIES: dict[str, Callable[[Config, Tensors], Parts]] = {
    "EAGLE": original,
    "layers.0, biases, four aux layers": renamed_biased,
    "NeMo": lambda c, t: (c, renamed(t, "model.", "layers.0")),
    "speculators": speculators,
    "ModelOpt": modelopt,
    "absolute d2t": absolute,
    "fused projections, absolute d2t without t2d": lambda c, t: absolute_without_t2d(*fused(c, t)),
    "whole vocabulary": whole_vocabulary,
    "another width": wider,
    "another head_dim": longer_heads,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_and_acceptance(family: str, usual: Outcome, tmp_path: Path) -> None:
    shards = 3 if family in ("speculators", "NeMo") else 1
    draft = save(tmp_path / "draft", *FAMILIES[family](*demo_draft()), shards)
    assert decode(tmp_path, draft) == usual


def at_top_level(config: Config) -> None:
    """Layer outputs where vLLM would look for boundaries."""
    config[AUX] = config.pop("eagle_config")[AUX]


def whole_head(config: Config) -> None:
    for place in (config, config["rope_parameters"]):
        del place["partial_rotary_factor"]


def old_theta(config: Config) -> None:
    config["rope_parameters"]["rope_theta"] = 10000


def other_flag(flag: str) -> Callable[[Config], None]:
    return lambda config: config.update({flag: True})


# A config that says something else than the draft was trained with -> what puts it right.
UNDECIDABLE: dict[str, tuple[Callable[[Config], None], DraftOverrides]] = {
    "aux layers one too low": (at_top_level, DraftOverrides(aux_convention="outputs")),
    "whole head rotates": (whole_head, DraftOverrides(rotary_dim=16)),
    "theta 10000": (old_theta, DraftOverrides(rope_theta=1e7)),
    "norm_output": (other_flag("norm_output"), DraftOverrides(norm_output=False)),
    "norm_before_residual": (
        other_flag("norm_before_residual"),
        DraftOverrides(norm_before_residual=False),
    ),
}


@pytest.mark.parametrize("mistake", UNDECIDABLE)
def test_what_no_file_tells_shows_as_acceptance(
    mistake: str, usual: Outcome, tmp_path: Path
) -> None:
    change, overrides = UNDECIDABLE[mistake]
    config, tensors = demo_draft()
    change(config)
    draft = save(tmp_path / "draft", config, tensors)
    tokens, accepted, judged = decode(tmp_path, draft)
    assert tokens == usual[0], "a wrong draft changes no token"
    assert sum(accepted) < sum(usual[1])
    if mistake == "norm_output":
        assert accepted[0] / judged[0] > 0.7 * usual[1][0] / usual[2][0], "first drafts are fine"
    assert decode(tmp_path, draft, overrides) == usual


def test_a_copied_bundle_can_be_exported_again(usual: Outcome, tmp_path: Path) -> None:
    """With another override, from nothing but the bundle: what tuning does."""
    given = DraftOverrides(rotary_dim=16)
    pair = DEMO / "trunk", DEMO / "draft"
    first = export_bundle(*pair, tmp_path / "first", Options(5, 256), copy=True)
    weights = tmp_path / "first/weights"
    second = export_bundle(
        weights / "trunk", weights / "draft", tmp_path / "b", Options(5, 256), overrides=given
    )
    assert encode(second.draft) | {"sources": []} == encode(first.draft) | {"sources": []}
    assert second.overrides == given != first.overrides


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c, t: t.pop("lm_head.weight"), "a draft needs its own head"),
        (lambda c, t: t.update(d2t=t["d2t"] * 0), "all zeros: an untrained mapping"),
        (lambda c, t: c.update(num_hidden_layers=2), "num_hidden_layers: got 2, wanted 1"),
        (lambda c, t: c.update(fc_norm=True), "fc_norm.0.weight (fc_norm is true in config.json)"),
        (lambda c, t: c.update(bias=True), "bias is true in config.json, but fc.bias is not"),
        (lambda c, t: c.update(hidden_size=200), "embed_tokens.weight (a draft of another width"),
        (
            lambda c, t: t.update({"fc.bias": torch.zeros(192)}) or c.update(bias=False),
            "fc.bias: is in the file, but bias is false in config.json",
        ),
    ],
)  # fmt: skip
def test_contradictions_of_file_and_config(
    change: Callable[[Config, Tensors], Any], words: str, tmp_path: Path
) -> None:
    config, tensors = demo_draft()
    change(config, tensors)
    draft = save(tmp_path / "draft", config, tensors)
    with pytest.raises(InputError) as caught:
        read_pair(DEMO / "trunk", draft)
    assert words in str(caught.value)
