"""EAGLE's alignment: rows, positions, selector, recurrence and KV against row-by-row oracles."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eagle_chain.engines.errors import InputError
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.chain import Chain
from tests.toy import Paced, Script, Scripted, Step, Toy, by_row


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy(2)


def scripted_eagle(
    toy: Toy, truth: list[int], counts: list[int], wrong: int = 1, draft_kv: str = "kept"
) -> tuple[Chain, Scripted]:
    """A chain whose drafts follow a script while EAGLE's guesses are recorded."""

    def make(cache: Cache) -> Scripted:
        script = Script(cache, truth, itertools.cycle(counts), wrong)
        return Scripted(toy.eagle(cache, draft_kv=draft_kv), script)

    chain = toy.chain(make)
    assert isinstance(chain.drafter, Scripted)
    return chain, chain.drafter


def draft_kv(chain: Chain, rows: int) -> bytes:
    chain.drafter.settle()
    buffers = [pair[0].read() for _, pair in chain.cache._states[-2:]]
    return b"".join(np.ascontiguousarray(b[0, :, :rows]).tobytes() for b in buffers)


def check_last_guesses(
    toy: Toy, chain: Chain, drafter: Scripted, truth: list[int], steps: list[Step]
) -> None:
    """The last guesses, and the draft's KV behind them, are those of the oracle."""
    n, guesses = drafter.guesses[-1]
    features = [step.feature for step in steps]
    want, kv = toy.draft_rows(truth[: n + 1], features, max(1, len(guesses)))
    assert guesses == want[: len(guesses)]
    parts = (np.ascontiguousarray(kv[part]).tobytes() for part in ("key", "value"))
    assert draft_kv(chain, n) == b"".join(parts)


def test_the_worked_example_of_the_design(toy: Toy) -> None:
    """7-token prompt, W = 5, accepted 0, 4, 2: where every call stands and what it selects."""
    prompt = toy.prompt(0, 7)
    truth, _ = toy.decode(prompt, 12)
    chain, _ = scripted_eagle(toy, truth, [0, 4, 2])
    for session in toy.sessions.values():
        session.calls.clear()
    rounds = list(chain.rounds(prompt, max_new_tokens=9))
    assert [len(r.tokens) for r in rounds] == [1, 1, 5, 2]  # the last is cut by the budget
    trunk = [(c["position"][0], c["kept"][0], c["rows"][0]) for c in toy.sessions["trunk"].calls]
    assert trunk == [(0, 0, 5), (5, 5, 2), (7, 2, 5), (8, 1, 5), (13, 5, 2)]
    extends = [(c["position"][0], c["row"][0]) for c in toy.sessions["draft"].calls]
    assert extends == [(0, 4), (5, 1), (7, 0), (8, 4)]
    steps = [c["position"][0] for c in toy.sessions["draft_step"].calls]
    assert steps == [7, 8, 9, 8, 9, 10]  # the round with room for one draft needs no step


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 10, 11])
def test_prompt_chunks_feed_the_prompt_shifted_by_one(toy: Toy, length: int) -> None:
    prompt = toy.prompt(1, length)
    calls = toy.sessions["draft"].calls
    calls.clear()
    first = toy.chain().generate(prompt, max_new_tokens=3).tokens[0]
    shifted = [*prompt[1:], first]
    want = [shifted[i : i + 5] for i in range(0, length, 5)]
    assert [c["ids"] for c in calls[: len(want)]] == [ids + [-1] * (5 - len(ids)) for ids in want]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_guesses_and_kv_equal_the_oracle_after_every_accept_count(toy: Toy, k: int) -> None:
    for seed in range(3):
        prompt = toy.prompt(seed, 4 + 3 * seed)
        truth, steps = toy.decode(prompt, 30)
        chain, drafter = scripted_eagle(toy, truth, [*range(k + 1), *range(k, -1, -1)])
        seen = set()
        for _ in chain.rounds(prompt, max_new_tokens=29, k=k):
            if not drafter.guesses:
                continue
            check_last_guesses(toy, chain, drafter, truth, steps)
            seen.add(drafter.script.planned[-1])
        assert seen == set(range(k + 1))


@pytest.mark.parametrize(
    "ks", [[0, 4], [0, 0, 1], [2, 0, 0, 0, 0, 0, 0, 0], [0] * 6 + [1] + [0] * 13 + [4, 4, 0]]
)
def test_rounds_without_drafts_leave_no_trace_in_later_guesses(toy: Toy, ks: list[int]) -> None:
    """Guesses and KV are those of a drafter that ran after every call, row by row."""
    for seed in range(4):
        prompt = toy.prompt(seed, 3 + 4 * seed)
        truth, steps = toy.decode(prompt, 44)
        chain, drafter = scripted_eagle(toy, truth, [1, 4, 0, 2, 3])
        chain._adaptive = Paced(ks)  # type: ignore[assignment]
        asked = 0
        for round in chain.rounds(prompt, max_new_tokens=44, k="auto"):
            asked += round.drafted > 0
            if not round.drafted:
                continue
            n, guesses = drafter.guesses[-1]
            want, kv = toy.draft_rows(truth[: n + 1], [s.feature for s in steps], len(guesses))
            assert guesses == want
            parts = (np.ascontiguousarray(kv[part]).tobytes() for part in ("key", "value"))
            assert draft_kv(chain, n) == b"".join(parts)
        assert asked > 1


def test_off_the_draft_runs_once_per_w_tokens(toy: Toy) -> None:
    prompt = toy.prompt(0, 7)
    chain = toy.chain()
    chain._adaptive = Paced([0])  # type: ignore[assignment]
    calls = [toy.sessions[name].calls for name in ("draft", "encoder", "draft_step")]
    for list_ in calls:
        list_.clear()
    chain.generate(prompt, max_new_tokens=44, k="auto")
    # the prompt's first 5 rows, its last 2 with 3 of the rounds, then 5 at a time of the other 39
    assert [len(list_) for list_ in calls] == [1 + 1 + 7, 1 + 1 + 7, 0]
    assert [c["position"][0] for c in calls[0]] == [0, *range(5, 45, 5)]
    assert {c["row"][0] for c in calls[0]} == {4}


def test_a_snapshot_taken_while_rows_are_put_off_is_whole(toy: Toy) -> None:
    prompt = toy.prompt(0, 8)
    truth, steps = toy.decode(prompt, 40)
    chain, drafter = scripted_eagle(toy, truth, [0])
    chain._adaptive = Paced([0])  # type: ignore[assignment]
    chain.generate(prompt, max_new_tokens=4, k="auto")  # rows 5 to 9 wait, and row 10
    assert chain.cache.pending is not None
    held, ids = chain.snapshot(), [chain.cache.pending]
    for _ in range(2):
        chain.generate(toy.prompt(1, 20), max_new_tokens=9)
        chain.rollback(held)
        chain.generate(ids, max_new_tokens=5, append=True)
        n, guesses = drafter.guesses[-2]
        want, _ = toy.draft_rows(truth[: n + 1], [s.feature for s in steps], max(1, len(guesses)))
        assert guesses == want[: len(guesses)] and guesses


def test_rejected_drafts_do_not_influence_later_guesses(toy: Toy) -> None:
    prompt = toy.prompt(4, 9)
    truth, _ = toy.decode(prompt, 40)
    runs = []
    for wrong in (1, 7, 19):
        chain, drafter = scripted_eagle(toy, truth, [0, 2, 4, 1, 3], wrong)
        chain.generate(prompt, max_new_tokens=39)
        runs.append((drafter.guesses, draft_kv(chain, len(chain.cache.tokens) - 5)))
    assert runs[0] == runs[1] == runs[2]


def test_scratch_starts_each_round_from_the_last_feature_alone(toy: Toy) -> None:
    """Oracle: one row at slot 0 with the feature of the last kept token, then re-fed steps."""
    prompt = toy.prompt(5, 8)
    truth, steps = toy.decode(prompt, 30)
    chain, drafter = scripted_eagle(toy, truth, [0, 4, 2, 1, 3], draft_kv="scratch")
    toy.sessions["draft"].calls.clear()
    toy.sessions["draft_step"].calls.clear()
    assert chain.generate(prompt, max_new_tokens=25).tokens == truth[8:33]
    for n, guesses in drafter.guesses:
        want, _ = toy.draft_rows([-1, truth[n]], [steps[n - 1].feature], max(1, len(guesses)))
        assert guesses == want[: len(guesses)]
    assert not toy.sessions["draft"].calls
    assert {c["position"][0] for c in toy.sessions["draft_step"].calls} == {0, 1, 2, 3}


def test_continuing_with_another_token_rewrites_the_last_row(toy: Toy) -> None:
    """The draft row of the last kept token pairs with what really follows, not with `pending`."""
    prompt, turn = toy.prompt(6, 8), toy.prompt(7, 4)
    truth, _ = toy.decode(prompt, 10)
    for emitted in range(1, 8):
        chain, drafter = scripted_eagle(toy, truth, [2, 4])
        list(itertools.islice(chain.stream(prompt), emitted))
        before = list(chain.cache.tokens)
        assert chain.cache.pending == truth[8 + emitted - 1]
        whole, steps = toy.decode([*before, *turn], 12)
        drafter.script.truth = whole
        got = chain.generate(turn, max_new_tokens=10, append=True)
        assert got.tokens == whole[len(before) + 4 :][:10]
        features = [step.feature for step in steps]
        for n, guesses in drafter.guesses:
            if n < len(before) + 4:  # of the request before
                continue
            want, kv = toy.draft_rows(whole[: n + 1], features, max(1, len(guesses)))
            assert guesses == want[: len(guesses)]
        n = drafter.guesses[-1][0]
        parts = (np.ascontiguousarray(kv[part]).tobytes() for part in ("key", "value"))
        assert draft_kv(chain, n) == b"".join(parts)


@pytest.mark.parametrize("mode", ["kept", "scratch"])
def test_a_guess_without_finite_logits_ends_the_guessing_of_its_round(mode: str) -> None:
    toy = Toy(3)
    prompt = toy.prompt(0, 6)
    truth, _ = toy.decode(prompt, 30)
    chain = toy.chain(lambda cache: toy.eagle(cache, draft_kv=mode))
    clean = [r.drafted for r in chain.rounds(prompt, max_new_tokens=20)]
    where = 2 if mode == "scratch" else 7  # the third draft row of some rounds
    toy.draft_nan_at = {where}
    rounds = list(chain.rounds(prompt, max_new_tokens=20))
    assert [t for r in rounds for t in r.tokens] == truth[6:26]
    drafted = [r.drafted for r in rounds]
    assert min(drafted[1:10]) < 4 and -1 not in [t for r in rounds for t in r.tokens]
    toy.draft_nan_at = set()
    again = list(chain.rounds(prompt, max_new_tokens=20))
    assert [r.drafted for r in again] == clean


def test_scratch_recovers_in_the_round_after(toy: Toy) -> None:
    """A row of the scratch KV that is not a number must not poison the rounds after it."""
    prompt = toy.prompt(0, 6)
    chain = toy.chain(lambda cache: toy.eagle(cache, draft_kv="scratch"))
    rounds = chain.rounds(prompt, max_new_tokens=20, stop_ids=())
    next(rounds)
    toy.draft_nan_at = {2}
    assert next(rounds).drafted == 2
    toy.draft_nan_at = set()
    assert next(rounds).drafted == 4


def test_plain_decoding_leaves_the_drafter_alone(toy: Toy) -> None:
    chain = toy.chain()
    for session in toy.sessions.values():
        session.calls.clear()
    chain.generate(toy.prompt(0, 12), max_new_tokens=9, k=0)
    assert [len(toy.sessions[name].calls) for name in ("encoder", "draft", "draft_step")] == [0] * 3
    assert {tuple(c["rows"]) for c in toy.sessions["trunk"].calls[3:]} == {(1,)}


def test_encoder_rows_are_those_of_the_last_call(toy: Toy) -> None:
    chain = toy.chain()
    chain.generate(toy.prompt(8, 7), max_new_tokens=1)
    cache = chain.cache
    features = cache.outputs[cache.parity]["features"].read()
    chain.drafter.propose(3, 1)
    got = chain.drafter._g[0].read()  # type: ignore[attr-defined]
    assert np.array_equal(got, by_row(toy.fc, features))


def test_options_that_do_not_exist_are_refused(toy: Toy) -> None:
    with pytest.raises(InputError, match="draft_kv is 'ring', expected 'kept' or 'scratch'"):
        toy.eagle(toy.cache(), draft_kv="ring")
