"""Drafters guess the tokens after the pending one; the chain checks every guess.

Alignment, for all of them: row i of a draft pairs token i+1 with feature i and stands at position
i. So the rows of a trunk call can be drafted from once the token after its last kept row is known:
the next prompt token, the pending one, or whatever the caller continues with instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import TensorSpec
from eagle_chain.runtime.buffers import Buffer
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.session import Binding, Session

DraftKV = Literal["kept", "scratch"]
Part = tuple[str, Binding]  # one engine run of a round, under a name for clocks


class Drafter(Protocol):
    """Guesses tokens. What it remembers of a sequence lives in the cache, which can rewind it."""

    def observe(self, token: int) -> None:
        """Take in the kept rows of the last trunk call, which `token` follows."""
        ...

    def propose(self, token: int, k: int) -> list[int]:
        """Observe, then guess up to `k` trunk-vocabulary ids to follow `token`."""
        ...


@runtime_checkable
class DeviceDrafter(Drafter, Protocol):
    """A drafter that can also guess without the host, from the buffers of the cache alone."""

    def parts(self, parity: int, k: int) -> Sequence[Part]:
        """The runs that put k guesses behind `ids[0]` of the trunk call at `parity`.

        They read what the call before left and `Cache.follow` would write. None at all: this
        drafter needs the host.
        """
        ...


class NoDrafter:
    """Guesses nothing: the chain decodes plainly."""

    def observe(self, token: int) -> None:
        """Do nothing."""

    def propose(self, token: int, k: int) -> list[int]:
        """Return no guess."""
        return []


class EagleDrafter:
    """EAGLE-3: encoder over the trunk's features, one draft layer, its own output re-fed.

    `observe` runs all W rows of the last call from their true features (the `extend`); the rows
    behind the last kept one are never attended and are overwritten by the next extend, as are the
    rows that single steps wrote from guesses. The guesses of a round are read only at its end.

    Args:
        cache: The sequence to draft for.
        encoder: `features` [W, A*Ht] -> `g` [W, H].
        draft: The draft layer over W rows.
        draft_step: The same layer over one row.
        draft_kv: "kept" holds one KV row per token of the sequence; "scratch" starts each round
            from an empty cache with the last feature alone.
    """

    def __init__(
        self,
        cache: Cache,
        encoder: Session,
        draft: Session,
        draft_step: Session,
        draft_kv: DraftKV = "kept",
    ) -> None:
        if draft_kv not in ("kept", "scratch"):
            raise InputError(f"draft_kv is {draft_kv!r}, expected 'kept' or 'scratch'")
        self.cache = cache
        self.scratch = draft_kv == "scratch"
        if cache.width < 2:
            raise InputError("a trunk of width 1 has no row for a draft: export with --width 5")
        kv = cache.claim(draft.spec.states)
        self.kv = kv
        allocate = draft.memory.allocate
        self._g = allocate(encoder.spec.outputs[0])
        zero = allocate(TensorSpec("row", "int32", (1,)))
        self._first: dict[str, Buffer] = {}  # the one row of a scratch round
        if self.scratch:
            self._first = {t.name: allocate(t) for t in draft_step.spec.inputs}
        # guess j leaves its recurrence and position where guess j + 1 enters, and its token in row
        # j + 1 of the trunk's ids, where that guess and the trunk read it
        left = [t for t in draft.spec.outputs if t.name != "token"]
        guesses = [{t.name: allocate(t) for t in left} for _ in range(cache.width - 1)]
        self._runs: list[list[Part]] = []
        for parity in (0, 1):
            ids, outputs = cache.inputs[parity]["ids"], cache.outputs[parity]
            tokens = [ids.rows(j) for j in range(1, cache.width)]
            encode = encoder.bind({"features": outputs["features"], "g": self._g})
            entry: dict[str, Buffer] = self._first or {
                "ids": outputs["next_ids"],
                "g": self._g,
                "position": cache.inputs[1 - parity]["position"],  # of the call before
                "row": outputs["accepted"],
            }
            extend = (draft_step if self.scratch else draft).bind(
                {**entry, **guesses[0], "token": tokens[0], **kv}
            )
            runs: list[Part] = [("encoder", encode), ("draft", extend)]
            for j in range(1, cache.width - 1):
                before = guesses[j - 1]
                tensors = {
                    "ids": tokens[j - 1],
                    "g": before["g_next"],
                    "position": before["next_position"],
                    "row": zero,
                }
                tensors |= {**guesses[j], "token": tokens[j], **kv}
                runs.append(("draft_step", draft_step.bind(tensors)))
            self._runs.append(runs)

    def parts(self, parity: int, k: int) -> Sequence[Part]:
        """Encoder, extend, k - 1 steps; scratch rounds copy a row that the host must choose."""
        return [] if self.scratch else self._runs[parity][: k + 1]

    def observe(self, token: int) -> None:
        """Run the extend over the last call, unless nothing was kept or KV is scratch."""
        if self.cache.kept and not self.scratch:
            self._run_extend(token)

    def propose(self, token: int, k: int) -> list[int]:
        """Extend, then k - 1 single steps; a guess without finite logits is the round's end."""
        if not k:  # nothing to guess, but the rows must not be missed
            self.observe(token)
            return []
        if self.scratch:
            self._start_scratch(token)
        else:
            self._run_extend(token)
        for _, step in self._runs[self.cache.parity][2 : k + 1]:
            step.run()
        ids = self.cache.inputs[self.cache.parity]["ids"].read()
        guesses = [int(id) for id in ids[1 : k + 1]]
        if -1 not in guesses:
            return guesses
        if self.scratch:  # no later extend writes over the rows that are not numbers
            for buffer in self.kv.values():
                buffer.zero()
        return guesses[: guesses.index(-1)]

    def _run_extend(self, token: int) -> None:
        self.cache.follow(token)
        for _, part in self._runs[self.cache.parity][:2]:
            part.run()

    def _start_scratch(self, token: int) -> None:
        """One row at slot 0: the feature of the last kept row with the token after it."""
        (_, encode), (_, extend) = self._runs[self.cache.parity][:2]
        encode.run()
        self._first["g"].copy_from(self._g, 1, start=self.cache.kept - 1)
        self._first["ids"].write(token)
        extend.run()
