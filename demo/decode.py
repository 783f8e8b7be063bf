"""Text from the trunk, with the hidden states a draft head is trained on and judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from trunk_model import Trunk


@dataclass(frozen=True)
class TrunkText:
    """Prompts and their continuations; position i of everything belongs to token i."""

    tokens: Tensor  # int64 [N, T]
    greedy: Tensor  # int64 [N, T], the trunk's first choice for token i + 1
    features: Tensor  # [N, T, aux * H], residual stream after the aux layers
    hidden: Tensor  # [N, T, H], after the final norm

    def rows(self, index: Tensor | slice) -> TrunkText:
        """Return some of the sequences; a slice shares their memory."""
        return TrunkText(
            self.tokens[index], self.greedy[index], self.features[index], self.hidden[index]
        )


def empty_text(
    sequences: int, length: int, trunk: Trunk, aux: int, dtype: torch.dtype
) -> TrunkText:
    """Make room for texts; `dtype` is that of the stored states."""
    weight = trunk.embed_tokens.weight
    ids = torch.zeros(2, sequences, length, dtype=torch.int64, device=weight.device)
    states = weight.new_empty(sequences, length, (aux + 1) * trunk.config.hidden, dtype=dtype)
    features, hidden = torch.split(states, [aux * trunk.config.hidden, trunk.config.hidden], -1)
    return TrunkText(ids[0], ids[1], features, hidden)


@torch.no_grad()
def generate(
    trunk: Trunk,
    prompts: Tensor,  # int64 [N, P]
    temperature: Tensor,  # [N], 0 is greedy
    aux_layers: Sequence[int],
    out: TrunkText,
    generator: torch.Generator,
) -> None:
    """Continue every prompt to the length of `out`, one token at a time, and fill `out`."""
    count, length = out.tokens.shape
    given = prompts.shape[1]
    out.tokens[:, :given] = prompts
    state = trunk.empty_state(count, length)
    for t in range(length):
        hidden, features = trunk.step(out.tokens[:, t], state, aux_layers)
        logits = trunk.logits(hidden)
        out.hidden[:, t] = hidden
        out.features[:, t] = torch.cat(features, -1)
        out.greedy[:, t] = logits.argmax(-1)
        if given <= t + 1 < length:
            # argmax(logits / T + Gumbel) without the division, so that T = 0 is greedy
            noise = torch.empty_like(logits).exponential_(generator=generator).log_()
            out.tokens[:, t + 1] = (logits - temperature[:, None] * noise).argmax(-1)
