"""Chain against plain: the same requests decoded with drafts and without, token for token.

A mismatch does not end a comparison: decoding goes on from plain's tokens, that one included.

On a backend that computes every row of a call alike (`BIT_EXACT`), no token may differ, and no bit
of a logit where the bundle gives them. On others a mismatch needs a certificate: the noise is what
the logits of both computations differ by at positions that agree, and in the plain computation the
chain's token may trail plain's by 4 times its 99.9th percentile at most.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.drafters import NoDrafter
from eagle_chain.runtime.stats import Round, Stats

# Backends; docs/exactness.md has the runs that show it.
BIT_EXACT = frozenset({"onnxruntime-cpu", "onnxruntime-cuda"})
PERCENTILE, TIMES = 0.999, 4  # of the logit differences; the bound is so many times that
TOKENS_PER_MISMATCH = 1000  # more mismatches than one in so many fail whatever the margins
REPEAT = 12  # tokens; a run of so many that has occurred before is a repetition

Logits = NDArray[np.float32]  # [V]


@dataclass(frozen=True)
class Plain:
    """What plain decoding makes of a prompt."""

    prompt: list[int]
    tokens: list[int]
    logits: list[Logits]  # those that chose each token; none if the bundle does not give them
    fresh: int  # tokens before the text starts to repeat itself


@dataclass(frozen=True)
class Mismatch:
    """A token of the chain that is not plain's; -1 for a side that has already ended."""

    prompt: int
    position: int  # in the sequence, the prompt's tokens counted
    plain: int
    chain: int
    margin: float | None = None  # of plain's first choice over its second
    gap: float | None = None  # of plain's token over the chain's


def decode_plainly(chain: Chain, prompt: Sequence[int], new: int) -> Plain:
    """Decode without drafts; `FloatingPointError` as in `Chain.stream`."""
    tokens, logits = list[int](), list[Logits]()
    for round in chain.rounds(prompt, max_new_tokens=new, k=0):
        tokens += round.tokens
        logits += _logits(chain.cache, len(round.tokens))
    return Plain(list(prompt), tokens, logits, before_repeat(prompt, tokens))


def before_repeat(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Count the tokens before the first run of `REPEAT` that has occurred before.

    A small model that decodes greedily soon repeats itself, and repeated text is easy to draft.
    """
    row = [*prompt, *tokens]
    seen: set[tuple[int, ...]] = set()
    for start in range(len(row) - REPEAT + 1):
        run = tuple(row[start : start + REPEAT])
        if run in seen and start >= len(prompt):
            return start - len(prompt)
        seen.add(run)
    return len(tokens)


class Script(NoDrafter):
    """A drafter that knows plain's tokens and spoils one of each round's.

    It is right for 0..k drafts, then wrong once, then right again. Which count comes next is drawn
    from those used least so far, so that over many rounds each comes equally often, in any order.
    """

    def __init__(self, chain: Chain) -> None:
        self.truth: Sequence[int] = ()  # prompt and continuation
        self.planned = 0  # how many of the last drafts are right
        self._chain = chain
        self._used = Counter[int]()
        self._random = random.Random(0)

    def propose(self, token: int, k: int) -> list[int]:
        """Return up to k tokens, as far as plain's go."""
        start = len(self._chain.cache.tokens) + 1
        drafts = list(self.truth[start : start + k])
        fewest = min(self._used[count] for count in range(len(drafts) + 1))
        counts = [count for count in range(len(drafts) + 1) if self._used[count] == fewest]
        self.planned = self._random.choice(counts)
        if drafts:
            self._used[self.planned] += 1
        if self.planned < len(drafts):
            drafts[self.planned] = (drafts[self.planned] + 1) % self._chain.vocab_size
        return drafts


class Differences:
    """How far logits differ, as a histogram: one pass over any amount, a percentile at the end."""

    def __init__(self) -> None:
        self.largest = 0.0
        # by exponent and the first 7 bits of the fraction: 0 on its own, the others within 0.8 %
        self._counts = np.zeros(1 << 15, np.int64)

    def add(self, ours: Logits, theirs: Logits) -> None:
        """Take in one pair of rows."""
        difference = np.abs(ours - theirs)
        self.largest = max(self.largest, float(difference.max()))
        self._counts += np.bincount(difference.view(np.uint32) >> 16, minlength=1 << 15)

    @property
    def bound(self) -> float:
        """What a mismatch may trail by."""
        reached = np.searchsorted(self._counts.cumsum(), PERCENTILE * self._counts.sum())
        return TIMES * float(np.uint32(reached << 16).view(np.float32))


@dataclass
class Comparison:
    """One way to decode against plain, over any number of prompts.

    Args:
        chain: What is put to the test.
        k: Its drafts per round.
        script: Its drafter if that is a `Script`.
        budget: New tokens per prompt.
        tokens_to_come: That of all prompts.
        bit_exact: Whether even logits must be the same.
    """

    chain: Chain
    k: int
    script: Script | None
    budget: int
    tokens_to_come: int
    bit_exact: bool
    tokens: int = 0  # compared so far
    mismatches: list[Mismatch] = field(default_factory=list)
    differences: Differences | None = None  # None until there are logits
    counts: list[int] = field(default_factory=list)  # rounds by drafts accepted, 0..k
    unplanned: int = 0  # scripted rounds with right tokens and another count than planned
    stats: Stats = field(default_factory=Stats)  # rounds with room for k drafts
    fresh_stats: Stats = field(default_factory=Stats)  # of them, those before a repetition

    def __post_init__(self) -> None:
        self.counts = [0] * (self.k + 1)

    @property
    def too_many(self) -> bool:
        """Whether more tokens differ than one in 1,000; a single one never is too many."""
        return len(self.mismatches) > max(1, self.tokens_to_come / TOKENS_PER_MISMATCH)

    @property
    def bits_differ(self) -> bool:
        """Whether logits differ where even their bits should be the same."""
        return self.bit_exact and self.differences is not None and self.differences.largest > 0

    @property
    def passed(self) -> bool:
        """Whether nothing differs but near-ties, and few of them."""
        faults = (self.too_many, self.unplanned, self.bits_differ)
        return not (any(faults) or any(map(self.beyond, self.mismatches)))

    @property
    def bound(self) -> float | None:
        """What a mismatch may trail by; None if that is not known."""
        if self.bit_exact:
            return 0.0
        return self.differences.bound if self.differences else None

    def beyond(self, mismatch: Mismatch) -> bool:
        """Whether a mismatch is more than the backend's noise explains, as far as is known."""
        return mismatch.gap is None or self.bound is None or mismatch.gap > self.bound

    def add(self, number: int, plain: Plain) -> None:
        """Decode one more prompt; broken off once too many tokens differ."""
        if self.script:
            self.chain.drafter = self.script
            self.script.truth = [*plain.prompt, *plain.tokens]
        done = 0
        while done < len(plain.tokens) and not self.too_many:
            done = self._until_mismatch(number, plain, done)

    def _until_mismatch(self, number: int, plain: Plain, done: int) -> int:
        """Go on behind the first `done` of plain's tokens; returns how many are now compared."""
        chain, want = self.chain, plain.tokens
        prompt, room = [*plain.prompt, *want[:done]], self.budget - done
        for round in _until_nan(chain.rounds(prompt, max_new_tokens=room, k=self.k)):
            pending, start = done - 1, done
            logits = _logits(chain.cache, len(round.tokens))
            for token in round.tokens:
                self.tokens += 1
                if done == len(want) or token != want[done]:
                    self.mismatches.append(_mismatch(number, plain, done, token))
                    return done + 1
                if logits and plain.logits:
                    self.differences = self.differences or Differences()
                    self.differences.add(logits[done - start], plain.logits[done])
                done += 1
            if not round.prompt_tokens:
                self._count(round, self.budget - start > self.k, pending < plain.fresh)
        if done < len(want):
            self.tokens += 1
            self.mismatches.append(_mismatch(number, plain, done, -1))
            done += 1
        return done

    def _count(self, round: Round, whole: bool, fresh: bool) -> None:
        """Take note of a round; `whole` if the budget had room for k drafts."""
        if round.drafted:
            self.counts[round.accepted] += 1
        if self.script and round.drafted and round.accepted != self.script.planned:
            self.unplanned += 1
        if whole:
            self.stats.add(round)
        if whole and fresh:
            self.fresh_stats.add(round)


def _until_nan(rounds: Iterator[Round]) -> Iterator[Round]:
    """The rounds up to logits that are not finite, which plain decoding did not meet."""
    with suppress(FloatingPointError):
        yield from rounds


def _logits(cache: Cache, count: int) -> list[Logits]:
    """The logits that chose the last `count` tokens; none if the bundle does not give them."""
    output: Any = cache.outputs[cache.parity].get("logits")
    return list(output.read()[cache.kept - count : cache.kept]) if output else []


def _mismatch(number: int, plain: Plain, done: int, token: int) -> Mismatch:
    position = len(plain.prompt) + done
    want = plain.tokens[done] if done < len(plain.tokens) else -1
    if want < 0 or token < 0 or not plain.logits:
        return Mismatch(number, position, want, token)
    logits = plain.logits[done]
    second, first = np.partition(logits, -2)[-2:]
    margin, gap = float(first - second), float(logits[want] - logits[token])
    return Mismatch(number, position, want, token, margin, gap)
