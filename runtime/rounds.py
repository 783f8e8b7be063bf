"""Rounds without a host decision: draft, verify and accept run from device buffers alone.

What the trunk leaves (the pending token, how many rows were kept, where the next call stands) lies
where the next call reads it, and a drafted token in its row of the trunk's ids (`cache.py`). So a
round is a fixed sequence of engine runs over fixed addresses, one sequence per parity and number of
drafts; on a GPU each is captured once and replayed. The host reads 2 W + 1 integers of a round
while the next one already runs.

A round launched past the end of a request needs no undoing: it reads the states that the last
counted round left, and writes the other set of addresses and KV rows behind the sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.cuda import CudaMemory, Replay
from eagle_chain.runtime.drafters import DeviceDrafter, Part
from eagle_chain.runtime.session import Binding

WARM_UP = 2  # plain runs of each parity before capturing


@dataclass(frozen=True)
class Verdict:
    """What one round settled.

    A draft of -1 had no finite logits; the trunk never accepts it.
    """

    next_ids: tuple[int, ...]  # [W] the trunk's choice after each row
    accepted: int  # drafts confirmed, from the front
    drafts: tuple[int, ...]  # [k]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the round: the accepted drafts and the trunk's own next one."""
        return self.next_ids[: self.accepted + 1]

    @property
    def drafted(self) -> int:
        """How many drafts there were before one that is no number."""
        return (*self.drafts, -1).index(-1)

    @property
    def finite(self) -> bool:
        """Whether all logits behind it were finite."""
        return -1 not in (*self.next_ids, *self.drafts)


class Rounds:
    """Runs rounds over a cache, one launched ahead of the host if asked.

    Args:
        cache: Its buffers are all that a round reads and writes.
        trunk: The trunk bound to `cache.tensors(parity)`, per parity.
    """

    def __init__(self, cache: Cache, trunk: Sequence[Binding]) -> None:
        self.cache = cache
        self._trunk = trunk
        self._replay: Replay | None = None
        if isinstance(cache.memory, CudaMemory):
            self._replay = Replay(cache.memory, relaxed=True, warm_up=WARM_UP)
        self._readers = [Reader(cache, parity) for parity in (0, 1)]
        self._ahead: Reader | None = None
        self._failed: Exception | None = None

    def run(self, drafter: DeviceDrafter | None, k: int, *, ahead: bool) -> Verdict:
        """Run the round that starts from the cache's pending token, and count its call.

        The caller keeps what the verdict allows with `cache.commit`, and leaves nothing of it to
        `cache.undo`. Without that, or if an exception ends this, the cache holds the same tokens as
        before, with no kept row of its last call: a draft cannot take that one in again.

        Args:
            drafter: Who guesses; None if k is 0.
            k: How many guesses, the same as in the round before unless `leave` came between.
            ahead: Launch the next round before this one is read. It counts on all that this one
                accepts; if less was kept, `leave` must come before anything else.
        """
        cache = self.cache
        assert cache.pending is not None, "a round starts from a pending token"
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        if self._ahead is None:
            self.stage(k)
            self._ahead = self.launch(drafter, k, cache.parity)
        reader, self._ahead = self._ahead, None
        call = [cache.pending]
        try:
            if ahead:
                try:
                    self._ahead = self.launch(drafter, k, 1 - cache.parity)
                except Exception as error:
                    self._failed = error  # of the next round: this one is whole
            verdict = reader.verdict(k)
            call += verdict.next_ids[: verdict.accepted]
        finally:
            cache.advance(call, undoable=False)
        return verdict

    def leave(self) -> None:
        """Forget a round that ran ahead: what follows starts from the cache's counters."""
        reader, self._ahead, self._failed = self._ahead, None, None
        if reader is not None and not reader.verdict(0).finite:
            self.cache.wipe()

    @property
    def graphs(self) -> Collection[Hashable]:
        """The rounds that are replayed: (drafter, k, parity) each."""
        return self._replay.captured if self._replay else ()

    def parts(self, drafter: DeviceDrafter | None, k: int, parity: int) -> list[Part]:
        """The engine runs of a round in their order."""
        drafts = drafter.parts(parity, k) if drafter is not None else []
        return [*drafts, ("verify" if k else "plain", self._trunk[parity])]

    def stage(self, k: int) -> None:
        """Write what the call before would have left for a round, had nobody cut it."""
        cache = self.cache
        assert cache.pending is not None and cache.kept, "a draft follows a call that kept rows"
        cache.follow(cache.pending)
        cache.feed([cache.pending], rows=k + 1)

    def launch(self, drafter: DeviceDrafter | None, k: int, parity: int) -> Reader:
        """Queue a round that starts at `parity`; two may be open, one per parity."""
        reader = self._readers[parity]

        def work() -> None:
            for _, part in self.parts(drafter, k, parity):
                part.run()
            reader.queue()

        if self._replay is None:
            work()
        else:
            self._replay.run((drafter, k, parity), work)
        reader.mark()
        return reader


class Reader:
    """Brings a round's integers to the host; of one round, not of those queued behind it."""

    def __init__(self, cache: Cache, parity: int) -> None:
        outputs = cache.outputs[1 - parity]
        self._buffers = [outputs["next_ids"], outputs["accepted"], cache.inputs[parity]["ids"]]
        self._memory = cache.memory if isinstance(cache.memory, CudaMemory) else None
        self._values: list[NDArray[Any]] = []
        if self._memory is not None:
            pinned = self._memory.pinned
            self._values = [pinned(b.spec.shape, b.spec.dtype) for b in self._buffers]
            self._done = self._memory.event()

    def queue(self) -> None:
        """Queue the copies to the host; part of the captured round."""
        if self._memory is None:
            self._values = [buffer.read() for buffer in self._buffers]
        else:
            for values, buffer in zip(self._values, self._buffers, strict=True):
                self._memory.download(values, buffer.address)

    def mark(self) -> None:
        """Note that the round's work ends here."""
        if self._memory is not None:
            self._done.record()

    def verdict(self, k: int) -> Verdict:
        """Wait for the round, which had `k` drafts."""
        if self._memory is not None:
            self._done.wait()
        next_ids, accepted, ids = (np.ravel(values).tolist() for values in self._values)
        return Verdict(tuple(next_ids), accepted[0], tuple(ids[1 : k + 1]))
