"""A request to a chain: a prompt and its options, checked here."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypedDict

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.progress import counted
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


@dataclass(frozen=True)
class Limits:
    """What the engines of a bundle can be asked for."""

    width: int
    capacity: int
    vocab_size: int
    can_draw: bool

    def check_prompt(self, ids: Sequence[int], held: int = 0) -> list[int]:
        """The prompt as plain ints; an `InputError` if it does not fit behind `held` tokens."""
        prompt = token_ids("the prompt", ids)
        if not prompt:
            raise InputError("the prompt is empty: decoding starts from at least one token")
        wrong = [i for i in prompt if not 0 <= i < self.vocab_size]
        if wrong:
            raise InputError(
                f"token id {wrong[0]} in the prompt is outside the vocabulary, "
                f"0 to {self.vocab_size - 1}"
            )
        if held + len(prompt) > self.capacity:
            if held >= self.capacity:
                raise InputError(
                    f"nothing fits behind {counted(held, 'cached token')}, as the bundle's "
                    f"capacity is {self.capacity}: export with a larger --capacity"
                )
            behind = f" behind {held} cached ones" if held else ""
            raise InputError(
                f"the prompt has {counted(len(prompt), 'token')}{behind}, but the bundle's "
                f"capacity is {self.capacity}: shorten it or export with a larger --capacity"
            )
        return prompt

    def check_drafts(self, k: Drafts) -> int:
        """The most drafts of a round that `k` allows; an `InputError` if it is out of range."""
        most = self.width - 1
        if k is None or k == "auto":
            return most
        k = whole("k", k, "a whole number or 'auto'")
        if not 0 <= k <= most:
            raise InputError(
                f"k is {k}, expected 0 to {most}: the trunk was exported with width {most + 1}, "
                "one row for the pending token and one per draft"
            )
        return k

    def check_draws(self, temperature: float, seed: int) -> float:
        """The temperature as a float; an `InputError` if nothing can be drawn with it."""
        temperature = float(temperature)
        if not (0 <= temperature < math.inf):
            raise InputError(f"temperature is {temperature}, expected a number from 0 up")
        if not 0 <= whole("seed", seed) < 1 << 64:
            raise InputError(f"seed is {seed}, expected 0 to 2^64 - 1")
        if temperature and not self.can_draw:
            raise InputError(
                f"temperature is {temperature}, but this bundle only takes the largest logit: "
                "export it with --sampling"
            )
        return temperature


def check_budget(budget: int | None) -> None:
    """Refuse a number of new tokens that is none."""
    if budget is not None and whole("max_new_tokens", budget) < 0:
        raise InputError(f"max_new_tokens is {budget}, expected 0 or more")


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and its options, checked, with the chain's own in place of those left out."""

    prompt: list[int]
    pace: Pace
    stops: frozenset[int]
    max_new_tokens: int | None
    append: bool
    temperature: float
    seed: int
    fed: Fed

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


def whole(name: str, value: int, wanted: str = "a whole number") -> int:
    """`value`, or an `InputError` if it is not an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise InputError(f"{name} is {value!r}, expected {wanted}") from None


def token_ids(name: str, values: Collection[int]) -> list[int]:
    """Ids as a list of int, whatever integers they are; an `InputError` if they are not."""
    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise InputError(f"{name} must be a sequence of token ids: {error}") from None
