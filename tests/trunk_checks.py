"""What the trunk reference must do, as checks over a module, with transformers as the oracle.

A check takes the reference as a module, so that the same assertions judge the real one and copies
with a planted mistake. transformers is run once per `Case`; the checks only run the reference.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor

from eagle_chain.engines.config import TrunkConfig
from eagle_chain.engines.contract import trunk_spec
from eagle_chain.engines.spec import Options
from eagle_chain.export.checkpoint import open_trunk
from eagle_chain.export.eager import TORCH_TYPES, load_weights, zero_states

WIDTH = 5
CAPACITY = 160
# fp32: sums run in different orders, and the toy amplifies that: transformers differs from itself
# by 2e-4 on logits of size 7 between one call and single tokens. bf16: token by token both sides do
# the same operations, so there is nothing to allow for; over five rows transformers uses its
# chunked rule, whose S differs by 1e-6, which can flip a rounding (2^-5 at logits of 4 to 8).
ALLOWED = {"fp32": 1e-3, "bf16": 0.0}
ALLOWED_CHUNKED = {"fp32": 1e-3, "bf16": 0.0625}
# Rows kept of each verify call in `check_resume`: every count, a full rollback after a partial
# accept, two rollbacks in a row, everything accepted twice in a row.
KEPT = (2, 0, 5, 1, 0, 0, 3, 4, 5, 5, 1, 2)

transformers.logging.set_verbosity_error()


@dataclass(frozen=True)
class Oracle:
    """What transformers gives for one run of tokens."""

    logits: Tensor  # [T, V]
    streams: list[Tensor]  # entry 0 the embedding, entry i + 1 the stream after layer i, [T, H]
    hidden: Tensor  # after the last norm, [T, H]
    cache: Any

    def features(self, aux_layers: tuple[int, ...]) -> Tensor:
        """The residual stream after the aux layers, side by side."""
        return torch.cat([self.streams[i + 1] for i in aux_layers], -1)

    def states(self) -> dict[str, Tensor]:
        """The cache: S, the last conv inputs, and the live rows of key and value."""
        states = {}
        for i, layer in enumerate(self.cache.layers):
            if hasattr(layer, "recurrent_states"):
                states[f"layers.{i}.S"] = layer.recurrent_states[0][0].clone()
                states[f"layers.{i}.conv"] = layer.conv_states[0][0][
                    :, 1:
                ].clone()  # keeps one more
            else:
                states[f"layers.{i}.key"] = layer.keys[0].clone()
                states[f"layers.{i}.value"] = layer.values[0].clone()
        return states


@dataclass(frozen=True)
class Case:
    """A toy trunk in transformers and as weights of the reference."""

    folder: Path
    dtype: str = "fp32"
    aux_layers: tuple[int, ...] = (1, 3, 4)

    @cached_property
    def model(self) -> Any:
        """The model as transformers reads the folder."""
        return transformers.Qwen3_5ForCausalLM.from_pretrained(
            self.folder, dtype=TORCH_TYPES[self.dtype], attn_implementation="eager"
        ).eval()

    @cached_property
    def config(self) -> TrunkConfig:
        """The config as we read it."""
        return open_trunk(self.folder)[0]

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The weights as transformers has them: it rounds A_log and the gated norm as well."""
        weights = load_weights(open_trunk(self.folder)[1], "fp32")
        return {name: t.to(TORCH_TYPES[self.dtype]) for name, t in weights.items()}

    @cached_property
    def ids(self) -> Tensor:
        """A fixed sequence of random tokens."""
        generator = torch.Generator().manual_seed(5)
        return torch.randint(0, self.config.vocab_size, (CAPACITY,), generator=generator)

    def ask(self, ids: Tensor, past: Any = None) -> Oracle:
        """Run transformers over `ids` after the tokens in `past`, which it extends in place."""
        given = {} if past is None else {"cache": past}
        with torch.no_grad():
            out = self.model(ids[None], use_cache=True, output_hidden_states=True, **given)
        streams = [h[0] for h in out.hidden_states]
        return Oracle(out.logits[0], streams, streams[-1], out.cache)

    @cached_property
    def whole(self) -> Oracle:
        """One call over the first 60 tokens."""
        return self.ask(self.ids[:60])

    @cached_property
    def singles(self) -> list[Oracle]:
        """The first 24 tokens, one call each."""
        found = [self.ask(self.ids[:1])]
        for t in range(1, 24):
            found.append(self.ask(self.ids[t : t + 1], found[-1].cache))
        return found

    @cached_property
    def committed(self) -> dict[str, Tensor]:
        """The cache after the first 24 tokens, one call each."""
        return self.singles[-1].states()

    @cached_property
    def resumed(self) -> dict[str, Tensor]:
        """The cache after the tokens that `check_resume` commits."""
        return self.ask(self.ids[: 7 + sum(KEPT) + 1]).states()

    @cached_property
    def verified(self) -> Oracle:
        """Five more tokens in one call."""
        past = copy.deepcopy(self.singles[-1].cache)
        return self.ask(self.ids[24 : 24 + WIDTH], past)


class Run:
    """The reference over one sequence: what a runtime does with counters and states."""

    def __init__(self, reference: ModuleType, case: Case, width: int = WIDTH) -> None:
        self.reference, self.case, self.width = reference, case, width
        options = Options(width, CAPACITY, case.dtype)
        self.states = zero_states(trunk_spec(case.config, case.aux_layers, options))
        self.position = self.kept = 0

    def call(self, ids: Tensor, rows: int | None = None, pad: int = 11) -> Any:
        """One trunk call; ids beyond those given are `pad`."""
        padded = torch.full((self.width,), pad)
        padded[: len(ids)] = ids
        with torch.no_grad():
            out = self.reference.trunk_step(
                self.case.weights,
                self.case.config,
                self.case.aux_layers,
                padded,
                self.position,
                len(ids) if rows is None else rows,
                self.kept,
                self.states,
            )
        self.states = out.states
        return out

    def keep(self, count: int) -> None:
        """Make the first `count` rows of the last call part of the sequence."""
        self.position, self.kept = self.position + count, count

    def prefill(self, ids: Tensor, pad: int = 11) -> list[Any]:
        """Calls over a prompt, all their rows kept."""
        outs = []
        for chunk in ids.split(self.width):
            outs.append(self.call(chunk, pad=pad))
            self.keep(len(chunk))
        return outs

    def live(self, out: Any) -> dict[str, Tensor]:
        """The committed states, given the last call's outputs and what was kept of it."""
        states, history = {}, self.case.config.conv_kernel - 1
        for i, kind in enumerate(self.case.config.layer_types):
            if kind == "linear_attention":
                window = self.states[f"layers.{i}.window"]
                rows = out.S_rows[f"layers.{i}.S_rows"]
                before = self.states[f"layers.{i}.S"]
                states[f"layers.{i}.S"] = rows[self.kept - 1] if self.kept else before
                states[f"layers.{i}.conv"] = window[:, self.kept : self.kept + history]
            else:
                for part in ("key", "value"):
                    state = self.states[f"layers.{i}.{part}"]
                    states[f"layers.{i}.{part}"] = state[0, :, : self.position]
        return states

    def load(self, states: dict[str, Tensor], position: int) -> None:
        """Start from committed states, as after a call with a log of nothing that kept all rows."""
        for name, state in states.items():
            layer, part = name.rsplit(".", 1)
            if part == "S":
                self.states[name] = state
                self.states[f"{layer}.log_decay"] += 1
            elif part == "conv":
                self.states[f"{layer}.window"][:, self.width :] = state
            else:
                self.states[name][0, :, :position] = state
        self.position, self.kept = position, self.width


def near(got: Tensor, want: Tensor, allowed: float, what: str) -> None:
    """Assert the largest difference; NaN fails."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, wanted {want.shape}"
    gap = (got.to(torch.float64) - want.to(torch.float64)).abs().max().item()
    assert gap <= allowed, f"{what}: off by {gap:.2e}, allowed {allowed:.2e}"


def near_states(got: dict[str, Tensor], want: dict[str, Tensor], allowed: float) -> None:
    """Assert that two sets of committed states agree."""
    assert got.keys() == want.keys()
    for name in want:
        near(got[name], want[name], allowed, name)


def joined(outs: list[Any], name: str, rows: int) -> Tensor:
    """An output of several calls, without the padding of the last one."""
    return torch.cat([getattr(out, name) for out in outs])[:rows]


def check_prefill(reference: ModuleType, case: Case) -> None:
    """A prompt in calls of W rows == one call of transformers: logits, features, last norm."""
    count = 58  # the last call has two rows of padding
    run = Run(reference, case)
    outs = run.prefill(case.ids[:count])
    want, allowed = case.whole, ALLOWED[case.dtype]
    near(joined(outs, "logits", count), want.logits[:count], allowed, "logits")
    near(joined(outs, "hidden", count), want.hidden[:count], allowed, "hidden")
    features = want.features(case.aux_layers)[:count]
    near(joined(outs, "features", count), features, allowed, "features")
    assert torch.equal(joined(outs, "next_ids", count), want.logits[:count].argmax(-1).int())


def check_single(reference: ModuleType, case: Case) -> None:
    """One token a call == transformers' decode step: logits, features, every cache tensor."""
    run, allowed = Run(reference, case, width=1), ALLOWED[case.dtype]
    for t, want in enumerate(case.singles):
        out = run.call(case.ids[t : t + 1])
        near(out.logits, want.logits.float(), allowed, f"logits at {t}")
        near(out.features, want.features(case.aux_layers), allowed, f"features at {t}")
        run.keep(1)
    near_states(run.live(out), case.committed, allowed)


def check_verify(reference: ModuleType, case: Case) -> None:
    """Five rows on transformers' own cache == its call with five tokens, caches included."""
    start, want, allowed = len(case.singles), case.verified, ALLOWED_CHUNKED[case.dtype]
    run = Run(reference, case)
    run.load(case.committed, start)
    out = run.call(case.ids[start : start + WIDTH])
    near(out.logits, want.logits.float(), allowed, "logits")
    near(out.features, want.features(case.aux_layers), allowed, "features")
    run.keep(WIDTH)
    near_states(run.live(out), want.states(), allowed)


def check_resume(reference: ModuleType, case: Case) -> None:
    """Decoding goes on after each partial accept as if the rejected rows had never been run."""
    run, allowed = Run(reference, case), ALLOWED["fp32"]
    run.prefill(case.ids[:7])
    want = case.whole
    for count in KEPT:
        at = run.position
        ids = case.ids[at : at + WIDTH].clone()
        ids[max(count, 1) :] = (ids[max(count, 1) :] + 1) % case.config.vocab_size
        out = run.call(ids)
        valid = max(count, 1)
        near(out.logits[:valid], want.logits[at : at + valid], allowed, f"logits at {at}")
        features = want.features(case.aux_layers)[at : at + valid]
        near(out.features[:valid], features, allowed, f"features at {at}")
        run.keep(count)
    out = run.call(case.ids[run.position : run.position + 1])
    run.keep(1)
    near_states(run.live(out), case.resumed, allowed)


def check_log(reference: ModuleType, case: Case) -> None:
    """S at the start of a call == S after the last kept row of the call before, bit for bit."""
    run = Run(reference, case)
    before = None
    for count in KEPT:
        out = run.call(case.ids[run.position : run.position + WIDTH])
        for name in out.S_rows:
            start = run.states[name.replace("S_rows", "S")]
            if before is not None:
                folded = before[0].S_rows[name][run.kept - 1] if run.kept else before[1][name]
                assert torch.equal(start, folded), f"{name} after keeping {run.kept}"
        starts = {name: run.states[name.replace("S_rows", "S")] for name in out.S_rows}
        before = out, starts
        run.keep(count)
