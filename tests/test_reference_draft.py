"""The draft reference against the float64 oracle, over rounds that overwrite and keep KV rows."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle_chain.engines.config import DraftConfig
from eagle_chain.engines.contract import draft_spec
from eagle_chain.engines.overrides import NONE, DraftOverrides
from eagle_chain.engines.spec import Options
from eagle_chain.export import reference
from eagle_chain.export.checkpoint import open_pair
from eagle_chain.export.eager import (
    TORCH_TYPES,
    draft_session,
    encoder_session,
    load_draft,
    zero_states,
)
from tests.draft_oracle import DraftOracle
from tests.toy_pair import write_pair

WIDTH, CAPACITY = 5, 40
ALLOWED = 5e-5  # fp32 against float64, on values of size 1 to 8
SOURCE = Path(str(reference.__file__)).read_text()


@dataclasses.dataclass(frozen=True)
class Draft:
    """A toy draft as weights of the reference."""

    config: DraftConfig
    weights: dict[str, Tensor]
    embedding: Tensor

    def oracle(self) -> DraftOracle:
        """The same draft in the oracle, with an empty KV."""
        weights = {name: t.numpy() for name, t in self.weights.items()}
        return DraftOracle.of(self.config, weights, self.embedding.numpy())

    def states(self) -> dict[str, Tensor]:
        """An empty KV."""
        return zero_states(draft_spec(self.config, WIDTH, Options(WIDTH, CAPACITY)))


def make(folder: Path, overrides: DraftOverrides = NONE, **options: Any) -> Draft:
    return opened(*write_pair(folder, **options), overrides)


def opened(trunk_folder: Path, draft_folder: Path, overrides: DraftOverrides = NONE) -> Draft:
    (_, trunk), (config, draft) = open_pair(trunk_folder, draft_folder, overrides)
    return Draft(config, *load_draft(config, draft, trunk, "fp32"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Draft:
    torch.set_num_threads(1)
    return make(tmp_path_factory.mktemp("pair"))


def near(got: Tensor, want: Any, what: str) -> None:
    gap = np.abs(got.double().numpy() - want).max()
    assert gap <= ALLOWED, f"{what}: off by {gap:.2e}"


def check_rounds(reference: Any, draft: Draft) -> None:
    """Extends and single steps as a chain does them; every row's g, the logits and the KV agree.

    A prompt of 7 in two extends, then three rounds that keep 1, 5 and 3 rows. The single steps
    between them write rows that the next extend overwrites, and its rejected rows stay unread.
    """
    oracle, states = draft.oracle(), draft.states()
    random = torch.Generator().manual_seed(2)
    vocabulary = draft.config.vocab_size

    def tokens(count: int) -> Tensor:
        return torch.randint(0, vocabulary, (count,), generator=random)

    def check(out: Any, want: tuple[Any, Any], position: int) -> None:
        near(out.logits[0], want[0], f"logits at {position}")
        near(out.g_next[0], want[1], f"g at {position}")
        assert int(out.token) == oracle.target(int(np.argmax(want[0])))
        assert int(out.next_position) == position + 1

    # position, rows that become part of the sequence, single steps after them
    for position, kept, singles in ((0, 5, 0), (5, 2, 3), (7, 1, 3), (8, 5, 2), (13, 3, 3)):
        ids = tokens(WIDTH)
        features = torch.randn(WIDTH, draft.config.feature_size, generator=random)
        g = reference.encode(draft.weights, draft.config, features)
        row = kept - 1
        for i in range(kept):
            near(g[i], oracle.encode(features[i].double().numpy()), f"encoded row {i}")
            want = oracle.step(
                int(ids[i]), oracle.encode(features[i].double().numpy()), position + i
            )
        out = reference.draft_step(
            draft.weights, draft.embedding, draft.config, ids, g, position, row, states
        )
        check(out, want, position + row)
        for slot in range(position + kept):
            for part, kept_rows in (("key", oracle.keys), ("value", oracle.values)):
                got = out.states[f"draft.{part}"][0, :, slot]
                near(got, np.stack(kept_rows[slot]), f"{part} in slot {slot}")
        states = out.states
        for step in range(singles):
            here = position + kept + step
            token = out.token
            want = oracle.step(int(token), want[1], here)
            out = reference.draft_step(
                draft.weights, draft.embedding, draft.config, token, out.g_next, here, 0, states
            )
            check(out, want, here)
            states = out.states


VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "whole head rotates": {"overrides": DraftOverrides(rotary_dim=16)},
    "other theta": {"overrides": DraftOverrides(rope_theta=10000.0)},
    "one vocabulary": {"draft_sizes": {"draft_vocab_size": 512}},
    "one KV head": {"draft_sizes": {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}},
    "two aux layers": {"aux": [1, 4]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_rounds_like_the_oracle(variant: str, tmp_path: Path) -> None:
    check_rounds(reference, make(tmp_path, **VARIANTS[variant]))


MISTAKES = {
    "centred norms": ("(rms(x, eps) * weight.to(f32))", "(rms(x, eps) * (1 + weight.to(f32)))"),
    "hidden before embedding": (
        "x = torch.cat([e, normed_g], -1)",
        "x = torch.cat([normed_g, e], -1)",
    ),
    "hidden not normed": ("x = torch.cat([e, normed_g], -1)", "x = torch.cat([e, g], -1)"),
    "norms of embedding and hidden swapped": (
        'layer["input_layernorm.weight"], eps)\n    normed_g =',
        'layer["hidden_norm.weight"], eps)\n    normed_g =',
    ),
    "residual after the norm": (
        "residual = normed_g if config.norm_before_residual else g",
        "residual = normed_g",
    ),
    "no residual": ("h = residual + linear(mixed,", "h = linear(mixed,"),
    "embedding as residual": ("h = residual + linear(mixed,", "h = e + linear(mixed,"),
    "no residual around the MLP": ("h = h + mlp(plain", "h = mlp(plain"),
    "recurrence after the norm": (
        "g_next=normed if config.norm_output else g_next,",
        "g_next=normed,",
    ),
    "last norm left out": (
        'normed = plain_norm(g_next, weights["norm.weight"], eps)',
        "normed = g_next",
    ),
    "d2t as absolute ids": (
        "target = target if config.absolute_d2t else token + target",
        "target = target",
    ),
    "d2t not applied": ('if "d2t" in weights:', "if False:"),
    "last row instead of the chosen one": ("g_next = h[row : row + 1]", "g_next = h[-1:]"),
    "position of the token, not of the feature": (
        "norm_output else g_next,\n        next_position=int32(position + row + 1)",
        "norm_output else g_next,\n        next_position=int32(position + row + 2)",
    ),
    "all rows at one position": (
        "torch.arange(position, position + rows)",
        "torch.full((rows,), position)",
    ),
    "rotary position counted from 0": (
        "turn = (positions, config.rope_theta, config.rotary_dim)\n    cache = (pl",
        "turn = (positions - position, config.rope_theta, config.rotary_dim)\n    cache = (pl",
    ),
    "rotary over the whole head": (
        "turn = (positions, config.rope_theta, config.rotary_dim)\n    cache = (planes_of",
        "turn = (positions, config.rope_theta, dim)\n    cache = (planes_of",
    ),
    "KV written one slot late": (
        "cache = write_rows(cache, rotate(key, *turn), value, position)",
        "cache = write_rows(cache, rotate(key, *turn), value, position + 1)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_caught(mistake: str, draft: Draft) -> None:
    old, new = MISTAKES[mistake]
    assert SOURCE.count(old) == 1
    module = ModuleType("planted_draft")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(SOURCE.replace(old, new), "planted_draft", "exec"), module.__dict__)
    with pytest.raises(AssertionError):
        check_rounds(module, draft)


def extend(draft: Draft, ids: Tensor, row: int, **weights: Tensor) -> Any:
    g = torch.randn(len(ids), draft.config.hidden_size, generator=torch.Generator().manual_seed(3))
    return reference.draft_step(
        draft.weights | weights, draft.embedding, draft.config, ids, g, 0, row, draft.states()
    )


def test_logits_that_are_not_finite_give_no_token(draft: Draft) -> None:
    broken = {"norm.weight": torch.full((64,), torch.inf)}
    assert int(extend(draft, torch.arange(WIDTH), 2, **broken).token) == -1


def test_no_token_embeds_as_token_0(draft: Draft) -> None:
    """Rows past the accepted one may hold -1; the chosen row does not see them."""
    ids = torch.tensor([5, 6, -1, -1, -1])
    zero = extend(draft, ids.clamp(min=0), 4)
    assert torch.equal(extend(draft, ids, 4).logits, zero.logits)
    other = extend(draft, torch.tensor([5, 6, 7, 8, 9]), 1)
    assert torch.equal(extend(draft, ids, 1).logits, other.logits)


def test_rejected_rows_leave_no_trace(draft: Draft) -> None:
    """The next round gives the same bits whatever stood in the rows past the chosen one."""
    random = torch.Generator().manual_seed(4)
    again = torch.randn(WIDTH, draft.config.hidden_size, generator=random)
    results = []
    for rejected in ([7, 8, 9], [100, 200, 300]):
        out = extend(draft, torch.tensor([5, 6, *rejected]), 1)
        given = (torch.arange(WIDTH), again, 2, 4, out.states)
        out = reference.draft_step(draft.weights, draft.embedding, draft.config, *given)
        results.append(out)
    assert torch.equal(results[0].logits, results[1].logits)
    assert torch.equal(results[0].states["draft.key"], results[1].states["draft.key"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_sessions_give_what_the_specs_say(dtype: str, tmp_path: Path) -> None:
    (_, trunk), (config, stored) = open_pair(*write_pair(tmp_path, dtype="bf16"))
    options = Options(WIDTH, CAPACITY, dtype, debug=("logits",))
    weights, embedding = load_draft(config, stored, trunk, dtype)
    sessions = [encoder_session(weights, config, options)]
    sessions += [draft_session(weights, embedding, config, rows, options) for rows in (WIDTH, 1)]
    for session in sessions:
        feeds = {
            t.name: torch.ones(t.shape, dtype=TORCH_TYPES[t.dtype]) for t in session.spec.all_inputs
        } | zero_states(session.spec)
        if "row" in feeds:
            feeds["row"] -= 1
        outputs = session.run(feeds)
        assert list(outputs) == [t.name for t in session.spec.all_outputs]
        for tensor in session.spec.all_outputs:
            got = outputs[tensor.name]
            assert (got.dtype, got.shape) == (TORCH_TYPES[tensor.dtype], tensor.shape)
            assert got.isfinite().all()


def test_gradients_reach_every_weight(draft: Draft) -> None:
    weights = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in draft.weights.items()}
    features = torch.randn(WIDTH, draft.config.feature_size, generator=torch.Generator())
    g = reference.encode(weights, draft.config, features)
    ids, states = torch.arange(WIDTH), draft.states()
    out = reference.draft_step(weights, draft.embedding, draft.config, ids, g, 0, 4, states)
    out.logits.logsumexp(-1).sum().backward()
    for name, weight in weights.items():
        if weight.requires_grad:
            assert weight.grad is not None and weight.grad.any(), name
