"""The command `generate`: continue a text with a bundle, streaming it as it comes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO, Literal, cast

from eagle_chain.engines.cli import numbers
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.files import read_bounded
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.outcome import Outcome
from eagle_chain.engines.progress import counted, human_bytes
from eagle_chain.runtime.answer import Answer, answer, check_goes_on, printable
from eagle_chain.runtime.load import (
    DRAFTER_HELP,
    DRAFTERS,
    WITH_KV,
    add_backend_arguments,
    backend_for,
    bundle_stop_ids,
    chosen_drafter,
    identity,
    limits,
    open_engines,
)
from eagle_chain.runtime.prefix import Prefix, check_replaceable
from eagle_chain.runtime.request import check_budget
from eagle_chain.runtime.tokenizer import Tokenizer

LARGEST_PROMPT = 16 << 20  # bytes: more tokens than any trunk has positions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `eagle-chain generate` takes."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="what `export` wrote")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        help="text to continue, as it is (standard input, less one newline at its end)",
    )
    prompt.add_argument(
        "--prompt-file",
        metavar="FILE",
        type=Path,
        help="UTF-8 file with that text; one newline at its end is left out",
    )
    prompt.add_argument(
        "--ids",
        metavar="ID,...",
        type=numbers("token ids like 1,2,3 or [1, 2, 3]"),
        help="token ids in place of a text, with commas between or as a JSON list: the answer is "
        "ids as well, and no tokenizer is needed",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="take the text as a user's message and put it into the model's chat template",
    )
    parser.add_argument(
        "--drafter",
        choices=DRAFTERS,
        help=f"{DRAFTER_HELP} (the first of eagle, mtp, none that the bundle has)",
    )
    parser.add_argument(
        "-k",
        type=drafts,
        help="guesses per trunk pass; auto chooses a number for each pass by the acceptance and "
        "the timings of the last ones (as many as the bundle has)",
    )
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=256, help="most tokens to add (256)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="draw tokens from softmax(logits / TEMPERATURE); needs a bundle exported with "
        "--sampling (0: take the largest logit)",
    )
    parser.add_argument("--seed", type=int, help="of the draws: the same seed, the same text (0)")
    parser.add_argument(
        "--draft-kv",
        choices=("kept", "scratch"),
        default="kept",
        help="whether the draft remembers the sequence or starts over in each round (kept)",
    )
    parser.add_argument(
        "--save-prefix",
        metavar="FILE",
        type=Path,
        help="keep the sequence as the prompt leaves it, for --prefix, in the place of nothing but "
        "such a file (with --max-new-tokens 0 nothing else is done)",
    )
    parser.add_argument(
        "--prefix",
        metavar="FILE",
        type=Path,
        help="go on from a sequence kept with --save-prefix: the text is put behind it; without "
        "one, the tokens begin with the one that was next when the file was made",
    )
    parser.add_argument(
        "--rollback",
        choices=("log", "replay"),
        default="log",
        help="how rejected tokens leave the states: by a log, or by running the rest again (log)",
    )
    add_backend_arguments(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="decode plainly too and fail if a single token differs",
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Answer one prompt; with --check a token that differs from plain decoding fails."""
    _check_chat(arguments)
    text = "" if arguments.ids is not None else _prompt(arguments)
    manifest = Manifest.load(arguments.bundle)
    drafter = chosen_drafter(manifest, arguments.drafter)
    tokenizer = Tokenizer(arguments.bundle) if arguments.ids is None else None
    prompt = _tokens(arguments, tokenizer, text)
    with _opened(arguments, manifest) as kept:
        # before the minutes that large engines take to load
        _check(arguments, manifest, drafter, prompt, kept)
        engines = open_engines(arguments.bundle, arguments.backend, threads=arguments.threads)
        chain = engines.chain(
            drafter=drafter, draft_kv=arguments.draft_kv, rollback=arguments.rollback
        )
        given = answer(
            chain,
            tokenizer,
            prompt,
            drafter=drafter,
            draft_kv=arguments.draft_kv,
            max_new_tokens=arguments.max_new_tokens,
            k=arguments.k,
            temperature=arguments.temperature,
            seed=arguments.seed or 0,
            check=arguments.check,
            show=_show,
            prefix=kept,
            save_prefix=arguments.save_prefix,
        )
    report = given.to_json()
    report["warnings"] = [*_ignored(arguments, drafter), *report["warnings"]]
    if not engines.stop_ids:
        report["warnings"].append("the bundle names no stop ids: no text ends before its limit")
    _tell(given, report["warnings"])
    return Outcome(report, passed=given.exact is not False)


def _check_chat(arguments: argparse.Namespace) -> None:
    """Refuse what a template cannot be used with."""
    if arguments.chat and arguments.prefix is not None:
        raise InputError(
            "--chat puts the text into a template of its own, which cannot follow a --prefix; "
            "give the text as the template would have it"
        )
    if arguments.chat and arguments.ids is not None:
        raise InputError("--chat is for text; give --ids as the template would have them")


def _tokens(arguments: argparse.Namespace, tokenizer: Tokenizer | None, text: str) -> Sequence[int]:
    """The prompt; behind a prefix it begins with no special token."""
    if tokenizer is None:
        ids: Sequence[int] = arguments.ids
        return ids
    if arguments.chat:
        return tokenizer.encode_chat([{"role": "user", "content": text}])
    return tokenizer.encode(text, special=arguments.prefix is None)


def _show(piece: str, drafted: bool) -> None:
    print(printable(piece), end="", flush=True)


def _tell(given: Answer, warnings: Sequence[str]) -> None:
    """What it cost, behind the text on stderr."""
    print()
    stats = given.result.stats
    fed = f"prompt of {counted(stats.prompt_tokens, 'token')} in {stats.prompt_seconds:.2f} s"
    lines = "\n ".join([fed, *given.summary()])
    print(f"[{lines}]", file=sys.stderr)
    if saved := given.saved:
        size = human_bytes(saved.bytes)
        print(
            f"wrote {saved.file}: a prefix of {counted(saved.tokens, 'token')}, {size}",
            file=sys.stderr,
        )
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _opened(
    arguments: argparse.Namespace, manifest: Manifest
) -> AbstractContextManager[Prefix | None]:
    """The sequence to go on from, if one was named: read once, for the checks and for the chain."""
    if arguments.prefix is None:
        return nullcontext()
    return Prefix(arguments.prefix, manifest.trunk.vocab_size)


def _check(
    arguments: argparse.Namespace,
    manifest: Manifest,
    drafter: str,
    prompt: Sequence[int],
    kept: Prefix | None,
) -> None:
    """Refuse what the manifest and the files tell to be impossible."""
    backend = backend_for(arguments.bundle, manifest, arguments.backend)
    most = limits(manifest)
    most.check_drafts(arguments.k)
    most.check_draws(arguments.temperature, arguments.seed or 0)
    check_budget(arguments.max_new_tokens)
    if kept is not None:
        kept.check(most.capacity, identity(manifest, backend), drafter)
    counters = kept and kept.counters
    if counters and not prompt:
        stop_ids = bundle_stop_ids(arguments.bundle, manifest)
        check_goes_on(counters.pending, arguments.max_new_tokens, stop_ids)
        prompt = [counters.pending or 0]
    most.check_prompt(prompt, len(counters.tokens) if counters else 0)
    if arguments.save_prefix is not None:
        check_replaceable(arguments.save_prefix)


def _ignored(arguments: argparse.Namespace, drafter: str) -> list[str]:
    """Options that were given and change nothing, a sentence each."""
    found = []
    if drafter == "none" and arguments.k not in (None, 0):
        found.append(f"-k {arguments.k} has no effect: drafter none guesses nothing")
    if drafter not in WITH_KV and arguments.draft_kv == "scratch":
        found.append(f"--draft-kv scratch has no effect: drafter {drafter} has no KV")
    if arguments.seed is not None and not arguments.temperature:
        found.append("--seed has no effect: nothing is drawn without a --temperature above 0")
    return found


def drafts(text: str) -> int | Literal["auto"]:
    """What -k takes."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from None


def _prompt(arguments: argparse.Namespace) -> str:
    """The text to continue: the argument as it is, or a file without the newline at its end."""
    text: str | None = arguments.prompt
    file: Path | None = arguments.prompt_file
    if text is not None:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError("--prompt is not UTF-8 text; put it into a UTF-8 file") from None
        return text
    if file is None and sys.stdin.isatty():
        if arguments.prefix is not None:  # whose next token can begin
            return ""
        raise InputError(
            "no prompt: give --prompt TEXT, --prompt-file FILE or --ids, or pipe a text in"
        )
    where = "standard input" if file is None else str(file)
    try:
        with nullcontext(sys.stdin.buffer) if file is None else open(file, "rb") as stream:
            text = read_bounded(cast(BinaryIO, stream), where, LARGEST_PROMPT).decode("utf-8")
        return text.removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise InputError(f"{where}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: is not UTF-8 text (byte {error.start}); convert it first"
        ) from None
