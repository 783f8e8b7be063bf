"""Clocks over device work, and what the work must at least move: medians, spread, bytes, floors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from eagle_chain.engines.derived import Derived
from eagle_chain.engines.spec import ITEM_BYTES, EngineSpec, StatePair, TensorSpec
from eagle_chain.runtime.buffers import NUMPY_DTYPES, Buffer, Memory
from eagle_chain.runtime.cuda import CudaBuffer, CudaMemory
from eagle_chain.runtime.weights import to_bf16

POOL = 1 << 24  # random values that all random tensors are cut from
SPREAD = 0.02  # standard deviation of random weights
COPIED = 1 << 31  # bytes of the copy that tells the bandwidth
LOOKED_UP = ("embed_tokens.weight", "d2t", "t2d")  # ends of names; read by rows, if at all


@dataclass(frozen=True)
class Clock:
    """Times of one piece of work, in milliseconds."""

    times: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.times)

    @property
    def spread(self) -> tuple[float, float]:
        """The 10th and the 90th percentile."""
        low, high = np.percentile(self.times, [10, 90])
        return float(low), float(high)

    def to_json(self) -> dict[str, Any]:
        """Median and spread."""
        low, high = self.spread
        return {"median_ms": self.median, "p10_ms": low, "p90_ms": high, "runs": len(self.times)}


def nothing() -> None:
    """Do nothing."""


def clock(
    memory: Memory,
    work: Callable[[], object],
    runs: int = 50,
    warm_up: int = 5,
    prepare: Callable[[], object] = nothing,
) -> Clock:
    """Time `work` run by run: device time between events on a GPU, wall time on the host.

    `prepare` runs before each and is not counted.
    """
    for _ in range(warm_up):
        prepare()
        work()
    if not isinstance(memory, CudaMemory):
        times = []
        for _ in range(runs):
            prepare()
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e3)
        return Clock(tuple(times))
    memory.synchronize()
    marks = [(memory.event(), memory.event()) for _ in range(runs)]
    for before, after in marks:
        prepare()
        before.record()
        work()
        after.record()
    memory.synchronize()
    return Clock(tuple(after.milliseconds_since(before) for before, after in marks))


def host_time(
    memory: Memory,
    work: Callable[[], object],
    runs: int = 50,
    prepare: Callable[[], object] = nothing,
) -> float:
    """Median wall time, in milliseconds, that the host needs to queue `work`."""
    times = []
    for _ in range(runs):
        prepare()
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
        if isinstance(memory, CudaMemory):
            memory.synchronize()
    return statistics.median(times)


def copy_bandwidth(memory: CudaMemory) -> float:
    """Bytes read and written per second by a copy on the device."""
    source, target = (memory.allocate(TensorSpec(n, "int32", (COPIED // 4,))) for n in "ab")
    took = clock(memory, lambda: target.copy_from(source), 20)
    return 2 * COPIED / took.median * 1e3


def random_tensors(specs: Iterable[TensorSpec], memory: Memory) -> dict[TensorSpec, Buffer]:
    """Random weights made on the device: normal values, norms near what they are in a model."""
    values = _Values(seed=0)
    made: dict[TensorSpec, Buffer] = {}
    for spec in specs:
        if spec in made:
            continue
        made[spec] = memory.allocate(spec)
        if spec.dtype != "int32":  # draft to trunk ids: zero offsets
            values.fill(made[spec], *_distribution(spec))
    return made


def fill_states(states: Iterable[tuple[StatePair, Iterable[Buffer]]]) -> None:
    """Put random values into every state: zeros can run faster than data."""
    values = _Values(seed=1)
    for _, buffers in states:
        for buffer in set(buffers):
            values.fill(buffer, *((0.0, 0.5) if _is_large(buffer) else (0.5, 0.1)))


class _Values:
    """Normal values for any number of buffers; large ones get pieces of a pool on their device."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._pools: dict[tuple[str, float, float], Buffer] = {}

    def fill(self, buffer: Buffer, mean: float, spread: float) -> None:
        """Write values of this mean and standard deviation; int8 is codes, every bit at random."""
        spec = buffer.spec
        if not _is_large(buffer):
            buffer.write(self._normal(spec.shape, spec.dtype, mean, spread))
            return
        key = (spec.dtype, mean, spread)
        if key not in self._pools:
            self._pools[key] = buffer.memory.allocate(TensorSpec("pool", spec.dtype, (POOL,)))
            self._pools[key].write(self._normal((POOL,), *key))
        self._cover(buffer, self._pools[key])

    def _normal(self, shape: Sequence[int], dtype: str, mean: float, spread: float) -> NDArray[Any]:
        if dtype == "int8":
            return self._random.integers(-128, 128, shape, np.int8)
        values = self._random.standard_normal(shape, np.float32) * np.float32(spread)
        values += np.float32(mean)
        return to_bf16(values) if dtype == "bf16" else values.astype(NUMPY_DTYPES[dtype])

    def _cover(self, buffer: CudaBuffer, pool: Buffer) -> None:
        """Cover a buffer with pieces of the pool from random places."""
        item = ITEM_BYTES[buffer.spec.dtype]
        done, total = 0, buffer.spec.nbytes
        while done < total:
            start = int(self._random.integers(0, POOL // 2)) // 8 * 8
            size = min(total - done, (POOL - start) * item)
            buffer.memory.copy(buffer.address + done, pool.address + start * item, size)
            done += size


def _is_large(buffer: Buffer) -> TypeGuard[CudaBuffer]:
    """Whether its values are not made one by one."""
    count = buffer.spec.nbytes // ITEM_BYTES[buffer.spec.dtype]
    return isinstance(buffer, CudaBuffer) and count >= POOL // 64


def _distribution(spec: TensorSpec) -> tuple[float, float]:
    """Mean and standard deviation of a weight by its name."""
    form = Derived.parse(spec.name)
    name = form.sources[0] if form else spec.name
    if "norm" not in name:
        return 0.0, SPREAD if len(spec.shape) > 1 else 0.5
    plain = name.startswith("draft.") or "linear_attn.norm" in name
    return (1.0 if plain or (form and form.offset) else 0.0), 0.1


def weight_bytes(specs: Iterable[TensorSpec], *, head: str = "") -> int:
    """Bytes of weights that one call reads, each once; of an embedding or a table only rows.

    The head is read whole, even if it is the embedding; `head` is its name.
    """
    return sum(s.nbytes for s in specs if s.name == head or not s.name.endswith(LOOKED_UP))


def state_bytes(spec: EngineSpec, position: int) -> int:
    """Bytes of states that one call moves: KV rows up to `position`, S and window both ways."""
    total = 0
    for pair in spec.states:
        size = pair.tensors[0].nbytes
        if pair.rows_axis is not None:
            total += size // pair.shape[pair.rows_axis] * position
        elif ".window" in pair.input or pair.input.endswith(".S"):
            total += 2 * size
    return total
