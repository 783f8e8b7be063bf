"""The PyTorch reference as an engine: named inputs in, named outputs out, checked by the spec."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.contract import draft_spec, encoder_spec, mtp_spec, trunk_spec
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import EngineSpec, Options
from eagle_chain.export.checkpoint import Checkpoint
from eagle_chain.export.reference import Weights, draft_step, encode, mtp_step, trunk_step

TORCH_TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int8": torch.int8,
}
# Stored in fp32 and used in fp32; rounding them would move every decay.
KEEP_FP32 = ("A_log", "linear_attn.norm.weight")


@dataclass(frozen=True)
class EagerSession:
    """An engine made of PyTorch functions; holds weights, no sequence."""

    spec: EngineSpec
    call: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

    def run(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One call: a tensor for each name of `spec.all_inputs` -> one for each output.

        Raises:
            InputError: A name, dtype or shape is not that of the spec.
        """
        wanted = {t.name: (TORCH_TYPES[t.dtype], t.shape) for t in self.spec.all_inputs}
        got = {name: (t.dtype, tuple(t.shape)) for name, t in feeds.items()}
        if wanted != got:
            names = sorted(n for n in wanted.keys() | got.keys() if wanted.get(n) != got.get(n))
            lines = "; ".join(f"{n}: got {got.get(n)}, wanted {wanted.get(n)}" for n in names[:10])
            raise InputError(f"{self.spec.name}: {lines}")
        with torch.no_grad():
            outputs = self.call(feeds)
        return {
            t.name: outputs[t.name].to(TORCH_TYPES[t.dtype]).reshape(t.shape)
            for t in self.spec.all_outputs
        }


def load_weights(
    checkpoint: Checkpoint, dtype: str, *, stored: Collection[str] = ()
) -> dict[str, Tensor]:
    """All tensors of a checkpoint, floats in the compute dtype but for those that stay fp32.

    Those in `stored` stay as they are and on disk: tables of which only rows are read.
    """
    kind = TORCH_TYPES[dtype]
    weights = {}
    for name in checkpoint.tensors:
        tensor = checkpoint.torch(name)
        if tensor.is_floating_point() and name not in stored:
            tensor = tensor.to(torch.float32 if name.endswith(KEEP_FP32) else kind)
        weights[name] = tensor
    return weights


def load_draft(
    config: DraftConfig, draft: Checkpoint, trunk: Checkpoint, dtype: str
) -> tuple[dict[str, Tensor], Tensor]:
    """The weights of a draft, `lm_head.weight` always among them, and the embedding it reads.

    The embedding is as it is stored: only rows of it are read.
    """
    weights = load_weights(draft, dtype)

    def used(name: str) -> Tensor:
        own = name.removeprefix("draft.")
        return draft.torch(own) if own != name else trunk.torch(name)

    weights["lm_head.weight"] = used(config.head).to(TORCH_TYPES[dtype])
    return weights, used(config.embedding)


def zero_states(spec: EngineSpec) -> dict[str, Tensor]:
    """The states at the start of a sequence, by input name; feed them with kept = 0."""
    return {s.input: torch.zeros(s.shape, dtype=TORCH_TYPES[s.dtype]) for s in spec.states}


def trunk_session(
    weights: Weights, config: TrunkConfig, aux_layers: tuple[int, ...], options: Options
) -> EagerSession:
    """The trunk as an engine."""
    spec = trunk_spec(config, aux_layers, options)

    def call(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        position, rows, kept = (int(feeds[name]) for name in ("position", "rows", "kept"))
        states = states_of(spec, feeds)
        draw = None
        if options.sampling:
            share = feeds["uniform"][position : position + options.width]
            draw = share, float(feeds["temperature"])
        out = trunk_step(
            weights, config, aux_layers, feeds["ids"], position, rows, kept, states, draw
        )
        named = vars(out) | out.S_rows | out.made_of
        return named | {s.output: out.states[s.input] for s in spec.states}

    return EagerSession(spec, call)


def encoder_session(weights: Weights, config: DraftConfig, options: Options) -> EagerSession:
    """The draft's fc as an engine."""
    spec = encoder_spec(config, options)
    return EagerSession(spec, lambda feeds: {"g": encode(weights, config, feeds["features"])})


def draft_session(
    weights: Weights, embedding: Tensor, config: DraftConfig, rows: int, options: Options
) -> EagerSession:
    """The draft layer over `rows` rows as an engine; see `load_draft` for the weights."""
    spec = draft_spec(config, rows, options)

    def call(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        position, row = int(feeds["position"]), int(feeds["row"])
        states = states_of(spec, feeds)
        out = draft_step(
            weights, embedding, config, feeds["ids"], feeds["g"], position, row, states
        )
        return vars(out) | {s.output: out.states[s.input] for s in spec.states}

    return EagerSession(spec, call)


def mtp_session(weights: Weights, config: TrunkConfig, rows: int, options: Options) -> EagerSession:
    """The trunk's own head over `rows` rows as an engine; `weights` are its own and the trunk's."""
    spec = mtp_spec(config, rows, options)
    embedding = weights["embed_tokens.weight"]
    head = embedding if config.tied_head else weights["lm_head.weight"]

    def call(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        position, row = int(feeds["position"]), int(feeds["row"])
        states = states_of(spec, feeds)
        given = (feeds["ids"], feeds["g"], position, row, states)
        out = mtp_step(weights, embedding, head, config, *given)
        return vars(out) | {s.output: out.states[s.input] for s in spec.states}

    return EagerSession(spec, call)


def states_of(spec: EngineSpec, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The states that an engine is fed, by input name."""
    return {s.input: feeds[s.input] for s in spec.states}
