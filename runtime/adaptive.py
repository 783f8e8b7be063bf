"""How many drafts a round asks for: a fixed number, or the one that has paid best so far."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Literal, Protocol

from eagle_chain.runtime.stats import Round

Drafts = int | Literal["auto"] | None

MEMORY = 0.97  # weight of a round's verdict after one more round with drafts: about 33 rounds count
FIRST_GUESS = 0.6  # share of right first drafts before any has been judged, as if seen once
CLOCKS = 15  # latest times of a kind, of which the median counts
MORE = 1.02  # what more drafts must promise to gain before they are tried
DRAFT_SHARE = 0.03  # of a trunk pass: what a draft step is thought to cost before one was timed
# A request in which drafting has lost more than this share of the time after so many rounds, and
# is off, gives it up if merely following the text would go on taking more than the second share.
PATIENCE, LOSS, FOLLOWING = 32, 0.025, 0.02


class Pace(Protocol):
    """Decides how many drafts a round asks for."""

    @property
    def most(self) -> int:
        """The most drafts it ever asks for; 0 leaves the drafter out."""
        ...

    @property
    def given_up(self) -> bool:
        """Whether the drafter is left out for the rest of the request."""
        ...

    def begin(self) -> None:
        """A request begins."""
        ...

    def choose(self) -> int:
        """Drafts for the next round, if it has room for them."""
        ...

    def repeats(self, k: int) -> bool:
        """Whether the round after one with k drafts is likely to ask for as many."""
        ...

    def add(self, round: Round) -> None:
        """Take note of a round that has run."""
        ...


class Fixed:
    """The same number in every round."""

    given_up = False

    def __init__(self, k: int) -> None:
        self.most = k

    def begin(self) -> None:
        """Do nothing."""

    def choose(self) -> int:
        """As many as ever."""
        return self.most

    def repeats(self, k: int) -> bool:
        """Always."""
        return True

    def add(self, round: Round) -> None:
        """Do nothing."""


class Adaptive:
    """The number of drafts that gives most tokens a second, by what the last rounds gave and took.

    Expected tokens of a round with k drafts are 1 + p1 + p1 p2 + ... + p1...pk, where pj is the
    share of right ones among the drafts j whose predecessors were right; recent rounds count more,
    and a position never judged is thought to be as good as the one before it. Times are medians of
    this chain's own clocks: one for the trunk (a pass takes as long with drafts as without, its
    rows are always W), one for the drafter per k. Drafting is off while 0 drafts pay best. The
    drafter must still take in every row, an extend per W tokens. That extend gives one draft at no
    extra cost, so off means one draft per W tokens, which notices when a text has become easy.
    Where even that extend is expensive, drafting is given up for the rest of a request; a later
    request that appends then finds a gap in the drafter's KV.

    Args:
        width: Rows W of a trunk call.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.most = width - 1
        self._right = [0.0] * self.most  # weight of the drafts j accepted, j - 1 accepted before
        self._judged = [0.0] * self.most
        self._passes: deque[float] = deque(maxlen=CLOCKS)
        self._draft_times = [deque[float](maxlen=CLOCKS) for _ in range(width)]  # by drafts
        self._calls = 1.0  # trunk calls of a round with drafts; more than 1 where calls are re-run
        self._now = self.most  # what pays best; another number is a look around
        self._owed = 0  # rows that the drafter has not run over
        self._untold = False  # whether nobody knows yet what drafts take
        self.given_up = False
        self._rounds, self._seconds, self._lost = 0, 0.0, 0.0  # of the request

    def begin(self) -> None:
        """Keep the times, and of the shares no more than a first guess: the text is another one."""
        self.given_up = False
        self._rounds, self._seconds, self._lost = 0, 0.0, 0.0
        for j, judged in enumerate(self._judged):
            if judged > 1:
                self._right[j] /= judged
                self._judged[j] = 1.0

    def choose(self) -> int:
        """The best number for the next round."""
        k = self._now = self.best()
        if not k:
            self.given_up = self.given_up or self._is_hopeless()
            k = 1 if self._owed >= self.width else 0
        return k

    def repeats(self, k: int) -> bool:
        """Yes, but for the rounds around a look around."""
        return k == self._now and (k > 0 or self._owed + 1 < self.width)

    def add(self, round: Round) -> None:
        """Count the verdicts and the times of a round."""
        drafted, told = round.drafted, bool(round.draft_seconds)
        self._owed = len(round.tokens) if drafted else self._owed + len(round.tokens)
        self._rounds += 1
        self._seconds += round.seconds
        if told or not drafted:
            self._passes.append((round.seconds - round.draft_seconds) / round.trunk_calls)
        if not drafted:
            return
        self._untold = not told and not self._passes
        if told or self._passes:
            # a round that ran as one piece tells no time of its drafts: what it took on top
            draft = round.draft_seconds if told else max(0.0, round.seconds - self.pass_seconds)
            self._draft_times[drafted].append(draft)
            self._lost += draft - round.accepted * self.pass_seconds
        self._calls += (round.trunk_calls - self._calls) * (1 - MEMORY)
        for j in range(self.most):
            self._right[j] *= MEMORY
            self._judged[j] *= MEMORY
        for j in range(min(round.judged, round.accepted + 1)):
            self._judged[j] += 1
            self._right[j] += j < round.accepted

    def best(self) -> int:
        """The number of drafts that pays best by what is known now."""
        if self._untold:
            return 0  # a round without, to compare with
        pass_ = self.pass_seconds
        # off, the drafter still has to run once per W tokens
        rates = [1 / (pass_ + self.draft_seconds(1) / self.width)]
        tokens, run = 1.0, 1.0
        for k, share in enumerate(self.shares(), 1):
            run *= share
            tokens += run
            rates.append(tokens / (pass_ * self._calls + self.draft_seconds(k)))
        best = rates.index(max(rates))
        if best > self._now and rates[best] < rates[self._now] * MORE:
            return self._now
        return best

    def _is_hopeless(self) -> bool:
        if self._rounds < PATIENCE or self._lost < LOSS * self._seconds:
            return False
        return self.draft_seconds(1) / (self.width * self.pass_seconds) > FOLLOWING

    def shares(self) -> list[float]:
        """The expected share of right drafts j, for j = 1, 2, ..., if those before are right."""
        shares, before = [], FIRST_GUESS
        for right, judged in zip(self._right, self._judged, strict=True):
            before = (right + before) / (judged + 1)
            shares.append(before)
        return shares

    @property
    def pass_seconds(self) -> float:
        """What a trunk pass takes; 1 as long as none has been timed."""
        return median(self._passes) if self._passes else 1.0

    def draft_seconds(self, k: int) -> float:
        """What k drafts take: measured, or from the nearest number that was.

        A first draft, which runs over the rows of the last call, is counted as two.
        """
        known = [n for n, times in enumerate(self._draft_times) if times]
        if not known:
            return DRAFT_SHARE * (k + 1) * self.pass_seconds
        nearest = min(known, key=lambda n: abs(n - k))
        return median(self._draft_times[nearest]) * (k + 1) / (nearest + 1)
