"""One prompt answered: the text as it comes, what it cost, and whether plain decoding agrees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.progress import counted, phases
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.diagnosis import likely_cause
from eagle_chain.runtime.prefix import Prefix
from eagle_chain.runtime.request import RequestOptions
from eagle_chain.runtime.stats import Result, Round
from eagle_chain.runtime.tokenizer import TextStream, Tokenizer

if TYPE_CHECKING:
    from typing import Unpack  # Python 3.11

COLUMNS = 74  # of a line of a summary, so that a short mark in front of it fits on a terminal
FINISHES = {"eos": "end of text", "length": "limit reached", "capacity": "capacity reached"}
VERDICTS = {None: "", True: ", exact", False: ", NOT EXACT"}
PATIENCE = 1.0  # seconds of a prompt that pass without a word
Show = Callable[[str, bool], None]  # a piece of text, and whether a draft was accepted for it


@dataclass(frozen=True)
class Saved:
    """A sequence that was kept in a file."""

    file: str
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Answer:
    """A continuation and its cost; `plain` is the same request without drafts, if it was run."""

    text: str | None  # None where there is no tokenizer: ids were given and shown
    result: Result
    plain: Result | None
    drafter: str = "eagle"
    draft_kv: str = "kept"
    drawn: bool = False  # at a temperature, where even a good draft is often wrong
    saved: Saved | None = None  # the sequence as the prompt left it

    @property
    def exact(self) -> bool | None:
        """Whether plain decoding gives the same tokens; None if it was not asked."""
        return None if self.plain is None else self.plain.tokens == self.result.tokens

    @property
    def passes_saved(self) -> int:
        """Trunk passes that plain decoding would have needed on top."""
        return self.result.stats.decode_tokens - self.result.stats.rounds

    def to_json(self) -> dict[str, Any]:
        """What `generate --json` prints."""
        plain = self.plain
        return {
            "text": self.text,
            "ids": self.result.tokens,
            "finish_reason": self.result.finish_reason,
            "drafter": self.drafter,
            **self.result.stats.to_json(),
            "trunk_passes_saved": self.passes_saved,
            "exact": self.exact,
            "plain_tokens_per_second": plain.stats.tokens_per_second if plain else None,
            "saved_prefix": self.saved and asdict(self.saved),
            "warnings": self.warnings(),
        }

    def summary(self) -> list[str]:
        """The cost in a few short lines for people."""
        stats = self.result.stats
        finish = FINISHES[self.result.finish_reason]
        parts = [f"{counted(stats.tokens, 'token')} ({finish}){VERDICTS[self.exact]}"]
        if shares := stats.acceptance_by_position:
            drafts = f"drafts 1..{len(shares)}" if len(shares) > 1 else "draft 1"
            parts.append(f"{drafts} accepted {' '.join(f'{share:.0%}' for share in shares)}")
        if stats.acceptance_length is not None:
            parts.append(f"{stats.acceptance_length:.2f} per trunk pass")
        if stats.tokens_per_second is not None:
            plain = self.plain.stats.tokens_per_second if self.plain else None
            beside = f", {plain:.0f} without drafts in the same engine" if plain else ""
            parts.append(f"{stats.tokens_per_second:.0f} tokens/s{beside}")
        lines = [parts[0]]
        for part in parts[1:]:
            if len(lines[-1]) + len(part) + 2 <= COLUMNS:
                lines[-1] += f"; {part}"
            else:
                lines.append(part)
        return lines

    def warnings(self) -> list[str]:
        """What a user should look into: a draft that is hardly ever right, a token that differs."""
        cause = likely_cause(self.result.stats, self.drafter, self.draft_kv)
        found = [cause] if cause and not self.drawn else []
        if self.plain is not None and not self.exact:
            pairs = zip(self.result.tokens, self.plain.tokens, strict=False)
            common = min(len(self.result.tokens), len(self.plain.tokens))
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), common)
            found.append(f"NOT EXACT: plain decoding differs from token {at} on")
        return found


def answer(
    chain: Chain,
    tokenizer: Tokenizer | None,
    prompt: Sequence[int],
    *,
    check: bool,
    show: Show,
    drafter: str = "eagle",
    draft_kv: str = "kept",
    prefix: Prefix | None = None,
    save_prefix: Path | None = None,
    **options: Unpack[RequestOptions],
) -> Answer:
    """Run a request, showing its text while it comes.

    Args:
        chain: Runs it; `check` runs it a second time with no drafts.
        tokenizer: Turns tokens into text; None: the ids are shown.
        prompt: Token ids; none of them, behind a `prefix`, to go on with the token it leaves.
        check: Whether to compare with plain greedy decoding.
        show: Called with every piece of text.
        drafter: Who guesses on this chain, for warnings.
        draft_kv: With which memory.
        prefix: A sequence that the prompt continues.
        save_prefix: File for the sequence as the prompt leaves it.
        **options: As in `Chain.stream`.

    Raises:
        InputError: The request does not fit, the model gives no finite logits, or a file cannot be
            read or written.
    """
    result, text = Result(), _Shown(tokenizer.stream() if tokenizer else IdStream(), show)
    before, plain, saved, head = None, None, None, list[int]()
    try:
        if prefix is not None:
            chain.restore(prefix)
            before = chain.snapshot() if check else None  # the file may be the one to save into
            if not prompt:
                prompt = head = _next(chain, options)
                result.tokens, result.stats.tokens = list(head), len(head)
        options["append"] = prefix is not None
        for round in _rounds(chain, prompt, options):
            if round.prompt_tokens:
                if save_prefix is not None:
                    size = chain.save(save_prefix)
                    saved = Saved(str(save_prefix), len(chain.cache.tokens), size)
                text.add(head, 0)
            result.add(round)
            text.add(round.tokens, round.accepted)
        text.end()
        if check:
            if before is not None:
                chain.rollback(before)
            options["k"] = 0
            plain = chain.generate(prompt, **options)
            plain.tokens[:0] = head
    except FloatingPointError as error:
        raise InputError(str(error)) from error
    drawn = options.get("temperature", 0.0) > 0
    shown = text.whole if tokenizer else None
    return Answer(shown, result, plain, drafter, draft_kv, drawn, saved)


class _Shown:
    """The text of an answer, shown piece by piece as its tokens come."""

    def __init__(self, stream: TextStream | IdStream, show: Show) -> None:
        self.whole = ""
        self._stream = stream
        self._show = show

    def add(self, tokens: Sequence[int], accepted: int) -> None:
        """Show what these tokens complete; the first `accepted` of them were drafted."""
        for i, token in enumerate(tokens):
            self._put(self._stream.push(token), i < accepted)

    def end(self) -> None:
        """Show what no token has completed."""
        self._put(self._stream.end(), False)

    def _put(self, piece: str, drafted: bool) -> None:
        if piece:
            self.whole += piece
            self._show(piece, drafted)


def check_goes_on(pending: int | None, budget: int | None, stop_ids: Collection[int]) -> None:
    """Refuse to go on with the token that a prefix leaves, where none may come or none comes."""
    if budget == 0:
        raise InputError("there is nothing to do: no prompt behind the prefix, no new tokens")
    if pending in stop_ids:
        raise InputError("the prefix ends where the text ends: only a prompt can follow it")


def _next(chain: Chain, options: RequestOptions) -> list[int]:
    """The token that a restored sequence is to go on with; it counts as one of the new ones."""
    budget, pending = options.get("max_new_tokens"), chain.cache.pending
    check_goes_on(pending, budget, chain.stop_ids)
    if budget is not None:
        options["max_new_tokens"] = budget - 1
    return [] if pending is None else [pending]


def _rounds(chain: Chain, prompt: Sequence[int], options: RequestOptions) -> Iterator[Round]:
    """A request's rounds, with the progress of a prompt that takes its time on stderr."""
    before = len(chain.cache.tokens) if options["append"] else 0
    with phases("prompt", PATIENCE) as show:
        rounds = chain.rounds(
            prompt, fed=lambda held: show("", held - before, len(prompt)), **options
        )
        first = next(rounds)
    yield first
    yield from rounds


class IdStream:
    """Ids in the place of text: the answer to a prompt of ids."""

    def __init__(self) -> None:
        self._between = ""

    def push(self, token: int) -> str:
        """The id, behind a comma if it is not the first."""
        between, self._between = self._between, ","
        return f"{between}{token}"

    def end(self) -> str:
        """Nothing: no id waits for another one."""
        return ""


def printable(text: str) -> str:
    """Text without control characters, which a model could use to play with the terminal."""
    return "".join(
        c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text
    )
