"""Greedy acceptance of a draft head on held-out text.

Greedy speculative decoding emits the trunk's own greedy tokens, so it is enough to decode each
prompt once without drafting, let the head draft a chain from *every* row at once, and walk
through the rounds afterwards. The draft's keys are those of true features, as in a decoder that
rewrites them after each verification.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from decode import TrunkText
from heads import DraftHead, unroll
from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    """Counts over the rounds of a set of prompts."""

    rounds: int
    accepted: tuple[int, ...]  # rounds in which at least 1, 2, ... drafted tokens were right

    @property
    def length(self) -> float:
        """Tokens per trunk pass, the trunk's own token included."""
        return 1 + sum(self.accepted) / max(1, self.rounds)

    @property
    def by_position(self) -> list[float]:
        """Share of the rounds in which draft 1, 2, ... was accepted."""
        return [count / max(1, self.rounds) for count in self.accepted]


@torch.no_grad()
def drafts(head: DraftHead, embedding: Tensor, text: TrunkText, k: int) -> Tensor:
    """Draft k tokens from every row: target ids [B, T - 1, k]; row i proposes tokens i + 2, ..."""
    targets = head.targets()

    def choose(logits: Tensor) -> Tensor:
        best = logits.argmax(-1)
        return best if targets is None else targets[best]

    def tokens_at(step: int, logits: Tensor | None) -> Tensor:
        return text.tokens[:, 1:] if logits is None else choose(logits)

    rows = text.tokens.shape[1] - 1
    scores = unroll(head, embedding, text, rows, k, tokens_at)
    return torch.stack([choose(logits) for logits in scores], -1)


def acceptance(
    drafted: Tensor,  # [B, T - 1, k]
    tokens: Tensor,  # [B, T], greedy from `prompt` on, k more than are counted
    prompt: int,
    ends: list[int],  # rounds are counted while the pending token stands before this
) -> Acceptance:
    """Walk through the rounds: verify the drafts of a row, step past what was accepted."""
    k = drafted.shape[-1]
    ahead = tokens[:, 2:].unfold(1, k, 1)  # [B, T - 1 - k, k]
    right = (drafted[:, : ahead.shape[1]] == ahead).cumprod(-1).sum(-1).tolist()
    rounds, counts = 0, [0] * k
    for row, end in zip(right, ends, strict=True):
        position = prompt  # of the pending token: chosen, not yet through the trunk
        while position < min(end, len(row)):
            run = row[position - 1]
            rounds += 1
            for j in range(run):
                counts[j] += 1
            position += run + 1
    return Acceptance(rounds, tuple(counts))


def before_stop(tokens: Tensor, prompt: int, stops: list[int]) -> list[int]:
    """Where each continuation meets a stop token, or its length."""
    rows = tokens.tolist()
    found = ([i for i in range(prompt, len(row)) if row[i] in stops] for row in rows)
    return [places[0] if places else len(row) for places, row in zip(found, rows, strict=True)]


def before_repeat(tokens: Tensor, prompt: int, span: int = 12) -> list[int]:
    """Where each continuation starts a run of `span` tokens that has occurred before.

    Greedy text of a small model soon repeats itself, and repeated text is easy to draft.
    """
    ends = []
    for row in tokens.tolist():
        seen: set[tuple[int, ...]] = set()
        end = len(row)
        for start in range(len(row) - span + 1):
            run = tuple(row[start : start + span])
            if run in seen and start >= prompt:
                end = start
                break
            seen.add(run)
        ends.append(end)
    return ends
