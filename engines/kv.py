"""How the rows of a KV cache are stored: the planes of each KV type, and what a row takes.

The quantised types are ggml's (ggml-quants.c, `quantize_row_q8_0_ref` and `quantize_row_q5_1_ref`),
taken apart into planes of one dtype each. A block is 32 neighbouring dims of a head:

    q8_0   codes  int8  [dim]       x = code * scale
           scale  fp16  [dim / 32]  largest |x| / 127
    q5_1   nibbles int8 [dim / 2]   ggml's `qs`: in byte j of a block the low bits of dims j, j + 16
           high   int8  [dim / 8]   ggml's `qh`: bit i % 8 of byte i / 8 is bit 4 of code i
           scale  fp16  [dim / 32]  (largest - smallest) / 31
           min    fp16  [dim / 32]  smallest; x = code * scale + min

Bytes are int8 because TensorRT takes that and not uint8; their bits are ggml's.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle_chain.engines.errors import InputError

BLOCK = 32
FLOATS = ("fp32", "fp16", "bf16")
KV_TYPES = (*FLOATS, "q8_0/q5_1", "q8_0")  # of keys / of values; one word: of both

_QUANTISED = {
    "q8_0": (("codes", "int8", 1), ("scale", "fp16", BLOCK)),
    "q5_1": (
        ("nibbles", "int8", 2),
        ("high", "int8", 8),
        ("scale", "fp16", BLOCK),
        ("min", "fp16", BLOCK),
    ),
}


@dataclass(frozen=True)
class Plane:
    """One tensor of a cache; a row of a head has `columns` values in it."""

    suffix: str  # after the name of the cache: "" or ".codes"
    dtype: str
    columns: int


def key_and_value(kv: str) -> tuple[str, str]:
    """What a KV type means for keys and for values."""
    key, _, value = kv.partition("/")
    return key, value or key


def is_quantised(kv: str) -> bool:
    """Whether a KV type, or the kind of keys or values, is one of ggml's."""
    return kv not in FLOATS


def planes(kind: str, head_dim: int) -> tuple[Plane, ...]:
    """The planes of keys or values stored as `kind`.

    Raises:
        InputError: A head is not a whole number of blocks.
    """
    if not is_quantised(kind):
        return (Plane("", kind, head_dim),)
    if head_dim % BLOCK:
        raise InputError(
            f"head_dim is {head_dim}, and KV in {kind} takes multiples of {BLOCK}: "
            f"export with --kv {', '.join(FLOATS[:-1])} or {FLOATS[-1]}"
        )
    return tuple(
        Plane(f".{name}", dtype, head_dim // share) for name, dtype, share in _QUANTISED[kind]
    )


def names(kind: str, cache: str) -> tuple[str, ...]:
    """The names of the planes of `cache` ("layers.3.key"), in order."""
    if not is_quantised(kind):
        return (cache,)
    return tuple(f"{cache}.{name}" for name, *_ in _QUANTISED[kind])
