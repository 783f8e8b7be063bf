"""Engine outputs against recorded ones: how far off each tensor is, and which is the first too far.

Order is that of the graph: the tensors of a layer, then the features taken behind it, then the next
layer. What an engine is fed is the reference's, so a layer before a fault is never touched by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.recording import Call
from eagle_chain.engines.spec import TensorSpec
from eagle_chain.runtime.kv_planes import decoded, plane_of
from eagle_chain.runtime.player import Arrays
from eagle_chain.runtime.tolerances import (
    CHOICES,
    CHOSEN,
    DRAFTED,
    NEAR_TIE,
    OWN_NEAR_TIE,
    Tolerance,
    kind_of,
    limits_of,
    tolerance,
)

Array = NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int32]
LOGGED = {  # what the profile `ort-cuda` logs, by the reference's names
    "log_qkv": "log_qkv",
    "log_decay": "raw_decay",
    "log_beta": "raw_beta",
}
AFTER = 1 << 20  # in place of a layer's number for what comes behind the last one


@dataclass(frozen=True)
class Distance:
    """How far a tensor is from what it should be; see `Tolerance` for each."""

    cosine: float = 0.0
    norm: float = 0.0
    error: float = 0.0

    def within(self, limit: Tolerance) -> bool:
        """Whether all three are within the limit."""
        return self.cosine <= limit.cosine and self.norm <= limit.norm and self.error <= limit.error

    def worst(self, other: Distance) -> Distance:
        """The larger of each."""
        return Distance(
            max(self.cosine, other.cosine),
            max(self.norm, other.norm),
            max(self.error, other.error),
        )


NOWHERE = Distance(np.inf, np.inf, np.inf)


@dataclass
class Verdict:
    """One tensor of one engine over all its calls."""

    engine: str
    tensor: str  # states without `.next`, features with the layer they are taken behind
    dtype: str
    kind: str
    order: tuple[int, int]  # in the graph: layer, and place within it
    limit: Tolerance | None  # None: whole numbers, which must be the reference's
    worst: Distance = field(default_factory=Distance)
    worst_round: int = 0
    calls: int = 0
    near_ties: int = 0  # choices that differ between logits which are all but equal
    failed: list[int] = field(default_factory=list)  # rounds

    @property
    def layer(self) -> int | None:
        """Of the trunk; None behind or beside its layers."""
        return None if self.order[0] == AFTER else self.order[0]

    def note(self, found: Distance, round: int) -> None:
        """Take in one call."""
        self.calls += 1
        if found.error > self.worst.error:
            self.worst_round = round
        self.worst = self.worst.worst(found)
        if self.limit is not None and not found.within(self.limit):
            self.failed.append(round)


def distance(got: Array, want: Array) -> Distance:
    """Compare two tensors of one shape in float64; slices are along the first axis."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    if not np.isfinite(a).all():
        return NOWHERE
    while a.ndim > 2 and len(a) == 1:  # KV: [1, heads, rows, dim]
        a, b = a[0], b[0]
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    ours, theirs = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if ours == 0 or theirs == 0:
        return Distance() if ours == theirs else NOWHERE
    cosine = float(np.vdot(a, b)) / (ours * theirs)
    slices = np.linalg.norm(b, axis=1)
    typical = np.sqrt(np.mean(slices**2))
    error = np.linalg.norm(a - b, axis=1) / np.maximum(slices, typical)
    return Distance(max(0.0, 1 - cosine), abs(ours / theirs - 1), float(error.max()))


@dataclass(frozen=True, eq=False)
class _Output:
    """One output of a call: its place in the spec, what came out and what should have."""

    call: Call
    tensor: TensorSpec
    place: int
    got: Array
    want: Array


class Comparison:
    """The verdicts on a bundle, filled call by call.

    Attributes:
        verdicts: One for each tensor, in the order of the graphs once `ordered` is asked.
        unknown: Tensors of the bundle that the recording does not have.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._limits = limits_of(manifest.options)
        self.verdicts: dict[tuple[str, str], Verdict] = {}
        self.unknown: dict[str, None] = {}
        self._axes = {
            (engine, pair.output): pair.rows_axis
            for engine, spec in manifest.specs.items()
            for pair in spec.states
            if pair.rows_axis is not None
        }
        self._engines: list[str] = []  # as they first ran

    @property
    def passed(self) -> bool:
        """Whether no tensor failed in any call."""
        return not any(verdict.failed for verdict in self.verdicts.values())

    def ordered(self) -> list[Verdict]:
        """All verdicts, engine by engine in the order of its graph."""
        return sorted(
            self.verdicts.values(), key=lambda v: (self._engines.index(v.engine), v.order)
        )

    def first_fault(self) -> Verdict | None:
        """The first tensor that is too far off: first layer, first round, first in the graph.

        Of the engine that failed first: its states may be another's as well. Within a layer the
        round comes first, as what is wrong in one call enters the next.
        """
        failed = [verdict for verdict in self.ordered() if verdict.failed]
        rounds = {v.engine: AFTER for v in failed}
        for v in failed:
            rounds[v.engine] = min(rounds[v.engine], *v.failed)
        return min(
            failed,
            key=lambda v: (
                rounds[v.engine],
                self._engines.index(v.engine),
                v.order[0],
                min(v.failed),
                v.order[1],
            ),
            default=None,
        )

    def add(self, call: Call, got: Arrays) -> None:
        """Compare every output of one call."""
        if call.engine not in self._engines:
            self._engines.append(call.engine)
        tie = False
        planes: dict[str, dict[str, _Output]] = {}  # of each KV cache, by suffix
        for place, tensor in enumerate(self.manifest.specs[call.engine].all_outputs):
            here, want = got[tensor.name], self.wanted(call, tensor.name)
            if want is None:
                self.unknown[f"{call.engine}: {tensor.name.removesuffix('.next')}"] = None
                continue
            if self._has_rows(call, tensor):  # the others are padding
                here, want = (values[: int(call.inputs["rows"][0])] for values in (here, want))
            output = _Output(call, tensor, place, here, want)
            if plane := plane_of(tensor.name):
                planes.setdefault(plane[0], {})[plane[1]] = output
            elif self._is_choice(call.engine, tensor.name):
                tie |= self._choices(output, got.get("logits"))
            elif tensor.dtype == "int32":
                if not (tie and tensor.name in CHOSEN):
                    self._numbers(output)
            else:
                self._floats(output)
        for cache, parts in planes.items():
            first = next(iter(parts.values()))
            rows = first.want.shape[2]  # a recording may end at the last one
            ours = decoded({suffix: part.got[:, :, :rows] for suffix, part in parts.items()})
            theirs = decoded({suffix: part.want for suffix, part in parts.items()})
            self._floats(replace(first, got=ours, want=theirs), label=cache)

    def wanted(self, call: Call, name: str) -> Array | None:
        """What the reference has for an output, in the layout of the bundle's profile."""
        if self.manifest.options.profile != "ort-cuda":
            return call.outputs.get(name)
        layer, _, part = name.removesuffix(".next").rpartition(".")
        want: Array | None = call.outputs.get(f"{layer}.{LOGGED[part]}" if part in LOGGED else name)
        if want is not None and part in ("S", "window", "S_rows"):
            return np.swapaxes(want, -1, -2)
        return want

    def _has_rows(self, call: Call, tensor: TensorSpec) -> bool:
        """Whether a plain output has a row for each id of a call that may have fewer."""
        ids = call.inputs.get("ids", ())
        plain = not tensor.name.endswith(".next")
        return "rows" in call.inputs and plain and tensor.shape[0] == len(ids) > 1

    def _is_choice(self, engine: str, name: str) -> bool:
        """Whether ids are an argmax of the engine's logits, and not picked from such."""
        alone = all(t.name != "next_ids" for t in self.manifest.specs[engine].outputs)
        return name in CHOICES or (name == "pending" and alone)

    def _floats(self, output: _Output, label: str = "") -> None:
        call, got, want = output.call, output.got, output.want
        axis = self._axes.get((call.engine, output.tensor.name))
        if axis is not None:  # rows that no call has reached hold nothing
            start = int(call.inputs["position"][0])
            end = start + len(call.inputs["ids"])
            whole, new = (
                distance(_rows(got, axis, first, end), _rows(want, axis, first, end))
                for first in (0, start)
            )
            self._verdict(output, label).note(whole.worst(new), call.round)
            return
        for part, layer, ours, theirs in self._parts(output):
            self._verdict(output, part, layer).note(distance(ours, theirs), call.round)

    def _parts(self, output: _Output) -> Iterator[tuple[str, int | None, Array, Array]]:
        """The features layer by layer, any other tensor whole."""
        layers = self.manifest.aux_layers
        if output.tensor.name != "features" or not layers:
            yield "", None, output.got, output.want
            return
        pieces = (np.split(v, len(layers), axis=-1) for v in (output.got, output.want))
        for layer, ours, theirs in zip(layers, *pieces, strict=True):
            yield f"features (layer {layer})", layer, ours, theirs

    def _numbers(self, output: _Output) -> None:
        """Whole numbers: all the same, or failed."""
        verdict = self._verdict(output)
        verdict.calls += 1
        if not np.array_equal(output.got, output.want):
            verdict.failed.append(output.call.round)

    def _choices(self, output: _Output, own: Array | None) -> bool:
        """Chosen ids: the same, or another one whose logit is all but the same; whether one is.

        `own` are the engine's logits, if it gives them.
        """
        call, got = output.call, output.got
        logits = call.outputs["logits"]
        verdict = self._verdict(output)
        verdict.calls += 1
        limit = NEAR_TIE * tolerance(self._limits, "logits").error
        if own is not None:
            error = distance(own[: len(got)], logits[: len(got)]).error
            limit = min(limit, OWN_NEAR_TIE * error)
        wrong = np.flatnonzero(got != output.want)
        for row in wrong:
            second, first = np.partition(logits[row], -2)[-2:]
            gap = first - (second if output.tensor.name in DRAFTED else logits[row, got[row]])
            if got[row] < 0 or gap > limit * np.sqrt(np.mean(np.square(logits[row]))):
                verdict.failed.append(call.round)
                return True
        verdict.near_ties += len(wrong)
        return bool(len(wrong))

    def _verdict(self, output: _Output, label: str = "", layer: int | None = None) -> Verdict:
        """The verdict on a tensor, or on a part of one under a name of its own."""
        tensor = output.tensor
        label = label or tensor.name.removesuffix(".next")
        key = (output.call.engine, label)
        if key not in self.verdicts:
            kind = kind_of(tensor)
            inside = re.match(r"layers\.(\d+)\.", tensor.name)
            if inside:
                layer = int(inside[1])
            # states come before what is computed from them, ids are chosen last
            rank = 0 if tensor.name.endswith(".next") else 1 if kind else 2
            order = (AFTER if layer is None else layer, rank * AFTER + output.place)
            limit = None if kind is None else tolerance(self._limits, kind)
            self.verdicts[key] = Verdict(*key, tensor.dtype, kind or "ids", order, limit)
        return self.verdicts[key]


def _rows(values: Array, axis: int, start: int, end: int) -> Array:
    return values[(slice(None),) * axis + (slice(start, end),)]
