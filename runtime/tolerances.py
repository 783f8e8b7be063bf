"""How far a tensor may be from the reference, by dtype and kind; docs/parity.md says why."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_chain.engines.kv import is_quantised
from eagle_chain.engines.spec import Options, TensorSpec
from eagle_chain.runtime.kv_planes import plane_of

# A choice may trail the best by so many times the error of logits, over their typical size:
NEAR_TIE = 4  # of the error that is allowed,
OWN_NEAR_TIE = 8  # and of that of the engine's own logits, where it gives them
CHOICES = ("next_ids", "token")  # ids that are an argmax
DRAFTED = ("token",)  # of them, those that went through d2t: they do not index the logits
CHOSEN = ("accepted", "pending", "next_kept", "next_position")  # what follows from `next_ids`


@dataclass(frozen=True)
class Tolerance:
    """All three must hold; a scale shows in the norms, a turn in the cosine, one row in the error.

    `error` is the worst over the slices of a tensor (a row, a head): the norm of the difference
    over that of the slice or of a typical slice, whichever is larger. The other two are of the
    whole.
    """

    cosine: float  # 1 - cosine
    norm: float  # |norm / norm - 1|
    error: float


# Of the last part of a tensor's name.
KINDS = {
    "S": "state",
    "S_rows": "state",
    "log_key": "log",
    "log_delta": "log",
    "log_decay": "log",
    "log_qkv": "log",
    "log_beta": "log",
    "window": "window",
    "key": "kv",
    "value": "kv",
    "logits": "logits",
}
STREAM = "stream"  # every other float: features, hidden, g, g_next

_STATE, _FP32 = Tolerance(2e-9, 5e-5, 6e-5), Tolerance(5e-9, 5e-5, 1e-4)
_TOLERANCES = {
    "fp32": {"state": _STATE, **dict.fromkeys(("log", "window", "kv", "logits", STREAM), _FP32)},
    "fp16": {
        "state": Tolerance(1e-5, 2e-3, 1e-2),
        "log": Tolerance(1e-5, 4e-3, 1.5e-2),
        "window": Tolerance(1e-5, 1e-3, 1.5e-2),
        "kv": Tolerance(1e-5, 3e-3, 8e-3),
        "codes": Tolerance(2e-4, 5e-3, 3e-2),  # of an fp32 bundle, see `limits_of`
        "logits": Tolerance(1e-5, 5e-3, 8e-3),
        STREAM: Tolerance(1e-5, 4e-3, 1e-2),
    },
    "fp16, coarse KV": {
        "state": Tolerance(1e-4, 6e-3, 3e-2),
        "log": Tolerance(3e-4, 1.5e-2, 8e-2),
        "window": Tolerance(6e-5, 1.2e-3, 7e-2),
        "kv": Tolerance(5e-5, 1.5e-2, 2.5e-2),
        "codes": Tolerance(1.5e-3, 1.3e-2, 1.2e-1),
        "logits": Tolerance(9e-4, 5e-2, 1e-1),
        STREAM: Tolerance(1e-3, 5e-2, 1e-1),
    },
    "bf16": {
        "state": Tolerance(3e-3, 1.5e-2, 8e-2),
        "log": Tolerance(3e-3, 3e-2, 1e-1),
        "window": Tolerance(3e-3, 6e-3, 1.2e-1),
        "kv": Tolerance(2e-3, 2e-2, 6e-2),
        "logits": Tolerance(2e-3, 4e-2, 7e-2),
        STREAM: Tolerance(3e-3, 4e-2, 1e-1),
    },
    "bf16, coarse KV": {
        "state": Tolerance(3e-3, 2.4e-2, 1e-1),
        "log": Tolerance(3e-3, 4e-2, 1.4e-1),
        "window": Tolerance(3e-3, 6e-3, 2e-1),
        "codes": Tolerance(4.5e-3, 3e-2, 2e-1),
        "logits": Tolerance(1e-2, 1.2e-1, 3e-1),
        STREAM: Tolerance(5e-3, 1e-1, 2.2e-1),
    },
}


def kind_of(tensor: TensorSpec) -> str | None:
    """The row of the table for a tensor; None for whole numbers."""
    if tensor.dtype == "int32":
        return None
    if plane_of(tensor.name):
        return "codes"
    return KINDS.get(tensor.name.removesuffix(".next").rpartition(".")[2], STREAM)


def limits_of(options: Options) -> str:
    """Whose limits hold for a bundle: those of its dtype, or wider ones if its KV is coarser.

    A value that lies between two that a row can hold may go either way, and what is read of the
    row goes on through all that follows. Rounding of half dtypes brings many more there.
    """
    dtype, kv = options.dtype, options.kv_type
    if dtype == "fp32":
        return "fp32" if kv == "fp32" else "fp16"
    coarse = is_quantised(kv) or (dtype, kv) == ("fp16", "bf16")
    return f"{dtype}, coarse KV" if coarse else dtype


def tolerance(limits: str, kind: str) -> Tolerance:
    """What a bundle is allowed whose limits are those of `limits_of`."""
    return _TOLERANCES[limits][kind]
