"""The greedy chain: draft a few tokens, let the trunk judge them all in one call, keep the prefix.

`Chain._round` is the algorithm. Every token emitted is the trunk's own choice, so the output is
that of plain decoding whatever the drafter says; plain decoding is the same loop with no drafts.
`Chain._round_ahead` is the same round where the device decides and the host only reads along.
"""

from __future__ import annotations

import math
import operator
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

from eagle_chain.engines.errors import InputError
from eagle_chain.runtime import prefix
from eagle_chain.runtime.adaptive import Adaptive, Drafts, Fixed, Pace
from eagle_chain.runtime.cache import Cache, Snapshot
from eagle_chain.runtime.capacity import Ladder, Larger, Rung
from eagle_chain.runtime.cuda import CudaMemory
from eagle_chain.runtime.drafters import DeviceDrafter, Drafter, NoDrafter
from eagle_chain.runtime.prefill import Prefill
from eagle_chain.runtime.rounds import Rounds
from eagle_chain.runtime.session import Binding, Session
from eagle_chain.runtime.stats import Result, Round, Stats

if TYPE_CHECKING:
    from typing import Unpack  # Python 3.11

Rollback = Literal["log", "replay"]
Fed = Callable[[int], None]  # hears how many tokens the cache holds while a prompt is fed
PLAIN = NoDrafter()


def _unheard(held: int) -> None:
    """Nobody waits for the prompt."""


class Options(TypedDict, total=False):
    """What a request may say beside its prompt, see `Chain.stream`."""

    max_new_tokens: int | None
    k: Drafts
    stop_ids: Collection[int] | None
    append: bool
    temperature: float
    seed: int


@dataclass(frozen=True, eq=False)
class _Request:
    """A request whose arguments are checked."""

    prompt: list[int]
    max_new_tokens: int | None
    pace: Pace
    stops: frozenset[int]
    append: bool
    temperature: float
    seed: int
    fed: Fed


class Chain:
    """Greedy decoding of one sequence at a time over a trunk, its cache and a drafter.

    Args:
        trunk: The trunk's session; several chains may share it.
        cache: This chain's own cache.
        drafter: Guesses for this cache.
        vocab_size: Ids are 0..vocab_size - 1.
        stop_ids: Ids that end a request unless it names its own.
        rollback: "log" rejects rows by not counting them; "replay" copies the states before each
            call that checks drafts, copies them back and runs the accepted tokens again.
        ahead: Let the device decide, one round launched ahead of the host, while the drafter and
            the room for tokens allow it. None: where the memory is a GPU's.
        prefill: Wide calls on this cache, for prompts.
        larger: Further capacities, ascending, that a sequence moves to when it has grown.
    """

    def __init__(
        self,
        trunk: Session,
        cache: Cache,
        drafter: Drafter = PLAIN,
        *,
        vocab_size: int,
        stop_ids: Collection[int] = (),
        rollback: Rollback = "log",
        ahead: bool | None = None,
        prefill: Prefill | None = None,
        larger: Sequence[Larger] = (),
    ) -> None:
        if rollback not in ("log", "replay"):
            raise InputError(f"rollback is {rollback!r}, expected 'log' or 'replay'")
        self._ladder = Ladder(Rung(trunk, cache, drafter, prefill), larger)
        self.vocab_size = vocab_size
        self.stop_ids = frozenset(stop_ids)
        self._adaptive = Adaptive(cache.width)
        self._replay = rollback == "replay"
        self._ahead = isinstance(cache.memory, CudaMemory) if ahead is None else ahead
        self._before: Snapshot | None = None
        self._lock = threading.Lock()
        self._request: object = None

    @property
    def capacity(self) -> int:
        """The longest sequence in tokens."""
        return self._ladder.capacity

    @property
    def cache(self) -> Cache:
        """What holds the sequence; another one when it moves to another capacity."""
        return self._ladder.rung.cache

    @property
    def drafter(self) -> Drafter:
        """Who guesses for that cache."""
        return self._ladder.rung.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter) -> None:
        """One for every capacity: it keeps nothing in a cache."""
        self._ladder.give(drafter)

    @property
    def device(self) -> Rounds:
        """The rounds of that cache that need no host."""
        return self._ladder.rung.device

    @property
    def _trunk(self) -> list[Binding]:
        return self._ladder.rung.trunk

    def stream(self, ids: Sequence[int], **options: Unpack[Options]) -> Iterator[int]:
        """Yield tokens one by one.

        A consumer that stops early leaves the chain with exactly the tokens it has seen: the last
        of them is `cache.pending`, the others and the prompt are `cache.tokens`.

        Args:
            ids: The prompt, at least one id; prompt and new tokens fit in the capacity.
            **options: max_new_tokens: Budget; None is as many as fit.
                k: Drafts per round, below the width; None is width - 1, "auto" chooses for each
                round, see `Adaptive`. 0 decodes plainly and leaves the drafter out, so that a later
                request that appends finds a gap in its KV.
                stop_ids: Ids that end the request, themselves emitted; None is the chain's own.
                append: Keep the sequence in the cache and put `ids` behind `cache.tokens`. To go on
                from the last token emitted, begin with `cache.pending`.
                temperature: 0 takes the largest logit; above it tokens are drawn from the softmax
                of logits / temperature, if the bundle was exported with --sampling.
                seed: Of the draws, below 2^64: the same seed gives the same tokens, whatever the
                drafter and k (0).

        Raises:
            InputError: The arguments do not fit; raised at once, nothing has run.
            FloatingPointError: The trunk's logits at a position are not finite; what was emitted
                before stands, the cache holds it.
            RuntimeError: The chain is in use by another thread, or has begun another request.
        """
        request = self._checked(ids, **options)
        return self._tokens(request, self._rounds(request))

    def rounds(
        self, ids: Sequence[int], *, fed: Fed = _unheard, **options: Unpack[Options]
    ) -> Iterator[Round]:
        """Yield a request round by round, the prompt first; arguments and errors as in `stream`.

        `fed` hears after each trunk call of the prompt how many tokens the cache holds.
        """
        return self._rounds(self._checked(ids, fed, **options))

    def generate(self, ids: Sequence[int], **options: Unpack[Options]) -> Result:
        """Run a request to its end; arguments and errors as in `stream`."""
        stats, tokens, reason = Stats(), list[int](), ""
        for round in self._rounds(self._checked(ids, **options)):
            stats.add(round)
            tokens += round.tokens
            reason = round.finish_reason or reason
        return Result(tokens, reason, stats)

    def extend(self, ids: Sequence[int]) -> None:
        """Put tokens behind `cache.tokens` without emitting any; `cache.pending` is what follows.

        Raises:
            InputError: The ids do not fit.
            FloatingPointError: As in `stream`.
            RuntimeError: The chain is in use by another thread.
        """
        prompt = self._check_prompt(ids, append=True)
        with self._turn(object(), begin=True):
            self._ladder.draw(0.0, 0)
            self._feed_prompt(prompt, True)

    def reset(self) -> None:
        """Empty the cache; ends any request that is still open."""
        with self._turn(object(), begin=True):
            self._empty()

    def snapshot(self) -> Snapshot:
        """Copy the sequence as it stands, to branch from it later."""
        with self._turn(self._request):
            self.drafter.settle()
            return self.cache.snapshot()

    def rollback(self, snapshot: Snapshot) -> None:
        """Stand where `snapshot` was taken; ends any request that is still open."""
        with self._turn(object(), begin=True):
            self._stand(snapshot)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the sequence as it stands to a file, for `restore`; returns the file's size.

        Raises:
            InputError: The file cannot be written.
        """
        return prefix.save(path, self.snapshot())

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Stand where `save` was called, in this process or another; ends an open request.

        Raises:
            InputError: The file is not whole, or of other engines or another drafter; the chain
                stands where it stood.
        """
        with self._turn(object(), begin=True):
            snapshot = prefix.load(path, self.vocab_size, self._ladder.cache_for)
            self._stand(snapshot)

    def _stand(self, snapshot: Snapshot) -> None:
        held = len(snapshot.counters.tokens)
        self._ladder.stand(held, lambda rung: rung.cache.rollback(snapshot))
        self.drafter.reset()

    def _checked(
        self,
        ids: Sequence[int],
        fed: Fed = _unheard,
        *,
        max_new_tokens: int | None = None,
        k: Drafts = None,
        stop_ids: Collection[int] | None = None,
        append: bool = False,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> _Request:
        """Refuse bad arguments before anything runs."""
        prompt = self._check_prompt(ids, append)
        pace = self._pace(k)
        if max_new_tokens is not None and _whole("max_new_tokens", max_new_tokens) < 0:
            raise InputError(f"max_new_tokens is {max_new_tokens}, expected 0 or more")
        stops = self.stop_ids if stop_ids is None else frozenset(_ids("stop_ids", stop_ids))
        if not (0 <= temperature < math.inf):
            raise InputError(f"temperature is {temperature}, expected a number from 0 up")
        if temperature and not self.cache.can_draw:
            raise InputError(
                f"temperature is {temperature}, but this bundle only takes the largest logit: "
                "export it with --sampling"
            )
        if not 0 <= _whole("seed", seed) < 1 << 64:
            raise InputError(f"seed is {seed}, expected 0 to 2^64 - 1")
        return _Request(prompt, max_new_tokens, pace, stops, append, float(temperature), seed, fed)

    def _pace(self, k: Drafts) -> Pace:
        """What decides how many drafts a round asks for."""
        if k == "auto":
            return self._adaptive
        most = self.cache.width - 1
        k = most if k is None else _whole("k", k)
        if not 0 <= k <= most:
            raise InputError(
                f"k is {k}, expected 0 to {most}: the trunk was exported with width {most + 1}, "
                "one row for the pending token and one per draft"
            )
        return Fixed(k)

    def _check_prompt(self, ids: Sequence[int], append: bool) -> list[int]:
        prompt = _ids("the prompt", ids)
        if not prompt:
            raise InputError("the prompt is empty: decoding starts from at least one token")
        wrong = [i for i in prompt if not 0 <= i < self.vocab_size]
        if wrong:
            raise InputError(
                f"token id {wrong[0]} in the prompt is outside the vocabulary, "
                f"0 to {self.vocab_size - 1}"
            )
        held = len(self.cache.tokens) if append else 0
        if held + len(prompt) > self.capacity:
            behind = f" behind {held} cached ones" if held else ""
            raise InputError(
                f"the prompt has {len(prompt)} tokens{behind}, but the bundle's capacity is "
                f"{self.capacity}: shorten it or export with a larger --capacity"
            )
        return prompt

    def _rounds(self, request: _Request) -> Iterator[Round]:
        prompt, stops, pace = request.prompt, request.stops, request.pace
        with self._turn(request, begin=True):
            start = time.perf_counter()
            if request.append:
                self._check_prompt(prompt, True)  # another request may have run since
            else:
                self._empty()
            self._ladder.draw(request.temperature, request.seed)
            pace.begin()
            calls = self._feed_prompt(prompt, bool(pace.most), request.fed)
            seconds = time.perf_counter() - start
        cache = self.cache
        room, out_of_room = self.capacity - len(cache.tokens), "capacity"
        if request.max_new_tokens is not None and request.max_new_tokens <= room:
            room, out_of_room = request.max_new_tokens, "length"
        assert cache.pending is not None, "a prompt leaves a pending token"
        tokens = cut([cache.pending], room, stops)
        reason = _finish(tokens, room, stops, out_of_room)
        yield Round(tokens, 0, 0, len(prompt), calls, seconds, 0.0, reason)
        asked: int | None = None
        while reason is None:
            room -= len(tokens)
            with self._turn(request):
                start = drafted = time.perf_counter()
                rung = self._ladder.for_rows()
                here = min(room, self._ladder.rows)  # the rest is computed at a larger capacity
                before, asked = asked, pace.choose()
                drafter = rung.drafter if pace.most and not pace.given_up else PLAIN
                same = before in (None, asked) and here > asked
                if same and self._runs_ahead(drafter, asked):
                    step = self._round_ahead(request, drafter, asked, here)
                    tokens, count, accepted, calls = step
                else:
                    self.device.leave()
                    drafts = drafter.propose(tokens[-1], min(asked, here - 1))
                    drafted, count = time.perf_counter(), len(drafts)
                    tokens, accepted, calls = self._round([tokens[-1], *drafts], here, stops)
                end = time.perf_counter()
            reason = _finish(tokens, room, stops, out_of_room)
            times = (end - start, drafted - start)
            round = Round(tokens, count, accepted, 0, calls, *times, reason)
            pace.add(round)
            yield round

    def _runs_ahead(self, drafter: Drafter, k: int) -> bool:
        """Whether rounds of k drafts can run from device buffers alone."""
        if self._replay or not self._ahead:
            return False
        return not k or (isinstance(drafter, DeviceDrafter) and len(drafter.parts(0, k)) > 0)

    def _round_ahead(
        self, request: _Request, drafter: Drafter, k: int, room: int
    ) -> tuple[tuple[int, ...], int, int, int]:
        """One round decided on the device, which runs the next one while this one is read.

        Returns:
            The tokens that are now settled, how many drafts there were, how many of the tokens are
            drafts, the trunk calls made.
        """
        cache, pending = self.cache, self.cache.pending
        assert pending is not None, "a round starts from a pending token"
        guesses = drafter if k and isinstance(drafter, DeviceDrafter) else None
        if k:
            drafter.settle()
        else:
            drafter.observe(pending)
        # what this round leaves, if only one token, is enough for the next
        ahead = room > k + 1 and request.pace.repeats(k)
        verdict = self.device.run(guesses, k, ahead=ahead)
        tokens = cut(verdict.tokens, room, request.stops)
        if -1 in verdict.tokens:
            self.device.leave()
        if not tokens:
            tokens, accepted, calls = self._round([pending], room, request.stops)
            return tokens, verdict.drafted, accepted, calls + 1
        cache.commit(len(tokens), tokens[-1])
        return tokens, verdict.drafted, min(verdict.accepted, len(tokens)), 1

    def _round(
        self, ids: list[int], room: int, stops: frozenset[int]
    ) -> tuple[tuple[int, ...], int, int]:
        """Let the trunk judge the drafts behind the pending token, and keep what it would choose.

        Args:
            ids: The pending token, then its drafts.
            room: How many tokens may still be emitted.
            stops: A token of these is the last.

        Returns:
            The tokens that are now settled, how many of them were drafts, the trunk calls made.
        """
        cache, replay, calls = self.cache, self._replay, 1
        if replay and len(ids) > 1:
            self._before = cache.snapshot(kv=False, into=self._before)
        next_ids, accepted = self._call(ids)
        tokens = cut(next_ids[: accepted + 1], room, stops)
        if not tokens:  # also what a draft whose values are not finite does to the rows before it
            cache.undo()
            if len(ids) == 1:
                raise FloatingPointError(self._not_finite())
            tokens, accepted, calls = self._round(ids[:1], room, stops)
            return tokens, accepted, calls + 1
        if replay and self._before and len(tokens) < len(ids):
            cache.rollback(self._before)
            self._call(ids[: len(tokens)])
            calls = 2
        cache.commit(len(tokens), tokens[-1])
        return tokens, min(accepted, len(tokens)), calls

    def _empty(self) -> None:
        self._ladder.restart()
        self.drafter.reset()

    def _feed_prompt(self, prompt: list[int], draft: bool, fed: Fed = _unheard) -> int:
        """Feed a prompt behind the cache, in wide calls as far as they are worth it.

        Args:
            prompt: At least one token.
            draft: Whether the drafter takes part.
            fed: Hears how many tokens the cache holds.

        Returns:
            The trunk calls it took.
        """
        calls = 0
        while True:
            rung, rows = self._ladder.for_prompt(len(prompt))
            if not rows:
                return calls + self._feed(prompt, self.cache.width, draft, fed)
            assert rung.prefill is not None, "its wide calls were counted on"
            ids, prompt = prompt[:rows], prompt[rows:]
            if draft:
                rung.drafter.observe(ids[0])
                rung.drafter.settle()  # what it writes behind its rows must not hit those of this
            calls += 1
            if rung.prefill.feed(ids, prompt[0], draft=draft):
                fed(len(rung.cache.tokens))
            else:
                calls += self._feed(ids, self.cache.width, draft, fed)

    def _feed(self, prompt: list[int], rows: int, draft: bool, fed: Fed = _unheard) -> int:
        """Feed a prompt behind the cache, `rows` tokens at a time; returns the trunk calls."""
        calls = 0
        while prompt:
            cache = self._ladder.for_rows().cache
            count = min(rows, self._ladder.rows)
            ids, prompt = prompt[:count], prompt[count:]
            if draft:
                self.drafter.observe(ids[0])  # follows the rows of the call before
            next_ids, _ = self._call(ids)
            calls += 1
            if -1 not in next_ids[: len(ids)]:
                cache.commit(len(ids), next_ids[len(ids) - 1])
                fed(len(cache.tokens))
                continue
            cache.undo()
            if len(ids) == 1:
                raise FloatingPointError(self._not_finite())
            calls += self._feed(ids, 1, draft, fed)  # one at a time, to find the token
        return calls

    def _call(self, ids: list[int]) -> tuple[list[int], int]:
        """Run the trunk once; returns its choice after each row and how many drafts it confirms."""
        cache = self.cache
        cache.feed(ids)
        self._trunk[cache.parity].run()
        cache.advance(ids)
        outputs = cache.outputs[cache.parity]
        return outputs["next_ids"].read().tolist(), int(outputs["accepted"].read()[0])

    def _not_finite(self) -> str:
        return (
            f"the trunk's logits at position {len(self.cache.tokens)} are not finite: a weight or "
            "an activation overflows; the tokens before it are in the cache"
        )

    def _tokens(self, request: object, rounds: Iterator[Round]) -> Iterator[int]:
        for round in rounds:
            for taken, token in enumerate(round.tokens, 1):
                if len(round.tokens) > 1:  # the rest waits in the cache until it has been seen
                    with self._turn(request):
                        self.cache.commit(taken, token)
                yield token

    @contextmanager
    def _turn(self, request: object, begin: bool = False) -> Iterator[None]:
        """Own the chain for one step of a request; `begin` makes it the current request."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this chain is in use by another thread: give each thread a chain of its own, "
                "they can share the sessions"
            )
        try:
            with self.cache.memory.lock:  # chains of one stream take turns
                if begin:
                    self.device.leave()
                    self._request = request
                elif self._request is not request:
                    raise RuntimeError("this request is over: its chain has begun another one")
                yield
        finally:
            self._lock.release()


def cut(choices: Sequence[int], room: int, stops: frozenset[int]) -> tuple[int, ...]:
    """Return the choices to emit: up to the first stop id, `room` at most, numbers only.

    A choice of -1 stands for logits that are not finite; what comes before it is still good.
    """
    tokens: list[int] = []
    for token in choices[:room]:
        if token == -1:
            break
        tokens.append(token)
        if token in stops:
            break
    return tuple(tokens)


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InputError(f"{name} is {value!r}, expected a whole number") from None


def _ids(name: str, values: Collection[int]) -> list[int]:
    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise InputError(f"{name} must be a sequence of token ids: {error}") from None


def _finish(
    tokens: Sequence[int], room: int, stops: frozenset[int], out_of_room: str
) -> str | None:
    """Return why the request ends with these tokens, None if it goes on."""
    if tokens and tokens[-1] in stops:
        return "eos"
    return out_of_room if len(tokens) == room else None
