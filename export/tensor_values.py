"""The values of stored tensors: mapped from their files, compared without loading them whole."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle_chain.engines.errors import InputError
from eagle_chain.export.weight_files import FILE_BYTES, StoredTensor

Array = np.ndarray[Any, np.dtype[Any]]

# Of the types that a checked checkpoint can hold; bfloat16 is not one of NumPy's own.
NUMPY_TYPES = {
    "BOOL": "bool",
    "F16": "float16",
    "F32": "float32",
    "I32": "int32",
    "I64": "int64",
}
NUMBERS = ("BF16", *NUMPY_TYPES)


def mapped(tensor: StoredTensor) -> Array:
    """The bytes of a tensor, copy-on-write; never zeros for bytes that a file no longer has."""
    if tensor.nbytes == 0:
        return np.empty(0, np.uint8)
    size = tensor.file.stat().st_size
    if size < tensor.offset + tensor.nbytes:
        raise InputError(f"{tensor.file}: {size} bytes, shorter than when it was opened")
    values = np.memmap(tensor.file, np.uint8, "c", tensor.offset, (tensor.nbytes,))
    aligned = tensor.offset % FILE_BYTES[tensor.dtype] == 0
    return np.asarray(values) if aligned else np.array(values)


def array(tensor: StoredTensor) -> Array:
    """The tensor as a memory-mapped array; bfloat16 as the type of ml_dtypes."""
    kind: Any = NUMPY_TYPES.get(tensor.dtype)
    if tensor.dtype == "BF16":
        import ml_dtypes

        kind = ml_dtypes.bfloat16
    values: Array = mapped(tensor).view(kind).reshape(tensor.shape)
    return values


def same(one: StoredTensor, other: StoredTensor | None) -> bool:
    """Whether two tensors hold the same numbers, in whatever types of float."""
    if other is None or one.shape != other.shape or one.dtype not in NUMBERS:
        return False
    if one.dtype == other.dtype:
        a, b = mapped(one), mapped(other)
    else:
        a, b = array(one).reshape(-1), array(other).reshape(-1)
    step = 64 << 20
    for i in range(0, len(a), step):
        x, y = a[i : i + step], b[i : i + step]
        if one.dtype != other.dtype:
            x, y = x.astype(np.float32), y.astype(np.float32)
        if not np.array_equal(x, y):
            return False
    return True
