"""What a user says about a draft in place of its config: the options that override it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from eagle_chain.engines.fields import Reader, is_ascending, is_integer, is_number, raise_all

CONVENTIONS = ("outputs", "boundaries")
ROPE_THETA = (1.0, 1e12)


@dataclass(frozen=True)
class DraftOverrides:
    """What a draft's file cannot tell, or tells wrongly; None leaves it to the file.

    Each field is an option of `export` with dashes for underscores. They matter because a wrong
    value shows only as low acceptance: the tokens stay those of plain decoding.
    """

    aux_layers: tuple[int, ...] | None = None  # trunk layers that the features come from
    aux_convention: str | None = None  # what the ids are: "outputs" of layers, or "boundaries"
    rope_theta: float | None = None
    rotary_dim: int | None = None  # leading dims of each head that rotate
    norm_output: bool | None = None  # whether the recurrence is taken after the last norm
    norm_before_residual: bool | None = None  # whether the residual is taken after the norm

    def words(self) -> tuple[str, ...]:
        """These overrides as they are typed behind `eagle-chain export`."""
        words: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                words += [f"--{field.name.replace('_', '-')}", _typed(value)]
        return tuple(words)

    def check(self, head_dim: Any, depth: int) -> None:
        """Refuse values that fit no draft with this head_dim for a trunk of `depth` layers.

        Raises:
            InputError: Names each option, what was given and what would do.
        """
        given = Reader("", {})
        if self.aux_convention not in (None, *CONVENTIONS):
            given.note("--aux-convention", self.aux_convention, " or ".join(CONVENTIONS))
        low = 1 if self.aux_convention == "boundaries" else 0
        limits = (low, depth - 1 + low)
        if self.aux_layers is not None and not is_ascending(self.aux_layers, limits):
            wanted = f"layers from {limits[0]} to {limits[1]}, strictly ascending"
            given.note("--aux-layers", list(self.aux_layers), wanted)
        if self.rope_theta is not None and not is_number(self.rope_theta, ROPE_THETA):
            wanted = f"a number from {ROPE_THETA[0]:g} to {ROPE_THETA[1]:g}"
            given.note("--rope-theta", self.rope_theta, wanted)
        if self.rotary_dim is not None and is_integer(head_dim, (2, 1 << 30)):
            if not is_integer(self.rotary_dim, (2, head_dim)) or self.rotary_dim % 2:
                wanted = f"an even number from 2 to {head_dim}, the draft's head_dim"
                given.note("--rotary-dim", self.rotary_dim, wanted)
        raise_all("options for the draft", given.problems)


NONE = DraftOverrides()


def _typed(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
