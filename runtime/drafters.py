"""Drafters guess the tokens after the pending one; the chain checks every guess.

Alignment, for all of them: row i of a draft pairs token i+1 with feature i and stands at position
i. So the rows of a trunk call can be drafted from once the token after its last kept row is known:
the next prompt token, the pending one, or whatever the caller continues with instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal, Protocol

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import TensorSpec
from eagle_chain.runtime.buffers import Buffer
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.session import Session

DraftKV = Literal["kept", "scratch"]


class Drafter(Protocol):
    """Guesses tokens. What it remembers of a sequence lives in the cache, which can rewind it."""

    def observe(self, token: int) -> None:
        """Take in the kept rows of the last trunk call, which `token` follows."""
        ...

    def propose(self, token: int, k: int) -> list[int]:
        """Observe, then guess up to `k` trunk-vocabulary ids to follow `token`."""
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
        self._kv = list(kv.values())
        allocate = draft.memory.allocate
        self._g = allocate(encoder.spec.outputs[0])
        self._encode = [
            encoder.bind({"features": outputs["features"], "g": self._g})
            for outputs in cache.outputs
        ]
        # guess j leaves its token, recurrence and position where guess j + 1 enters
        outputs = draft.spec.outputs
        guesses = [{t.name: allocate(t) for t in outputs} for _ in range(cache.width - 1)]
        self._guesses = [guess["token"] for guess in guesses]
        entry = draft_step if self.scratch else draft
        self._entry = {t.name: allocate(t) for t in entry.spec.inputs if t.name != "g"}
        self._entry["g"] = allocate(TensorSpec("g", self._g.spec.dtype, entry.spec.inputs[1].shape))
        if not self.scratch:
            self._entry["g"] = self._g
        self._extend = entry.bind({**self._entry, **guesses[0], **kv})
        row_zero = allocate(TensorSpec("row", "int32", (1,)))
        self._steps = [
            draft_step.bind({**_re_fed(before), "row": row_zero, **after, **kv})
            for before, after in itertools.pairwise(guesses)
        ]

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
        for step in self._steps[: k - 1]:
            step.run()
        guesses = [int(buffer.read()[0]) for buffer in self._guesses[:k]]
        if -1 not in guesses:
            return guesses
        if self.scratch:  # no later extend writes over the rows that are not numbers
            for buffer in self._kv:
                buffer.zero()
        return guesses[: guesses.index(-1)]

    def _run_extend(self, token: int) -> None:
        cache, entry = self.cache, self._entry
        ids = [*cache.tokens[cache.position + 1 :], token]
        self._encode[cache.parity].run()
        entry["ids"].write([*ids, *[-1] * (cache.width - len(ids))])
        entry["position"].write(cache.position)
        entry["row"].write(cache.kept - 1)
        self._extend.run()

    def _start_scratch(self, token: int) -> None:
        """One row at slot 0: the feature of the last kept row with the token after it."""
        self._encode[self.cache.parity].run()
        self._entry["g"].copy_from(self._g, 1, start=self.cache.kept - 1)
        self._entry["ids"].write(token)
        self._extend.run()


def _re_fed(guess: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """The outputs of one guess under the names by which they enter the next step."""
    return {"ids": guess["token"], "g": guess["g_next"], "position": guess["next_position"]}
