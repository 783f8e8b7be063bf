"""A chain that stands at a position without having got there, for measuring."""

from __future__ import annotations

import time
from collections.abc import Mapping

from eagle_chain.runtime.cache import Cache, Counters
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.drafters import NoDrafter
from eagle_chain.runtime.load import engine_drafter
from eagle_chain.runtime.measure import Clock, clock, fill_states, host_time
from eagle_chain.runtime.session import Binding, Session

WARM_UP = 6  # rounds before the clock: every one has been captured by then


class Stand:
    """Rounds of a chain at a position, with something in every state.

    Args:
        sessions: `trunk`, and for k > 0 those of the drafter.
        capacity: Of the engines.
        k: Drafts per round.
        position: How many tokens the cache says it holds.
        drafter: One of `DRAFT_ENGINES`.
    """

    def __init__(
        self,
        sessions: Mapping[str, Session],
        capacity: int,
        k: int,
        position: int,
        drafter: str = "eagle",
    ) -> None:
        self.k, self.position = k, position
        trunk = sessions["trunk"]
        self.memory = trunk.memory
        self.cache = Cache(trunk.spec, trunk.memory, capacity)
        self.drafter = engine_drafter(drafter, sessions, self.cache) if k else None
        self.chain = Chain(trunk, self.cache, self.drafter or NoDrafter(), vocab_size=1)
        fill_states(self.cache.states)
        self.stand()

    @property
    def parts(self) -> Mapping[str, Binding]:
        """The engines of a round by name."""
        return dict(self.chain.device.parts(self.drafter, self.k, 0))

    def part(self, name: str, runs: int) -> Clock:
        """Time the engine of one part of a round."""
        return clock(self.memory, self.parts[name].run, runs)

    def whole(self, runs: int) -> Clock:
        """Time whole rounds on the device; each starts over at the position."""
        return clock(self.memory, self.launch, runs, WARM_UP, self.stand)

    def wall(self, runs: int) -> Clock | None:
        """Time rounds by the wall as `Chain.generate` runs them; None if too few fit.

        Random states may give logits that are not finite, where a chain ends: then zeros must do.
        """
        runs = min(runs, (self.cache.capacity - self.position) // (self.k + 1) - WARM_UP - 2)
        if runs < 1:
            return None
        try:
            return self._timed(runs)
        except FloatingPointError:
            self.cache.reset()
            return self._timed(runs)

    def _timed(self, runs: int) -> Clock:
        self.stand()
        rounds = self.chain.rounds([0], k=self.k, append=True, stop_ids=())
        for _ in range(WARM_UP + 1):  # the first is the prompt
            next(rounds)
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            next(rounds)
            times.append((time.perf_counter() - start) * 1e3)
        return Clock(tuple(times))

    def host(self, runs: int) -> float:
        """Milliseconds that the host is busy with queueing one round."""
        return host_time(self.memory, self.launch, runs, self.stand)

    def launch(self) -> None:
        """Queue one round."""
        self.chain.device.launch(self.drafter, self.k, 0)

    def stand(self) -> None:
        """Go back to the position."""
        rows = min(3, self.cache.width, self.position)
        tokens = (0,) * self.position
        self.cache.stand(Counters(tokens, self.position - rows, 0, tokens[:rows]))
        self.chain.device.stage(self.k)
