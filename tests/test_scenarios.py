"""Random sequences of everything a chain can be asked, on ONNX Runtime, against plain decoding.

Oracle: `Plain`, which feeds one token a call on a chain of its own and remembers what follows every
history. After each action the chain's history and pending token are those the oracle expects; now
and then its states are compared bit for bit with those of a plain chain fed the same history.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from eagle_chain.runtime import Engines, open_engines
from eagle_chain.runtime.cache import Cache, Snapshot
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.drafters import Drafter
from tests.toy import Over
from tests.toy_pair import exported, write_pair

WIDTH, CAPACITY, VOCAB = 5, 40, 300
SEEDS, ACTIONS = 40, 20
NAMES = [*["request"] * 4, *["cancel"] * 2, *["stop"] * 2]
NAMES += ["error", "snapshot", "rollback", "extend", "reset"]
SMALL = {"hidden_size": 16, "vocab_size": VOCAB, "intermediate_size": 24, "head_dim": 8}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"linear_key_head_dim": 4, "linear_value_head_dim": 6}
SMALL_DRAFT = {"intermediate_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL_DRAFT |= {"head_dim": 8, "draft_vocab_size": 40}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("scenarios")
    pair = write_pair(
        folder, layers=4, aux=[0, 1, 3], sizes=SMALL, draft_sizes=SMALL_DRAFT, extras=False
    )
    # without wide calls, whose sums run in another order than those of one token a call
    flags = "--aux-layers", "0,1,3", "--capacity", str(CAPACITY), "--prefill", "0"
    return open_engines(exported(pair, folder / "bundle", *flags), threads=1)


class Plain:
    """What follows any history, one token a call; what it has seen it remembers."""

    def __init__(self, engines: Engines) -> None:
        self.chain = engines.chain(drafter="none")
        self.seen: dict[tuple[int, ...], int] = {}

    def stand(self, history: list[int]) -> None:
        """Have fed exactly this history."""
        held = self.chain.cache.tokens
        if history[: len(held)] != held:
            self.chain.reset()
        for token in history[len(self.chain.cache.tokens) :]:
            self.chain.extend([token])
            assert self.chain.cache.pending is not None
            self.seen[tuple(self.chain.cache.tokens)] = self.chain.cache.pending

    def next(self, history: list[int]) -> int:
        """The token after a history."""
        if tuple(history) not in self.seen:
            self.stand(history)
        return self.seen[tuple(history)]

    def more(self, history: list[int], count: int) -> list[int]:
        """The next tokens, as far as the capacity goes."""
        row = list(history)
        for _ in range(min(count, CAPACITY - len(history))):
            row.append(self.next(row))
        return row[len(history) :]


class Noisy(Over):
    """Another drafter's guesses, or mostly right ones, or fewer than were asked for."""

    def __init__(self, drafter: Drafter, cache: Cache, plain: Plain, rng: random.Random) -> None:
        super().__init__(drafter)
        self.cache, self.plain, self.rng = cache, plain, rng

    def propose(self, token: int, k: int) -> list[int]:
        """The other drafter is always asked, so that its KV has no gap."""
        own = self.drafter.propose(token, k)
        if self.rng.random() < 0.2:
            return own
        right = self.plain.more([*self.cache.tokens, token], k)
        noisy = [t if self.rng.random() < 0.8 else self.rng.randrange(VOCAB) for t in right]
        return noisy[: k if self.rng.random() < 0.8 else self.rng.randrange(k + 1)]


def live_states(cache: Cache) -> dict[str, bytes]:
    """The trunk's states at the start of the next call, the log folded in by one more call."""
    states = {}
    for pair, buffers in cache._states:
        array = buffers[cache.parity].read()
        if pair.input.startswith("draft."):
            continue
        if pair.rows_axis is not None:
            states[pair.input] = array.take(range(len(cache.tokens)), pair.rows_axis).tobytes()
        elif pair.input.endswith(".S"):
            states[pair.input] = array.tobytes()
        elif pair.input.endswith(".window"):
            taps = pair.shape[1] - cache.width
            states[pair.input] = array[:, cache.kept : cache.kept + taps].tobytes()
    return states


class Scenario:
    """A chain, what it should hold, and random things to do with it."""

    def __init__(self, engines: Engines, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.plain = Plain(engines)
        self.chain: Chain = engines.chain(
            rollback=("log", "replay")[seed % 2],  # type: ignore[arg-type]
            draft_kv=("kept", "scratch")[seed // 2 % 2],  # type: ignore[arg-type]
        )
        self.chain.drafter = Noisy(self.chain.drafter, self.chain.cache, self.plain, rng)
        self.history: list[int] = []
        self.pending: int | None = None
        self.snapshots: list[tuple[Snapshot, list[int], int | None]] = []
        self.tokens = 0  # emitted
        self.accepted = 0  # drafts of requests that ran to their end
        self.compared = 0  # states

    def act(self) -> str:
        """Do one thing and compare."""
        rng = self.rng
        name = rng.choice(NAMES)
        if name == "snapshot":
            self.snapshots.append((self.chain.snapshot(), list(self.history), self.pending))
        elif name == "rollback" and self.snapshots:
            snapshot, history, self.pending = rng.choice(self.snapshots)
            self.chain.rollback(snapshot)
            self.history = list(history)
        elif name == "reset":
            self.chain.reset()
            self.history, self.pending = [], None
        elif name != "rollback":
            self.feed(name)
        assert self.chain.cache.tokens == self.history
        assert self.chain.cache.pending == self.pending
        if self.history and len(self.history) < CAPACITY and rng.random() < 0.2:
            self.compare_states()
        return name

    def feed(self, name: str) -> None:
        """A request or an extend, behind the history or from the start."""
        rng = self.rng
        append = bool(self.history) and rng.random() < 0.7
        held = self.history if append else []
        room = CAPACITY - len(held)
        if not room:
            return
        count = min(room, rng.choice([1, 1, 2, WIDTH, WIDTH + 1, rng.randrange(1, room + 1)]))
        ids = [rng.randrange(VOCAB) for _ in range(count)]
        if append and self.pending is not None and rng.random() < 0.7:
            ids[0] = self.pending
        start = [*held, *ids]
        if name == "extend":
            if not append:
                self.chain.reset()
            self.chain.extend(ids)
            self.history, self.pending = start, self.plain.next(start)
            return
        budget = rng.choice([None, 0, 1, 2, rng.randrange(20), 10**9])
        left = CAPACITY - len(start)
        want = self.plain.more(start, left if budget is None else budget)
        reason = "length" if budget is not None and budget <= left else "capacity"
        stops: set[int] = set()
        if name == "stop" and want:
            stops = set(rng.sample(want, rng.randrange(1, min(3, len(want)) + 1)))
            want = want[: next(i for i, token in enumerate(want) if token in stops) + 1]
            reason = "eos"
        options: dict[str, Any] = {"max_new_tokens": budget, "k": rng.randrange(WIDTH)}
        options |= {"stop_ids": stops, "append": append}
        if name == "cancel":
            got = self.cancelled(ids, start, options)
            want = want[: len(got)]
        elif name == "error":
            got, broken = self.broken(ids, options)
            if broken and not got:  # in the prompt: any part of it may have been fed
                self.history = list(self.chain.cache.tokens)
                assert start[: len(self.history)] == self.history
                self.pending = self.plain.next(self.history) if self.history else None
                return
            want = want[: len(got)] if broken else want
        else:
            result = self.chain.generate(ids, **options)
            got = result.tokens
            assert result.finish_reason == reason
            assert result.stats.tokens == len(got)
            self.accepted += result.stats.accepted
        assert got == want
        self.history = start + got[:-1]
        self.pending = got[-1] if got else self.plain.next(start)
        self.tokens += len(got)

    def cancelled(self, ids: list[int], start: list[int], options: dict[str, Any]) -> list[int]:
        """Tokens of a stream that is left before its end, with a snapshot on the way."""
        got: list[int] = []
        stream = self.chain.stream(ids, **options)
        for token in itertools.islice(stream, self.rng.randrange(1, 12)):
            got.append(token)
            if self.rng.random() < 0.2:
                self.snapshots.append((self.chain.snapshot(), start + got[:-1], token))
        if self.rng.random() < 0.5:
            stream.close()  # type: ignore[attr-defined]
        return got

    def broken(self, ids: list[int], options: dict[str, Any]) -> tuple[list[int], bool]:
        """Tokens of a stream whose trunk fails once, before or after it has run."""
        binding = self.chain._ladder.rung.trunk[self.rng.randrange(2)]
        run, calls, late = binding.run, itertools.count(), self.rng.random() < 0.5
        at = self.rng.randrange(5)
        got: list[int] = []

        def failing() -> None:
            fails = next(calls) == at
            if late or not fails:
                run()
            if fails:
                raise OSError("device lost")

        binding.run = failing  # type: ignore[method-assign]
        try:
            got.extend(self.chain.stream(ids, **options))
        except OSError:
            return got, True
        finally:
            binding.run = run  # type: ignore[method-assign]
        return got, False

    def compare_states(self) -> None:
        """Feed one more token to both chains, compare, go back."""
        before = self.chain.snapshot()
        history = [*self.history, self.rng.randrange(VOCAB)]
        self.chain.extend(history[-1:])
        self.plain.stand(history)
        assert self.plain.chain.cache.tokens == history
        mine, theirs = live_states(self.chain.cache), live_states(self.plain.chain.cache)
        assert len(mine) == 2 * 3 + 2 and mine == theirs
        self.chain.rollback(before)
        assert self.chain.cache.tokens == self.history
        self.compared += 1


@pytest.mark.parametrize("seed", range(SEEDS))
def test_anything_in_any_order_gives_plain_s_tokens_and_states(engines: Engines, seed: int) -> None:
    scenario = Scenario(engines, seed)
    for _ in range(ACTIONS):
        scenario.act()


def test_scenarios_reach_what_they_are_for(engines: Engines) -> None:
    scenarios = [Scenario(engines, seed) for seed in range(4)]
    names = {scenario.act() for scenario in scenarios for _ in range(ACTIONS)}
    assert names == {*NAMES}
    assert sum(scenario.tokens for scenario in scenarios) > 100
    assert sum(scenario.compared for scenario in scenarios) > 4
    assert sum(scenario.accepted for scenario in scenarios) > 20
