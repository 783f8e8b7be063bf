"""Caches of several capacities for one sequence: each call runs at the smallest that holds it.

What a call costs in attention goes with the capacity of its engines. So a sequence starts in the
smallest cache and moves, by copies within the device, when it has grown; the engines share their
weights. Which capacity computes a token depends on nothing but its position, or plain decoding and
the chain would not agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eagle_chain.engines.errors import InputError
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.drafters import Drafter
from eagle_chain.runtime.prefill import Prefill
from eagle_chain.runtime.rounds import Rounds
from eagle_chain.runtime.session import Session


class Rung:
    """A cache of one capacity, and all that is bound to its buffers.

    Args:
        trunk: The trunk's engine of this capacity.
        cache: For that engine.
        drafter: Guesses for this cache.
        prefill: Wide calls on it.
    """

    def __init__(
        self, trunk: Session, cache: Cache, drafter: Drafter, prefill: Prefill | None = None
    ) -> None:
        self.cache = cache
        self.drafter = drafter
        self.prefill = prefill
        self.trunk = [trunk.bind(cache.tensors(parity)) for parity in (0, 1)]
        self.device = Rounds(cache, self.trunk)


@dataclass(frozen=True)
class Larger:
    """A capacity that is made when a sequence first needs it.

    Args:
        capacity: In tokens.
        wide: Rows of its prefill engine, 0 without.
        make: Allocates its cache and binds its engines.
    """

    capacity: int
    wide: int
    make: Callable[[], Rung]


class Ladder:
    """The rungs of a chain, smallest first, one of which holds the sequence.

    Args:
        first: The smallest.
        larger: The others, ascending.
    """

    def __init__(self, first: Rung, larger: Sequence[Larger] = ()) -> None:
        self._larger = larger
        self._rungs: list[Rung | None] = [first, *[None] * len(larger)]
        self._capacities = [first.cache.capacity, *(rung.capacity for rung in larger)]
        wide = first.prefill.rows if first.prefill else 0
        self._wide = [wide, *(rung.wide for rung in larger)]
        self._width = first.cache.width
        self._at = 0
        self._draw = (0.0, 0)
        self._given: Drafter | None = None

    @property
    def capacity(self) -> int:
        """The longest sequence in tokens."""
        return self._capacities[-1]

    @property
    def rung(self) -> Rung:
        """The rung that holds the sequence."""
        rung = self._rungs[self._at]
        assert rung is not None, "the sequence stands on a rung that was made"
        return rung

    @property
    def rows(self) -> int:
        """How many tokens from here on this rung computes."""
        return self._last(self._at) + 1 - len(self.rung.cache.tokens)

    def for_rows(self) -> Rung:
        """The rung for a call of W rows behind the sequence, which it then holds."""
        return self._move(self._index(len(self.rung.cache.tokens)))

    def for_prompt(self, left: int) -> tuple[Rung, int]:
        """The rung for a wide call over a prompt of `left` more tokens, and how many it takes.

        That is 0 where no wide call is worth it or fits: the sequence stays where it is.
        """
        position = len(self.rung.cache.tokens)
        for index, rows in enumerate(self._wide):
            if rows and position + rows <= self._capacities[index] + self._width:
                prefill = self._made(index).prefill
                assert prefill is not None, "this rung has an engine for it"
                taken = prefill.next_rows(left)
                return (self._move(index), taken) if taken else (self.rung, 0)
        return self.rung, 0

    def draw(self, temperature: float, seed: int) -> None:
        """How tokens are chosen from here on, see `Cache.draw`."""
        self._draw = (temperature, seed)
        self.rung.cache.draw(temperature, seed)

    def give(self, drafter: Drafter) -> None:
        """Let one drafter guess at every capacity."""
        self._given = drafter
        for rung in self._rungs:
            if rung is not None:
                rung.drafter = drafter

    def restart(self) -> Rung:
        """The smallest rung, emptied."""
        self._at = 0
        self.rung.cache.reset()
        return self.rung

    def stand(self, position: int, settle: Callable[[Rung], None]) -> Rung:
        """Leave the sequence for one of `position` tokens, which `settle` puts into its rung.

        If `settle` raises, the sequence stays.
        """
        index = self._index(position)
        settle(self._made(index))
        self._at = index
        return self.rung

    def cache_for(self, tokens: int) -> Cache:
        """The cache that holds a sequence of so many tokens.

        Raises:
            InputError: They are too many.
        """
        if tokens > self.capacity:
            raise InputError(
                f"the sequence has {tokens} tokens, but the bundle's capacity is {self.capacity}"
            )
        return self._made(self._index(tokens)).cache

    def _last(self, index: int) -> int:
        """The last position that a rung computes: W rows from there fit its capacity.

        The largest goes on to its end, as its buffers have W rows more than that.
        """
        capacity = self._capacities[index]
        return capacity - (self._width if index + 1 < len(self._capacities) else 1)

    def _index(self, position: int) -> int:
        last = len(self._capacities) - 1
        return next((i for i in range(last) if position <= self._last(i)), last)

    def _made(self, index: int) -> Rung:
        rung = self._rungs[index]
        if rung is None:
            rung = self._rungs[index] = self._larger[index - 1].make()
            rung.drafter = self._given or rung.drafter
        return rung

    def _move(self, index: int) -> Rung:
        if index != self._at:
            there, here = self._made(index), self.rung
            here.device.leave()
            there.device.leave()
            here.drafter.settle()
            there.cache.adopt(here.cache)
            there.cache.draw(*self._draw)
            there.drafter.reset()
            self._at = index
        return self.rung
