"""The greedy chain: draft a few tokens, let the trunk judge them all in one call, keep the prefix.

`Decoder._judge` is the algorithm. Every token emitted is the trunk's own choice, so the output is
that of plain decoding whatever the drafter says; plain decoding is the same loop with no drafts.
`Decoder._round_ahead` is the same round where the device decides and the host only reads along.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from eagle_chain.runtime.cache import Cache, Snapshot
from eagle_chain.runtime.capacity import Ladder
from eagle_chain.runtime.drafters import DeviceDrafter, Drafter, NoDrafter
from eagle_chain.runtime.request import Fed, Request, cut, unheard
from eagle_chain.runtime.stats import Round

PLAIN = NoDrafter()


class Decoder:
    """Decodes the sequence of a ladder; one thread at a time, and only requests that fit.

    Args:
        ladder: Trunk, cache and drafter.
        replay: Reject rows by running the accepted ones again instead of not counting them.
        ahead: Let the device decide, one round ahead, while the drafter and the room allow it.
    """

    def __init__(self, ladder: Ladder, *, replay: bool, ahead: bool) -> None:
        self._ladder = ladder
        self._replay = replay
        self._ahead = ahead
        self._before: Snapshot | None = None  # of the states, for a replay

    @property
    def _cache(self) -> Cache:
        return self._ladder.rung.cache

    def rounds(self, request: Request) -> Iterator[Round]:
        """The rounds of a request, the prompt first."""
        start, pace = time.perf_counter(), request.pace
        if not request.append:
            self.empty()
        self._ladder.draw(request.temperature, request.seed)
        pace.begin()
        calls = self.feed(request.prompt, draft=pace.most > 0, fed=request.fed)
        seconds = time.perf_counter() - start

        room, out_of_room = self._ladder.capacity - len(self._cache.tokens), "capacity"
        if request.max_new_tokens is not None and request.max_new_tokens <= room:
            room, out_of_room = request.max_new_tokens, "length"
        tokens = cut([self._pending], room, request.stops)
        reason = request.finish(tokens, room, out_of_room)
        yield Round(
            tokens,
            prompt_tokens=len(request.prompt),
            trunk_calls=calls,
            seconds=seconds,
            finish_reason=reason,
        )
        asked: int | None = None
        while reason is None:
            room -= len(tokens)
            before, start = asked, time.perf_counter()
            rung = self._ladder.for_rows()
            here = min(room, self._ladder.rows)  # the rest is computed at a larger capacity
            asked = pace.choose()
            drafter = rung.drafter if pace.most and not pace.given_up else PLAIN
            same = before in (None, asked) and here > asked
            if same and self._runs_ahead(drafter, asked):
                round = self._round_ahead(request, drafter, asked, here)
            else:
                rung.device.leave()
                round = self._round(request, drafter, asked, here)
            tokens, seconds = round.tokens, time.perf_counter() - start
            reason = request.finish(tokens, room, out_of_room)
            round = replace(round, seconds=seconds, finish_reason=reason)
            pace.add(round)
            yield round

    def extend(self, prompt: list[int]) -> None:
        """Put tokens behind the sequence; what follows them is the largest logit."""
        self._ladder.draw(0.0, 0)
        self.feed(prompt, draft=True)

    def empty(self) -> None:
        """Forget the sequence."""
        self._ladder.restart()
        self._ladder.rung.drafter.reset()

    def stand(self, snapshot: Snapshot) -> None:
        """Stand where a snapshot was taken."""
        held = len(snapshot.counters.tokens)
        self._ladder.stand(held, lambda rung: rung.cache.rollback(snapshot))
        self._ladder.rung.drafter.reset()

    # --- rounds ---

    def _runs_ahead(self, drafter: Drafter, k: int) -> bool:
        """Whether rounds of k drafts can run from device buffers alone."""
        if self._replay or not self._ahead:
            return False
        return not k or (isinstance(drafter, DeviceDrafter) and len(drafter.parts(0, k)) > 0)

    def _round_ahead(self, request: Request, drafter: Drafter, k: int, room: int) -> Round:
        """A round decided on the device, which runs the next one while this one is read."""
        cache, device, pending = self._cache, self._ladder.rung.device, self._pending
        guesses = drafter if k and isinstance(drafter, DeviceDrafter) else None
        if k:
            drafter.settle()
        else:
            drafter.observe(pending)
        # what this round leaves, if only one token, is enough for the next
        ahead = room > k + 1 and request.pace.repeats(k)
        verdict = device.run(guesses, k, ahead=ahead)
        tokens = cut(verdict.tokens, room, request.stops)
        if -1 in verdict.tokens:
            device.leave()
        if not tokens:
            round = self._judge(request, [], room)
            return replace(round, drafted=verdict.drafted, trunk_calls=round.trunk_calls + 1)
        cache.commit(len(tokens), tokens[-1])
        return Round(tokens, verdict.drafted, min(verdict.accepted, len(tokens)))

    def _round(self, request: Request, drafter: Drafter, k: int, room: int) -> Round:
        """A round decided on the host."""
        start = time.perf_counter()
        drafts = drafter.propose(self._pending, min(k, room - 1))
        seconds = time.perf_counter() - start
        return replace(self._judge(request, drafts, room), draft_seconds=seconds)

    def _judge(self, request: Request, drafts: list[int], room: int) -> Round:
        """Let the trunk judge the drafts behind the pending token, and keep what it would choose.

        Args:
            request: Whose stop ids end it.
            drafts: Up to W - 1.
            room: How many tokens may still be emitted.
        """
        cache, ids = self._cache, [self._pending, *drafts]
        if self._replay and drafts:
            self._before = cache.snapshot(kv=False, into=self._before)
        next_ids, accepted = self._call(ids)
        tokens = cut(next_ids[: accepted + 1], room, request.stops)
        if not tokens:  # also what a draft whose values are not finite does to the rows before it
            cache.undo()
            if not drafts:
                raise FloatingPointError(self._not_finite())
            round = self._judge(request, [], room)
            return replace(round, drafted=len(drafts), trunk_calls=round.trunk_calls + 1)
        again = self._replay and len(tokens) < len(ids)
        if again:
            assert self._before is not None, "taken above, as there are drafts"
            cache.rollback(self._before)
            self._call(ids[: len(tokens)])
        cache.commit(len(tokens), tokens[-1])
        return Round(tokens, len(drafts), min(accepted, len(tokens)), trunk_calls=1 + again)

    # --- prompts ---

    def feed(self, prompt: list[int], *, draft: bool, fed: Fed = unheard) -> int:
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
                return calls + self._feed_rows(prompt, rung.cache.width, draft, fed)
            assert rung.prefill is not None, "its wide calls were counted on"
            ids, prompt = prompt[:rows], prompt[rows:]
            if draft:
                rung.drafter.observe(ids[0])
                rung.drafter.settle()  # what it writes behind its rows must not hit those of this
            calls += 1
            if rung.prefill.feed(ids, prompt[0], draft=draft):
                fed(len(rung.cache.tokens))
            else:
                calls += self._feed_rows(ids, rung.cache.width, draft, fed)

    def _feed_rows(self, prompt: list[int], rows: int, draft: bool, fed: Fed) -> int:
        """Feed a prompt behind the cache, `rows` tokens at a time; returns the trunk calls."""
        calls = 0
        while prompt:
            rung = self._ladder.for_rows()
            count = min(rows, self._ladder.rows)
            ids, prompt = prompt[:count], prompt[count:]
            if draft:
                rung.drafter.observe(ids[0])  # follows the rows of the call before
            next_ids, _ = self._call(ids)
            calls += 1
            if -1 not in next_ids[: len(ids)]:
                rung.cache.commit(len(ids), next_ids[len(ids) - 1])
                fed(len(rung.cache.tokens))
                continue
            rung.cache.undo()
            if len(ids) == 1:
                raise FloatingPointError(self._not_finite())
            calls += self._feed_rows(ids, 1, draft, fed)  # one at a time, to find the token
        return calls

    # --- calls ---

    def _call(self, ids: list[int]) -> tuple[list[int], int]:
        """Run the trunk once; returns its choice after each row and how many drafts it confirms."""
        cache = self._cache
        cache.feed(ids)
        self._ladder.rung.trunk[cache.parity].run()
        cache.advance(ids)
        outputs = cache.outputs[cache.parity]
        return outputs["next_ids"].read().tolist(), int(outputs["accepted"].read()[0])

    @property
    def _pending(self) -> int:
        pending = self._cache.pending
        assert pending is not None, "a prompt leaves a pending token"
        return pending

    def _not_finite(self) -> str:
        return (
            f"the trunk's logits at position {len(self._cache.tokens)} are not finite: a weight or "
            "an activation overflows; the tokens before it are in the cache"
        )
