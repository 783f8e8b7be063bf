"""The contract between a graph and whoever runs it: what each engine of a bundle takes and gives.

Everything is static: one engine serves one width, so every kernel sees the same shapes whether a
token is decoded plainly or verified. Names in comments: W rows of a trunk call, R rows of a draft
call, P rows of a prompt, H hidden, V vocabulary, C capacity.
"""

from __future__ import annotations

from dataclasses import replace

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.kv import key_and_value, planes
from eagle_chain.engines.spec import EngineSpec, Options, StatePair, TensorSpec


def engine_specs(
    trunk: TrunkConfig, draft: DraftConfig | None, options: Options, mtp: bool = False
) -> dict[str, EngineSpec]:
    """The specs of all engines of a bundle, by name; of a smaller capacity those that keep KV.

    `mtp` adds those of the trunk's own head.
    """
    specs = _specs(trunk, draft, options.at(options.capacity), mtp)
    for capacity in options.smaller:
        for name, spec in _specs(trunk, draft, options.at(capacity), mtp).items():
            if spec.states:
                sized = options.engine(name, capacity)
                specs[sized] = replace(spec, name=sized)
    return specs


def _specs(
    trunk: TrunkConfig, draft: DraftConfig | None, options: Options, mtp: bool
) -> dict[str, EngineSpec]:
    """The specs of the engines of one capacity."""
    aux_layers, width = draft.aux_layers if draft else (), options.width
    specs = {"trunk": trunk_spec(trunk, aux_layers, options)}
    if draft is not None:
        specs["encoder"] = encoder_spec(draft, options)
        specs["draft"] = draft_spec(draft, width, options)
        specs["draft_step"] = draft_spec(draft, 1, options)
    if mtp:
        specs["mtp"] = mtp_spec(trunk, width, options)
        specs["mtp_step"] = mtp_spec(trunk, 1, options)
    if options.prefill:
        specs["prefill"] = prefill_spec(trunk, aux_layers, options)
        if draft is not None:
            specs["draft_prefill"] = draft_prefill_spec(draft, options)
        if mtp:
            specs["mtp_prefill"] = mtp_prefill_spec(trunk, options)
    return specs


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
    width, states = options.width, _trunk_states(config, options)
    inputs = [TensorSpec("ids", "int32", (width,)), *_counts("position", "rows", "kept")]
    if options.sampling:
        inputs.append(TensorSpec("temperature", "fp32", (1,)))
        inputs.append(TensorSpec("uniform", "fp32", (options.kv_rows,)))
    outputs = [
        TensorSpec("next_ids", "int32", (width,)),
        *_counts("accepted", "pending", "next_kept", "next_position"),
        *_streams(config, aux_layers, width, options),
    ]
    if "logits" in options.debug:
        outputs.append(TensorSpec("logits", "fp32", (width, config.vocab_size)))
    if "S_rows" in options.debug:  # S after every row: the oracle for the log
        outputs += [
            TensorSpec(pair.input.replace(".S", ".S_rows"), "fp32", (width, *pair.shape))
            for pair in states
            if pair.input.endswith(".S")
        ]
    return EngineSpec("trunk", tuple(inputs), tuple(outputs), states)


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
    rows = options.prefill
    inputs = (TensorSpec("ids", "int32", (rows,)), *_counts("position", "rows", "kept"))
    outputs = [
        *_counts("pending", "next_kept", "next_position"),
        *_streams(config, aux_layers, rows, options),
    ]
    if "logits" in options.debug:
        outputs.append(TensorSpec("logits", "fp32", (1, config.vocab_size)))
    return EngineSpec("prefill", inputs, tuple(outputs), _trunk_states(config, options))


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
    states = kv_pairs("draft", config.kv_heads, config.head_dim, options)
    name = "draft_step" if rows == 1 else "draft"
    return _layer_spec(name, rows, config.hidden_size, config.draft_vocab_size, states, options)


def mtp_spec(config: TrunkConfig, rows: int, options: Options) -> EngineSpec:
    """One call of the trunk's own head over R rows: `mtp` with W rows, `mtp_step` with 1.

    Inputs and outputs as in `draft_spec`; `g` is the trunk's `hidden` or the `g_next` of the step
    before, both after a final norm.
    """
    states = kv_pairs("mtp", config.kv_heads, config.head_dim, options)
    name = "mtp_step" if rows == 1 else "mtp"
    return _layer_spec(name, rows, config.hidden_size, config.vocab_size, states, options)


def draft_prefill_spec(config: DraftConfig, options: Options) -> EngineSpec:
    """The draft's KV rows for P rows of a prompt; no guess is made, so nothing else is computed.

    Inputs: `ids` [P] (row i holds the token behind feature i), `features` [P, A*Ht] of the
    prefill, `position` [1] of row 0, `rows` [1] valid rows (1..P).
    """
    features = TensorSpec("features", options.dtype, (options.prefill, config.feature_size))
    states = kv_pairs("draft", config.kv_heads, config.head_dim, options)
    return _kv_rows_spec("draft_prefill", features, states)


def mtp_prefill_spec(config: TrunkConfig, options: Options) -> EngineSpec:
    """The KV rows of the trunk's own head for P rows of a prompt, as `draft_prefill_spec`.

    Inputs: `ids` [P], `hidden` [P, H] of the prefill, `position` [1], `rows` [1].
    """
    hidden = TensorSpec("hidden", options.dtype, (options.prefill, config.hidden_size))
    states = kv_pairs("mtp", config.kv_heads, config.head_dim, options)
    return _kv_rows_spec("mtp_prefill", hidden, states)


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


def linear_pairs(prefix: str, config: TrunkConfig, options: Options) -> tuple[StatePair, ...]:
    """The recurrent state S as of the call's start, the call's rank-1 log and its conv window.

    For com.microsoft.GatedDeltaNet (`ort-cuda`) S and the window are transposed, and the log holds
    the inputs of the call's rows.
    """
    width, dtype, heads = options.width, options.dtype, config.linear_value_heads
    key_dim, value_dim = config.linear_key_dim, config.linear_value_dim
    channels, columns = config.conv_channels, config.conv_kernel - 1 + width
    if options.profile == "ort-cuda":
        tensors = {
            "S": ("fp32", (heads, value_dim, key_dim)),
            "log_qkv": (dtype, (width, channels)),
            "log_decay": ("fp32", (width, heads)),
            "log_beta": ("fp32", (width, heads)),
            "window": (dtype, (columns, channels)),
        }
    else:
        tensors = {
            "S": ("fp32", (heads, key_dim, value_dim)),
            "log_key": ("fp32", (width, config.linear_key_heads, key_dim)),
            "log_delta": ("fp32", (width, heads, value_dim)),
            "log_decay": ("fp32", (width, heads)),
            "window": (dtype, (channels, columns)),
        }
    return tuple(
        StatePair(f"{prefix}.{part}", f"{prefix}.{part}.next", kind, shape)
        for part, (kind, shape) in tensors.items()
    )


def _trunk_states(config: TrunkConfig, options: Options) -> tuple[StatePair, ...]:
    states: list[StatePair] = []
    for i, kind in enumerate(config.layer_types):
        prefix = f"layers.{i}"
        if kind == "linear_attention":
            states += linear_pairs(prefix, config, options)
        else:
            states += kv_pairs(prefix, config.kv_heads, config.head_dim, options)
    return tuple(states)


def _streams(
    config: TrunkConfig, aux_layers: tuple[int, ...], rows: int, options: Options
) -> list[TensorSpec]:
    """What drafts read of the trunk's rows: `features`, if a draft does, and `hidden`."""
    hidden = config.hidden_size
    features = TensorSpec("features", options.dtype, (rows, len(aux_layers) * hidden))
    last = TensorSpec("hidden", options.dtype, (rows, hidden))
    return [features, last] if aux_layers else [last]


def _layer_spec(
    name: str, rows: int, hidden: int, vocab: int, states: tuple[StatePair, ...], options: Options
) -> EngineSpec:
    """A draft layer whose output enters it again."""
    (token, next_position) = _counts("token", "next_position")
    outputs = [token, TensorSpec("g_next", options.dtype, (1, hidden)), next_position]
    if "logits" in options.debug:
        outputs.append(TensorSpec("logits", "fp32", (1, vocab)))
    inputs = (
        TensorSpec("ids", "int32", (rows,)),
        TensorSpec("g", options.dtype, (rows, hidden)),
        *_counts("position", "row"),
    )
    return EngineSpec(name, inputs, tuple(outputs), states)


def _kv_rows_spec(name: str, read: TensorSpec, states: tuple[StatePair, ...]) -> EngineSpec:
    """What only writes a draft layer's KV rows, from `read` [P, ...]."""
    ids = TensorSpec("ids", "int32", read.shape[:1])
    return EngineSpec(name, (ids, read, *_counts("position", "rows")), (), states)


def _counts(*names: str) -> tuple[TensorSpec, ...]:
    """Single whole numbers, int32 [1] each."""
    return tuple(TensorSpec(name, "int32", (1,)) for name in names)
