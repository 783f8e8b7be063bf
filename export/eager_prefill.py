"""The engines that read a prompt, in the PyTorch reference: row by row, not in chunks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.contract import draft_prefill_spec, mtp_prefill_spec, prefill_spec
from eagle_chain.engines.spec import Options
from eagle_chain.export.eager import EagerSession, mtp_session, states_of
from eagle_chain.export.reference import Weights, draft_step, encode, int32, trunk_step

PIECE = 64  # rows at a time: S is kept after each


def prefill_session(
    weights: Weights, config: TrunkConfig, aux_layers: tuple[int, ...], options: Options
) -> EagerSession:
    """The trunk over P rows, all valid ones folded in."""
    spec = prefill_spec(config, aux_layers, options)
    history = config.conv_kernel - 1

    def call(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        position, rows, kept = (int(feeds[name]) for name in ("position", "rows", "kept"))
        states, outs = states_of(spec, feeds), []
        for start in range(0, rows, PIECE):
            ids = feeds["ids"][start : min(start + PIECE, rows)]
            at = position + start
            out = trunk_step(weights, config, aux_layers, ids, at, len(ids), kept, states)
            outs.append(out)
            states, kept = out.states, len(ids)
        after: dict[str, Tensor] = {}
        for pair in spec.states:
            name, new = pair.input, out.states[pair.input]
            if pair.rows_axis is not None:
                new = _emptied(new, position + rows, position + len(feeds["ids"]))
            elif name.endswith(".S"):
                new = out.S_rows[f"{name}_rows"][-1]
            elif name.endswith(".window"):  # the last inputs, where `kept` = 0 reads them
                last, new = new[:, -history:], torch.zeros(pair.shape)
                new[:, :history] = last
            else:  # the log, of which the next call keeps nothing
                new = torch.zeros(pair.shape)
            after[pair.output] = new
        blank = (0, 0, 0, len(feeds["ids"]) - rows)  # rows that are not valid hold nothing
        return {
            "pending": out.next_ids[-1:],
            "next_kept": int32(0),
            "next_position": int32(position + rows),
            "features": F.pad(torch.cat([o.features for o in outs]), blank),
            "hidden": F.pad(torch.cat([o.hidden for o in outs]), blank),
            "logits": out.logits[-1:],
            **after,
        }

    return EagerSession(spec, call)


def draft_prefill_session(
    weights: Weights, embedding: Tensor, config: DraftConfig, options: Options
) -> EagerSession:
    """The draft's KV rows for P rows of a prompt."""
    spec = draft_prefill_spec(config, options)

    def call(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        position, rows, ids = int(feeds["position"]), int(feeds["rows"]), feeds["ids"]
        states = states_of(spec, feeds)
        g = encode(weights, config, feeds["features"])
        out = draft_step(weights, embedding, config, ids, g, position, rows - 1, states)
        written = {s.output: out.states[s.input] for s in spec.states}
        return _valid_rows(written, position, rows, len(ids))

    return EagerSession(spec, call)


def mtp_prefill_session(weights: Weights, config: TrunkConfig, options: Options) -> EagerSession:
    """The KV rows of the trunk's own head for P rows of a prompt."""
    spec = mtp_prefill_spec(config, options)
    step = mtp_session(weights, config, options.prefill, options)

    def call(feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        position, rows, ids = int(feeds["position"]), int(feeds["rows"]), feeds["ids"]
        given = {"ids": ids, "g": feeds["hidden"], "position": feeds["position"]}
        out = step.call({**given, "row": int32(rows - 1), **states_of(spec, feeds)})
        written = {s.output: out[s.output] for s in spec.states}
        return _valid_rows(written, position, rows, len(ids))

    return EagerSession(spec, call)


def _valid_rows(
    written: Mapping[str, Tensor], position: int, rows: int, width: int
) -> dict[str, Tensor]:
    """KV planes that a call over `width` rows has written, with nothing behind the valid ones."""
    end = position + width
    return {name: _emptied(cache, position + rows, end) for name, cache in written.items()}


def _emptied(cache: Tensor, start: int, end: int) -> Tensor:
    """A KV plane [1, Hkv, T, columns] with nothing in the slots `start`..`end`."""
    cache = cache.clone()
    cache[:, :, start:end] = 0
    return cache
