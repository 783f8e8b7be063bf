"""The planes of a quantised KV cache back in numbers, in NumPy; see `engines.kv`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_chain.engines.kv import BLOCK

SUFFIXES = ("codes", "nibbles", "high", "scale", "min")


def plane_of(tensor: str) -> tuple[str, str] | None:
    """Cache and suffix ("layers.3.key", "codes") of a state's name; None if it is no plane."""
    cache, _, suffix = tensor.removesuffix(".next").rpartition(".")
    return (cache, suffix) if suffix in SUFFIXES else None


def decoded(planes: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Rows [..., dim] of the planes of q8_0 (codes, scale) or q5_1 (nibbles, high, scale, min)."""
    scale = planes["scale"].astype(np.float32)[..., None]
    if "codes" in planes:
        codes = planes["codes"].astype(np.float32)
        return _rows(codes.reshape(*scale.shape[:-1], BLOCK) * scale)
    low = planes["nibbles"].view(np.uint8).reshape(*scale.shape[:-1], BLOCK // 2)
    low = np.concatenate([low & 15, low >> 4], -1)
    high = np.unpackbits(planes["high"].view(np.uint8), axis=-1, bitorder="little")
    codes = (low | high.reshape(low.shape) << 4).astype(np.float32)
    return _rows(codes * scale + planes["min"].astype(np.float32)[..., None])


def _rows(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    return blocks.reshape(*blocks.shape[:-2], -1)
