"""The chain: its tokens are plain greedy's, its counts are exact, and it can stop anywhere.

Oracle throughout: `Toy.decode`, one token a call, without cache, drafter or loop.
"""

from __future__ import annotations

import gc
import itertools
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from eagle_chain.engines.errors import InputError
from eagle_chain.runtime import cache as cache_module
from eagle_chain.runtime import decoder as decoder_module
from eagle_chain.runtime import drafters as drafters_module
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.request import cut
from eagle_chain.runtime.stats import Round, Stats
from tests.toy import VOCAB, Script, Scripted, Toy, cache_states, live_states


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy(4)


def scripted(toy: Toy, truth: list[int], counts: Iterator[int], **options: Any) -> Chain:
    return toy.chain(lambda cache: Script(cache, truth, counts), **options)


# --- exactness, with counts ---


@pytest.mark.parametrize("rollback", ["log", "replay"])
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_tokens_are_plain_and_accepted_counts_are_exact(toy: Toy, k: int, rollback: str) -> None:
    """Every accepted count 0..K equally often; after each round the live state is plain's bits."""
    made: list[int] = []
    for seed in range(4):
        prompt = toy.prompt(seed, 3 + 4 * seed)
        truth, steps = toy.decode(prompt, 40)
        counts = itertools.cycle(np.random.default_rng(seed).permutation(k + 1).tolist())
        chain = scripted(toy, truth, counts, rollback=rollback)
        rounds = []
        for round in chain.rounds(prompt, max_new_tokens=40, k=k):
            rounds.append(round)
            cache = chain.cache
            n = len(cache.tokens)
            assert cache.tokens == truth[:n] and cache.pending == truth[n]
            states = cache_states(cache, toy.specs["trunk"])
            live = live_states(states, cache.kept, n)
            want = steps[n - 1].states
            assert all(live[name].tobytes() == want[name].tobytes() for name in want)
        assert [t for r in rounds for t in r.tokens] == truth[len(prompt) :]
        drafter = chain.drafter
        assert isinstance(drafter, Script)
        if k:
            assert [r.accepted for r in rounds[1:]] == drafter.planned
        assert all(token == truth[n] for n, token in drafter.told)
        made += [r.accepted for r in rounds[1:-1]]
    assert set(made) == set(range(k + 1))
    assert k == 0 or max(map(made.count, set(made))) <= min(map(made.count, set(made))) + 4


@pytest.mark.parametrize("append", [False, True])
def test_a_prompt_tells_how_far_it_is(toy: Toy, append: bool) -> None:
    """Once a trunk call of the prompt, never after it."""
    chain, heard = toy.chain(), list[int]()
    chain.extend(toy.prompt(0, 3))
    before = 3 if append else 0
    rounds = chain.rounds(toy.prompt(1, 12), max_new_tokens=9, append=append, fed=heard.append)
    assert heard == []
    next(rounds)
    assert heard == [before + 5, before + 10, before + 12]
    assert len(list(rounds)) > 1
    assert len(heard) == 3


def test_replay_makes_the_same_states_as_the_log(toy: Toy) -> None:
    prompt = toy.prompt(0, 9)
    truth, _ = toy.decode(prompt, 40)
    calls = []
    for rollback in ("log", "replay"):
        chain = scripted(toy, truth, itertools.cycle([2, 0, 4, 1, 3]), rollback=rollback)
        result = chain.generate(prompt, max_new_tokens=38)
        assert result.tokens == truth[9:47]
        calls.append(result.stats.trunk_calls)
        rounds = result.stats.rounds
    assert calls == [2 + rounds, 2 + rounds + rounds - rounds // 5 - 1]  # all but full accepts


@pytest.mark.parametrize("width", [2, 3, 7, 9])
def test_other_widths(width: int) -> None:
    toy = Toy(5, width=width)
    prompt = toy.prompt(0, 10)
    truth, _ = toy.decode(prompt, 30)
    for k in range(width):
        chain = scripted(toy, truth, itertools.cycle(range(k + 1)))
        assert chain.generate(prompt, max_new_tokens=30, k=k).tokens == truth[10:]
        assert toy.chain().generate(prompt, max_new_tokens=30, k=k).tokens == truth[10:]


def test_prompts_of_every_length_up_to_the_capacity() -> None:
    toy = Toy(6, capacity=23)
    ids = toy.prompt(0, 23)
    for length in range(1, 24):
        truth, _ = toy.decode(ids[:length], 23 - length + 1)
        chain = toy.chain()
        result = chain.generate(ids[:length])
        assert result.tokens == truth[length:23] and result.finish_reason == "capacity"


# --- mutants of style.md 5.2: break the source, see which property notices ---

COMMIT = "cache.commit(len(tokens), tokens[-1])\n        return Round(tokens, len(drafts)"
SHIFTED = "[*self.tokens[self.position + 1 :], token]"
MUTANTS: dict[str, tuple[ModuleType, str, str, set[str]]] = {
    "rollback one short": (
        decoder_module,
        COMMIT,
        COMMIT.replace("len(tokens)", "min(len(ids), len(tokens) + 1)"),
        {"tokens", "counts"},
    ),
    "no rollback": (
        decoder_module,
        COMMIT,
        COMMIT.replace("len(tokens)", "len(ids)"),
        {"tokens", "counts"},
    ),
    "pending token not fed again": (
        decoder_module,
        "self._cache, [self._pending, *drafts]",
        "self._cache, drafts or [self._pending]",
        {"tokens", "counts"},
    ),
    "bonus taken one early": (
        decoder_module,
        "cut(next_ids[: accepted + 1], room, request.stops)",
        "cut([*next_ids[:accepted], next_ids[max(0, accepted - 1)]], room, request.stops)",
        {"tokens", "counts"},
    ),
    "feature of the last row": (
        cache_module,
        'outputs["accepted"].write(self.kept - 1)',
        'outputs["accepted"].write(self.width - 1)',
        {"guesses"},
    ),
    "feature one row early": (
        cache_module,
        'outputs["accepted"].write(self.kept - 1)',
        'outputs["accepted"].write(max(0, self.kept - 2))',
        {"guesses"},
    ),
    "drafter fed the wrong token": (
        cache_module,
        SHIFTED,
        "self.tokens[self.position :]",
        {"guesses"},
    ),
    "draft rows one position late": (
        cache_module,
        '["position"].write(self.position)',
        '["position"].write(self.position + 1)',
        {"guesses"},
    ),
    "features of the call before": (
        drafters_module,
        'ids, outputs = cache.inputs[parity]["ids"], cache.outputs[parity]',
        'ids, outputs = cache.inputs[parity]["ids"], cache.outputs[1 - parity]',
        {"guesses"},
    ),
    "states do not change places": (
        cache_module,
        "self.parity = 1 - self.parity\n        self.position, self._call = len",
        "self.position, self._call = len",
        {"tokens", "counts"},
    ),
    "kept of the call before": (
        cache_module,
        'inputs["kept"].write(self.kept)',
        'inputs["kept"].write(max(0, self.kept - 1))',
        {"tokens", "counts"},
    ),
    "position without the kept rows": (
        cache_module,
        'inputs["position"].write(len(self.tokens))',
        'inputs["position"].write(self.position)',
        {"tokens", "counts"},
    ),
}


def changed(module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of a module with one piece of its source replaced."""
    assert module.__file__
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1, f"the mutant no longer fits: {old}"
    copy = ModuleType(module.__name__)
    exec(compile(source.replace(old, new), module.__file__, "exec"), copy.__dict__)
    return copy


def noticed(toy: Toy, modules: dict[str, Any]) -> set[str]:
    """Which properties the given classes break: tokens, accepted counts, EAGLE's guesses."""
    broken = set()
    sessions = toy.sessions
    for seed in range(3):
        prompt = toy.prompt(seed, 6 + seed)
        truth, steps = toy.decode(prompt, 40)
        cache = modules["Cache"](toy.specs["trunk"], toy.memory, toy.capacity)
        eagle = modules["EagleDrafter"](
            cache, sessions["encoder"], sessions["draft"], sessions["draft_step"]
        )
        drafter = Scripted(eagle, Script(cache, truth, itertools.cycle([2, 0, 4, 1, 3])))
        chain = modules["Chain"](sessions["trunk"], cache, drafter, vocab_size=VOCAB)
        try:
            rounds = list(chain.rounds(prompt, max_new_tokens=24))
        except (AssertionError, IndexError):
            broken |= {"tokens", "counts"}
            continue
        if [t for r in rounds for t in r.tokens] != truth[len(prompt) :][:24]:
            broken.add("tokens")
        planned = drafter.script.planned[:-1]  # the budget cuts the last
        if [r.accepted for r in rounds[1:-1]] != planned:
            broken.add("counts")
        features = [step.feature for step in steps]
        if "tokens" not in broken:
            for n, guesses in drafter.guesses:
                want, _ = toy.draft_rows(truth[: n + 1], features, max(1, len(guesses)))
                if guesses != want[: len(guesses)]:
                    broken.add("guesses")
    return broken


CLASSES = {
    "Cache": Cache,
    "Chain": Chain,
    "EagleDrafter": drafters_module.EagleDrafter,
}


def chain_over(decoder: Any) -> type[Chain]:
    """Chains that decode with this class."""

    class Mutant(Chain):
        def __init__(self, *arguments: Any, rollback: Any = "log", **options: Any) -> None:
            super().__init__(*arguments, rollback=rollback, **options)
            self._decoder = decoder(self._ladder, replay=rollback == "replay", ahead=False)

    return Mutant


def mutated(name: str) -> dict[str, Any]:
    """The classes, with those of one mutant in place."""
    module, old, new, _ = MUTANTS[name]
    mutant = changed(module, old, new)
    if module is decoder_module:
        return CLASSES | {"Chain": chain_over(mutant.Decoder)}
    own = {n: getattr(mutant, n) for n, c in CLASSES.items() if c.__module__ == module.__name__}
    return CLASSES | own


def test_the_unchanged_source_breaks_no_property(toy: Toy) -> None:
    assert noticed(toy, CLASSES) == set()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(toy: Toy, name: str) -> None:
    assert noticed(toy, mutated(name)) == MUTANTS[name][3]


# --- a trunk that counts ---


class Counting(Toy):
    """Its choice is how many tokens its first recurrent state has seen: 1, 2, 3 and so on.

    A row too many in that state skips a number, one too few repeats one. Nothing else can tell the
    trunk where it stands.
    """

    def __init__(self) -> None:
        super().__init__(0)
        turns = np.arange(VOCAB) * (2 * np.pi / VOCAB)
        self.head[:] = 0
        self.head[:, 0], self.head[:, 1] = np.cos(turns), np.sin(turns)

    def linear(self, h: Any, w: Any, at: str, t: Any, position: int, kept: int) -> Any:
        """The first layer logs one more per row, the last puts the count's direction into `h`."""
        out = super().linear(h, w, at, t, position, kept)
        if at == "layers.0":
            key, delta, decay = (t[f"{at}.log_{p}.next"] for p in ("key", "delta", "decay"))
            key[:], delta[:], decay[:] = np.eye(key.shape[-1])[0], 1, 1
            self.seen = round(float(t[f"{at}.S.next"][0, 0, 0]))
            return out
        return self.head[(self.seen + 1 + np.arange(len(h))) % VOCAB] - h


def count(counts: Iterator[int], k: int, rollback: str, modules: dict[str, Any]) -> list[int]:
    """What the counting trunk says after one token, in rounds with these accepted counts."""
    toy, numbers = Counting(), list(range(VOCAB))
    cache = modules["Cache"](toy.specs["trunk"], toy.memory, toy.capacity)
    script = Script(cache, numbers, counts)
    chain = modules["Chain"](
        toy.sessions["trunk"], cache, script, vocab_size=VOCAB, rollback=rollback
    )
    tokens: list[int] = chain.generate([0], max_new_tokens=20, k=k).tokens
    return tokens


@pytest.mark.parametrize("rollback", ["log", "replay"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_counting_to_20_skips_and_repeats_no_number(k: int, rollback: str) -> None:
    """Drafts wrong at each place in turn, all right, and mixed; the wrong ones are one ahead."""
    orders = [[n] for n in range(k + 1)] + [list(range(k + 1)), [k, 0, 1]]
    for order in orders:
        tokens = count(itertools.cycle(order), k, rollback, CLASSES)
        for place, (got, want) in enumerate(zip(tokens, range(1, 21), strict=True)):
            assert got == want, f"number {place + 1} with {order} accepted"


@pytest.mark.parametrize(
    "name",
    [
        "rollback one short",
        "no rollback",
        "bonus taken one early",
        "states do not change places",
        "kept of the call before",
    ],
)
def test_a_chain_that_miscounts_is_noticed(name: str) -> None:
    assert count(itertools.cycle([2, 0, 4, 1, 3]), 4, "log", mutated(name)) != list(range(1, 21))


# --- where a request ends ---


def test_a_stop_id_at_every_offset_of_an_accepted_run(toy: Toy) -> None:
    prompt = toy.prompt(1, 7)
    truth, _ = toy.decode(prompt, 40)
    emitted = truth[7:]
    for k, at in itertools.product([1, 4], range(13)):
        stop = emitted[at]
        end = emitted.index(stop) + 1
        chain = scripted(toy, truth, itertools.repeat(4))
        result = chain.generate(prompt, max_new_tokens=40, k=k, stop_ids={stop, VOCAB + 5})
        assert result.tokens == emitted[:end] and result.finish_reason == "eos"
        assert result.stats.tokens == end
        cache = chain.cache
        assert [*cache.tokens, cache.pending] == truth[: 7 + end]


def test_every_budget(toy: Toy) -> None:
    prompt = toy.prompt(2, 5)
    truth, _ = toy.decode(prompt, 30)
    for budget in range(14):
        chain = scripted(toy, truth, itertools.cycle([4, 1]))
        result = chain.generate(prompt, max_new_tokens=budget)
        assert result.tokens == truth[5 : 5 + budget] and result.finish_reason == "length"
        assert result.stats.tokens == budget
        cache = chain.cache
        assert [*cache.tokens, cache.pending] == truth[: 5 + max(1, budget)]


def test_stop_and_budget_in_one_run(toy: Toy) -> None:
    """A run of six, a budget of 5: a stop id at 3 comes first, one at 6 does not come."""
    stops = frozenset({7})
    assert cut([1, 2, 7, 4, 5, 6], 5, stops) == (1, 2, 7)
    assert cut([1, 2, 3, 4, 5, 7], 5, stops) == (1, 2, 3, 4, 5)
    assert cut([1, 2, 3, 4, 7, 6], 5, stops) == (1, 2, 3, 4, 7)
    assert cut([7], 0, stops) == ()
    assert cut([1, -1, 7], 5, stops) == (1,)
    assert cut([-1], 5, stops) == ()


@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_last_slots_before_the_capacity(k: int) -> None:
    """Capacity 24 with 0, 1, ..., K + 2 slots left; sessions assert that no row is past the end."""
    toy = Toy(7, capacity=24)
    for slots in range(k + 3):
        prompt = toy.prompt(slots, 24 - slots)
        truth, _ = toy.decode(prompt, slots + 1)
        for counts in ([4], [0], [0, 4, 2]):
            chain = scripted(toy, truth + [0] * 5, itertools.cycle(counts))
            result = chain.generate(prompt, max_new_tokens=100, k=k)
            assert result.tokens == truth[24 - slots : 24]
            assert result.finish_reason == "capacity"
            exact = chain.generate(prompt, max_new_tokens=slots, k=k)
            assert exact.tokens == result.tokens and exact.finish_reason == "length"
        eagle = toy.chain().generate(prompt, max_new_tokens=100, k=k)
        assert eagle.tokens == truth[24 - slots : 24]


def test_no_row_is_written_past_a_call_at_the_last_position() -> None:
    """A call at the last position, 20, writes slots 20..24 of the 26: the last one is a guard."""
    toy = Toy(7, capacity=21)
    chain = toy.chain()
    for length in range(15, 22):
        chain.generate(toy.prompt(0, length), max_new_tokens=99)
        for pair, buffers in chain.cache._states:
            if pair.rows_axis is not None:
                assert not buffers[0].read()[0, :, 25].any()
    assert max(call["position"][0] for call in toy.sessions["trunk"].calls) == 20


# --- one request after another ---


def everything_nan(cache: Cache) -> None:
    for _, buffers in cache._states:
        for buffer in buffers:
            buffer.write(np.nan)


DISTURBANCES = ["nothing", "cancel", "cut", "eos in a run", "capacity", "error", "nan logits"]


@pytest.mark.parametrize("what", DISTURBANCES)
def test_a_request_leaves_nothing_behind(what: str) -> None:
    """A, B, A with all states NaN in between; B equals B on a fresh chain."""
    toy = Toy(8)
    a, b = toy.prompt(0, 8), toy.prompt(1, 13)
    truth_a, truth_b = toy.decode(a, 20)[0][8:], toy.decode(b, 20)[0][13:]
    chain = toy.chain()
    assert chain.generate(a, max_new_tokens=20).tokens == truth_a
    if what == "cancel":
        list(itertools.islice(chain.stream(b), 7))
    elif what == "cut":
        stream = chain.stream(b)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    elif what == "eos in a run":
        chain.generate(a, stop_ids={truth_a[9]})
    elif what == "capacity":
        chain.generate(b)
    elif what == "error":
        toy.sessions["trunk"].fails.append(OSError("device lost"))
        with pytest.raises(OSError, match="device lost"):
            chain.generate(b)
    elif what == "nan logits":
        toy.nan_at = {16}
        with pytest.raises(FloatingPointError):
            chain.generate(b)
        toy.nan_at = set()
    everything_nan(chain.cache)
    assert chain.generate(b, max_new_tokens=20).tokens == truth_b
    everything_nan(chain.cache)
    assert chain.generate(a, max_new_tokens=20).tokens == truth_a


@pytest.mark.parametrize("rollback", ["log", "replay"])
def test_a_consumer_may_stop_after_any_token_and_go_on(toy: Toy, rollback: str) -> None:
    prompt = toy.prompt(3, 6)
    truth, _ = toy.decode(prompt, 20)
    for stop in range(1, 15):
        chain = scripted(toy, truth, itertools.repeat(4), rollback=rollback)
        got = list(itertools.islice(chain.stream(prompt, max_new_tokens=20), stop))
        cache = chain.cache
        assert [*cache.tokens, cache.pending] == truth[: 6 + stop]
        rest = chain.generate([got[-1]], max_new_tokens=20 - stop, append=True)
        assert got + rest.tokens == truth[6:]


def test_turns_of_a_conversation_equal_one_long_prompt(toy: Toy) -> None:
    chain = toy.chain()
    sequence: list[int] = []
    for turn in range(4):
        text = toy.prompt(20 + turn, 1 + 2 * turn)
        fed = text if not turn else [sequence[-1], *text]
        sequence += text
        result = chain.generate(fed, max_new_tokens=6, append=turn > 0)
        want, _ = toy.decode(sequence, 6)
        sequence += result.tokens
        assert sequence == want


def test_an_error_in_a_request_that_appends_keeps_the_conversation() -> None:
    toy = Toy(9)
    prompt, more = toy.prompt(0, 7), toy.prompt(1, 3)
    chain = toy.chain()
    first = chain.generate(prompt, max_new_tokens=6).tokens
    tokens, pending = list(chain.cache.tokens), chain.cache.pending
    toy.sessions["trunk"].fails.append(KeyboardInterrupt())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        chain.generate([first[-1], *more], append=True)
    assert (chain.cache.tokens, chain.cache.pending) == (tokens, pending)
    want, _ = toy.decode([*prompt, *first, *more], 6)
    for session in ("draft", "encoder"):  # at the latest once the ids are in the cache
        held = len(chain.cache.tokens)
        toy.sessions[session].fails.append(KeyboardInterrupt())  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            chain.generate(want[held : max(held + 1, 16)], append=True)
        assert chain.cache.tokens == want[: len(chain.cache.tokens)]
    held = len(chain.cache.tokens)
    assert chain.generate(want[held:18], max_new_tokens=4, append=True).tokens == want[18:]


def test_logits_that_are_not_numbers_end_a_request_with_their_position() -> None:
    """Tokens before them are emitted as plain decoding would, -1 and token 0 never are."""
    toy = Toy(10)
    prompt = toy.prompt(0, 7)
    truth, _ = toy.decode(prompt, 30)
    for position in range(7, 15):
        toy.nan_at = {position}
        for rollback in ("log", "replay"):
            chain = scripted(toy, truth, itertools.repeat(4), rollback=rollback)
            got = []
            with pytest.raises(FloatingPointError, match=f"at position {position} are not finite"):
                for token in chain.stream(prompt):
                    got.append(token)
            assert got == truth[7 : position + 1]
            cache = chain.cache
            assert [*cache.tokens, cache.pending] == truth[: position + 1]
            toy.nan_at = set()
            rest = chain.generate([got[-1]], max_new_tokens=5, append=True).tokens
            assert rest == truth[position + 1 :][:5]
            toy.nan_at = {position}
    for position in range(7):
        toy.nan_at = {position}
        chain = toy.chain()
        with pytest.raises(FloatingPointError, match=f"at position {position} "):
            chain.generate(prompt)
        toy.nan_at = set()
        assert chain.generate(prompt, max_new_tokens=9).tokens == truth[7:16]


def test_rejected_rows_that_are_not_numbers_do_no_harm() -> None:
    toy = Toy(11)
    prompt = toy.prompt(0, 7)
    truth, _ = toy.decode(prompt, 12)
    chain = scripted(toy, truth, itertools.repeat(0))
    rounds = chain.rounds(prompt, max_new_tokens=12)
    next(rounds)
    toy.nan_at = {9, 10}  # drafts of the next round, all rejected
    assert next(rounds).tokens == (truth[8],)
    toy.nan_at = set()
    assert [t for r in rounds for t in r.tokens] == truth[9:]


# --- refusals: before anything runs, in one sentence ---


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([3, VOCAB], {}, f"token id {VOCAB} in the prompt is outside the vocabulary, 0 to 30"),
        ([3, -1], {}, "token id -1 in the prompt is outside the vocabulary"),
        ([3, 1.5], {}, "the prompt must be a sequence of token ids"),
        ("text", {}, "the prompt must be a sequence of token ids"),
        (None, {}, "the prompt must be a sequence of token ids"),
        ([1] * 65, {}, "the prompt has 65 tokens, but the bundle's capacity is 64"),
        ([1], {"k": 5}, "k is 5, expected 0 to 4: the trunk was exported with width 5"),
        ([1], {"k": -1}, "k is -1"),
        ([1], {"k": "4"}, "k is '4', expected a whole number or 'auto'"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens is -1, expected 0 or more"),
        ([1], {"max_new_tokens": 2.5}, "max_new_tokens is 2.5, expected a whole number"),
        ([1], {"stop_ids": 7}, "stop_ids must be a sequence of token ids"),
    ],
)
def test_bad_arguments(toy: Toy, ids: Any, options: dict[str, Any], message: str) -> None:
    chain = toy.chain()
    chain.generate(toy.prompt(0, 5), max_new_tokens=3)
    before = list(chain.cache.tokens)
    calls = len(toy.sessions["trunk"].calls)
    for request in (chain.stream, chain.rounds, chain.generate):
        with pytest.raises(InputError) as caught:
            request(ids, **options)
        assert message in str(caught.value)
    assert len(toy.sessions["trunk"].calls) == calls and chain.cache.tokens == before


def test_appending_past_the_capacity(toy: Toy) -> None:
    chain = toy.chain()
    chain.generate(toy.prompt(0, 60), max_new_tokens=1)
    with pytest.raises(InputError, match=r"5 tokens behind 60 cached ones, but .* capacity is 64"):
        chain.generate([1] * 5, append=True)
    assert chain.generate([1] * 4, append=True).finish_reason == "capacity"


def test_a_request_that_appends_is_checked_again_when_it_starts(toy: Toy) -> None:
    chain = toy.chain()
    late = chain.stream([1] * 10, append=True)
    chain.extend(toy.prompt(0, 60))
    with pytest.raises(InputError, match="10 tokens behind 60 cached ones"):
        next(late)
    assert len(chain.cache.tokens) == 60


def test_extending_is_a_prompt_without_an_answer(toy: Toy) -> None:
    chain = toy.chain()
    prompt = toy.prompt(0, 13)
    truth, _ = toy.decode(prompt, 6)
    for piece in (prompt[:1], prompt[1:8], prompt[8:]):
        chain.extend(piece)
    assert (chain.cache.tokens, chain.cache.pending) == (prompt, truth[13])
    assert list(chain.stream([truth[13]], max_new_tokens=5, append=True)) == truth[14:]


def test_ids_may_be_any_integers(toy: Toy) -> None:
    prompt = toy.prompt(0, 6)
    chain = toy.chain()
    want = chain.generate(prompt, max_new_tokens=5).tokens
    assert chain.generate(np.array(prompt), max_new_tokens=5).tokens == want  # type: ignore[arg-type]
    assert chain.generate(tuple(np.array(prompt, np.int32)), max_new_tokens=5).tokens == want
    assert all(type(token) is int for token in want)


def test_unknown_rollback(toy: Toy) -> None:
    with pytest.raises(InputError, match="rollback is 'copy', expected 'log' or 'replay'"):
        toy.chain(rollback="copy")


# --- threads, sharing, memory ---


def test_two_chains_share_sessions_and_nothing_else(toy: Toy) -> None:
    prompts = [toy.prompt(30, 6), toy.prompt(31, 11)]
    streams = [toy.chain().stream(p, max_new_tokens=25) for p in prompts]
    got: list[list[int]] = [[], []]
    for pair in zip(*streams, strict=True):
        for tokens, token in zip(got, pair, strict=True):
            tokens.append(token)
    for tokens, prompt in zip(got, prompts, strict=True):
        assert tokens == toy.decode(prompt, 25)[0][len(prompt) :]


def test_a_request_that_was_overtaken_says_so(toy: Toy) -> None:
    chain = toy.chain()
    old = chain.stream(toy.prompt(0, 5), max_new_tokens=20)
    next(old)
    want = chain.generate(toy.prompt(1, 5), max_new_tokens=5).tokens
    with pytest.raises(RuntimeError, match="its chain has begun another one"):
        list(old)
    assert chain.generate(toy.prompt(1, 5), max_new_tokens=5).tokens == want


def test_a_second_thread_is_refused_while_the_chain_is_at_work() -> None:
    toy = Toy(12)
    chain = toy.chain()
    inside, leave = threading.Event(), threading.Event()
    encode = toy.sessions["encoder"]
    run = encode.function

    def slow(tensors: dict[str, Any]) -> None:
        inside.set()
        assert leave.wait(10)
        run(tensors)

    encode.function = slow
    prompt = toy.prompt(0, 6)
    results: list[list[int]] = []
    worker = threading.Thread(
        target=lambda: results.append(chain.generate(prompt, max_new_tokens=6).tokens)
    )
    worker.start()
    assert inside.wait(10)
    with pytest.raises(RuntimeError, match="in use by another thread"):
        chain.generate(prompt)
    with pytest.raises(RuntimeError, match="in use by another thread"):
        chain.snapshot()
    leave.set()
    worker.join(10)
    assert results == [toy.decode(prompt, 6)[0][6:]]


def test_500_requests_keep_memory_flat_and_make_no_buffer() -> None:
    """Mixed lengths, drafting on and off, cancelled ones and ones that fail."""
    toy = Toy(13, capacity=24)
    chain = toy.chain(rollback="replay")
    rng = np.random.default_rng(0)
    memory = toy.memory

    def request(i: int) -> list[int]:
        prompt, k = toy.prompt(i % 20, 1 + i % 9), (4, 0, 2)[i % 3]
        if i % 7 == 3:
            return list(itertools.islice(chain.stream(prompt, k=k), 3))
        if i % 7 == 5:
            toy.sessions["trunk"].fails.append(OSError("lost"))
            with pytest.raises(OSError, match="lost"):
                chain.generate(prompt, k=k)
            return []
        return chain.generate(prompt, max_new_tokens=int(rng.integers(0, 5)), k=k).tokens

    def settle() -> None:
        for session in toy.sessions.values():
            session.calls.clear()
        gc.collect()

    for i in range(20):
        request(i)
    settle()
    made = memory.count
    tracemalloc.start()
    start = tracemalloc.get_traced_memory()[0]
    for i in range(500):
        request(i)
    settle()
    grown = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()
    assert memory.count == made
    assert grown < 100_000


# --- statistics ---


def test_statistics_count_what_was_emitted() -> None:
    stats = Stats()
    stats.add(Round((5,), prompt_tokens=7, trunk_calls=2, seconds=1.0))
    stats.add(Round((6,), drafted=4, accepted=0, seconds=0.5, draft_seconds=0.1))
    stats.add(Round((7, 8, 9), drafted=4, accepted=2, seconds=0.5, draft_seconds=0.1))
    stats.add(Round((1, 2), drafted=4, accepted=2, seconds=1.0))  # cut after two accepted drafts
    assert (stats.tokens, stats.rounds, stats.trunk_calls) == (7, 3, 5)
    assert stats.acceptance_length == 2.0 and stats.tokens_per_second == 3.0
    assert stats.acceptance_by_position == [2 / 3, 2 / 3, 0.0, 0.0]
    assert stats.to_json()["tokens"] == 7
    assert Stats().acceptance_length is None and Stats().tokens_per_second is None


def test_plain_decoding_has_acceptance_length_one(toy: Toy) -> None:
    stats = toy.chain().generate(toy.prompt(0, 6), max_new_tokens=9, k=0).stats
    assert (stats.acceptance_length, stats.acceptance_by_position) == (1.0, [])
    assert (stats.trunk_calls, stats.rounds, stats.drafted) == (10, 8, 0)


def test_an_option_that_does_not_exist_is_named_with_those_that_do(toy: Toy) -> None:
    for run in (toy.chain().generate, toy.chain().stream, toy.chain().rounds):
        with pytest.raises(TypeError, match=r"no option 'max_tokens'; it takes max_new_tokens, k"):
            run([1], max_tokens=3)  # type: ignore[call-arg]
