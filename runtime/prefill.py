"""A prompt in wide calls: the trunk over P rows at once, then the drafter's KV rows for them.

The last rows of a prompt always go through the trunk's own W-row engine. So whatever follows (a
round, a snapshot, another prompt) finds the sequence as any other call leaves it, and the drafts
are made from the same features as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eagle_chain.runtime.buffers import Buffer
from eagle_chain.runtime.cache import Cache, padded
from eagle_chain.runtime.session import Binding, Session

# A call that is not full costs as much as one that is. It is worth that from so many rows on, as a
# share of P: on a CPU time goes with the rows, on a GPU a W-row call reads all weights as well.
WORTH_ON_CPU = 4
WORTH_ON_GPU = 16


@dataclass(frozen=True)
class Follower:
    """What a drafter does after each wide call.

    Args:
        session: Takes `ids`, `position` and `rows` as the trunk does, but every id one further, and
            outputs of the trunk's call by their names.
        kv: The drafter's KV buffers by tensor name.
    """

    session: Session
    kv: Mapping[str, Buffer]


class Prefill:
    """Wide calls on one cache.

    Args:
        trunk: The engine over P rows.
        cache: The sequence.
        follower: The drafter's part; None if nothing is kept of a prompt.
    """

    def __init__(self, trunk: Session, cache: Cache, follower: Follower | None = None) -> None:
        self.cache = cache
        allocate = trunk.memory.allocate
        self._inputs = {t.name: allocate(t) for t in trunk.spec.inputs}
        self._outputs = {t.name: allocate(t) for t in trunk.spec.outputs}
        self.rows = self._inputs["ids"].spec.shape[0]
        share = WORTH_ON_CPU if trunk.memory.device == "cpu" else WORTH_ON_GPU
        self._worth = self.rows // share
        states = [cache.state_tensors(parity) for parity in (0, 1)]
        plain = {**self._inputs, **self._outputs}
        self._trunk = [trunk.bind({**plain, **states[parity]}) for parity in (0, 1)]
        self._follow: Binding | None = None
        if follower is not None:
            shared = {**self._outputs, **self._inputs}
            names = [t.name for t in follower.session.spec.inputs if t.name != "ids"]
            self._next = allocate(follower.session.spec.inputs[0])
            given = {name: shared[name] for name in names}
            self._follow = follower.session.bind({"ids": self._next, **given, **follower.kv})

    def next_rows(self, left: int) -> int:
        """How many of the `left` tokens of a prompt a wide call takes, 0 if it is not worth it.

        One at least stays for the W-row call that ends a prompt.
        """
        rows = min(self.rows, left - 1)
        return rows if rows >= self._worth else 0

    def feed(self, ids: Sequence[int], follows: int, *, draft: bool) -> bool:
        """Run over `ids` behind the sequence, of which they are then part.

        Args:
            ids: Up to P tokens.
            follows: The token after them.
            draft: Whether the drafter takes part.

        Returns:
            False if the logits after the last of them are not finite: the sequence is as before.
        """
        cache = self.cache
        self._inputs["ids"].write(padded(ids, self.rows))
        self._inputs["position"].write(len(cache.tokens))
        self._inputs["rows"].write(len(ids))
        self._inputs["kept"].write(cache.kept)
        self._trunk[cache.parity].run()
        pending = int(self._outputs["pending"].read()[0])
        if pending < 0:
            cache.wipe()  # rows that are not numbers, further on than the next calls write
            return False
        if draft and self._follow is not None:
            self._next.write(padded([*ids[1:], follows], self.rows))
            self._follow.run()
        cache.absorb(ids, pending)
        return True
