"""Trunks and drafts of unusual sizes, exported and run on ONNX Runtime.

Oracles: plain decoding in the same engine for the chain's tokens; transformers' model over the same
tokens for the logits of plain decoding; the draft in float64 NumPy for the guesses.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle_chain.engines.cli import main
from eagle_chain.engines.overrides import DraftOverrides
from eagle_chain.export.checkpoint import open_draft, open_trunk
from eagle_chain.runtime import Engines, open_engines
from eagle_chain.runtime.exactness import decode_plainly
from tests.draft_oracle import DraftOracle
from tests.toy import Script
from tests.toy_pair import write_pair
from tests.trunk_checks import Case

# Largest difference of a logit over the largest logit: sums run in another order, and the layers
# amplify that. The worst of the table is 1.5e-5.
LOGITS = 1e-4
# Two guesses whose logits (of size 1 to 10) are closer than this may change places.
NEAR_TIE = 1e-3
FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True)
class Kind:
    """One unusual pair; sizes replace those of the toy pair."""

    aux: tuple[int, ...] = (0, 1, 3)
    layers: int = 4
    width: int = 5
    capacity: int = 24
    profile: str = "portable"
    tied: bool = False
    sizes: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)


def heads(key: int, value: int, attention: int, kv: int) -> dict[str, Any]:
    return {
        "linear_num_key_heads": key,
        "linear_num_value_heads": value,
        "num_attention_heads": attention,
        "num_key_value_heads": kv,
    }


def rotary(factor: float, theta: float = 1e7, **more: Any) -> dict[str, Any]:
    values = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor, **more}
    return {"rope_parameters": values}


def kinds(*names: str) -> dict[str, Any]:
    return {"layer_types": list(names), "full_attention_interval": None}


ODD = Kind(
    sizes={
        **{"vocab_size": 263, "hidden_size": 37, "intermediate_size": 53, "head_dim": 14},
        **{"linear_key_head_dim": 7, "linear_value_head_dim": 11},
        **heads(1, 5, 3, 3),
        **rotary(0.3),
    },
    draft={
        **{"intermediate_size": 41, "num_attention_heads": 3, "num_key_value_heads": 1},
        **{"head_dim": 10, "draft_vocab_size": 17, "partial_rotary_factor": 0.4},
    },
)
TABLE = {
    "heads of the 0.8B, tied": Kind(tied=True, sizes=heads(4, 4, 4, 1)),
    "heads of the 4B, tied": Kind(tied=True, sizes=heads(2, 4, 4, 1)),
    "heads of the 27B": Kind(sizes=heads(2, 6, 6, 1)),
    "width 2": Kind(width=2),
    "width 3": Kind(width=3),
    "width 9": Kind(width=9),
    "capacity = width": Kind(capacity=5),
    "capacity = width = 2": Kind(capacity=2, width=2),
    "conv over 2, width 2": Kind(width=2, sizes={"linear_conv_kernel_dim": 2}),
    "conv over 3": Kind(sizes={"linear_conv_kernel_dim": 3}),
    "conv over 5": Kind(sizes={"linear_conv_kernel_dim": 5}),
    "conv over 7, width 2": Kind(width=2, sizes={"linear_conv_kernel_dim": 7}),
    "the whole head rotates": Kind(
        sizes=rotary(1.0, 1e4, mrope_section=[6, 5, 5]), draft={"partial_rotary_factor": 1.0}
    ),
    "one linear layer": Kind(layers=1, aux=(0,), sizes=kinds(LINEAR)),
    "one full layer": Kind(layers=1, aux=(0,), sizes=kinds(FULL)),
    "all full, first and last as features": Kind(
        layers=3, aux=(0, 2), sizes=kinds(FULL, FULL, FULL)
    ),
    "all linear": Kind(layers=3, aux=(0, 1, 2), sizes=kinds(LINEAR, LINEAR, LINEAR)),
    "full first": Kind(aux=(0, 3), sizes=kinds(FULL, LINEAR, FULL, LINEAR)),
    "draft vocabulary = vocabulary": Kind(draft={"draft_vocab_size": 512}),
    "draft vocabulary of 2": Kind(draft={"draft_vocab_size": 2}),
    "odd sizes": ODD,
    "odd sizes, standard": Kind(profile="standard", sizes=ODD.sizes, draft=ODD.draft),
    "conv over 2, standard": Kind(profile="standard", sizes={"linear_conv_kernel_dim": 2}),
}


def export(kind: Kind, folder: Path) -> Engines:
    trunk, draft = write_pair(
        folder,
        layers=kind.layers,
        tied=kind.tied,
        aux=list(kind.aux),
        sizes=kind.sizes,
        draft_sizes=kind.draft,
        extras=False,
    )
    words = ["export", str(trunk), str(draft), "-o", str(folder / "bundle"), "--debug", "logits"]
    words += ["--aux-layers", ",".join(map(str, kind.aux)), "--profile", kind.profile]
    words += ["--width", str(kind.width), "--capacity", str(kind.capacity)]
    assert main(words) == 0
    return replace(open_engines(folder / "bundle", threads=1), stop_ids=frozenset())


def draft_oracle(folder: Path, kind: Kind) -> DraftOracle:
    """The draft on disk in float64."""
    trunk_config, trunk = open_trunk(folder / "trunk")
    overrides = DraftOverrides(aux_layers=kind.aux)
    config, draft = open_draft(folder / "draft", trunk_config, trunk, overrides=overrides)
    weights = {name: draft.array(name) for name in draft.tensors}
    return DraftOracle.of(config, weights, trunk.array("embed_tokens.weight"))


def ask(case: Case, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and features by transformers, without its cache, which wants a full layer."""
    streams: dict[int, torch.Tensor] = {}

    def keep(index: int) -> Any:
        return lambda layer, inputs, output: streams.update({index: output[0]})

    layers = case.model.model.layers
    hooks = [layers[i].register_forward_hook(keep(i)) for i in case.aux_layers]
    with torch.no_grad():
        logits = case.model(torch.tensor(ids)[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.cat([streams[i] for i in case.aux_layers], -1)


@pytest.mark.parametrize("name", TABLE)
def test_unusual_sizes(name: str, tmp_path: Path) -> None:
    kind = TABLE[name]
    engines = export(kind, tmp_path)
    case = Case(tmp_path / "trunk", aux_layers=kind.aux)
    ids = case.ids.tolist()
    compared = 0
    for length in sorted({1, min(7, kind.capacity - 1)}):
        prompt = ids[:length]
        plain = decode_plainly(engines.chain(drafter="none"), prompt, kind.capacity)
        full = [*prompt, *plain.tokens]
        assert len(full) == kind.capacity
        theirs = ask(case, full)
        for at, logits in enumerate(plain.logits, length - 1):
            want = theirs[0][at].numpy()
            assert np.abs(logits - want).max() < LOGITS * np.abs(want).max(), f"logits at {at}"
        for rollback, draft_kv in (("log", "kept"), ("replay", "scratch")):
            chain = engines.chain(rollback=rollback, draft_kv=draft_kv)  # type: ignore[arg-type]
            assert chain.generate(prompt).tokens == plain.tokens
            counts = itertools.cycle(range(kind.width))
            vocab = engines.manifest.trunk.vocab_size
            chain.drafter = script = Script(chain.cache, full, counts, vocab=vocab)
            rounds = list(chain.rounds(prompt))
            assert [token for r in rounds for token in r.tokens] == plain.tokens
            assert [r.accepted for r in rounds[1:]] == script.planned
        compared += compare_guesses(engines, draft_oracle(tmp_path, kind), theirs[1], full)
    assert compared >= min(kind.width - 1, kind.capacity - 1)


def compare_guesses(
    engines: Engines, oracle: DraftOracle, features: torch.Tensor, full: list[int]
) -> int:
    """EAGLE's guesses after half of a sequence are those of the draft over its true features."""
    chain = engines.chain()
    known = full[: len(full) // 2]
    chain.extend(known)
    assert chain.cache.pending is not None
    guesses = chain.drafter.propose(chain.cache.pending, engines.manifest.options.width - 1)
    rows = features.double().numpy()
    g = rows[0]
    for i, token in enumerate([*known[1:], chain.cache.pending]):
        logits, g = oracle.step(token, oracle.encode(rows[i]), i)
    for j, guess in enumerate(guesses):
        want = oracle.target(int(logits.argmax()))
        second, first = np.sort(logits)[-2:]
        if guess != want:
            assert first - second < NEAR_TIE, f"guess {j}"
            return j
        logits, g = oracle.step(want, g, len(known) + j)
    return len(guesses)
