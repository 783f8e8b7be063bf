"""What a request gave and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Round:
    """One step of a request: the prompt with the first token, then one trunk verdict per round."""

    tokens: tuple[int, ...]  # emitted: accepted drafts, then the trunk's own choice unless cut
    drafted: int = 0
    accepted: int = 0  # drafts among `tokens`
    prompt_tokens: int = 0  # fed before the first token; 0 in all later rounds
    trunk_calls: int = 1
    seconds: float = 0.0
    draft_seconds: float = 0.0  # part of `seconds`; 0 where a round is one piece of device work
    finish_reason: str | None = None  # "eos", "length" or "capacity" in the last round

    @property
    def judged(self) -> int:
        """How many of the drafts have a verdict in the output; a cut round gives no more."""
        return self.drafted if len(self.tokens) > self.accepted else self.accepted


@dataclass
class Stats:
    """Sums over the rounds of one or more requests."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0  # trunk verdicts after the prompt
    trunk_calls: int = 0  # prompt calls included
    drafted: int = 0
    accepted: int = 0
    decode_tokens: int = 0  # emitted by rounds: all but the one the prompt gave
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    judged_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, round: Round) -> None:
        """Count one more round."""
        self.tokens += len(round.tokens)
        self.trunk_calls += round.trunk_calls
        if round.prompt_tokens:
            self.prompt_tokens += round.prompt_tokens
            self.prompt_seconds += round.seconds
            return
        self.rounds += 1
        self.drafted += round.drafted
        self.accepted += round.accepted
        self.decode_tokens += len(round.tokens)
        self.decode_seconds += round.seconds
        self.draft_seconds += round.draft_seconds
        for counts, upto in ((self.judged_at, round.judged), (self.accepted_at, round.accepted)):
            counts += [0] * (round.drafted - len(counts))
            for j in range(upto):
                counts[j] += 1

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per round, the trunk's own choice included: 1 when decoding plainly."""
        return self.decode_tokens / self.rounds if self.rounds else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """For draft 1, 2, ...: accepted, as a fraction of the rounds that judged it."""
        pairs = zip(self.accepted_at, self.judged_at, strict=True)
        return [accepted / judged for accepted, judged in pairs if judged]

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of decoding, prompt not included."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers under the names that every command prints."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "trunk_calls": self.trunk_calls,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": self.acceptance_length,
            "acceptance_by_position": self.acceptance_by_position,
            "prompt_seconds": self.prompt_seconds,
            "decode_seconds": self.decode_seconds,
            "draft_seconds": self.draft_seconds,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass
class Result:
    """The tokens of one request, why it ended, and its statistics."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stats: Stats = field(default_factory=Stats)

    def add(self, round: Round) -> None:
        """Take in one more round."""
        self.stats.add(round)
        self.tokens += round.tokens
        self.finish_reason = round.finish_reason or self.finish_reason
