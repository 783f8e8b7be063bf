"""Drafting along a fixed text: how many drafts are right behind every token, for any draft.

The trunk's tokens do not depend on who drafts. So a text that the trunk has chosen once, kept with
the features of its rows, is enough to judge every draft and every setting of one: behind each token
the drafts are made as a chain makes them there, and compared with what the text goes on with. No
trunk is needed for that, and all settings are judged on the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_chain.runtime.buffers import Buffer
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.exactness import before_repeat
from eagle_chain.runtime.session import Session


@dataclass(frozen=True, eq=False)
class Text:
    """A prompt, what the trunk chose behind it, and the features of all rows but the last."""

    prompt: list[int]
    chosen: list[int]
    fresh: int  # of the chosen ones, those before the text begins to repeat itself
    features: NDArray[Any]  # [tokens - 1, features], in the engine's dtype

    @property
    def tokens(self) -> list[int]:
        """All of it."""
        return self.prompt + self.chosen

    def rounds(self, k: int) -> int:
        """How many tokens, from the first chosen one on, a round of k drafts may start from.

        Left out are those near the end, where a chain has no room for k drafts any more, and those
        of a repetition, which is easy to draft.
        """
        return min(self.fresh, len(self.chosen) - 1 - k)


def record(chain: Chain, prompt: Sequence[int], new: int) -> Text:
    """Decode plainly, and keep the features of every call.

    Args:
        chain: Without a drafter, and not ahead of the host.
        prompt: Token ids.
        new: Most tokens to decode.

    Raises:
        FloatingPointError: As in `Chain.stream`.
    """
    rows, chosen = list[NDArray[Any]](), list[int]()

    def keep(held: int) -> None:
        cache = chain.cache
        rows.append(cache.outputs[cache.parity]["features"].read()[: cache.kept])

    for round in chain.rounds(prompt, max_new_tokens=new, k=0, fed=keep):
        chosen += round.tokens
        if not round.prompt_tokens:
            keep(0)
    fresh = before_repeat(prompt, chosen)
    return Text(list(prompt), chosen, fresh, np.concatenate(rows))


def encode(encoder: Session, features: NDArray[Any]) -> NDArray[Any]:
    """What a draft's encoder makes of features [N, A*H]: g [N, H]."""
    read, left = encoder.spec.inputs[0], encoder.spec.outputs[0]
    tensors = {t.name: encoder.memory.allocate(t) for t in (read, left)}
    binding, width = encoder.bind(tensors), read.shape[0]
    rows = []
    for start in range(0, len(features), width):
        part = features[start : start + width]
        padded = np.zeros(read.shape, features.dtype)
        padded[: len(part)] = part
        tensors[read.name].write(padded)
        binding.run()
        rows.append(tensors[left.name].read()[: len(part)])
    return np.concatenate(rows)


class Layer:
    """A draft layer over one row at a time, with a KV of its own."""

    def __init__(self, draft_step: Session) -> None:
        spec, allocate = draft_step.spec, draft_step.memory.allocate
        self._tensors = {t.name: allocate(t) for t in (*spec.inputs, *spec.outputs)}
        self._kv: list[Buffer] = []
        for pair in spec.states:
            self._kv.append(allocate(pair.tensors[0]))
            self._tensors |= dict.fromkeys((pair.input, pair.output), self._kv[-1])
        self._binding = draft_step.bind(self._tensors)

    def right_drafts(self, text: Text, g: NDArray[Any], most: int, *, scratch: bool) -> list[int]:
        """How many of `most` drafts are right from the front, for each start of a round.

        A row with the true g of the text, whose KV stays, then rows with the layer's own output,
        whose KV is overwritten by the next true ones: what `EagleDrafter` does. With `scratch` each
        round begins at position 0.
        """
        for buffer in self._kv:
            buffer.zero()
        tokens, first = text.tokens, len(text.prompt) - 1
        found = []
        for row in range(first if scratch else 0, first + text.rounds(0)):
            position, follows = 0 if scratch else row, tokens[row + 2 : row + 2 + most]
            draft, right = self._step(tokens[row + 1], g[row : row + 1], position), 0
            while row >= first and right < len(follows) and draft == follows[right]:
                right += 1
                if right < len(follows):
                    draft = self._step(draft, self._tensors["g_next"].read(), position + right)
            if row >= first:
                found.append(right)
        return found

    def _step(self, token: int, g: NDArray[Any], position: int) -> int:
        for name, value in (("ids", token), ("g", g), ("position", position)):
            self._tensors[name].write(value)
        self._binding.run()
        return int(self._tensors["token"].read()[0])


@dataclass(frozen=True, eq=False)
class Found:
    """What one setting gave along some texts: right drafts for each start of a round."""

    texts: Sequence[Text]
    right: Sequence[Sequence[int]]

    def accepted(self, k: int) -> list[list[int]]:
        """Drafts accepted in each round that a chain with k drafts makes of each text."""
        walks = []
        for text, right in zip(self.texts, self.right, strict=True):
            walk, start, end = list[int](), 0, text.rounds(k)
            while start < end:
                walk.append(min(right[start], k))
                start += walk[-1] + 1
            walks.append(walk)
        return walks

    def tokens_per_pass(self, k: int) -> float:
        """Tokens of a round, the trunk's own counted."""
        return 1 + float(np.mean([a for walk in self.accepted(k) for a in walk]))

    def by_position(self, k: int) -> list[float]:
        """Share of the rounds in which draft 1, 2, ... k was accepted."""
        accepted = np.array([a for walk in self.accepted(k) for a in walk])
        return [float((accepted >= j).mean()) for j in range(1, k + 1)]


def gain(a: Found, b: Found, k: int) -> tuple[float, float]:
    """How many tokens a pass `a` gives more than `b`, and the standard error of that.

    The rounds of one text are not independent of each other, the texts are: the error is that of a
    jackknife, which leaves out one text at a time.
    """
    sums = np.array(
        [
            [len(ours), sum(ours), len(theirs), sum(theirs)]
            for ours, theirs in zip(a.accepted(k), b.accepted(k), strict=True)
            if ours
        ],
        float,
    )
    left_out = np.array([_difference(sums.sum(0) - row) for row in sums])
    spread = (len(sums) - 1) * np.mean((left_out - left_out.mean()) ** 2)
    return _difference(sums.sum(0)), float(np.sqrt(spread))


def _difference(sums: NDArray[Any]) -> float:
    rounds, accepted, other_rounds, other_accepted = sums
    return float(accepted / rounds - other_accepted / other_rounds)
