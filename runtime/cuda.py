"""CUDA memory and streams: device buffers, asynchronous copies and replayed graphs.

Everything goes through `cuda.bindings.runtime` (the package cuda-python), imported when a
`CudaMemory` is made. A memory owns one stream; whatever its buffers do is queued there, in order,
and only `read`, `synchronize` and `Event.wait` wait for the device.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Hashable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.gpu import cuda_runtime, device_info, error_text
from eagle_chain.engines.progress import human_bytes
from eagle_chain.engines.spec import ITEM_BYTES, TensorSpec
from eagle_chain.runtime.buffers import NUMPY_DTYPES, Buffer
from eagle_chain.runtime.dlpack import Imported, capsule, imported

STAGING_BYTES = 1 << 16  # pinned memory for small writes, used as a ring
_CUDA = 2  # DLPack's device type


class CudaError(RuntimeError):
    """A CUDA call failed; the message has the call's name and CUDA's own words."""


class CudaMemory:
    """Device memory whose buffers share one stream.

    Args:
        index: Which GPU.
        stream: Handle of a stream that belongs to somebody else; None makes a new one.

    Raises:
        InputError: cuda-python is missing, or there is no such GPU.
    """

    def __init__(self, index: int = 0, stream: int | None = None) -> None:
        self.info = device_info(index)
        self.device = f"cuda:{index}"
        self.cuda = Calls(index)
        self.lock = threading.RLock()  # one stream, one ring, one capture at a time
        self._ring: _Ring | None = None
        self._scratch: CudaBuffer | None = None
        self._capturing = False
        if stream is None:
            flags = self.cuda.lib.cudaStreamNonBlocking
            stream = int(self.cuda("cudaStreamCreateWithFlags", flags))
            weakref.finalize(self, self.cuda.quietly, "cudaStreamDestroy", stream)
        self.stream = stream

    def allocate(self, spec: TensorSpec) -> CudaBuffer:
        """Return a new zeroed buffer."""
        assert not self._capturing, "nothing is allocated while a graph is captured"
        buffer = CudaBuffer(self, spec, self._malloc(spec.nbytes, spec.name))
        weakref.finalize(buffer, self.cuda.quietly, "cudaFree", buffer.address)
        buffer.zero()
        return buffer

    def wrap(self, tensor: Any, name: str) -> CudaBuffer:
        """A buffer over the memory of any DLPack tensor (torch, CuPy, JAX): nothing is copied.

        Raises:
            InputError: The tensor is on another device, not contiguous, or of another dtype.
        """
        held = imported(tensor, name, (_CUDA, self.info.index), self.stream)
        buffer = CudaBuffer(self, held.spec, held.address)
        buffer.held = held
        return buffer

    def scratch(self, nbytes: int) -> CudaBuffer:
        """A block of at least this size, shared by all who ask: for work that runs in order."""
        if self._scratch is None or self._scratch.spec.nbytes < nbytes:
            spec = TensorSpec("scratch", "int32", (max(1, -(-nbytes // 4)),))
            self._scratch = self.allocate(spec)
        return self._scratch

    def free_bytes(self) -> int:
        """Device memory that nobody uses, this process and all others counted."""
        self.cuda.activate()
        free: int = self.cuda("cudaMemGetInfo")[0]
        return free

    def synchronize(self) -> None:
        """Wait until everything queued so far is done."""
        self.cuda("cudaStreamSynchronize", self.stream)

    def event(self) -> Event:
        """A new event, recorded on this memory's stream."""
        return Event(self)

    def capture(self, work: Callable[[], None], *, relaxed: bool = False) -> Graph:
        """Record what `work` queues on the stream, without running it.

        `work` must have run once before, so that lazy set-up is behind it; it may neither allocate
        nor wait nor write host values.

        Args:
            work: Kept alive by the graph, with all the buffers it refers to.
            relaxed: Allow calls in this thread that CUDA calls unsafe while capturing.
        """
        cuda = self.cuda
        cuda.activate()
        mode = cuda.lib.cudaStreamCaptureMode
        cuda(
            "cudaStreamBeginCapture",
            self.stream,
            mode.cudaStreamCaptureModeRelaxed if relaxed else mode.cudaStreamCaptureModeThreadLocal,
        )
        self._capturing = True
        try:
            work()
        except BaseException:
            cuda.quietly("cudaStreamEndCapture", self.stream)
            raise
        finally:
            self._capturing = False
        return Graph(self, cuda("cudaStreamEndCapture", self.stream), work)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy between two device addresses."""
        kind = self.cuda.lib.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self.cuda("cudaMemcpyAsync", target, source, nbytes, kind, self.stream)

    def upload(self, target: int, values: NDArray[Any]) -> None:
        """Queue a copy of contiguous host values; they may change as soon as this returns."""
        assert not self._capturing, "a captured graph must not read host memory that may change"
        kind = self.cuda.lib.cudaMemcpyKind.cudaMemcpyHostToDevice
        if values.nbytes > STAGING_BYTES // 4:
            self.cuda(
                "cudaMemcpyAsync", target, values.ctypes.data, values.nbytes, kind, self.stream
            )
            self.synchronize()
            return
        if self._ring is None:
            self._ring = _Ring(self)
        staged = self._ring.put(values)
        self.cuda("cudaMemcpyAsync", target, staged, values.nbytes, kind, self.stream)

    def download(self, values: NDArray[Any], source: int) -> None:
        """Queue a copy to host memory; the values are there after `synchronize`."""
        kind = self.cuda.lib.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.cuda("cudaMemcpyAsync", values.ctypes.data, source, values.nbytes, kind, self.stream)

    def pinned(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """A zeroed host array that the device reaches directly; freed with the array."""
        nbytes = max(1, prod(shape)) * ITEM_BYTES[dtype]
        address = int(self.cuda("cudaHostAlloc", nbytes, 0))
        block = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(block, self.cuda.quietly, "cudaFreeHost", address)
        array: NDArray[Any] = np.frombuffer(memoryview(block), NUMPY_DTYPES[dtype], prod(shape))
        array.fill(0)
        return array.reshape(shape)

    def _malloc(self, nbytes: int, name: str) -> int:
        self.cuda.activate()
        code, address = self.cuda.lib.cudaMalloc(max(1, nbytes))
        if code == self.cuda.lib.cudaError_t.cudaErrorMemoryAllocation:
            raise InputError(
                f"{self.device} ({self.info.name}): no memory for {name}, {human_bytes(nbytes)}; "
                f"{human_bytes(self.free_bytes())} of {human_bytes(self.info.total_bytes)} are free"
            )
        self.cuda.check("cudaMalloc", code)
        return int(address)


class CudaBuffer:
    """A dense tensor in device memory."""

    def __init__(self, memory: CudaMemory, spec: TensorSpec, address: int) -> None:
        self.memory = memory
        self.spec = spec
        self.address = address
        self.held: CudaBuffer | Imported | None = None  # who owns the memory, if not this buffer

    @property
    def device(self) -> str:
        """As `CudaMemory.device`."""
        return self.memory.device

    def read(self) -> NDArray[Any]:
        """Return a host copy, after all queued work."""
        values = np.empty(self.spec.shape, NUMPY_DTYPES[self.spec.dtype])
        self.memory.download(values, self.address)
        self.memory.synchronize()
        return values

    def write(self, values: ArrayLike) -> None:
        """Queue host values of this shape, or one value for all elements."""
        host = np.empty(self.spec.shape, NUMPY_DTYPES[self.spec.dtype])
        host[...] = values
        self.memory.upload(self.address, host)

    def zero(self) -> None:
        """Queue setting every byte to zero."""
        cuda = self.memory.cuda
        cuda("cudaMemsetAsync", self.address, 0, self.spec.nbytes, self.memory.stream)

    def rows(self, start: int, count: int = 1) -> CudaBuffer:
        """A view of `count` rows along the first axis."""
        shape = self.spec.shape
        assert 0 <= start and start + count <= shape[0], f"{self.spec.name} has {shape[0]} rows"
        spec = TensorSpec(self.spec.name, self.spec.dtype, (count, *shape[1:]))
        view = CudaBuffer(self.memory, spec, self.address + start * (self.spec.nbytes // shape[0]))
        view.held = self
        return view

    def copy_from(
        self, source: Buffer, rows: int | None = None, *, axis: int = 0, start: int = 0
    ) -> None:
        """Queue a copy of everything, or of rows `start`..`start + rows` to rows 0..`rows`."""
        assert source.device == self.device, "a copy stays within one device"
        assert source.spec.dtype == self.spec.dtype, "a copy does not convert"
        target, origin = self.spec, source.spec
        if rows is None:
            assert origin.shape == target.shape, "a full copy needs equal shapes"
            self.memory.copy(self.address, source.address, target.nbytes)
            return
        lead, tail = target.shape[:axis], target.shape[axis + 1 :]
        assert origin.shape[:axis] == lead and origin.shape[axis + 1 :] == tail, "only axis differs"
        assert rows <= target.shape[axis] and start + rows <= origin.shape[axis], "no such rows"
        row = prod(tail) * ITEM_BYTES[target.dtype]
        blocks = prod(lead)
        if not rows or not blocks:
            return
        self.memory.cuda(
            "cudaMemcpy2DAsync",
            self.address,
            target.shape[axis] * row,
            source.address + start * row,
            origin.shape[axis] * row,
            rows * row,
            blocks,
            self.memory.cuda.lib.cudaMemcpyKind.cudaMemcpyDeviceToDevice,
            self.memory.stream,
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's (device type, index)."""
        return _CUDA, self.memory.info.index

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        """A capsule over this memory; `torch.from_dlpack(buffer)` shares it without a copy.

        The consumer's stream waits for what is queued here; what the consumer does later is not
        waited for: synchronise its stream before the next run.
        """
        if stream != -1:  # -1: the consumer wants no synchronisation
            waiting = {None: 1, 0: 1}.get(stream, stream)  # 1: the legacy default stream
            self.memory.event().hold_back(int(waiting or 1))
        return capsule(self.spec, self.address, self.__dlpack_device__(), self)


class Event:
    """A mark in the stream of a memory."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._handle = memory.cuda("cudaEventCreate")
        weakref.finalize(self, memory.cuda.quietly, "cudaEventDestroy", self._handle)
        self.record()

    def record(self) -> None:
        """Move the mark to the end of what is queued now."""
        self._memory.cuda("cudaEventRecord", self._handle, self._memory.stream)

    def wait(self) -> None:
        """Wait until everything before the mark is done; what is queued behind it goes on."""
        self._memory.cuda("cudaEventSynchronize", self._handle)

    def hold_back(self, stream: int) -> None:
        """Let another stream wait for the mark."""
        self._memory.cuda("cudaStreamWaitEvent", stream, self._handle, 0)

    def milliseconds_since(self, earlier: Event) -> float:
        """Device time between two marks; waits for both."""
        self._memory.synchronize()
        time: float = self._memory.cuda("cudaEventElapsedTime", earlier._handle, self._handle)
        return time


class Graph:
    """Captured device work, to be launched any number of times over the same addresses."""

    def __init__(self, memory: CudaMemory, graph: Any, work: Callable[[], None]) -> None:
        self._memory = memory
        self._work = work  # keeps alive whatever the graph has addresses of
        try:
            self._handle = memory.cuda("cudaGraphInstantiate", graph, 0)
        finally:
            memory.cuda.quietly("cudaGraphDestroy", graph)
        weakref.finalize(self, memory.cuda.quietly, "cudaGraphExecDestroy", self._handle)

    def launch(self) -> None:
        """Queue the whole graph."""
        self._memory.cuda.activate()
        self._memory.cuda("cudaGraphLaunch", self._handle, self._memory.stream)


class Replay:
    """Runs device work that repeats: plainly at first, from a captured graph ever after.

    One graph per key; the key must name everything that differs between two runs (the parity of the
    buffers, the number of rows).

    Args:
        memory: Whose stream runs it.
        relaxed: See `CudaMemory.capture`.
        warm_up: Plain runs before the capture.
        optional: Whether work that cannot be captured goes on in plain runs, with a warning.
    """

    def __init__(
        self,
        memory: CudaMemory,
        *,
        relaxed: bool = False,
        warm_up: int = 1,
        optional: bool = False,
    ) -> None:
        self._memory = memory
        self._relaxed = relaxed
        self._warm_up = warm_up
        self._optional = optional
        self._runs: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, Graph] = {}
        self._refused: set[Hashable] = set()

    @property
    def captured(self) -> Collection[Hashable]:
        """The keys whose work is a graph by now."""
        return self._graphs.keys()

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Queue `work`, or the graph that was captured from the work of the same key."""
        if self._memory._capturing:  # part of a larger graph
            work()
            return
        graph = self._graphs.get(key)
        if graph is None:
            done = self._runs.get(key, 0)
            self._runs[key] = done + 1
            if done < self._warm_up or key in self._refused:
                work()
                return
            try:
                graph = self._graphs[key] = self._memory.capture(work, relaxed=self._relaxed)
            except Exception as error:
                if not self._optional:
                    raise
                self._refused.add(key)
                warnings.warn(f"goes on without CUDA graphs, more slowly: {error}", stacklevel=2)
                work()  # an attempt to capture it computes nothing
                return
        graph.launch()


class Calls:
    """CUDA runtime calls by name; anything but success is a `CudaError`."""

    def __init__(self, index: int) -> None:
        self.lib = cuda_runtime()
        self._index = index

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call; returns the one result, or a list of several."""
        code, *results = getattr(self.lib, name)(*arguments)
        self.check(name, code)
        return results[0] if len(results) == 1 else results

    def check(self, name: str, code: Any) -> None:
        """Raise unless `code` is success."""
        if code != self.lib.cudaError_t.cudaSuccess:
            raise CudaError(f"{name}: {error_text(self.lib, code)}")

    def quietly(self, name: str, *arguments: Any) -> None:
        """Call and ignore the result: for releasing, which also happens when CUDA is gone."""
        getattr(self.lib, name)(*arguments)

    def activate(self) -> None:
        """Make the device current in this thread."""
        self("cudaSetDevice", self._index)


class _Ring:
    """Pinned memory handed out in turn; waits for the stream each time it comes round."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._bytes = memory.pinned((STAGING_BYTES // 4,), "int32").view(np.uint8)
        self._next = 0

    def put(self, values: NDArray[Any]) -> int:
        """Copy `values` into the ring and return where they lie."""
        if self._next + values.nbytes > self._bytes.nbytes:
            self._memory.synchronize()
            self._next = 0
        place = self._bytes[self._next : self._next + values.nbytes]
        place[:] = np.frombuffer(values.tobytes(), np.uint8)
        self._next += -(-values.nbytes // 16) * 16
        return int(place.ctypes.data)
