"""The terms of the contract: tensors, state pairs, an engine's spec, the options of a bundle."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.kv import KV_TYPES

DTYPES = ("fp32", "fp16", "bf16")
CUDA_PROFILES = ("ort-cuda", "ort-fused")  # for ONNX Runtime on a GPU
PROFILES = ("portable", "standard", *CUDA_PROFILES)
DEBUG_OUTPUTS = ("logits", "S_rows")
PREFILL_STEP = 32  # rows of the smallest chunk of the delta rule
# Attention of many rows in primitives takes so many scores at a time (fp32: 128 MB).
ATTENTION_SCORES = 32 * 1024 * 1024
ALIGNMENT = 256  # bytes; what TensorRT asks of a tensor address
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int32": 4, "int8": 1}


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of an engine."""

    name: str
    dtype: str  # fp32, fp16, bf16, int32 or int8
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the dense tensor in bytes."""
        size = ITEM_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class StatePair:
    """A state that enters as one tensor and leaves as another, of one dtype and shape.

    `in_place` says that one buffer may be bound to both names (KV caches: rows are only written at
    `position`). All other pairs need two buffers that change places after each call.
    `rows_axis` is the axis that grows with the sequence, None for states of constant size.
    """

    input: str
    output: str
    dtype: str
    shape: tuple[int, ...]
    in_place: bool = False
    rows_axis: int | None = None

    @property
    def tensors(self) -> tuple[TensorSpec, TensorSpec]:
        """The pair as an input and an output tensor."""
        return (
            TensorSpec(self.input, self.dtype, self.shape),
            TensorSpec(self.output, self.dtype, self.shape),
        )

    @property
    def held_bytes(self) -> int:
        """Size of its buffers: one if it is updated in place, otherwise two."""
        return self.tensors[0].nbytes * (1 if self.in_place else 2)


@dataclass(frozen=True)
class EngineSpec:
    """What one engine takes and gives, its states included."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    states: tuple[StatePair, ...] = ()

    @property
    def plain(self) -> str:
        """Its name without the capacity that it may be made for, see `Options.engine`."""
        return self.name.partition("-")[0]

    @property
    def reads_prompts(self) -> bool:
        """Whether it takes many rows of a prompt."""
        return self.plain.endswith("prefill")

    @property
    def all_inputs(self) -> tuple[TensorSpec, ...]:
        """Plain inputs first, then the state inputs, in graph order."""
        return self.inputs + tuple(pair.tensors[0] for pair in self.states)

    @property
    def all_outputs(self) -> tuple[TensorSpec, ...]:
        """Plain outputs first, then the state outputs, in graph order."""
        return self.outputs + tuple(pair.tensors[1] for pair in self.states)


MOST_WIDTH = 64  # rows of a call that verifies drafts


@dataclass(frozen=True)
class Options:
    """What the user chooses at export; the same for every engine of a bundle."""

    width: int = 5  # rows of a trunk call: 1 pending token + up to width - 1 drafted ones
    capacity: int = 4096  # longest sequence in tokens, prompt included
    dtype: str = "fp32"  # of activations; recurrent states are always fp32
    profile: str = "portable"
    debug: tuple[str, ...] = ()  # extra outputs, of `DEBUG_OUTPUTS`
    kv: str | None = None  # how KV rows are stored, one of `kv.KV_TYPES`; None: as `dtype`
    prefill: int = 0  # rows of a call over a prompt; 0: no engines for that
    sampling: bool = False  # the trunk can draw tokens: two more inputs
    smaller: tuple[int, ...] = ()  # ascending: capacities that have engines of their own as well

    @property
    def capacities(self) -> tuple[int, ...]:
        """Every capacity that there are engines for, ascending."""
        return (*self.smaller, self.capacity)

    def at(self, capacity: int) -> Options:
        """The options of the engines of one capacity; P rows must fit its buffers."""
        prefill = self.prefill if self.prefill <= capacity + self.width else 0
        return replace(self, capacity=capacity, smaller=(), prefill=prefill)

    def capacity_at(self, position: int) -> int:
        """Whose engines compute a call from `position` on: the smallest with W rows of room."""
        fits = (size for size in self.smaller if position + self.width <= size)
        return next(fits, self.capacity)

    def engine(self, name: str, capacity: int) -> str:
        """What the engine `name` is called that is made for a capacity: "trunk", "trunk-2048"."""
        return name if capacity == self.capacity else f"{name}-{capacity}"

    def of_engine(self, name: str) -> tuple[str, Options]:
        """The inverse of `engine`: a plain name, and the options that the engine is made with."""
        plain, _, capacity = name.partition("-")
        return plain, self.at(int(capacity) if capacity else self.capacity)

    def engines_at(self, capacity: int, specs: Mapping[str, EngineSpec]) -> dict[str, str]:
        """Plain name -> name of the engines of one capacity, with those that serve any."""
        named = ((*self.of_engine(name), name) for name in specs)
        return {
            plain: name
            for plain, made, name in named
            if made.capacity == capacity or not specs[name].states
        }

    @property
    def for_cuda(self) -> bool:
        """Whether the profile is for ONNX Runtime's CUDA provider."""
        return self.profile in CUDA_PROFILES

    @property
    def kv_rows(self) -> int:
        """Rows of a KV buffer: a call at the last position still writes `width` rows."""
        return self.capacity + self.width

    @property
    def kv_type(self) -> str:
        """How KV rows are stored."""
        return self.kv or self.dtype


def check_options(options: Options) -> None:
    """Refuse options that no graph can be made for."""
    if options.width < 2:
        raise InputError(f"width is {options.width}, expected 2 or more: 1 token and the drafts")
    if options.width > MOST_WIDTH:
        raise InputError(
            f"width is {options.width}, expected at most {MOST_WIDTH}: every row is computed in "
            "every call, and so many drafts in a row are hardly ever right"
        )
    if options.capacity < options.width:
        raise InputError(
            f"capacity is {options.capacity}, expected at least the width, {options.width}"
        )
    if options.dtype not in DTYPES:
        raise InputError(f"dtype is {options.dtype!r}, expected one of {', '.join(DTYPES)}")
    if options.kv_type not in KV_TYPES:
        raise InputError(f"kv is {options.kv!r}, expected one of {', '.join(KV_TYPES)}")
    if options.profile not in PROFILES:
        raise InputError(f"profile is {options.profile!r}, expected one of {', '.join(PROFILES)}")
    _check_smaller(options)
    _check_prefill(options)
    unknown = sorted(set(options.debug) - set(DEBUG_OUTPUTS))
    if unknown or len(set(options.debug)) != len(options.debug):
        raise InputError(
            f"debug is {', '.join(options.debug)}, expected some of {', '.join(DEBUG_OUTPUTS)}"
        )


def _check_smaller(options: Options) -> None:
    """Refuse capacities that do not ascend, or in which not even one call fits."""
    for small, large in itertools.pairwise(options.capacities):
        if not options.width <= small < large:
            raise InputError(
                f"capacity is {', '.join(map(str, options.capacities))}, expected ascending "
                f"numbers, each at least the width, {options.width}"
            )


def _check_prefill(options: Options) -> None:
    """Refuse a number of prompt rows that does not divide into chunks, or is more than fit."""
    rows = options.prefill
    if rows < 0 or rows % PREFILL_STEP or 0 < rows < options.width:
        raise InputError(
            f"prefill is {rows}, expected 0 (off) or a multiple of {PREFILL_STEP} rows above the "
            f"width, {options.width}"
        )
    if rows > options.kv_rows:
        raise InputError(
            f"prefill is {rows}, but the capacity is {options.capacity}: give at most that"
        )


def kv_row_bytes(specs: Iterable[EngineSpec]) -> int:
    """What one more token adds to the KV caches of these engines, each cache counted once."""
    pairs = {pair.input: pair for spec in specs for pair in spec.states}
    return sum(
        pair.tensors[0].nbytes // pair.shape[pair.rows_axis]
        for pair in pairs.values()
        if pair.rows_axis is not None
    )
