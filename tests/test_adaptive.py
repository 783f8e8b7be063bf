"""The number of drafts per round: against the best fixed number, in a simulated engine."""

# ruff: noqa: D102

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from eagle_chain.runtime.adaptive import Adaptive, Fixed, Pace
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.drafters import NoDrafter
from eagle_chain.runtime.stats import Round
from tests.toy import Script, Toy

Shares = Callable[[int], float]  # how often a draft is right if those before are, at a token


def simulate(
    pace: Pace,
    width: int,
    costs: tuple[float, float],
    share: Shares,
    tokens: int,
    *,
    one_piece: bool = False,
) -> tuple[float, list[int]]:
    """Decode with a trunk pass of 1 second: the seconds it took, and the drafts of each round.

    Args:
        pace: Under test.
        width: Rows W of a trunk call.
        costs: Seconds of an extend and of a single step.
        share: Of right drafts.
        tokens: To emit.
        one_piece: Rounds do not tell the time of their drafts.
    """
    rng, done, seconds, behind, asked = random.Random(1), 0, 0.0, 0, list[int]()
    extend, step = costs
    pace.begin()
    while done < tokens:
        k = 0 if pace.given_up else min(pace.choose(), tokens - done - 1)
        drafting = 0.0
        if k or (behind >= width and pace.most and not pace.given_up):
            drafting, behind = extend + max(0, k - 1) * step, 0
        right = next((j for j in range(k) if rng.random() >= share(done)), k)
        noise = 1 + 0.2 * rng.random() ** 4  # clocks have outliers, upwards
        told = 0.0 if one_piece else drafting
        took = (noise, drafting, told)
        pace.add(Round((0,) * (right + 1), k, right, 0, 1, took[0] + took[1], took[2]))
        seconds, done, behind = seconds + 1 + drafting, done + right + 1, behind + right + 1
        asked.append(k)
    return seconds, asked


COSTS = [(0.02, 0.01), (0.05, 0.03), (0.1, 0.05), (0.15, 0.1), (0.3, 0.2)]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("width", [2, 5, 9])
def test_text_that_nobody_can_draft_costs_3_percent_at_most(
    width: int, costs: tuple[float, float]
) -> None:
    for tokens in (200, 1000):
        seconds, _ = simulate(Adaptive(width), width, costs, lambda at: 0.0, tokens)
        assert seconds < 1.03 * tokens


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("one_piece", [False, True])
def test_it_comes_close_to_the_best_fixed_number(
    costs: tuple[float, float], one_piece: bool
) -> None:
    width, tokens = 5, 2000
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):

        def always(at: int, share: float = share) -> float:
            return share

        fixed = [simulate(Fixed(k), width, costs, always, tokens)[0] for k in range(width)]
        ours, _ = simulate(Adaptive(width), width, costs, always, tokens, one_piece=one_piece)
        assert ours < (1.06 if one_piece else 1.03) * min(fixed), share


def test_it_notices_when_a_text_changes() -> None:
    """500 tokens that cannot be drafted, 500 that can, and so on."""

    def share(at: int) -> float:
        return 0.9 if at // 500 % 2 else 0.0

    seconds, asked = simulate(Adaptive(5), 5, (0.05, 0.03), share, 3000)
    fixed = [simulate(Fixed(k), 5, (0.05, 0.03), share, 3000)[0] for k in range(5)]
    assert seconds < 0.98 * min(fixed)
    assert {0, 1, 4} <= set(asked)


def test_a_request_begins_with_an_open_mind_and_known_times() -> None:
    pace = Adaptive(5)
    simulate(pace, 5, (0.05, 0.03), lambda at: 0.0, 400)
    assert pace.best() == 0 and pace.shares()[0] < 0.05
    times = [pace.draft_seconds(k) for k in (1, 2, 3, 4)]
    pace.begin()
    assert pace.best() > 0 and not pace.given_up
    assert [pace.draft_seconds(k) for k in (1, 2, 3, 4)] == times


def test_a_hopeless_request_is_given_up_and_the_next_one_is_not() -> None:
    toy = Toy(4)
    prompt = toy.prompt(0, 7)
    truth, _ = toy.decode(prompt, 56)
    chain = toy.chain(lambda cache: Slow(Script(cache, truth, itertools.repeat(0))))
    for _ in range(2):
        slow = chain.drafter
        assert isinstance(slow, Slow)
        slow.asked = 0
        assert clocked(chain, prompt, 56) == truth[7:]
        assert 32 <= slow.asked < 36


class Slow(NoDrafter):
    """Another drafter, which is asked by a chain whose clock says that it takes its time."""

    def __init__(self, script: Script) -> None:
        self.script, self.asked = script, 0

    def propose(self, token: int, k: int) -> list[int]:
        self.asked += 1
        return self.script.propose(token, k)


def clocked(chain: Chain, prompt: list[int], new: int) -> list[int]:
    """A request whose passes take 1 second and whose drafts 0.3 each, whatever the machine."""
    pace = chain._adaptive

    class Clock:
        most = pace.most

        @property
        def given_up(self) -> bool:
            return pace.given_up

        def begin(self) -> None:
            pace.begin()

        def choose(self) -> int:
            return pace.choose()

        def repeats(self, k: int) -> bool:
            return pace.repeats(k)

        def add(self, round: Round) -> None:
            draft = 0.3 * round.drafted
            told = (round.tokens, round.drafted, round.accepted, 0, 1, 1 + draft, draft)
            pace.add(Round(*told))

    chain._adaptive = Clock()  # type: ignore[assignment]
    try:
        return chain.generate(prompt, max_new_tokens=new, k="auto").tokens
    finally:
        chain._adaptive = pace


@pytest.mark.parametrize("rollback", ["log", "replay"])
def test_auto_is_exact_with_every_drafter(rollback: str) -> None:
    toy = Toy(5)
    prompt = toy.prompt(0, 9)
    truth, _ = toy.decode(prompt, 40)
    for counts in ([0], [4], [0, 4, 2, 1, 3]):

        def script(cache: object, counts: list[int] = counts) -> Script:
            return Script(cache, truth, itertools.cycle(counts))  # type: ignore[arg-type]

        for drafter in (None, script):
            chain = toy.chain(drafter, rollback=rollback)
            for _ in range(2):
                rounds = list(chain.rounds(prompt, max_new_tokens=40, k="auto"))
                assert [t for r in rounds for t in r.tokens] == truth[9:]
                assert max(r.drafted for r in rounds) <= 4
