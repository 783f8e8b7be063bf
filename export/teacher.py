"""The PyTorch reference taken through the rounds of a parity check, call by call.

It computes in fp32 from the checkpoint. What an engine is fed is always what the reference has, so
a fault in one engine does not reach the next; the states are the only thing that goes on from call
to call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.recording import Call
from eagle_chain.engines.schedule import PROMPT, STEPS, Round
from eagle_chain.engines.spec import TensorSpec
from eagle_chain.export.checkpoint import Checkpoint
from eagle_chain.export.eager import (
    TORCH_TYPES,
    EagerSession,
    draft_session,
    encoder_session,
    load_draft,
    load_weights,
    mtp_session,
    states_of,
    trunk_session,
    zero_states,
)
from eagle_chain.export.eager_prefill import (
    draft_prefill_session,
    mtp_prefill_session,
    prefill_session,
)
from eagle_chain.export.weight_files import StoredTensor

Tensors = dict[str, Tensor]
DRAWING = ("temperature", "uniform")  # what a trunk takes beside its tokens if it can draw


def reference_sessions(
    folder: Path, manifest: Manifest, dtype: str = "fp32"
) -> dict[str, EagerSession]:
    """A PyTorch engine for each engine of a bundle, from its weight files.

    Raises:
        InputError: The bundle has an engine that the reference has no counterpart of.
    """
    options = replace(
        manifest.options,
        dtype=dtype,
        profile="portable",
        debug=tuple(dict.fromkeys((*manifest.options.debug, "logits"))),
    )
    table = () if manifest.trunk.tied_head else ("embed_tokens.weight",)
    stored = stored_tensors(folder, manifest, "")
    trunk, config = load_weights(stored, dtype, stored=table), manifest.draft
    makers: dict[str, Callable[[], EagerSession]] = {
        "trunk": lambda: trunk_session(trunk, manifest.trunk, manifest.aux_layers, options),
        "prefill": lambda: prefill_session(trunk, manifest.trunk, manifest.aux_layers, options),
    }
    if config is not None:
        own = stored_tensors(folder, manifest, "draft.")
        draft, embedding = load_draft(config, own, stored, dtype)
        makers |= {
            "encoder": lambda: encoder_session(draft, config, options),
            "draft": lambda: draft_session(draft, embedding, config, options.width, options),
            "draft_step": lambda: draft_session(draft, embedding, config, 1, options),
            "draft_prefill": lambda: draft_prefill_session(draft, embedding, config, options),
        }
    if manifest.options.profile == "ort-cuda":
        makers["trunk"] = lambda: _with_rows(
            trunk_session(trunk, manifest.trunk, manifest.aux_layers, options)
        )
    if manifest.mtp:
        makers |= {
            "mtp": lambda: mtp_session(trunk, manifest.trunk, options.width, options),
            "mtp_step": lambda: mtp_session(trunk, manifest.trunk, 1, options),
            "mtp_prefill": lambda: mtp_prefill_session(trunk, manifest.trunk, options),
        }
    plain = {manifest.options.of_engine(name)[0] for name in manifest.specs}
    unknown = sorted(plain - makers.keys())
    if unknown:
        raise InputError(
            f"{folder}: there is no PyTorch reference for {', '.join(unknown)}, so that parity "
            "cannot check this bundle; export one without"
        )
    return {name: makers[name]() for name in manifest.specs if name in makers}


def _with_rows(session: EagerSession) -> EagerSession:
    """A trunk that also gives what the profile `ort-cuda` logs of linear layers."""
    spec, rows = session.spec, session.spec.inputs[0].shape[0]
    outputs = []
    for pair in spec.states:
        layer, _, part = pair.input.rpartition(".")
        if part == "S":
            channels = next(s.shape[0] for s in spec.states if s.input == f"{layer}.window")
            outputs += [
                TensorSpec(f"{layer}.log_qkv", "fp32", (rows, channels)),
                TensorSpec(f"{layer}.raw_decay", "fp32", (rows, pair.shape[0])),
                TensorSpec(f"{layer}.raw_beta", "fp32", (rows, pair.shape[0])),
            ]
    return replace(session, spec=replace(spec, outputs=(*spec.outputs, *outputs)))


def stored_tensors(folder: Path, manifest: Manifest, prefix: str) -> Checkpoint:
    """The tensors of one checkpoint, "" or "draft.", where the bundle's table says they lie."""
    tensors = {
        name.removeprefix(prefix): StoredTensor(
            name, folder / weight.file, weight.offset, weight.dtype, weight.shape
        )
        for name, weight in manifest.weights.items()
        if name.startswith("draft.") == (prefix == "draft.")
    }
    return Checkpoint(folder, tensors, {})


class Teacher:
    """Runs the rounds; its states are those of the reference.

    Args:
        sessions: As `reference_sessions` gives them.
        manifest: Of the bundle that is to be compared.
        seed: Of the prompt.
    """

    def __init__(
        self, sessions: Mapping[str, EagerSession], manifest: Manifest, seed: int = 0
    ) -> None:
        self.sessions = sessions
        self.manifest = manifest
        self.width = manifest.options.width
        self.vocabulary = manifest.trunk.vocab_size
        # Greedy where the bundle can draw: a draw that falls near an edge says nothing.
        drawing = [t for t in manifest.specs["trunk"].inputs if t.name in DRAWING]
        self._drawing = {t.name: torch.zeros(t.shape) for t in drawing}
        self.states: Tensors = {}
        for session in sessions.values():
            self.states |= zero_states(session.spec)
        self._random = np.random.default_rng(seed)
        self._calls: list[Call] = []
        self._whole, self._number = False, 0

    def calls(self, rounds: tuple[Round, ...], *, whole: bool) -> Iterator[Call]:
        """Every call of every engine in order; see `Call` for `whole`."""
        self._whole = whole
        prompt = [round.rows for round in rounds if round.accepted == PROMPT]
        ids = self._random.integers(0, self.vocabulary, sum(prompt)).tolist()
        position = kept = 0
        pending = -1
        for self._number, round in enumerate(rounds):
            if round.at_end:
                position = self.manifest.options.capacity - 1
            counters = {"position": position, "rows": round.rows, "kept": kept}
            if round.accepted == PROMPT:
                row, ids = ids[: round.rows], ids[round.rows :]
                choices = self._prompt(row, ids, round.wide, counters)
            else:
                choices = self._verify(pending, round, counters)
            if -1 in choices:
                raise InputError(
                    f"the reference's logits in round {self._number} are not finite: a weight or "
                    "an activation overflows fp32"
                )
            pending = choices[-1]
            yield from self._calls
            self._calls.clear()
            kept, position = round.kept, position + round.joins

    def _prompt(
        self, row: list[int], behind: list[int], wide: bool, counters: Mapping[str, int]
    ) -> list[int]:
        """Feed a part of the prompt, `behind` what comes after it; the choices of its rows."""
        engine = "prefill" if wide else "trunk"
        width = self.manifest.specs[engine].inputs[0].shape[0]
        fed = self._fed(row, width, counters)
        out = self._run(engine, fed if wide else fed | self._drawing)
        choices: list[int] = out["pending" if wide else "next_ids"].tolist()[: len(row)]
        # the prompt shifted by one: never the trunk's choices, but behind its end
        follows = behind[0] if behind else choices[-1]
        shifted = _padded([*row[1:], follows], width)
        if not wide:
            self._draft(shifted, out, counters["position"], len(row) - 1)
            return choices
        for follower, read in (("draft_prefill", "features"), ("mtp_prefill", "hidden")):
            if follower in self.sessions:
                places = {name: _ints(counters[name]) for name in ("position", "rows")}
                self._run(follower, {"ids": shifted, read: out[read], **places})
        return choices

    def _verify(self, pending: int, round: Round, counters: Mapping[str, int]) -> list[int]:
        """Let the trunk judge drafts; its choices up to the one that is pending now."""
        fed, out = self._drafted(pending, round, counters)
        self._note("trunk", fed, out)
        self._draft(out["next_ids"], out, counters["position"], round.accepted)
        choices: list[int] = out["next_ids"].tolist()
        return choices[: round.joins]

    def _fed(self, row: list[int], width: int, counters: Mapping[str, int]) -> Tensors:
        return {
            "ids": _padded(row, width),
            **{name: _ints(value) for name, value in counters.items()},
        }

    def _drafted(
        self, pending: int, round: Round, counters: Mapping[str, int]
    ) -> tuple[Tensors, Tensors]:
        """A call with drafts of which the trunk confirms exactly `round.accepted`: its both ends.

        The first wrong one is followed by what the trunk chooses behind it: only a prefix counts.
        A row depends on the rows before it, so each pass settles at least one more.
        """
        drafts = [pending] * (round.rows - 1)
        while True:
            fed = self._fed([pending, *drafts], self.width, counters) | self._drawing
            session = self.sessions["trunk"]
            out = session.run({**fed, **states_of(session.spec, self.states)})
            better = out["next_ids"].tolist()[: round.rows - 1]
            if round.accepted < len(better):
                better[round.accepted] = (better[round.accepted] + 1) % self.vocabulary
            if better == drafts:
                return fed, out
            drafts = better

    def _draft(self, ids: Tensor, trunk: Tensors, position: int, row: int) -> None:
        """What the drafts do after a trunk call: encode, extend, single steps."""
        fed = {"ids": ids, "position": _ints(position), "row": _ints(row)}
        if "encoder" in self.sessions:
            g = self._run("encoder", {"features": trunk["features"]})["g"]
            self._guesses("draft", "draft_step", {**fed, "g": g})
        if "mtp" in self.sessions:
            self._guesses("mtp", "mtp_step", {**fed, "g": trunk["hidden"]})

    def _guesses(self, extend: str, step: str, fed: Tensors) -> None:
        guess = self._run(extend, fed)
        for _ in range(STEPS):
            fed = {
                "ids": guess["token"],
                "g": guess["g_next"],
                "position": guess["next_position"],
                "row": _ints(0),
            }
            guess = self._run(step, fed)

    def _run(self, engine: str, fed: Tensors) -> Tensors:
        """One call, fed what the bundle's dtype can hold, and noted."""
        taken = self._taken(engine)
        fed = {name: value.to(taken[name]).to(value.dtype) for name, value in fed.items()}
        session = self.sessions[engine]
        out = session.run({**fed, **states_of(session.spec, self.states)})
        self._note(engine, fed, out)
        return out

    def _note(self, engine: str, fed: Tensors, out: Tensors) -> None:
        """Keep a call; the states move on."""
        session, taken = self.sessions[engine], self._taken(engine)
        states = states_of(session.spec, self.states)
        inputs = {**fed, **states} if self._whole else fed
        grown = int(fed["position"]) + len(fed["ids"]) if session.spec.states else 0
        cut = {} if self._whole else {s.output: s.rows_axis for s in session.spec.states}
        self._calls.append(
            Call(
                engine,
                self._number,
                {name: _array(value, taken.get(name)) for name, value in inputs.items()},
                {name: _array(_head(value, cut.get(name), grown)) for name, value in out.items()},
            )
        )
        self.states |= {pair.input: out[pair.output] for pair in session.spec.states}

    def _taken(self, engine: str) -> dict[str, torch.dtype]:
        """The dtypes that the bundle's engine takes."""
        spec = self.manifest.specs[engine]
        return {t.name: TORCH_TYPES[t.dtype] for t in spec.all_inputs}


def _head(value: Tensor, axis: int | None, rows: int) -> Tensor:
    """The first `rows` of a state along the axis that grows; all of any other tensor."""
    return value if axis is None else value.narrow(axis, 0, min(rows, value.shape[axis]))


def _array(value: Tensor, dtype: torch.dtype | None = None) -> Any:
    """A copy for NumPy, which has no bf16: such values are fp32."""
    if dtype == torch.float16:
        value = value.to(dtype)
    elif value.dtype == torch.bfloat16:
        value = value.to(torch.float32)
    return np.array(value.contiguous().numpy())


def _padded(ids: list[int], width: int) -> Tensor:
    return _ints(*ids, *[-1] * (width - len(ids)))


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
