"""Drafters guess the tokens after the pending one; the chain checks every guess.

Alignment, for all that have a KV: row i of a draft pairs token i+1 with feature i and stands at
position i. So the rows of a trunk call can be drafted from once the token after its last kept row
is known: the next prompt token, the pending one, or whatever the caller continues with instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import TensorSpec
from eagle_chain.runtime.buffers import Buffer
from eagle_chain.runtime.cache import Cache, padded
from eagle_chain.runtime.session import Binding, Session

DraftKV = Literal["kept", "scratch"]
Part = tuple[str, Binding]  # one engine run of a round, under a name for clocks
# The engines of an `EagleDrafter` by its name: its encoder, over W rows, over one.
DRAFT_ENGINES: dict[str, tuple[str | None, str, str]] = {
    "eagle": ("encoder", "draft", "draft_step"),
    "mtp": (None, "mtp", "mtp_step"),
}


def engine_calls(k: int, drafter: str | None) -> dict[str, int]:
    """How often a round of k drafts calls each engine, the trunk under its name for clocks."""
    if not k or drafter is None:
        return {"plain": 1}
    encoder, extend, step = DRAFT_ENGINES[drafter]
    return {"verify": 1} | ({encoder: 1} if encoder else {}) | {extend: 1, step: k - 1}


class Drafter(Protocol):
    """Guesses tokens for one cache; the chain tells it of every trunk call, in order.

    Device state of a sequence is claimed from the cache, which can rewind it.
    """

    def observe(self, token: int) -> None:
        """Take in the kept rows of the last trunk call, which `token` follows.

        The work may be put off until `propose` or `settle`.
        """
        ...

    def propose(self, token: int, k: int) -> list[int]:
        """Observe, then guess up to `k` trunk-vocabulary ids to follow `token`."""
        ...

    def settle(self) -> None:
        """Do what was put off: the cache is about to be copied, or read by the device alone."""
        ...

    def reset(self) -> None:
        """Forget the sequence: the cache is empty now, or stands elsewhere."""
        ...


@runtime_checkable
class DeviceDrafter(Drafter, Protocol):
    """A drafter that can also guess without the host, from the buffers of the cache alone."""

    def parts(self, parity: int, k: int) -> Sequence[Part]:
        """The runs that put k guesses behind `ids[0]` of the trunk call at `parity`.

        They read what the call before left and `Cache.follow` would write, and nothing may be put
        off. None at all: this drafter needs the host.
        """
        ...


class NoDrafter:
    """Guesses nothing: the chain decodes plainly. Base of those that keep nothing in a cache."""

    def observe(self, token: int) -> None:
        """Do nothing."""

    def propose(self, token: int, k: int) -> list[int]:
        """Return no guess."""
        return []

    def settle(self) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


class EagleDrafter:
    """EAGLE-3 or MTP: one layer over what the trunk leaves per row, its own output re-fed.

    EAGLE-3 reads `features` through an encoder, MTP reads `hidden` as it is; the rest is the same.
    An extend runs up to W rows from their true features; rows behind the last kept one are never
    attended and are overwritten by the next extend, as are the rows that single steps wrote from
    guesses. The guesses of a round are read only at its end.

    Rows that nobody drafts from are put off: their features are copied aside, and one extend takes
    in up to W of them together. So a round without drafts costs a copy, and an extend once per W
    tokens.

    Args:
        cache: The sequence to draft for.
        encoder: `features` [W, A*Ht] -> `g` [W, H]; None for a layer that reads `hidden` [W, H].
        draft: The draft layer over W rows.
        draft_step: The same layer over one row.
        draft_kv: "kept" holds one KV row per token of the sequence; "scratch" starts each round
            from an empty cache with the last feature alone.
    """

    def __init__(
        self,
        cache: Cache,
        encoder: Session | None,
        draft: Session,
        draft_step: Session,
        draft_kv: DraftKV = "kept",
    ) -> None:
        if draft_kv not in ("kept", "scratch"):
            raise InputError(f"draft_kv is {draft_kv!r}, expected 'kept' or 'scratch'")
        self.cache = cache
        self.scratch = draft_kv == "scratch"
        self.encoded = encoder is not None
        if cache.width < 2:
            raise InputError("a trunk of width 1 has no row for a draft: export with --width 5")
        self.kv = cache.claim(draft.spec.states)
        allocate = draft.memory.allocate
        read = "features" if encoder else "hidden"
        self._read = [outputs[read] for outputs in cache.outputs]
        self._aside = allocate(replace(self._read[0].spec, name="aside"))  # rows put off
        self._ids: list[int] = []  # the token behind each of them
        self._start = 0  # where the first of them stands
        encoded = allocate(encoder.spec.outputs[0]) if encoder else None
        self._g = [encoded or rows for rows in self._read]
        self._late = {t.name: allocate(t) for t in draft.spec.inputs if t.name != "g"}
        self._late["g"] = encoded or self._aside
        self._first: dict[str, Buffer] = {}  # the one row of a scratch round
        if self.scratch:
            self._first = {t.name: allocate(t) for t in draft_step.spec.inputs}
        left = [t for t in draft.spec.outputs if t.name != "token"]
        guesses = [{t.name: allocate(t) for t in left} for _ in range(cache.width - 1)]
        row = allocate(TensorSpec("row", "int32", (1,)))  # 0

        def encode(rows: Buffer) -> list[Part]:
            if encoder is None or encoded is None:
                return []
            return [(encoder.spec.plain, encoder.bind({"features": rows, "g": encoded}))]

        self._runs: list[list[Part]] = []
        self._late_runs: list[list[Part]] = []
        self._lead = 1 if encoder is None else 2  # runs up to the first guess
        for parity in (0, 1):
            (reads, writes), *later = self._guesses(parity, guesses, row)
            extend = (draft_step if self.scratch else draft).bind({**reads, **writes})
            late = draft.bind({**self._late, **writes})
            steps = [(draft_step.spec.plain, draft_step.bind({**r, **w})) for r, w in later]
            read_now = encode(self._read[parity])
            self._runs.append([*read_now, (draft.spec.plain, extend), *steps])
            self._late_runs.append([*encode(self._aside), (draft.spec.plain, late)])

    def _guesses(
        self, parity: int, left: Sequence[dict[str, Buffer]], row: Buffer
    ) -> Iterator[tuple[dict[str, Buffer], dict[str, Buffer]]]:
        """What each guess of a round reads and writes.

        It leaves its recurrence and position where the next one enters, and its token in the row of
        the trunk's ids where that one and the trunk read it.
        """
        cache = self.cache
        ids, outputs = cache.inputs[parity]["ids"], cache.outputs[parity]
        reads = self._first or {
            "ids": outputs["next_ids"],
            "g": self._g[parity],
            "position": cache.inputs[1 - parity]["position"],  # of the call before
            "row": outputs["accepted"],
        }
        for j, states in enumerate(left, 1):
            token = ids.rows(j)
            yield reads, {**states, "token": token, **self.kv}
            position = states["next_position"]
            reads = {"ids": token, "g": states["g_next"], "position": position, "row": row}

    def parts(self, parity: int, k: int) -> Sequence[Part]:
        """The extend and k - 1 steps; scratch rounds copy a row that the host must choose."""
        return [] if self.scratch else self._runs[parity][: self._lead + k - 1]

    def observe(self, token: int) -> None:
        """Run the extend over a full call, put fewer rows off; nothing if KV is scratch."""
        cache = self.cache
        if self.scratch or not cache.kept:
            return
        self._make_room()
        if cache.kept == cache.width:
            self._run_extend(token)
        else:
            self._put_off(token)

    def propose(self, token: int, k: int) -> list[int]:
        """Extend, then k - 1 single steps; a guess without finite logits is the round's end."""
        if not k:  # nothing to guess, but the rows must not be missed
            self.observe(token)
            return []
        if self.scratch:
            self._start_scratch(token)
        else:
            self._extend_to(token)
        for _, step in self._runs[self.cache.parity][self._lead : self._lead + k - 1]:
            step.run()
        ids = self.cache.inputs[self.cache.parity]["ids"].read()
        guesses = [int(id) for id in ids[1 : k + 1]]
        if -1 not in guesses:
            return guesses
        if self.scratch:  # no later extend writes over the rows that are not numbers
            for buffer in self.kv.values():
                buffer.zero()
        return guesses[: guesses.index(-1)]

    def settle(self) -> None:
        """Run the extend over the rows that were put off."""
        ids, late = self._ids, self._late
        if not ids:
            return
        late["ids"].write(padded(ids, self.cache.width))
        late["position"].write(self._start)
        late["row"].write(len(ids) - 1)
        for _, part in self._late_runs[self.cache.parity]:
            part.run()
        self._ids = []

    def reset(self) -> None:
        """Drop the rows that were put off: they belong to another sequence."""
        self._ids = []

    def _extend_to(self, token: int) -> None:
        """Extend over all rows up to the last kept one, together with those put off if they fit."""
        self._make_room()
        if self._ids:
            self._put_off(token)
            self.settle()
        else:
            self._run_extend(token)

    def _make_room(self) -> None:
        """Settle unless the kept rows of the last call follow those put off, and fit in as well."""
        cache, held = self.cache, len(self._ids)
        if self._start + held != cache.position or held + cache.kept > cache.width:
            self.settle()

    def _put_off(self, token: int) -> None:
        """Copy the kept rows of the last call aside."""
        cache = self.cache
        if not self._ids:
            self._start = cache.position
        there = self._aside.rows(len(self._ids), cache.kept)
        there.copy_from(self._read[cache.parity], cache.kept)
        self._ids += [*cache.tokens[cache.position + 1 :], token]

    def _run_extend(self, token: int) -> None:
        self.cache.follow(token)
        for _, part in self._runs[self.cache.parity][: self._lead]:
            part.run()

    def _start_scratch(self, token: int) -> None:
        """One row at slot 0: the feature of the last kept row with the token after it."""
        parity = self.cache.parity
        *encode, (_, extend) = self._runs[parity][: self._lead]
        for _, part in encode:
            part.run()
        self._first["g"].copy_from(self._g[parity], 1, start=self.cache.kept - 1)
        self._first["ids"].write(token)
        extend.run()
