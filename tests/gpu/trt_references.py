"""What the PyTorch reference gives for a bundle, saved for a Python that has no PyTorch.

    python tests/gpu/trt_references.py BUNDLE OUT.npz

Computed in fp32 from the checkpoints that the bundle links to: every output of nine trunk calls
that go through all patterns of rows and kept rows, of the encoder and of both draft engines after
each, and plain greedy tokens after a few prompts.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle_chain.engines.manifest import Manifest
from eagle_chain.export.checkpoint import open_pair
from eagle_chain.export.eager import (
    EagerSession,
    draft_session,
    encoder_session,
    load_draft,
    load_weights,
    trunk_session,
    zero_states,
)

CALLS = ((5, 5), (2, 2), (5, 1), (5, 5), (5, 3), (3, 2), (5, 4), (1, 1), (5, 2))  # rows, kept
PROMPTS = ((5, 9, 2), (7, 7, 7, 1, 30, 4, 12, 3), tuple(range(40, 57)))
NEW_TOKENS = 48


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Reference:
    """The engines of a pair in PyTorch, fp32."""

    def __init__(self, bundle: Path) -> None:
        manifest = Manifest.load(bundle)
        assert manifest.draft is not None
        self.options = replace(manifest.options, dtype="fp32", debug=("logits",))
        (self.config, trunk), (self.draft_config, draft) = open_pair(
            bundle / "weights" / "trunk", bundle / "weights" / "draft", manifest.overrides
        )
        weights = load_weights(trunk, "fp32")
        drafted, embedding = load_draft(self.draft_config, draft, trunk, "fp32")
        options = self.options
        self.trunk = trunk_session(weights, self.config, manifest.aux_layers, options)
        self.encoder = encoder_session(drafted, self.draft_config, options)
        self.draft, self.step = (
            draft_session(drafted, embedding, self.draft_config, rows, options)
            for rows in (options.width, 1)
        )

    def calls(self) -> dict[str, np.ndarray]:
        """Inputs and outputs of every engine, as `CALL.ENGINE.in.NAME` and `.out.NAME`."""
        random = np.random.default_rng(0)
        saved: dict[str, np.ndarray] = {}
        trunk_states, draft_states = zero_states(self.trunk.spec), zero_states(self.draft.spec)
        position, kept, width = 0, 0, self.options.width
        for i, (rows, keep) in enumerate(CALLS):
            ids = random.integers(0, self.config.vocab_size, width)
            ids[rows:] = -1
            feeds = {
                "ids": torch.from_numpy(ids.astype(np.int32)),
                **{"position": ints(position), "rows": ints(rows), "kept": ints(kept)},
            }
            out = run(self.trunk, feeds, trunk_states, saved, f"{i}.trunk")
            features = {"features": out["features"]}
            g = run(self.encoder, features, {}, saved, f"{i}.encoder")["g"]
            follows = random.integers(0, self.config.vocab_size, width).astype(np.int32)
            draft = {
                **{"ids": torch.from_numpy(follows), "g": g},
                **{"position": ints(position), "row": ints(keep - 1)},
            }
            guess = run(self.draft, draft, draft_states, saved, f"{i}.draft")
            step = {
                **{"ids": guess["token"], "g": guess["g_next"]},
                **{"position": guess["next_position"], "row": ints(0)},
            }
            run(self.step, step, draft_states, saved, f"{i}.draft_step")
            position, kept = position + keep, keep
        return saved

    def plain(self, prompt: tuple[int, ...]) -> list[int]:
        """Greedy decoding, one token a call."""
        states = zero_states(self.trunk.spec)
        ids, tokens = list(prompt), []
        for position in range(len(prompt) + NEW_TOKENS - 1):
            row = [ids[position], *[-1] * (self.options.width - 1)]
            feeds = {
                **{"ids": ints(*row), "position": ints(position), "rows": ints(1)},
                "kept": ints(min(position, 1)),
            }
            out = run(self.trunk, feeds, states, {}, "")
            if position >= len(prompt) - 1:
                tokens.append(int(out["next_ids"][0]))
                ids.append(tokens[-1])
        return tokens


def run(
    session: EagerSession,
    feeds: dict[str, Tensor],
    states: dict[str, Tensor],
    saved: dict[str, np.ndarray],
    key: str,
) -> dict[str, Tensor]:
    """One call; `states` moves on."""
    out = session.run({**feeds, **states})
    saved |= {f"{key}.in.{name}": value.numpy() for name, value in feeds.items()}
    saved |= {f"{key}.out.{name}": value.numpy() for name, value in out.items()}
    for pair in session.spec.states:
        states[pair.input] = out[pair.output]
    return out


def main(bundle: str, out: str) -> None:
    reference = Reference(Path(bundle))
    saved = reference.calls()
    for i, prompt in enumerate(PROMPTS):
        saved[f"prompt{i}"] = np.array(prompt, np.int32)
        saved[f"tokens{i}"] = np.array(reference.plain(prompt), np.int32)
    np.savez(out, **saved)
    print(f"wrote {out}: {len(saved)} arrays")


if __name__ == "__main__":
    main(*sys.argv[1:])
