"""Weights of a checkpoint on the device: read once, converted to what the engines take, shared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import STORED_BYTES, Weight
from eagle_chain.engines.progress import progress
from eagle_chain.engines.spec import ITEM_BYTES, TensorSpec
from eagle_chain.runtime.cuda import CudaBuffer, CudaMemory

BLOCK = 1 << 24  # elements converted at a time

_STORED = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
}
UNCHANGED = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "I32": "int32"}


def upload(
    folder: Path,
    table: Mapping[str, Weight],
    wanted: Iterable[TensorSpec],
    memory: CudaMemory,
) -> dict[TensorSpec, CudaBuffer]:
    """Put weights on the device, each in the dtype that is wanted; equal wishes share a buffer.

    Args:
        folder: The bundle.
        table: Where each weight lies.
        wanted: Named as in `table`.
        memory: Where to.

    Raises:
        InputError: A weight is unknown, of another shape, or does not fit the dtype.
    """
    specs = list(dict.fromkeys(wanted))
    for spec in specs:
        weight = table.get(spec.name)
        if weight is None or weight.shape != spec.shape or weight.dtype not in _STORED:
            found = f"{weight.dtype} {list(weight.shape)}" if weight else "not in the bundle"
            raise InputError(
                f"weight {spec.name} is {found}, the engine wants {spec.dtype} {list(spec.shape)}"
            )
    buffers = {}
    with progress("uploading weights", sum(spec.nbytes for spec in specs)) as advance:
        for spec in specs:
            buffers[spec] = memory.allocate(spec)
            for start, values in blocks(folder, table[spec.name], spec):
                memory.upload(buffers[spec].address + start, values)
                advance(values.nbytes)
    return buffers


def blocks(folder: Path, weight: Weight, spec: TensorSpec) -> Iterable[tuple[int, NDArray[Any]]]:
    """Byte offset in the buffer and values, block by block: no whole tensor is held in memory."""
    size = STORED_BYTES[weight.dtype]
    count = weight.nbytes // size
    stored = np.memmap(folder / weight.file, np.uint8, "r", weight.offset, (weight.nbytes,))
    for start in range(0, count, BLOCK):
        block = np.ascontiguousarray(stored[start * size : (start + BLOCK) * size])
        values = converted(block.view(_STORED[weight.dtype]), weight.dtype, spec)
        yield start * ITEM_BYTES[spec.dtype], values


def converted(stored: NDArray[Any], dtype: str, spec: TensorSpec) -> NDArray[Any]:
    """Stored values in the dtype of `spec`, rounded to nearest even; bf16 as its bits in uint16."""
    if UNCHANGED.get(dtype) == spec.dtype:
        return stored
    if (spec.dtype == "int32") != dtype.startswith("I"):
        raise InputError(f"weight {spec.name} is {dtype}, the engine wants {spec.dtype}")
    if spec.dtype == "int32":
        limits = np.iinfo(np.int32)
        if stored.size and (stored.min() < limits.min or stored.max() > limits.max):
            raise InputError(f"weight {spec.name} holds numbers that do not fit int32")
        return stored.astype(np.int32)
    values = from_bf16(stored) if dtype == "BF16" else stored.astype(np.float32)
    if spec.dtype == "fp32":
        return values
    with np.errstate(over="ignore"):
        lower = to_bf16(values) if spec.dtype == "bf16" else values.astype(np.float16)
    if spec.dtype == "fp16" and not np.array_equal(np.isfinite(lower), np.isfinite(values)):
        largest = np.abs(values[np.isfinite(values)]).max()
        raise InputError(
            f"weight {spec.name} holds numbers up to {largest:.3g}, fp16 ends at 65504: "
            "export with --dtype bf16"
        )
    return lower


def from_bf16(bits: NDArray[Any]) -> NDArray[Any]:
    """The numbers in fp32 that these bits (uint16) stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: NDArray[Any]) -> NDArray[Any]:
    """The bits of fp32 values, rounded to nearest even."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40  # a NaN must not round to infinity
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
