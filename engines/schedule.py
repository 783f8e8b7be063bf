"""The trunk calls of a parity check: a prompt, then every accepted count, each resumed from."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_chain.engines.errors import InputError

PROMPT = -1  # in place of an accepted count
STEPS = 2  # single draft steps after each extend


@dataclass(frozen=True)
class Round:
    """One trunk call and what of it joins the sequence."""

    rows: int  # valid rows
    accepted: int  # drafts that must be confirmed, or PROMPT
    at_end: bool = False  # stands where the capacity ends, not where the sequence does

    @property
    def kept(self) -> int:
        """How many of its rows join the sequence."""
        return self.rows if self.accepted == PROMPT else self.accepted + 1


def schedule(width: int, capacity: int) -> tuple[Round, ...]:
    """The rounds for a trunk of `width` rows.

    Two whole prompt chunks and a part of one; then every accepted count 0..width - 1, from both
    ends inwards, so that long and short resumptions alternate; a plain step; a call with fewer rows
    than the width; and one at the last position of the capacity, where KV buffer and rotary table
    end.

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
    needed = sum(round.kept for round in rounds) + width
    if needed > capacity:
        raise InputError(
            f"the bundle's capacity is {capacity}, the calls of a parity check at width {width} "
            f"take {needed} tokens: export with a larger --capacity"
        )
    return rounds
