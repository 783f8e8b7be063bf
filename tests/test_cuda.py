"""CUDA buffers over a stand-in for cuda-python: the same promises as host buffers, and graphs.

What only a GPU can show (asynchrony, speed) is in tests/gpu.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import ALIGNMENT, TensorSpec
from eagle_chain.runtime import dlpack
from eagle_chain.runtime.buffers import Buffer, Memory
from eagle_chain.runtime.cuda import (
    STAGING_BYTES,
    CudaBuffer,
    CudaError,
    CudaMemory,
    Graph,
    Replay,
)
from tests.standin import standins


@pytest.fixture
def cuda() -> Iterator[Any]:
    with standins() as runtime:
        yield runtime


@pytest.fixture
def memory(cuda: Any) -> CudaMemory:
    return CudaMemory()


def ints(memory: CudaMemory, *values: int) -> CudaBuffer:
    buffer = memory.allocate(TensorSpec("ints", "int32", (len(values),)))
    buffer.write(values)
    return buffer


def test_it_is_a_memory_and_its_buffers_are_buffers(memory: CudaMemory) -> None:
    protocol: Memory = memory
    buffer: Buffer = protocol.allocate(TensorSpec("x", "fp32", (2,)))
    assert (memory.device, buffer.device, memory.info.name) == ("cuda:0", "cuda:0", "Stand-in GPU")
    assert memory.info.compute_capability == "9.0"


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int32"])
@pytest.mark.parametrize("shape", [(1,), (5, 3), (1, 2, 7, 4), (5, 0)])
def test_new_buffers_are_zero_and_aligned(
    memory: CudaMemory, dtype: str, shape: tuple[int, ...]
) -> None:
    buffer = memory.allocate(TensorSpec("x", dtype, shape))
    assert buffer.address % ALIGNMENT == 0
    assert buffer.read().shape == shape and not buffer.read().any()
    assert buffer.read().nbytes == buffer.spec.nbytes


def test_host_values_may_change_right_after_a_write(memory: CudaMemory) -> None:
    """Sizes on both sides of the staging ring, and more writes than the ring holds."""
    for size in (1, STAGING_BYTES // 16, STAGING_BYTES):
        buffers = [memory.allocate(TensorSpec("x", "int32", (size,))) for _ in range(5)]
        values = np.zeros(size, np.int32)
        for i, buffer in enumerate(buffers):
            values[:] = i
            buffer.write(values)
        values[:] = -1
        assert [int(b.read()[-1]) for b in buffers] == list(range(5))


def test_a_write_refuses_another_shape_and_spreads_one_value(memory: CudaMemory) -> None:
    buffer = memory.allocate(TensorSpec("x", "int32", (4,)))
    buffer.write(7)
    assert buffer.read().tolist() == [7] * 4
    with pytest.raises(ValueError):
        buffer.write([1, 2, 3])


@pytest.mark.parametrize(("axis", "shape"), [(0, (6, 3)), (1, (2, 6)), (2, (1, 2, 6, 3))])
def test_rows_are_copied_along_their_axis_and_nothing_else(
    memory: CudaMemory, axis: int, shape: tuple[int, ...]
) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    long = memory.allocate(TensorSpec("kv", "fp32", shape))
    long.write(values)
    small = tuple(4 if i == axis else extent for i, extent in enumerate(shape))
    short = memory.allocate(TensorSpec("kv", "fp32", small))
    short.write(-1)
    short.copy_from(long, 3, axis=axis, start=2)
    lead = (slice(None),) * axis
    assert np.array_equal(short.read()[(*lead, slice(3))], values[(*lead, slice(2, 5))])
    assert (short.read()[(*lead, slice(3, None))] == -1).all()


def test_a_view_writes_through(memory: CudaMemory) -> None:
    """How a drafted token enters the verify: one element of the ids, on the device."""
    ids, token = ints(memory, -1, -1, -1), ints(memory, 42)
    ids.rows(1).copy_from(token)
    assert ids.read().tolist() == [-1, 42, -1]


def test_memory_is_given_back_when_nobody_refers_to_it(cuda: Any, memory: CudaMemory) -> None:
    before = len(cuda.allocated)
    buffer = memory.allocate(TensorSpec("x", "fp32", (64, 2)))
    view = buffer.rows(3)
    del buffer
    gc.collect()
    assert len(cuda.allocated) == before + 1
    del view
    gc.collect()
    assert len(cuda.allocated) == before


def test_a_graph_replays_on_what_the_buffers_hold_then(memory: CudaMemory) -> None:
    source, target = ints(memory, 1, 2), ints(memory, 0, 0)
    graph = memory.capture(lambda: target.copy_from(source))
    assert target.read().tolist() == [0, 0], "capturing runs nothing"
    graph.launch()
    assert target.read().tolist() == [1, 2]
    source.write([3, 4])
    graph.launch()
    assert target.read().tolist() == [3, 4]


def test_a_graph_keeps_its_buffers_alive(cuda: Any, memory: CudaMemory) -> None:
    target = ints(memory, 0)

    def captured() -> tuple[Graph, int]:
        source = ints(memory, 1)
        return memory.capture(lambda: target.copy_from(source)), source.address

    graph, address = captured()
    gc.collect()
    assert address in cuda.allocated
    graph.launch()
    assert target.read().tolist() == [1]
    del graph
    gc.collect()
    assert address not in cuda.allocated


def test_nothing_is_allocated_written_or_awaited_while_capturing(memory: CudaMemory) -> None:
    buffer = ints(memory, 0)
    for work, error in (
        (lambda: memory.allocate(TensorSpec("x", "int32", (1,))), AssertionError),
        (lambda: buffer.write(1), AssertionError),
        (lambda: buffer.read(), CudaError),
    ):
        with pytest.raises(error):
            memory.capture(work)  # type: ignore[arg-type]
        buffer.write(5)  # the stream is usable again
        assert buffer.read().tolist() == [5]


def test_replay_runs_plainly_first_and_keeps_one_graph_per_key(memory: CudaMemory) -> None:
    calls: list[str] = []
    pair = ints(memory, 1), ints(memory, 2)
    target = ints(memory, 0)
    replay = Replay(memory)

    def run(parity: int) -> int:
        def work() -> None:
            calls.append("plain or captured")
            target.copy_from(pair[parity])

        replay.run(parity, work)
        return int(target.read()[0])

    assert [run(i % 2) for i in range(10)] == [1, 2] * 5
    assert len(calls) == 4, "each parity: once plainly, once for the graph"


def test_what_cannot_be_captured_goes_on_plainly_where_it_may(
    cuda: Any, memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run counts once, that of the attempt as well; and there is one attempt."""
    counter, attempts = memory.allocate(TensorSpec("n", "int32", (1,))), []
    counter.zero()

    def work() -> None:
        attempts.append(memory._capturing)
        cuda.queue(memory.stream, add)

    def add() -> None:
        ctypes.c_int32.from_address(counter.address).value += 1

    refused = cuda.cudaError_t.cudaErrorStreamCaptureUnsupported
    monkeypatch.setattr(cuda, "cudaGraphInstantiate", lambda *_: (refused, None))
    replay = Replay(memory, warm_up=2, optional=True)
    for _ in range(2):
        replay.run(0, work)
    with pytest.warns(UserWarning, match="without CUDA graphs, more slowly: cudaGraphInstantiate"):
        replay.run(0, work)
    replay.run(0, work)
    assert counter.read() == [4] and attempts == [False, False, True, False, False]
    needed = Replay(memory, warm_up=0)
    for _ in range(2):
        with pytest.raises(CudaError, match="cudaGraphInstantiate"):
            needed.run(0, work)


def test_scratch_is_shared_and_grows(memory: CudaMemory) -> None:
    small = memory.scratch(100)
    assert memory.scratch(50) is small
    large = memory.scratch(1000)
    assert large is not small and large.spec.nbytes >= 1000 and memory.scratch(1000) is large


def test_no_memory_says_how_much_was_wanted(cuda: Any, memory: CudaMemory) -> None:
    with pytest.raises(
        InputError, match=r"no memory for kv, 8\.0 GB; 4\.\d GB of 4\.3 GB are free"
    ):
        memory.allocate(TensorSpec("kv", "fp16", (4_000_000_000,)))


def test_no_device_is_one_sentence(cuda: Any) -> None:
    cuda.DEVICE.count = 0
    with pytest.raises(InputError, match="no CUDA device: stand-in error cudaErrorNoDevice"):
        CudaMemory()
    cuda.DEVICE.without = cuda.cudaError_t.cudaErrorInsufficientDriver
    with pytest.raises(InputError, match="no CUDA device: no NVIDIA driver was found"):
        CudaMemory()
    cuda.DEVICE.without, cuda.DEVICE.count = cuda.cudaError_t.cudaErrorNoDevice, 1
    with pytest.raises(InputError, match="no CUDA device 3: this machine has 1"):
        CudaMemory(3)


def test_without_cuda_python_the_extras_are_named(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(InputError, match=r"needs the Python package cuda-python \(.*'\.\[gpu\]'"):
        CudaMemory()


def test_a_failing_call_is_named(cuda: Any, memory: CudaMemory) -> None:
    with pytest.raises(CudaError, match="cudaMemcpy2DAsync: stand-in error cudaErrorInvalidValue"):
        memory.cuda("cudaMemcpy2DAsync", 0, 1, 0, 1, 2, 1, 3, memory.stream)


class OnHost:
    """A DLPack exporter over host memory, as `CudaBuffer` is one over the device's."""

    def __init__(self, values: np.ndarray[Any, Any], dtype: str) -> None:
        self.values, self.dtype = values, dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        spec = TensorSpec("x", self.dtype, self.values.shape)
        return dlpack.capsule(spec, self.values.ctypes.data, (1, 0), self)


def test_dlpack_out_shares_memory_and_is_released() -> None:
    values = np.array([[0x3F80, 0xBF00], [0x4049, 0]], np.uint16)  # bf16 1, -0.5, 3.140625, 0
    tensor = torch.from_dlpack(OnHost(values, "bf16"))
    assert tensor.dtype == torch.bfloat16 and tensor.tolist() == [[1.0, -0.5], [3.140625, 0.0]]
    tensor[0, 0] = 2
    assert values[0, 0] == 0x4000
    del tensor
    gc.collect()
    assert not dlpack._alive
    unused = OnHost(values, "bf16").__dlpack__()
    assert dlpack._alive
    del unused
    assert not dlpack._alive


def test_dlpack_in_shares_memory_and_keeps_it() -> None:
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    held = dlpack.imported(tensor, "x", (1, 0), None)
    assert held.spec == TensorSpec("x", "int32", (2, 3)) and held.address == tensor.data_ptr()


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(3, 4).T, "not contiguous"),
        (torch.ones(2, dtype=torch.float64), "code 2, 64 bits"),
    ],
)
def test_dlpack_in_refuses_what_an_engine_cannot_read(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(InputError, match=words):
        dlpack.imported(tensor, "x", (1, 0), None)


def test_a_tensor_of_another_device_is_refused(memory: CudaMemory) -> None:
    with pytest.raises(InputError, match=r"DLPack device \(1, 0\), expected \(2, 0\)"):
        memory.wrap(torch.ones(2), "x")
