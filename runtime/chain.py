"""The chain that users hold: requests over one sequence, one at a time, and its snapshots.

The algorithm is in `decoder.py`; here arguments are checked and threads kept apart.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

from eagle_chain.engines.errors import InputError
from eagle_chain.runtime import prefix
from eagle_chain.runtime.adaptive import Adaptive, Drafts, Fixed, Pace
from eagle_chain.runtime.cache import Cache, Snapshot
from eagle_chain.runtime.capacity import Ladder, Larger, Rung
from eagle_chain.runtime.cuda import CudaMemory
from eagle_chain.runtime.decoder import PLAIN, Decoder
from eagle_chain.runtime.drafters import Drafter
from eagle_chain.runtime.prefill import Prefill
from eagle_chain.runtime.request import (
    Fed,
    Limits,
    Request,
    RequestOptions,
    check_budget,
    token_ids,
    unheard,
)
from eagle_chain.runtime.rounds import Rounds
from eagle_chain.runtime.session import Session
from eagle_chain.runtime.stats import Result, Round

if TYPE_CHECKING:
    from typing import Unpack  # Python 3.11

Rollback = Literal["log", "replay"]


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
        ahead = isinstance(cache.memory, CudaMemory) if ahead is None else ahead
        self._decoder = Decoder(self._ladder, replay=rollback == "replay", ahead=ahead)
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

    def stream(self, ids: Sequence[int], **options: Unpack[RequestOptions]) -> Iterator[int]:
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
        return self._tokens(self._checked(ids, **options))

    def rounds(
        self, ids: Sequence[int], *, fed: Fed = unheard, **options: Unpack[RequestOptions]
    ) -> Iterator[Round]:
        """Yield a request round by round, the prompt first; arguments and errors as in `stream`.

        `fed` hears after each trunk call of the prompt how many tokens the cache holds.
        """
        return self._rounds(self._checked(ids, fed, **options))

    def generate(self, ids: Sequence[int], **options: Unpack[RequestOptions]) -> Result:
        """Run a request to its end; arguments and errors as in `stream`."""
        result = Result()
        for round in self._rounds(self._checked(ids, **options)):
            result.add(round)
        return result

    def extend(self, ids: Sequence[int]) -> None:
        """Put tokens behind `cache.tokens` without emitting any; `cache.pending` is what follows.

        Raises:
            InputError: The ids do not fit.
            FloatingPointError: As in `stream`.
            RuntimeError: The chain is in use by another thread.
        """
        prompt = self._check_prompt(ids, append=True)
        with self._turn(object(), begin=True):
            self._decoder.extend(prompt)

    def reset(self) -> None:
        """Empty the cache; ends any request that is still open."""
        with self._turn(object(), begin=True):
            self._decoder.empty()

    def snapshot(self) -> Snapshot:
        """Copy the sequence as it stands, to branch from it later."""
        with self._turn(self._request):
            self.drafter.settle()
            return self.cache.snapshot()

    def rollback(self, snapshot: Snapshot) -> None:
        """Stand where `snapshot` was taken; ends any request that is still open."""
        with self._turn(object(), begin=True):
            self._decoder.stand(snapshot)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the sequence as it stands to a file, for `restore`; returns the file's size.

        Raises:
            InputError: The file cannot be written.
        """
        return prefix.save(path, self.snapshot())

    def restore(self, path: str | os.PathLike[str] | prefix.Prefix) -> None:
        """Stand where `save` was called, in this process or another; ends an open request.

        Args:
            path: What `save` wrote, or that as it was opened and checked before.

        Raises:
            InputError: The file is not whole, or of other engines or another drafter; the chain
                stands where it stood.
        """
        with self._turn(object(), begin=True):
            opened: AbstractContextManager[prefix.Prefix] = (
                nullcontext(path)
                if isinstance(path, prefix.Prefix)
                else prefix.Prefix(path, self.vocab_size)
            )
            with opened as kept:
                snapshot = kept.load(self._ladder.cache_for)
            self._decoder.stand(snapshot)

    def _checked(
        self,
        ids: Sequence[int],
        fed: Fed = unheard,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Refuse bad arguments before anything runs."""
        unknown = [name for name in options if name not in RequestOptions.__annotations__]
        if unknown:
            known = ", ".join(RequestOptions.__annotations__)
            raise TypeError(f"a request has no option {unknown[0]!r}; it takes {known}")
        return self._made(ids, fed, **options)

    def _made(
        self,
        ids: Sequence[int],
        fed: Fed,
        *,
        max_new_tokens: int | None = None,
        k: Drafts = None,
        stop_ids: Collection[int] | None = None,
        append: bool = False,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Request:
        """A request with the chain's own in the place of what it leaves out."""
        prompt = self._check_prompt(ids, append)
        stops = self.stop_ids if stop_ids is None else frozenset(token_ids("stop_ids", stop_ids))
        pace = self._pace(k)
        check_budget(max_new_tokens)
        temperature = self._limits.check_draws(temperature, seed)
        return Request(prompt, pace, stops, max_new_tokens, append, temperature, seed, fed)

    def _pace(self, k: Drafts) -> Pace:
        """What decides how many drafts a round asks for."""
        if k == "auto":
            return self._adaptive
        return Fixed(self._limits.check_drafts(k))

    def _check_prompt(self, ids: Sequence[int], append: bool) -> list[int]:
        return self._limits.check_prompt(ids, len(self.cache.tokens) if append else 0)

    @property
    def _limits(self) -> Limits:
        """What a request may ask for."""
        return Limits(self.cache.width, self.capacity, self.vocab_size, self.cache.can_draw)

    def _rounds(self, request: Request) -> Iterator[Round]:
        """The rounds of a request, each in a turn of its own."""
        with self._turn(request, begin=True):
            if request.append:
                self._check_prompt(request.prompt, True)  # another request may have run since
            rounds = self._decoder.rounds(request)
            round = next(rounds)
        yield round
        while round.finish_reason is None:
            with self._turn(request):
                round = next(rounds)
            yield round

    def _tokens(self, request: Request) -> Iterator[int]:
        for round in self._rounds(request):
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
