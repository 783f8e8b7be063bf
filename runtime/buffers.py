"""Device buffers: fixed pieces of memory that engines read and write in place.

The chain and the cache only move whole buffers or leading rows of them, never array views.
`HostMemory` is ordinary memory; a CUDA memory implements the same two protocols over a stream,
where `copy_from`, `zero` and `write` are queued and only `read` waits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eagle_chain.engines.spec import ALIGNMENT, TensorSpec

NUMPY_DTYPES: dict[str, type[np.generic]] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": np.uint16,  # NumPy has no bfloat16: the bits
    "int32": np.int32,
    "int8": np.int8,
}


class Buffer(Protocol):
    """A dense tensor at an address that never changes."""

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape; the name is only a label."""
        ...

    @property
    def device(self) -> str:
        """Where the memory is: "cpu", "cuda:0"."""
        ...

    @property
    def address(self) -> int:
        """Address of the first element on its device."""
        ...

    def read(self) -> NDArray[Any]:
        """Return a copy of the contents in host memory, bf16 as uint16; waits for queued work."""
        ...

    def write(self, values: ArrayLike) -> None:
        """Set the contents from host values of this shape, or from one value for all elements."""
        ...

    def zero(self) -> None:
        """Set every byte to zero."""
        ...

    def rows(self, start: int, count: int = 1) -> Buffer:
        """A view of `count` rows along the first axis."""
        ...

    def copy_from(
        self, source: Buffer, rows: int | None = None, *, axis: int = 0, start: int = 0
    ) -> None:
        """Copy rows `start`..`start + rows` of `source` along `axis` to rows 0..`rows` of this one.

        Without `rows` everything is copied and the shapes must be equal; with `rows` they may
        differ in `axis`. Both buffers are of one device and dtype.
        """
        ...


class Memory(Protocol):
    """Where buffers come from."""

    @property
    def device(self) -> str:
        """The device of every buffer of this memory."""
        ...

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held for work that another thread must not interleave with its own on this memory."""
        ...

    def allocate(self, spec: TensorSpec) -> Buffer:
        """Return a new buffer of `spec`, all zero."""
        ...


class HostBuffer:
    """A buffer in host memory; `array` is for engines that run on the host."""

    device = "cpu"

    def __init__(self, spec: TensorSpec, array: NDArray[Any], address: int) -> None:
        self.spec = spec
        self.array = array
        self.address = address  # NumPy tells another one for an empty array

    def read(self) -> NDArray[Any]:
        """Return a copy."""
        return self.array.copy()

    def write(self, values: ArrayLike) -> None:
        """Set the contents."""
        self.array[...] = values

    def zero(self) -> None:
        """Set every byte to zero."""
        self.array.fill(0)

    def rows(self, start: int, count: int = 1) -> HostBuffer:
        """A view of `count` rows along the first axis."""
        shape = self.spec.shape
        assert 0 <= start and start + count <= shape[0], f"{self.spec.name} has {shape[0]} rows"
        spec = TensorSpec(self.spec.name, self.spec.dtype, (count, *shape[1:]))
        address = self.address + start * self.array.strides[0]
        return HostBuffer(spec, self.array[start : start + count], address)

    def copy_from(
        self, source: Buffer, rows: int | None = None, *, axis: int = 0, start: int = 0
    ) -> None:
        """Copy everything, or rows `start`..`start + rows` of `source` to rows 0..`rows`."""
        assert isinstance(source, HostBuffer), "a copy stays within one device"
        assert source.spec.dtype == self.spec.dtype, "a copy does not convert"
        if rows is None:
            assert source.spec.shape == self.spec.shape, "a full copy needs equal shapes"
            np.copyto(self.array, source.array)
            return
        lead = (slice(None),) * axis
        there = source.array[(*lead, slice(start, start + rows))]
        np.copyto(self.array[(*lead, slice(rows))], there)


class HostMemory:
    """Ordinary memory of this process."""

    device = "cpu"
    lock = nullcontext()  # engines on it run beside each other

    def allocate(self, spec: TensorSpec) -> HostBuffer:
        """Return a new zeroed buffer, aligned for any engine."""
        raw = np.zeros(spec.nbytes + ALIGNMENT, np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT
        array = raw[offset : offset + spec.nbytes].view(NUMPY_DTYPES[spec.dtype])
        return HostBuffer(spec, array.reshape(spec.shape), raw.ctypes.data + offset)
