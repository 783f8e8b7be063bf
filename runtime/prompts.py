"""Prompts cut out of a user's text: evenly spaced, each from one document, all of one length."""

from __future__ import annotations

import argparse
import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.files import read_bounded
from eagle_chain.engines.progress import counted
from eagle_chain.runtime.tokenizer import Tokenizer

FIELDS = ("text", "t")  # of a line of JSON lines, the first that is there


@dataclass(frozen=True)
class TextFile:
    """A file of text, as one document or one per line."""

    path: Path
    sha256: str
    kind: str  # "plain text" or "JSON lines"
    documents: list[str]


def add_prompt_arguments(
    parser: argparse.ArgumentParser, what: str, *, prompts: int, new_tokens: int
) -> None:
    """The options that say which prompts are cut, and how far they are decoded.

    Args:
        parser: Of a command.
        what: What the text is, for the help of `--text`.
        prompts: How many without the option.
        new_tokens: How many to add to each without the option.
    """
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=Path,
        required=True,
        help=f'{what} to cut prompts from: plain, or JSON lines with the text in "text" or "t"',
    )
    parser.add_argument(
        "--prompts", metavar="N", type=int, default=prompts, help=f"how many ({prompts})"
    )
    parser.add_argument(
        "--prompt-tokens", metavar="N", type=int, default=64, help="tokens of each (64)"
    )
    parser.add_argument(
        "--prefix",
        metavar="TEXT",
        default="",
        help="what each prompt begins with, like '<|py|>'; counted in --prompt-tokens (nothing)",
    )
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=int,
        default=new_tokens,
        help=f"tokens to add to each ({new_tokens})",
    )


def check_prompt_sizes(
    arguments: argparse.Namespace, capacity: int, *, prompts: int = 1, new_tokens: int = 1
) -> None:
    """Refuse sizes below these least ones, or beyond the capacity.

    Raises:
        InputError: Names the option, or what takes more than there is.
    """
    least = {"prompts": prompts, "prompt_tokens": 1, "max_new_tokens": new_tokens}
    for option, low in least.items():
        if getattr(arguments, option) < low:
            name, got = option.replace("_", "-"), getattr(arguments, option)
            raise InputError(f"--{name} is {got}, expected {low} or more")
    length = arguments.prompt_tokens
    if length + arguments.max_new_tokens > capacity:
        raise InputError(
            f"prompts of {counted(length, 'token')} and {arguments.max_new_tokens} new ones take "
            f"more than the bundle's capacity of {capacity}: ask for fewer, or export with a "
            "larger --capacity"
        )


def asked_prompts(
    arguments: argparse.Namespace, file: TextFile, tokenizer: Tokenizer
) -> list[list[int]]:
    """`cut_prompts` as the options of `add_prompt_arguments` say."""
    return cut_prompts(
        file,
        tokenizer,
        count=arguments.prompts,
        length=arguments.prompt_tokens,
        prefix=arguments.prefix,
    )


def read_text(path: Path) -> TextFile:
    """Read plain text, or JSON lines: objects with the text in `text` or `t`.

    A file is JSON lines if its name ends in .jsonl or its first line is such an object.

    Raises:
        InputError: It cannot be read, is not UTF-8, has a line that is no such object, or no text.
    """
    try:
        with open(path, "rb") as stream:
            content = read_bounded(stream, str(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InputError(f"{path}: has no text in it")
    kind, documents = "plain text", [text]
    if path.suffix == ".jsonl" or _document(lines[0][1]) is not None:
        kind, documents = "JSON lines", []
        for number, line in lines:
            document = _document(line)
            if document is None:
                raise InputError(
                    f'{path}: line {number} is not a JSON object with its text in "text" or "t"'
                )
            documents.append(document)
    return TextFile(path, hashlib.sha256(content).hexdigest(), kind, documents)


def _document(line: str) -> str | None:
    """The text of one line of JSON lines; None if the line is something else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    text = next((value[f] for f in FIELDS if isinstance(value.get(f), str)), None)
    return text and text.encode("utf-8", "replace").decode()  # JSON can spell lone surrogates


def cut_prompts(
    file: TextFile, tokenizer: Tokenizer, *, count: int, length: int, prefix: str = ""
) -> list[list[int]]:
    """Cut `count` prompts of `length` tokens, their starts evenly spaced over the text.

    Args:
        file: The text.
        tokenizer: Makes the tokens, each document on its own.
        count: How many.
        length: Tokens of a prompt, those of the prefix included.
        prefix: What every prompt begins with.

    Raises:
        InputError: The text is too short, or the prefix as long as a prompt.
    """
    head = tokenizer.encode(prefix) if prefix else []
    span = length - len(head)
    if span < 1:
        raise InputError(
            f"the prefix has {counted(len(head), 'token')}, which leaves nothing of a prompt of "
            f"{length}: ask for longer prompts"
        )
    documents = [tokenizer.encode(text) for text in file.documents]
    places = [max(0, len(ids) - span + 1) for ids in documents]  # where a prompt can start
    ends = list(accumulate(places))
    if ends[-1] < count:
        raise InputError(
            f"{file.path}: has room for {ends[-1]} different prompts of {counted(span, 'token')} "
            f"({_longest(documents)}), {count} are asked for: give more text, or ask for fewer or "
            "shorter prompts"
        )
    prompts = []
    for i in range(count):
        place = i * ends[-1] // count
        document = bisect_right(ends, place)
        start = place - (ends[document] - places[document])
        prompts.append([*head, *documents[document][start : start + span]])
    return prompts


def _longest(documents: Sequence[Sequence[int]]) -> str:
    longest = max(map(len, documents))
    if len(documents) == 1:
        return f"it has {counted(longest, 'token')}"
    return f"the longest of {len(documents)} documents has {longest}"
