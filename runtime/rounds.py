"""Rounds without a host decision: draft, verify and accept run from device buffers alone.

What the trunk leaves (the pending token, how many rows were kept, where the next call stands) is
written straight to where the next call reads it, and a drafted token straight to its row of the
trunk's ids. So a round is a fixed sequence of engine runs over fixed addresses, one sequence per
parity; on a GPU each is captured once and replayed. The host reads W + 1 integers of a round, and
may do so while the next round already runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import StatePair, TensorSpec
from eagle_chain.runtime.buffers import Buffer, HostBuffer, Memory
from eagle_chain.runtime.cuda import CudaBuffer, CudaMemory, Graph
from eagle_chain.runtime.session import Binding, Session

WARM_UP = 2  # plain runs of each parity before capturing


@dataclass(frozen=True)
class Verdict:
    """What one round settled."""

    next_ids: tuple[int, ...]  # the trunk's choice after each row
    accepted: int  # drafted tokens confirmed, from the front

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the round: the accepted drafts and the trunk's own next one."""
        return self.next_ids[: self.accepted + 1]


class Rounds:
    """One sequence decoded in rounds of `k` drafts, k = 0 plainly.

    Args:
        sessions: `trunk`, and for k > 0 `encoder`, `draft` and `draft_step`, all of one memory.
        k: Drafts per round, below the trunk's width.
        graphs: Capture each round; only where the memory is a GPU's.
    """

    def __init__(self, sessions: Mapping[str, Session], k: int, *, graphs: bool = True) -> None:
        trunk = sessions["trunk"]
        self.memory = trunk.memory
        self.width = trunk.spec.inputs[0].shape[0]
        if not 0 <= k < self.width:
            raise InputError(f"k is {k}, expected 0 to {self.width - 1}")
        self.k = k
        self.parity = 0
        self._sides = tuple(self._side(trunk) for _ in range(2))
        self._states = [(pair, *self._pair(pair)) for pair in trunk.spec.states]
        self._rows = self.memory.allocate(TensorSpec("rows", "int32", (1,)))
        self.trunk = [trunk.bind(self._tensors(parity)) for parity in (0, 1)]
        self.parts: list[list[tuple[str, Binding]]] = [[], []]
        if k:
            self._bind_draft(sessions)
        for parity in (0, 1):
            self.parts[parity].append(("verify" if k else "plain", self.trunk[parity]))
        self._graphs: list[Graph | None] = [None, None]
        self._runs = [0, 0]
        self._capture = graphs and isinstance(self.memory, CudaMemory)
        self._results = [self._reader(parity) for parity in (0, 1)]

    def reset(self) -> None:
        """Empty every state."""
        for side in self._sides:
            for buffer in side.values():
                buffer.zero()
        for _, *buffers in self._states:
            for buffer in buffers:
                buffer.zero()
        self._rows.write(self.k + 1)

    def stand(self, position: int) -> None:
        """Pretend that a call ended at `position`, for measuring."""
        for side in self._sides:
            side["position"].write(position)
            side["kept"].write(min(3, self.width))
            side["accepted"].write(min(2, self.width - 1))

    def fill(self, work: Callable[[Iterable[tuple[StatePair, Buffer, Buffer]]], None]) -> None:
        """Let `work` write into the buffers of every state."""
        work(self._states)

    def start(self, prompt: Sequence[int]) -> int:
        """Feed a prompt into an empty sequence and return the token that follows it."""
        self.reset()
        next_ids: list[int] = []
        for at in range(0, len(prompt), self.width):
            ids = list(prompt[at : at + self.width])
            here, after = self._sides[self.parity], self._sides[1 - self.parity]
            here["ids"].write(self._padded(ids))
            here["position"].write(at)
            here["kept"].write(min(at, self.width))
            self._rows.write(len(ids))
            self.trunk[self.parity].run()
            next_ids = [int(i) for i in after["next_ids"].read()]
            follows = (
                prompt[at + len(ids)] if at + len(ids) < len(prompt) else next_ids[len(ids) - 1]
            )
            # what the draft will be run over: the prompt shifted by one, never the trunk's choices
            after["next_ids"].write(self._padded([*ids[1:], follows]))
            after["accepted"].write(len(ids) - 1)
            after["kept"].write(len(ids))
            after["position"].write(at + len(ids))
            ids_after = after["ids"].read()
            ids_after[0] = follows
            after["ids"].write(ids_after)
            self.parity = 1 - self.parity
            if self.k and at + len(ids) < len(prompt):
                for _, part in self.parts[self.parity][:2]:  # encoder and extend
                    part.run()
        self._rows.write(self.k + 1)
        return next_ids[(len(prompt) - 1) % self.width]

    def queue(self) -> Callable[[], Verdict]:
        """Queue one round and return what reads its result; at most two may be open."""
        parity = self.parity
        self._run(parity)
        self._results[parity].mark()
        self.parity = 1 - parity
        return self._results[parity]

    def verdicts(self) -> Iterator[Verdict]:
        """Endless rounds; each is read while the next one runs."""
        pending = self.queue()
        while True:
            following = self.queue()
            yield pending()
            pending = following

    def _run(self, parity: int) -> None:
        def work() -> None:
            for _, part in self.parts[parity]:
                part.run()
            self._results[parity].queue()

        graph = self._graphs[parity]
        if graph is not None:
            graph.launch()
            return
        self._runs[parity] += 1
        if self._capture and self._runs[parity] > WARM_UP:
            assert isinstance(self.memory, CudaMemory)
            graph = self._graphs[parity] = self.memory.capture(work, relaxed=True)
            graph.launch()
        else:
            work()

    def _side(self, trunk: Session) -> dict[str, Buffer]:
        """What the call of one parity reads, and what the call before it left."""
        names = {"next_kept": "kept", "next_position": "position"}
        side = {t.name: self.memory.allocate(t) for t in trunk.spec.inputs if t.name != "rows"}
        for tensor in trunk.spec.outputs:
            if tensor.name == "pending":
                side["pending"] = _row(side["ids"], 0)
            elif tensor.name not in names:
                side[tensor.name] = self.memory.allocate(tensor)
        return side | {name: side[input_] for name, input_ in names.items()}

    def _pair(self, pair: StatePair) -> tuple[Buffer, Buffer]:
        source, target = pair.tensors
        first = self.memory.allocate(source)
        return first, first if pair.in_place else self.memory.allocate(target)

    def _tensors(self, parity: int) -> dict[str, Buffer]:
        here, after = self._sides[parity], self._sides[1 - parity]
        inputs = {name: here[name] for name in ("ids", "position", "kept")}
        outputs = {name: b for name, b in after.items() if name not in inputs}
        tensors = {**inputs, "rows": self._rows, **outputs}
        for pair, first, second in self._states:
            sides = (first, second) if parity == 0 else (second, first)
            tensors |= {pair.input: sides[0], pair.output: sides[1]}
        return tensors

    def _bind_draft(self, sessions: Mapping[str, Session]) -> None:
        encoder, draft, step = (sessions[name] for name in ("encoder", "draft", "draft_step"))
        allocate = self.memory.allocate
        for pair in draft.spec.states:
            self._states.append((pair, *self._pair(pair)))
        kv = {
            name: buffer
            for pair, buffer, _ in self._states[-len(draft.spec.states) :]
            for name in (pair.input, pair.output)
        }
        g = allocate(encoder.spec.outputs[0])
        zero = allocate(TensorSpec("row", "int32", (1,)))
        for parity in (0, 1):
            here, parts = self._sides[parity], self.parts[parity]
            before = self._sides[1 - parity]  # whose `position` is that of the call before
            parts.append(("encoder", encoder.bind({"features": here["features"], "g": g})))
            guess = self._guess(draft, here["ids"], 1)
            inputs = {"ids": here["next_ids"], "g": g, "position": before["position"]}
            tensors = {**inputs, "row": here["accepted"], **guess, **kv}
            parts.append(("draft", draft.bind(tensors)))
            for j in range(2, self.k + 1):
                after = self._guess(step, here["ids"], j)
                inputs = {
                    "ids": guess["token"],
                    "g": guess["g_next"],
                    "position": guess["next_position"],
                }
                parts.append(("draft_step", step.bind({**inputs, "row": zero, **after, **kv})))
                guess = after

    def _guess(self, draft: Session, ids: Buffer, row: int) -> dict[str, Buffer]:
        outputs = {t.name: self.memory.allocate(t) for t in draft.spec.outputs if t.name != "token"}
        return outputs | {"token": _row(ids, row)}

    def _padded(self, ids: Sequence[int]) -> list[int]:
        return [*ids, *[-1] * (self.width - len(ids))]

    def _reader(self, parity: int) -> _Reader:
        after = self._sides[1 - parity]
        return _Reader(self.memory, after["next_ids"], after["accepted"])


class _Reader:
    """Brings a round's W + 1 integers to the host; of a round, not of those queued behind it."""

    def __init__(self, memory: Memory, *buffers: Buffer) -> None:
        self._buffers = buffers
        self._memory = memory if isinstance(memory, CudaMemory) else None
        self._host: list[NDArray[Any]] = []
        if self._memory is not None:
            self._host = [self._memory.pinned(b.spec.shape, b.spec.dtype) for b in buffers]
            self._done = self._memory.event()

    def queue(self) -> None:
        """Queue the copies to the host; part of the captured round."""
        if self._memory is not None:
            for host, buffer in zip(self._host, self._buffers, strict=True):
                self._memory.download(host, buffer.address)

    def mark(self) -> None:
        """Note that the round's work ends here."""
        if self._memory is not None:
            self._done.record()

    def __call__(self) -> Verdict:
        """Wait for the round and read it."""
        if self._memory is None:
            values = [buffer.read() for buffer in self._buffers]
        else:
            self._done.wait()
            values = self._host
        return Verdict(tuple(int(i) for i in values[0]), int(values[1][0]))


class _HostRow:
    """One element of a vector in host memory, as a buffer of its own."""

    device = "cpu"

    def __init__(self, vector: HostBuffer, row: int) -> None:
        self.spec = TensorSpec(vector.spec.name, vector.spec.dtype, (1,))
        self.array: NDArray[Any] = vector.array[row : row + 1]
        self.address: int = self.array.ctypes.data

    def read(self) -> NDArray[Any]:
        """Return a copy."""
        return self.array.copy()

    def write(self, values: ArrayLike) -> None:
        """Set the element."""
        self.array[...] = values

    def zero(self) -> None:
        """Set the element to zero."""
        self.array.fill(0)

    def copy_from(
        self, source: Buffer, rows: int | None = None, *, axis: int = 0, start: int = 0
    ) -> None:
        """Copy one element."""
        self.array[...] = np.asarray(source.read())[start : start + 1]


def _row(vector: Buffer, row: int) -> Buffer:
    if isinstance(vector, CudaBuffer):
        return vector.rows(row)
    assert isinstance(vector, HostBuffer), "vectors of counters are whole buffers"
    return _HostRow(vector, row)
