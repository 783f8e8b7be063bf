"""Engine specs: names, dtypes, shapes and state pairs of trunk, encoder and draft.

This file is the contract between a graph and whoever runs it. Everything is static: one engine
serves one width, so every kernel sees the same shapes whether a token is decoded plainly or
verified. Names in comments: W rows of a trunk call, R rows of a draft call, H hidden, V vocabulary,
C capacity.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.kv import key_and_value, planes

DTYPES = ("fp32", "fp16", "bf16")
# Attention of many rows in primitives takes so many scores at a time (fp32: 128 MB).
ATTENTION_SCORES = 32 * 1024 * 1024
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


@dataclass(frozen=True)
class EngineSpec:
    """What one engine takes and gives, its states included."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    states: tuple[StatePair, ...] = ()

    @property
    def reads_prompts(self) -> bool:
        """Whether it takes many rows of a prompt; one for a smaller capacity is "prefill-2048"."""
        return self.name.partition("-")[0].endswith("prefill")

    @property
    def all_inputs(self) -> tuple[TensorSpec, ...]:
        """Plain inputs first, then the state inputs, in graph order."""
        return self.inputs + tuple(pair.tensors[0] for pair in self.states)

    @property
    def all_outputs(self) -> tuple[TensorSpec, ...]:
        """Plain outputs first, then the state outputs, in graph order."""
        return self.outputs + tuple(pair.tensors[1] for pair in self.states)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dicts for the manifest."""

        def tensor(t: TensorSpec) -> list[Any]:
            return [t.name, t.dtype, list(t.shape)]

        return {
            "name": self.name,
            "inputs": [tensor(t) for t in self.inputs],
            "outputs": [tensor(t) for t in self.outputs],
            "states": [
                {
                    "input": s.input,
                    "output": s.output,
                    "dtype": s.dtype,
                    "shape": list(s.shape),
                    "in_place": s.in_place,
                    "rows_axis": s.rows_axis,
                }
                for s in self.states
            ],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> EngineSpec:
        """Inverse of `to_json`."""

        def tensors(rows: list[list[Any]]) -> tuple[TensorSpec, ...]:
            return tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in rows)

        return EngineSpec(
            data["name"],
            tensors(data["inputs"]),
            tensors(data["outputs"]),
            tuple(StatePair(**{**s, "shape": tuple(s["shape"])}) for s in data["states"]),
        )


@dataclass(frozen=True)
class Options:
    """What the user chooses at export; the same for every engine of a bundle."""

    width: int = 5  # rows of a trunk call: 1 pending token + up to width - 1 drafted ones
    capacity: int = 4096  # longest sequence in tokens, prompt included
    dtype: str = "fp32"  # of activations; recurrent states are always fp32
    profile: str = "portable"
    debug: tuple[str, ...] = ()  # extra outputs: "logits", "S_rows"
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

    def engine(self, name: str, capacity: int) -> str:
        """What the engine `name` is called that is made for a capacity: "trunk", "trunk-2048"."""
        return name if capacity == self.capacity else f"{name}-{capacity}"

    def of_engine(self, name: str) -> tuple[str, Options]:
        """The inverse of `engine`: a plain name, and the options that the engine is made with."""
        plain, _, capacity = name.partition("-")
        return plain, self.at(int(capacity) if capacity else self.capacity)

    @property
    def kv_rows(self) -> int:
        """Rows of a KV buffer: a call at the last position still writes `width` rows."""
        return self.capacity + self.width

    @property
    def kv_type(self) -> str:
        """How KV rows are stored."""
        return self.kv or self.dtype


def kv_pairs(prefix: str, heads: int, head_dim: int, options: Options) -> tuple[StatePair, ...]:
    """Keys (after norm and rotary) and values of one attention layer.

    Each is one tensor [1, heads, C + W, dim], or the planes of its KV type, see `engines.kv`.

    Raises:
        InputError: The KV type does not suit `head_dim`.
    """
    pairs = []
    try:
        for part, kind in zip(("key", "value"), key_and_value(options.kv_type), strict=True):
            for plane in planes(kind, head_dim):
                name = f"{prefix}.{part}{plane.suffix}"
                shape = (1, heads, options.kv_rows, plane.columns)
                pairs.append(StatePair(name, f"{name}.next", plane.dtype, shape, True, 2))
    except InputError as error:
        raise InputError(f"{prefix}: {error}") from None
    return tuple(pairs)


def kv_row_bytes(specs: Iterable[EngineSpec]) -> int:
    """What one more token adds to the KV caches of these engines, each cache counted once."""
    pairs = {pair.input: pair for spec in specs for pair in spec.states}
    return sum(
        pair.tensors[0].nbytes // pair.shape[pair.rows_axis]
        for pair in pairs.values()
        if pair.rows_axis is not None
    )


def linear_pairs(prefix: str, config: TrunkConfig, options: Options) -> tuple[StatePair, ...]:
    """The recurrent state S as of the call's start, the call's rank-1 log and its conv window."""
    if options.profile == "ort-cuda":
        return _replayed_pairs(prefix, config, options)
    width = options.width
    shapes = {
        "S": (config.linear_value_heads, config.linear_key_dim, config.linear_value_dim),
        "log_key": (width, config.linear_key_heads, config.linear_key_dim),
        "log_delta": (width, config.linear_value_heads, config.linear_value_dim),
        "log_decay": (width, config.linear_value_heads),
    }
    window = (config.conv_channels, config.conv_kernel - 1 + width)
    return (
        *(
            StatePair(f"{prefix}.{part}", f"{prefix}.{part}.next", "fp32", shape)
            for part, shape in shapes.items()
        ),
        StatePair(f"{prefix}.window", f"{prefix}.window.next", options.dtype, window),
    )


def _replayed_pairs(prefix: str, config: TrunkConfig, options: Options) -> tuple[StatePair, ...]:
    """The same for com.microsoft.GatedDeltaNet: S transposed, and the inputs of the call's rows."""
    heads, width, dtype = config.linear_value_heads, options.width, options.dtype
    tensors = {
        "S": ("fp32", (heads, config.linear_value_dim, config.linear_key_dim)),
        "log_qkv": (dtype, (width, config.conv_channels)),
        "log_decay": ("fp32", (width, heads)),
        "log_beta": ("fp32", (width, heads)),
        "window": (dtype, (config.conv_kernel - 1 + width, config.conv_channels)),
    }
    return tuple(
        StatePair(f"{prefix}.{part}", f"{prefix}.{part}.next", kind, shape)
        for part, (kind, shape) in tensors.items()
    )


def trunk_spec(config: TrunkConfig, aux_layers: tuple[int, ...], options: Options) -> EngineSpec:
    """One call of the trunk over W rows.

    Inputs: `ids` [W] (-1: no token, never accepted), `position` [1] of row 0, `rows` [1] valid rows
    of this call (1..W), `kept` [1] rows of the previous call that joined the sequence.
    Outputs: `next_ids` [W] greedy choice per row (-1 where the logits are not finite), `accepted`
    [1] drafted rows confirmed from the front, `pending` [1] = next_ids[accepted], `next_kept` [1] =
    accepted + 1, `next_position` [1] = position + next_kept, `features` [W, A*H] the residual
    stream after the A aux layers (absent without any), `hidden` [W, H] after the final norm.
    With `sampling` two more inputs: `temperature` [1], 0 for the greedy choice, and `uniform`
    [C + W], the number in [0, 1) by which the token behind each position is drawn.
    """
    width, hidden = options.width, config.hidden_size
    outputs = [
        TensorSpec("next_ids", "int32", (width,)),
        TensorSpec("accepted", "int32", (1,)),
        TensorSpec("pending", "int32", (1,)),
        TensorSpec("next_kept", "int32", (1,)),
        TensorSpec("next_position", "int32", (1,)),
    ]
    if aux_layers:
        features = TensorSpec("features", options.dtype, (width, len(aux_layers) * hidden))
        outputs.append(features)
    outputs.append(TensorSpec("hidden", options.dtype, (width, hidden)))
    states: list[StatePair] = []
    for i, kind in enumerate(config.layer_types):
        prefix = f"layers.{i}"
        if kind == "linear_attention":
            states += linear_pairs(prefix, config, options)
        else:
            states += kv_pairs(prefix, config.kv_heads, config.head_dim, options)
    if "logits" in options.debug:
        outputs.append(TensorSpec("logits", "fp32", (width, config.vocab_size)))
    if "S_rows" in options.debug:  # S after every row: the oracle for the log
        outputs += [
            TensorSpec(pair.input.replace(".S", ".S_rows"), "fp32", (width, *pair.shape))
            for pair in states
            if pair.input.endswith(".S")
        ]
    counters = tuple(TensorSpec(name, "int32", (1,)) for name in ("position", "rows", "kept"))
    ids = TensorSpec("ids", "int32", (width,))
    draws = ("temperature", (1,)), ("uniform", (options.kv_rows,))
    numbers = tuple(TensorSpec(n, "fp32", shape) for n, shape in draws if options.sampling)
    return EngineSpec("trunk", (ids, *counters, *numbers), tuple(outputs), tuple(states))


def prefill_spec(config: TrunkConfig, aux_layers: tuple[int, ...], options: Options) -> EngineSpec:
    """One call over P rows of a prompt, all of which join the sequence; the trunk's states.

    Inputs: `ids` [P], `position` [1] of row 0, `rows` [1] valid rows of this call (1..P), `kept`
    [1] rows of the trunk call before it that joined the sequence (0 behind another prefill). P rows
    of KV are written: position + P is at most C + W.
    Outputs: `pending` [1] greedy choice after the last valid row (-1 where the logits are not
    finite), `next_kept` [1] = 0, as S leaves with all valid rows folded and the window begins with
    their last inputs, `next_position` [1] = position + rows, `features` [P, A*H], `hidden` [P, H];
    rows behind the valid ones change no state and hold nothing.
    """
    trunk = trunk_spec(config, aux_layers, options)
    rows, hidden = options.prefill, config.hidden_size
    outputs = [
        TensorSpec("pending", "int32", (1,)),
        TensorSpec("next_kept", "int32", (1,)),
        TensorSpec("next_position", "int32", (1,)),
    ]
    if aux_layers:
        features = TensorSpec("features", options.dtype, (rows, len(aux_layers) * hidden))
        outputs.append(features)
    outputs.append(TensorSpec("hidden", options.dtype, (rows, hidden)))
    if "logits" in options.debug:
        outputs.append(TensorSpec("logits", "fp32", (1, config.vocab_size)))
    ids, *counters = (t for t in trunk.inputs if t.dtype == "int32")  # nothing is drawn here
    inputs = (TensorSpec(ids.name, ids.dtype, (rows,)), *counters)
    return EngineSpec("prefill", inputs, tuple(outputs), trunk.states)


def draft_prefill_spec(config: DraftConfig, options: Options) -> EngineSpec:
    """The draft's KV rows for P rows of a prompt; no guess is made, so nothing else is computed.

    Inputs: `ids` [P] (row i holds the token behind feature i), `features` [P, A*Ht] of the
    prefill, `position` [1] of row 0, `rows` [1] valid rows (1..P).
    """
    rows = options.prefill
    return EngineSpec(
        "draft_prefill",
        (
            TensorSpec("ids", "int32", (rows,)),
            TensorSpec("features", options.dtype, (rows, config.feature_size)),
            TensorSpec("position", "int32", (1,)),
            TensorSpec("rows", "int32", (1,)),
        ),
        (),
        kv_pairs("draft", config.kv_heads, config.head_dim, options),
    )


def mtp_prefill_spec(config: TrunkConfig, options: Options) -> EngineSpec:
    """The KV rows of the trunk's own head for P rows of a prompt, as `draft_prefill_spec`.

    Inputs: `ids` [P], `hidden` [P, H] of the prefill, `position` [1], `rows` [1].
    """
    rows = options.prefill
    return EngineSpec(
        "mtp_prefill",
        (
            TensorSpec("ids", "int32", (rows,)),
            TensorSpec("hidden", options.dtype, (rows, config.hidden_size)),
            TensorSpec("position", "int32", (1,)),
            TensorSpec("rows", "int32", (1,)),
        ),
        (),
        kv_pairs("mtp", config.kv_heads, config.head_dim, options),
    )


def encoder_spec(config: DraftConfig, options: Options) -> EngineSpec:
    """The draft's fc: `features` [W, A*Ht] of the trunk -> `g` [W, H] for the draft's extend."""
    width = options.width
    return EngineSpec(
        "encoder",
        (TensorSpec("features", options.dtype, (width, config.feature_size)),),
        (TensorSpec("g", options.dtype, (width, config.hidden_size)),),
    )


def draft_spec(config: DraftConfig, rows: int, options: Options) -> EngineSpec:
    """One call of the draft layer over R rows: `draft` extends with W rows, `draft_step` with 1.

    Inputs: `ids` [R] trunk-vocabulary tokens (row i pairs token i+1 with feature i), `g` [R, H],
    `position` [1] of row 0, `row` [1] the row whose result is wanted.
    Outputs: `token` [1] drafted trunk-vocabulary id (-1 where the logits are not finite), `g_next`
    [1, H] the recurrence of that row, `next_position` [1] = position + row + 1.
    """
    return _layer_spec(
        "draft_step" if rows == 1 else "draft",
        rows,
        config.hidden_size,
        config.draft_vocab_size,
        kv_pairs("draft", config.kv_heads, config.head_dim, options),
        options,
    )


def mtp_spec(config: TrunkConfig, rows: int, options: Options) -> EngineSpec:
    """One call of the trunk's own head over R rows: `mtp` with W rows, `mtp_step` with 1.

    Inputs and outputs as in `draft_spec`; `g` is the trunk's `hidden` or the `g_next` of the step
    before, both after a final norm.
    """
    return _layer_spec(
        "mtp_step" if rows == 1 else "mtp",
        rows,
        config.hidden_size,
        config.vocab_size,
        kv_pairs("mtp", config.kv_heads, config.head_dim, options),
        options,
    )


def _layer_spec(
    name: str,
    rows: int,
    hidden: int,
    vocab: int,
    states: tuple[StatePair, ...],
    options: Options,
) -> EngineSpec:
    """A draft layer whose output enters it again."""
    outputs = [
        TensorSpec("token", "int32", (1,)),
        TensorSpec("g_next", options.dtype, (1, hidden)),
        TensorSpec("next_position", "int32", (1,)),
    ]
    if "logits" in options.debug:
        outputs.append(TensorSpec("logits", "fp32", (1, vocab)))
    inputs = (
        TensorSpec("ids", "int32", (rows,)),
        TensorSpec("g", options.dtype, (rows, hidden)),
        TensorSpec("position", "int32", (1,)),
        TensorSpec("row", "int32", (1,)),
    )
    return EngineSpec(name, inputs, tuple(outputs), states)
