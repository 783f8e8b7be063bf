"""A request to a chain: a prompt and its options, checked here."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypedDict

from eagle_chain.engines.errors import InputError
from eagle_chain.runtime.adaptive import Drafts, Pace

Fed = Callable[[int], None]  # hears how many tokens the cache holds while a prompt is fed


def unheard(held: int) -> None:
    """Nobody waits for the prompt."""


class RequestOptions(TypedDict, total=False):
    """What a request may say beside its prompt, see `Chain.stream`."""

    max_new_tokens: int | None
    k: Drafts
    stop_ids: Collection[int] | None
    append: bool
    temperature: float
    seed: int


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and its options, with the chain's own in place of those left out.

    Raises:
        InputError: An option is out of its range.
    """

    prompt: list[int]
    pace: Pace
    stops: frozenset[int]
    max_new_tokens: int | None
    append: bool
    temperature: float
    seed: int
    fed: Fed

    def __post_init__(self) -> None:
        budget = self.max_new_tokens
        if budget is not None and whole("max_new_tokens", budget) < 0:
            raise InputError(f"max_new_tokens is {budget}, expected 0 or more")
        if not (0 <= self.temperature < math.inf):
            raise InputError(f"temperature is {self.temperature}, expected a number from 0 up")
        if not 0 <= whole("seed", self.seed) < 1 << 64:
            raise InputError(f"seed is {self.seed}, expected 0 to 2^64 - 1")

    def finish(self, tokens: Sequence[int], room: int, out_of_room: str) -> str | None:
        """Why the request ends with these tokens, None if it goes on."""
        if tokens and tokens[-1] in self.stops:
            return "eos"
        return out_of_room if len(tokens) == room else None


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


def whole(name: str, value: int) -> int:
    """`value`, or an `InputError` if it is not an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise InputError(f"{name} is {value!r}, expected a whole number") from None


def token_ids(name: str, values: Collection[int]) -> list[int]:
    """Ids as a list of int, whatever integers they are; an `InputError` if they are not."""
    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise InputError(f"{name} must be a sequence of token ids: {error}") from None
