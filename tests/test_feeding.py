"""Prompts in wide calls, on the NumPy pair: which calls are made, and that nothing else differs.

The toy computes every row on its own, so a prompt fed in wide calls must leave the very bits that
one token a call leaves.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from eagle_chain.engines.spec import Options
from eagle_chain.export.bundle import write_bundle
from eagle_chain.runtime import Chain, open_engines
from tests.onnx_engine import open_pair
from tests.test_drafters import check_last_guesses, scripted_eagle
from tests.toy import Script, Toy, cache_states, live_states
from tests.toy_pair import write_pair

WIDE = 16  # rows of a wide call; worth it from 4 on


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy(7, capacity=90, prefill=WIDE)


def calls(toy: Toy, name: str) -> list[tuple[int, ...]]:
    """Position, rows and (of the trunk's engines) kept of every call so far, which are cleared."""
    made = toy.sessions[name].calls
    found = [
        tuple(call[part][0] for part in ("position", "rows", "kept") if part in call)
        for call in made
    ]
    made.clear()
    return found


def test_which_calls_a_prompt_takes(toy: Toy) -> None:
    """Full ones, one that is not if it is worth it, and at the end always the trunk's own."""
    for length, wide, steps in (
        (4, [], [(0, 4, 0)]),
        (5, [(0, 4, 0)], [(4, 1, 0)]),
        (17, [(0, 16, 0)], [(16, 1, 0)]),
        (20, [(0, 16, 0)], [(16, 4, 0)]),
        (40, [(0, 16, 0), (16, 16, 0), (32, 7, 0)], [(39, 1, 0)]),
    ):
        for name in ("prefill", "draft_prefill", "trunk"):
            calls(toy, name)
        toy.chain().extend(toy.prompt(0, length))
        assert calls(toy, "prefill") == wide
        assert calls(toy, "draft_prefill") == [call[:2] for call in wide]
        assert calls(toy, "trunk") == steps


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("length", [5, 17, 33, 50])
def test_the_sequence_goes_on_bit_for_bit(toy: Toy, k: int, length: int) -> None:
    """States, accepted counts, guesses and the draft's KV, as if no call had been wide."""
    prompt = toy.prompt(length, length)
    truth, steps = toy.decode(prompt, 25)
    chain, drafter = scripted_eagle(toy, truth, list(range(k + 1)))
    for round in chain.rounds(prompt, max_new_tokens=24, k=k):
        cache, n = chain.cache, len(chain.cache.tokens)
        assert cache.tokens == truth[:n] and cache.pending == truth[n]
        live = live_states(cache_states(cache, toy.specs["trunk"]), cache.kept, n)
        assert all(live[x].tobytes() == a.tobytes() for x, a in steps[n - 1].states.items())
        if drafter.guesses:
            assert round.accepted == min(drafter.script.planned[-1], len(drafter.guesses[-1][1]))
            check_last_guesses(toy, chain, drafter, truth, steps)
    assert chain.cache.tokens == truth[: length + 23]


def test_a_prompt_behind_a_round_folds_its_kept_rows(toy: Toy) -> None:
    first, second = toy.prompt(1, 9), toy.prompt(2, 30)
    truth, _ = toy.decode(first, 12)
    for accepted in range(5):
        chain = toy.chain(lambda cache: Script(cache, truth, itertools.repeat(accepted)))  # noqa: B023
        made = chain.generate(first, max_new_tokens=1 + accepted + 1).tokens
        assert made == truth[9 : 9 + accepted + 2]
        calls(toy, "prefill")
        whole = [*chain.cache.tokens, *second]
        want, steps = toy.decode(whole, 6)
        assert (
            chain.generate(second, max_new_tokens=5, append=True).tokens == want[len(whole) :][:5]
        )
        assert calls(toy, "prefill")[0] == (10 + accepted, 16, 1 + accepted)
        n = len(chain.cache.tokens)
        live = live_states(cache_states(chain.cache, toy.specs["trunk"]), chain.cache.kept, n)
        assert all(live[x].tobytes() == a.tobytes() for x, a in steps[n - 1].states.items())


@pytest.mark.parametrize("rollback", ["log", "replay"])
def test_branches_behind_a_wide_prompt(toy: Toy, rollback: str) -> None:
    prompt = toy.prompt(3, 40)
    chain = toy.chain(rollback=rollback)
    chain.extend(prompt)
    before = chain.snapshot()
    for seed in (1, 2, 1):
        more = toy.prompt(seed, 20)
        whole = [*prompt, *more]
        want, _ = toy.decode(whole, 10)
        result = chain.generate(more, max_new_tokens=10, append=True)
        assert result.tokens == want[len(whole) :]
        chain.rollback(before)
        assert chain.cache.tokens == prompt


def test_to_the_last_slot() -> None:
    """Where P rows do not fit the buffers any more, calls of W rows take over."""
    toy = Toy(6, capacity=42, prefill=WIDE)
    ids = toy.prompt(0, 42)
    for length in (38, 41, 42):
        truth, _ = toy.decode(ids[:length], 42 - length + 1)
        calls(toy, "prefill")
        result = toy.chain().generate(ids[:length])
        assert result.tokens == truth[length:42] and result.finish_reason == "capacity"
        assert calls(toy, "prefill") == [(0, 16, 0), (16, 16, 0)]  # 32 + 16 rows are more than 47


def test_a_token_that_breaks_the_logits_is_found(toy: Toy) -> None:
    """The tokens before it are kept, and the chain goes on as if nothing had been."""
    ids = toy.prompt(5, 60)
    chain = toy.chain()
    toy.nan_at = {29}
    try:
        with pytest.raises(FloatingPointError, match="position 29"):
            chain.generate(ids)
    finally:
        toy.nan_at = set()
    assert chain.cache.tokens == ids[:29]
    truth, _ = toy.decode(ids, 9)
    assert chain.generate(ids[29:], max_new_tokens=9, append=True).tokens == truth[60:]


def test_a_plain_request_leaves_the_draft_out(toy: Toy) -> None:
    calls(toy, "draft_prefill")
    toy.chain().generate(toy.prompt(0, 40), max_new_tokens=2, k=0)
    toy.chain(lambda cache: toy.eagle(cache, draft_kv="scratch")).extend(toy.prompt(0, 40))
    assert calls(toy, "draft_prefill") == []


def test_one_reader_hears_of_every_call(toy: Toy) -> None:
    heard: list[int] = []
    rounds = toy.chain().rounds(toy.prompt(0, 41), max_new_tokens=2, fed=heard.append)
    assert next(rounds).trunk_calls == 4 and heard == [16, 32, 40, 41]


def test_a_bundle_reads_prompts_in_wide_calls(tmp_path: Path) -> None:
    """On ONNX Runtime, sums in another order: same tokens, same drafts, and plain decoding's."""
    pair = open_pair(*write_pair(tmp_path / "pair", dtype="bf16"))
    prompt = np.random.default_rng(0).integers(0, 512, 100).tolist()
    chains = list[Chain]()
    for rows in (0, 64):
        write_bundle(tmp_path / str(rows), pair, Options(5, 160, prefill=rows), False, ())
        engines = open_engines(tmp_path / str(rows), "onnxruntime-cpu", threads=1)
        chains += [engines.chain(), engines.chain(drafter="none"), engines.chain(rollback="replay")]
    results = [chain.generate(prompt, max_new_tokens=40) for chain in chains]
    assert all(result.tokens == results[0].tokens for result in results)
    assert results[3].stats.accepted == results[0].stats.accepted
    feeding = [r.stats.trunk_calls - r.stats.rounds for r in (*results[:2], *results[3:5])]
    assert feeding == [20, 20, 3, 3]
