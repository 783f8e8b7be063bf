"""KV planes as ggml stores a row, and the `gguf` package as their oracle."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

from tests.onnx_engine import Arrays


def ggml_bytes(kind: str, planes: Arrays) -> np.ndarray[Any, Any]:
    """Planes [..., columns] by suffix, put together as ggml stores a row: [..., bytes]."""

    def part(name: str, size: int) -> np.ndarray[Any, Any]:
        plane = np.ascontiguousarray(planes[f".{name}"])
        return plane.view(np.uint8).reshape(*plane.shape[:-1], -1, size)

    order = {
        "q8_0": [("scale", 2), ("codes", 32)],
        "q5_1": [("scale", 2), ("min", 2), ("high", 4), ("nibbles", 16)],
    }[kind]
    blocks = np.concatenate([part(*item) for item in order], -1)
    return blocks.reshape(*blocks.shape[:-2], -1)


def by_gguf(kind: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    quantised: np.ndarray[Any, Any] = gguf.quantize(
        rows.astype(np.float32), gguf.GGMLQuantizationType[kind.upper()]
    )
    return quantised
