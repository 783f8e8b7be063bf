"""The cache: every buffer of one sequence, and the one set of counters that says what they hold.

The trunk's states come in pairs that change places after each call, so there are two fixed sets of
addresses, one per parity. The plain outputs of a call exist per parity as well: changing places
back (`undo`) brings states, features and choices of the call before into view again. What a call
leaves for the next one (the pending token, how many rows were kept, where it stands) is written
straight to where that one reads it: rounds need no host in between (`rounds.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import EngineSpec, StatePair, TensorSpec
from eagle_chain.runtime.buffers import Buffer, Memory

SHARED = ("rows", "temperature", "uniform")  # inputs that are one buffer for both parities
FEATURES = ("features", "hidden")  # outputs of the last call that a drafter may still read
HANDED_ON = {"next_kept": "kept", "next_position": "position"}  # outputs that the next call reads


@dataclass(frozen=True)
class Counters:
    """Where a sequence stands after a trunk call."""

    tokens: tuple[int, ...]
    position: int
    pending: int | None
    call: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of a KV cache that are copied: those of all tokens, and one of an empty sequence."""
        return max(1, len(self.tokens))


@dataclass(frozen=True)
class Snapshot:
    """A copy of a sequence, to stand there again with `Cache.rollback`, any number of times."""

    counters: Counters
    buffers: tuple[Buffer | None, ...]  # one per state; None: a KV cache that was not copied
    outputs: tuple[Buffer, ...]  # features and hidden of the last call
    engines: Hashable  # of the cache it was taken from

    @property
    def nbytes(self) -> int:
        """Device memory that the copies take."""
        return sum(b.spec.nbytes for b in (*self.buffers, *self.outputs) if b is not None)


class Cache:
    """States of the trunk and of its drafters, and the sequence they belong to.

    Args:
        trunk: What the trunk takes and gives.
        memory: Where the buffers live.
        capacity: The longest sequence in tokens.
        engines: Whose states these are; only caches of equal ones may exchange snapshots.

    Attributes:
        tokens: Ids whose rows are in the states, oldest first.
        position: Where row 0 of the last trunk call stands.
        pending: The trunk's choice after `tokens`, not yet fed; None in an empty cache.
        parity: Which set of addresses the next call uses; `outputs[parity]` is what the last gave.
        inputs: The trunk's plain inputs by name, per parity: `ids` [W], `position`, `rows`, `kept`
            [1]; `rows` and what tokens are drawn by are one buffer for both.
        outputs: The trunk's plain outputs by name, per parity; `pending`, `next_kept` and
            `next_position` are the `ids[:1]`, `kept` and `position` of that parity's inputs.
    """

    def __init__(
        self, trunk: EngineSpec, memory: Memory, capacity: int, engines: Hashable = None
    ) -> None:
        self.capacity = capacity
        self.engines = engines
        self.memory = memory
        even = {t.name: memory.allocate(t) for t in trunk.inputs}
        odd = {t.name: memory.allocate(t) for t in trunk.inputs if t.name not in SHARED}
        self.inputs = (even, odd | {name: even[name] for name in SHARED if name in even})
        self.outputs = (self._left(trunk, even), self._left(trunk, odd))
        self.width = even["ids"].spec.shape[0]
        self.parity = 0
        self.tokens: list[int] = []
        self.position = 0
        self.pending: int | None = None
        self._seed: int | None = None  # of the numbers in `uniform`
        self._trunk_states = trunk.states
        self._states: list[tuple[StatePair, tuple[Buffer, Buffer]]] = []
        self._call: tuple[int, ...] = ()
        self._before: tuple[int, int | None, tuple[int, ...]] | None = None
        self._add(trunk.states)

    @property
    def kept(self) -> int:
        """How many rows of the last trunk call are part of the sequence."""
        return len(self.tokens) - self.position

    @property
    def counters(self) -> Counters:
        """Where the sequence stands."""
        return Counters(tuple(self.tokens), self.position, self.pending, self._call)

    @property
    def states(self) -> Sequence[tuple[StatePair, tuple[Buffer, Buffer]]]:
        """Every state, a drafter's last, with its buffer per parity: the same one if in place."""
        return self._states

    def tensors(self, parity: int) -> dict[str, Buffer]:
        """Every buffer of a trunk call that starts at `parity`, by tensor name."""
        return {
            **self.inputs[parity],
            **self.outputs[1 - parity],
            **self.state_tensors(parity),
        }

    def state_tensors(self, parity: int) -> dict[str, Buffer]:
        """The trunk's states, in and out, of a call that starts at `parity`, by tensor name."""
        tensors: dict[str, Buffer] = {}
        for pair, buffers in self._states[: len(self._trunk_states)]:
            tensors |= {pair.input: buffers[parity], pair.output: buffers[1 - parity]}
        return tensors

    def claim(self, states: Iterable[StatePair]) -> dict[str, Buffer]:
        """Add the states of a drafter, all in place; returns their buffers by tensor name."""
        pairs = tuple(states)
        assert all(pair.in_place for pair in pairs), "only the trunk's states change places"
        added = self._add(pairs)
        return {name: buffers[0] for pair, buffers in added for name in (pair.input, pair.output)}

    def feed(self, ids: Sequence[int], rows: int | None = None) -> None:
        """Write the inputs of the next call: ids, where they stand, what was kept of the last.

        `rows` counts the ids with those that somebody else will put behind them.
        """
        inputs = self.inputs[self.parity]
        inputs["ids"].write(padded(ids, self.width))
        inputs["position"].write(len(self.tokens))
        inputs["rows"].write(len(ids) if rows is None else rows)
        inputs["kept"].write(self.kept)

    @property
    def can_draw(self) -> bool:
        """Whether the trunk can draw tokens."""
        return "temperature" in self.inputs[0]

    def draw(self, temperature: float, seed: int) -> None:
        """Let the trunk draw its tokens, or with temperature 0 take the largest logit.

        The number that the token behind position p is drawn by is the p-th of Philox with this key.
        """
        if not self.can_draw:
            return
        self.inputs[0]["temperature"].write(temperature)
        if temperature and seed != self._seed:
            table = self.inputs[0]["uniform"]
            random = np.random.Generator(np.random.Philox(key=seed))
            table.write(random.random(table.spec.shape, np.float32))
            self._seed = seed

    def follow(self, token: int) -> None:
        """Write what a draft reads of the last call: the id after each kept row, the last `token`.

        The trunk leaves the same there itself, if `token` is its choice and nothing was cut.
        """
        outputs = self.outputs[self.parity]
        outputs["next_ids"].write(padded([*self.tokens[self.position + 1 :], token], self.width))
        outputs["accepted"].write(self.kept - 1)
        self.inputs[1 - self.parity]["position"].write(self.position)

    def advance(self, ids: Sequence[int], *, undoable: bool = True) -> None:
        """Take note that a call over `ids` has run; none of its rows is kept until `commit`.

        Args:
            ids: The rows of the call.
            undoable: False if the call after it is under way as well and writes over the states
                that `undo` would bring back.
        """
        self._before = (self.position, self.pending, self._call) if undoable else None
        self.parity = 1 - self.parity
        self.position, self._call = len(self.tokens), tuple(ids)

    def commit(self, kept: int, pending: int) -> None:
        """Keep the first `kept` rows of the last call; may be repeated with another count.

        Args:
            kept: 1..rows of the call; the rows after them are rejected.
            pending: The trunk's choice after the last kept row.
        """
        assert 0 < kept <= len(self._call), "the last call has no such row"
        self.tokens[self.position :] = self._call[:kept]
        self.pending = pending

    def absorb(self, ids: Sequence[int], pending: int) -> None:
        """Take note that a wide call over `ids` has run, whose states hold all of its rows.

        It leaves neither a log to keep rows of nor features to draft from, and is not undone.
        """
        self._before = None
        self.parity = 1 - self.parity
        self.tokens += ids
        self.position, self.pending, self._call = len(self.tokens), pending, ()

    def undo(self) -> None:
        """Forget the last call: the states change places back. One call deep."""
        assert self._before is not None, "there is no call to undo"
        del self.tokens[self.position :]
        self.position, self.pending, self._call = self._before
        self.parity = 1 - self.parity
        self._before = None

    def reset(self) -> None:
        """Empty the sequence and zero every state: not even a NaN outlives it."""
        for _, buffers in self._states:
            for buffer in set(buffers):
                buffer.zero()
        self.stand(Counters((), 0, None, ()))

    def wipe(self) -> None:
        """Zero the KV rows behind the sequence: 0, the weight of such a row, times NaN is NaN."""
        for pair, buffers in self._states:
            if pair.rows_axis is not None:
                values = buffers[self.parity].read()
                values[(slice(None),) * pair.rows_axis + (slice(len(self.tokens), None),)] = 0
                buffers[self.parity].write(values)

    def snapshot(self, *, kv: bool = True, into: Snapshot | None = None) -> Snapshot:
        """Copy the sequence: live KV rows, the other states, the last features, the counters.

        Args:
            kv: False leaves the KV caches out. Such a copy is good as long as the sequence has only
                grown since: rows below its length are never written again.
            into: An earlier snapshot of this cache, also without KV, whose buffers are used again.
        """
        assert into is None or not kv, "copies of KV caches are as long as the sequence was"
        counters = self.counters
        into = into or self.blank(counters, kv=kv)
        for (pair, buffers), copy in zip(self._states, into.buffers, strict=True):
            if copy is not None:
                _copy_state(copy, buffers[self.parity], pair, counters.rows)
        for copy, buffer in zip(into.outputs, self._features(), strict=True):
            copy.copy_from(buffer)
        return Snapshot(counters, into.buffers, into.outputs, self.engines)

    def blank(self, counters: Counters, *, kv: bool = True) -> Snapshot:
        """A snapshot of a sequence of zeros, to be filled."""

        def blank(pair: StatePair) -> Buffer | None:
            is_kv = pair.rows_axis is not None
            return self.memory.allocate(_copied(pair, counters)) if kv or not is_kv else None

        return Snapshot(
            counters,
            tuple(blank(pair) for pair, _ in self._states),
            tuple(self.memory.allocate(b.spec) for b in self._features()),
            self.engines,
        )

    def rollback(self, snapshot: Snapshot) -> None:
        """Stand where `snapshot` was taken, whatever has happened since, `reset` included.

        Raises:
            InputError: The snapshot was taken from a cache of other engines, states or sizes.
        """
        if not self._fits(snapshot):
            raise InputError("this snapshot was taken on a chain of another bundle or drafter")
        self._take(snapshot.buffers, snapshot.outputs, snapshot.counters)

    def adopt(self, other: Cache) -> None:
        """Stand where a cache of another capacity stands, by copies of all that is live there."""
        states = [buffers[other.parity] for _, buffers in other._states]
        self._take(states, other._features(), other.counters)

    def stand(self, counters: Counters) -> None:
        """Say where the sequence stands, whatever the buffers hold."""
        self.tokens, self.position = list(counters.tokens), counters.position
        self.pending, self._call = counters.pending, counters.call
        self._before = None

    def _take(
        self, states: Sequence[Buffer | None], outputs: Sequence[Buffer], counters: Counters
    ) -> None:
        """Copy what is live of these states and outputs, and stand where they stood."""
        for (pair, buffers), source in zip(self._states, states, strict=True):
            target = buffers[self.parity]
            if source is not None:
                if pair.rows_axis is not None:
                    target.zero()  # rows of another sequence: a NaN there would spread
                _copy_state(target, source, pair, counters.rows)
        for target, source in zip(self._features(), outputs, strict=True):
            target.copy_from(source)
        self.stand(counters)

    def _left(self, trunk: EngineSpec, inputs: Mapping[str, Buffer]) -> dict[str, Buffer]:
        """The outputs that a call leaves beside the inputs of the next one."""
        outputs = {name: inputs[as_read] for name, as_read in HANDED_ON.items()}
        outputs["pending"] = inputs["ids"].rows(0)
        return {t.name: outputs.get(t.name) or self.memory.allocate(t) for t in trunk.outputs}

    def _add(self, pairs: Sequence[StatePair]) -> list[tuple[StatePair, tuple[Buffer, Buffer]]]:
        added = []
        for pair in pairs:
            source, target = pair.tensors
            buffer = self.memory.allocate(source)
            other = buffer if pair.in_place else self.memory.allocate(target)
            added.append((pair, (buffer, other)))
        self._states += added
        return added

    def _features(self) -> list[Buffer]:
        outputs = self.outputs[self.parity]
        return [outputs[name] for name in FEATURES if name in outputs]

    def _fits(self, snapshot: Snapshot) -> bool:
        if snapshot.engines != self.engines or len(snapshot.buffers) != len(self._states):
            return False
        for (pair, _), copy in zip(self._states, snapshot.buffers, strict=True):
            want = _copied(pair, snapshot.counters)
            if copy and (copy.spec.dtype, copy.spec.shape) != (want.dtype, want.shape):
                return False
        return len(snapshot.counters.tokens) <= self.capacity


def padded(ids: Sequence[int], rows: int) -> list[int]:
    """Ids for a call of so many rows: -1, no token, behind the last."""
    return [*ids, *[-1] * (rows - len(ids))]


def _copied(pair: StatePair, counters: Counters) -> TensorSpec:
    """The copy of a state in a snapshot: whole, or the rows of a KV cache up to the sequence's."""
    shape = list(pair.shape)
    if pair.rows_axis is not None:
        shape[pair.rows_axis] = counters.rows
    return TensorSpec(pair.input, pair.dtype, tuple(shape))


def _copy_state(target: Buffer, source: Buffer, pair: StatePair, rows: int) -> None:
    """Copy a whole state, or so many rows of a KV cache."""
    if pair.rows_axis is None:
        target.copy_from(source)
    else:
        target.copy_from(source, rows, axis=pair.rows_axis)
