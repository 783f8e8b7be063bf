"""Weights that a graph takes in another form than the checkpoint holds them.

They are inputs of the graph, made once when the weights are loaded; on disk there is only the
checkpoint. The name of such an input says how it is made, so a graph needs no table beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

_MARK = "derived:"


@dataclass(frozen=True)
class Derived:
    """`sources` one below the other, plus `offset`, in `dtype`."""

    sources: tuple[str, ...]  # names of the weight table, equal but for their first extent
    dtype: str  # fp32, fp16 or bf16
    offset: float = 0.0  # added in fp32, before rounding: RMSNorms that use 1 + w

    @property
    def name(self) -> str:
        """The name of the graph input."""
        return f"{_MARK}{self.dtype}:rows:{self.offset:g}:{'|'.join(self.sources)}"

    @staticmethod
    def parse(name: str) -> Derived | None:
        """The form that the name of a graph input asks for, None for a weight as it is stored."""
        if not name.startswith(_MARK):
            return None
        dtype, _, offset, sources = name.removeprefix(_MARK).split(":", 3)
        return Derived(tuple(sources.split("|")), dtype, float(offset))
