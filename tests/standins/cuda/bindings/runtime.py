"""A stand-in for cuda-python over host memory: "device" addresses are this process's own.

Work on a stream happens at once, unless the stream is being captured: then it is recorded, and
happens at each launch of the graph. With `DEVICE.late` it happens as late as it may: when somebody
waits for it. `DEVICE` and `allocated` are for tests to look at and change.
"""
# ruff: noqa: D101

import ctypes
import enum
import os
from types import SimpleNamespace

cudaStreamNonBlocking = 1


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidValue = 1
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorStreamCaptureUnsupported = 900


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaStreamCaptureMode(enum.IntEnum):
    cudaStreamCaptureModeThreadLocal = 1
    cudaStreamCaptureModeRelaxed = 2


OK = cudaError_t.cudaSuccess
DEVICE = SimpleNamespace(
    count=1,
    without=cudaError_t.cudaErrorNoDevice,
    late=False,
    properties=SimpleNamespace(
        name=b"Stand-in GPU\0\0",
        major=9,
        minor=0,
        totalGlobalMem=int(os.environ.get("STANDIN_MEMORY", 1 << 32)),
        multiProcessorCount=1,
    ),
)
allocated: dict[int, ctypes.Array] = {}
_pinned: dict[int, ctypes.Array] = {}
_recording: dict[int, list] = {}  # stream -> work
_graphs: dict[int, list] = {}
_late: dict[int, list] = {}  # stream -> work that nobody has waited for, and events
_next = iter(range(1, 1 << 30))


def queue(stream, work):
    """Do it, record it, or leave it for later."""
    if int(stream) in _recording:
        _recording[int(stream)].append(work)
    elif DEVICE.late:
        _late.setdefault(int(stream), []).append(work)
    else:
        work()
    return (OK,)


def _catch_up(stream, event=None):
    """Do what is left on a stream, up to an event."""
    left = _late.get(int(stream), [])
    end = left.index(event) + 1 if event in left else 0 if event is not None else len(left)
    work, left[:end] = left[:end], []
    for item in work:
        if callable(item):
            item()


def cudaGetDeviceCount():
    return (OK, DEVICE.count) if DEVICE.count else (DEVICE.without, None)


def cudaGetDeviceProperties(index):
    return OK, DEVICE.properties


def cudaGetErrorString(code):
    return OK, f"stand-in error {code.name}".encode()


def cudaSetDevice(index):
    return (OK,)


def cudaMalloc(size):
    if _recording:
        return cudaError_t.cudaErrorStreamCaptureUnsupported, None
    if size + sum(len(block) for block in allocated.values()) > DEVICE.properties.totalGlobalMem:
        return cudaError_t.cudaErrorMemoryAllocation, None
    block = (ctypes.c_uint8 * (size + 256))()
    address = -(-ctypes.addressof(block) // 256) * 256
    ctypes.memset(address, 0xCD, size)  # fresh device memory holds anything
    allocated[address] = block
    return OK, address


def cudaFree(address):
    for stream in _late:
        _catch_up(stream)
    allocated.pop(address, None)
    return (OK,)


def cudaMemGetInfo():
    total = DEVICE.properties.totalGlobalMem
    return OK, total - sum(len(block) for block in allocated.values()), total


def cudaHostAlloc(size, flags):
    block = (ctypes.c_uint8 * size)()
    _pinned[ctypes.addressof(block)] = block
    return OK, ctypes.addressof(block)


def cudaFreeHost(address):
    _pinned.pop(address, None)
    return (OK,)


def cudaStreamCreateWithFlags(flags):
    return OK, next(_next)


def cudaStreamDestroy(stream):
    return (OK,)


def cudaStreamSynchronize(stream):
    if int(stream) in _recording:
        return (cudaError_t.cudaErrorStreamCaptureUnsupported,)
    _catch_up(stream)
    return (OK,)


def cudaStreamWaitEvent(stream, event, flags):
    return (OK,)


def cudaMemcpyAsync(target, source, size, kind, stream):
    return queue(stream, lambda: ctypes.memmove(target, source, size))


def cudaMemcpy2DAsync(target, target_pitch, source, source_pitch, width, height, kind, stream):
    if width > target_pitch or width > source_pitch:
        return (cudaError_t.cudaErrorInvalidValue,)

    def work():
        for i in range(height):
            ctypes.memmove(target + i * target_pitch, source + i * source_pitch, width)

    return queue(stream, work)


def cudaMemsetAsync(address, value, size, stream):
    return queue(stream, lambda: ctypes.memset(address, value, size))


def cudaStreamBeginCapture(stream, mode):
    _recording[int(stream)] = []
    return (OK,)


def cudaStreamEndCapture(stream):
    handle = next(_next)
    _graphs[handle] = _recording.pop(int(stream))
    return OK, handle


def cudaGraphInstantiate(graph, flags):
    handle = next(_next)
    _graphs[handle] = _graphs[graph]
    return OK, handle


def cudaGraphDestroy(graph):
    _graphs.pop(graph, None)
    return (OK,)


cudaGraphExecDestroy = cudaGraphDestroy


def cudaGraphLaunch(graph, stream):
    for work in _graphs[graph]:
        queue(stream, work)
    return (OK,)


def cudaEventCreate():
    return OK, next(_next)


def cudaEventDestroy(event):
    return (OK,)


def cudaEventRecord(event, stream):
    left = _late.setdefault(int(stream), [])
    if event in left:  # an event marks the last place where it was recorded
        left.remove(event)
    left.append(event)
    return (OK,)


def cudaEventSynchronize(event):
    for stream in _late:
        _catch_up(stream, event)
    return (OK,)


def cudaEventElapsedTime(start, end):
    return OK, 1.5
