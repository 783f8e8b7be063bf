"""The trunk calls of a parity check: a prompt, then every accepted count, each resumed from."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_chain.engines.errors import InputError

PROMPT = -1  # in place of an accepted count
STEPS = 2  # single draft steps after each extend


@dataclass(frozen=True)
class Round:
    """One trunk call, or one of the prefill engine, and what of it joins the sequence."""

    rows: int  # valid rows
    accepted: int  # drafts that must be confirmed, or PROMPT
    at_end: bool = False  # stands where the capacity ends, not where the sequence does
    wide: bool = False  # of the prefill engine

    @property
    def joins(self) -> int:
        """How many of its rows join the sequence."""
        return self.rows if self.accepted == PROMPT else self.accepted + 1

    @property
    def kept(self) -> int:
        """How many of them the next call has to fold in."""
        return 0 if self.wide else self.joins


def schedule(width: int, capacity: int, prefill: int = 0) -> tuple[Round, ...]:
    """The rounds for a trunk of `width` rows and a prefill engine of `prefill`, if there is one.

    Two whole prompt chunks and a part of one; then every accepted count 0..width - 1, from both
    ends inwards, so that long and short resumptions alternate; a plain step; a call with fewer rows
    than the width; and one at the last position of the capacity, where KV buffer and rotary table
    end. Wide calls stand behind the first chunk.

    Raises:
        InputError: The capacity does not hold them.
    """
    counts = [n for pair in zip(range(width), range(width - 1, -1, -1), strict=True) for n in pair]
    rounds = (
        Round(width, PROMPT),
        Round(width, PROMPT),
        Round((width + 1) // 2, PROMPT),
        *(Round(width, accepted) for accepted in counts[:width]),
        Round(1, 0),
        Round(max(2, width - 1), 1),
        Round(width, 0),
        Round(1, 0, at_end=True),
    )
    needed = sum(round.joins for round in rounds) + width
    if needed + (prefill > 0) > capacity:
        raise InputError(
            f"the bundle's capacity is {capacity}, the calls of a parity check at width {width} "
            f"take {needed + (prefill > 0)} tokens: export with a larger --capacity"
        )
    if not prefill:
        return rounds
    at = 1 if width + prefill <= capacity + width else 0
    wide = _wide(at * width, capacity - needed, capacity + width - prefill, prefill)
    return (*rounds[:at], *wide, *rounds[at:])


def _wide(start: int, room: int, last_start: int, prefill: int) -> list[Round]:
    """A wide call that is as full as the room allows, and if it can stand there a fuller one.

    Args:
        start: Where the first stands.
        room: Tokens that both may add.
        last_start: Where the last may stand, as a call writes all its rows.
        prefill: Rows of a call.
    """
    first = min(prefill, max(1, room // 3), max(1, last_start - start))
    second = min(prefill, room - first)
    if second < 1 or start + first > last_start:
        return [Round(min(prefill, room), PROMPT, wide=True)]
    return [Round(n, PROMPT, wide=True) for n in (first, second)]
