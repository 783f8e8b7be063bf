"""The command `eagle-chain`: picks a subcommand, and turns its outcome into an exit code.

A subcommand is a module with `add_arguments(parser)` and `run(arguments) -> Outcome`. Modules are
named here as text and imported when asked for: a command needs only its own libraries.
Exit codes: 0 done, 1 a check failed, 2 usage or bad input, 130 interrupted (143 by SIGTERM, see
`entry.py`), 141 the reader of stdout has gone.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from eagle_chain.engines.entry import INTERRUPTED
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.extras import EXTRAS, install
from eagle_chain.engines.outcome import Outcome
from eagle_chain.engines.version import VERSION

COMMANDS = {
    "demo": ("eagle_chain.runtime.demo", "run the shipped pair on this machine"),
    "export": ("eagle_chain.export.command", "make a bundle from a trunk and a draft checkpoint"),
    "build": ("eagle_chain.engines.build", "compile a bundle's graphs to TensorRT plans"),
    "generate": ("eagle_chain.runtime.generate", "continue a text with a bundle"),
    "parity": ("eagle_chain.runtime.parity", "compare a bundle's engines with PyTorch"),
    "record": ("eagle_chain.export.record", "keep what PyTorch gives for a bundle, for parity"),
    "verify": ("eagle_chain.runtime.verify", "check a bundle's tokens against plain decoding"),
    "bench": ("eagle_chain.runtime.bench", "time every part of a round"),
    "tune": ("eagle_chain.runtime.tune", "find the setting of a draft that a text speaks for"),
    "variants": ("eagle_chain.export.variants", "author a bundle's graphs again, for tune"),
    "inspect": ("eagle_chain.engines.inspection", "tell what a bundle holds and needs"),
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # why a redirected output may break


class _Parser(argparse.ArgumentParser):
    """A parser whose usage errors are `InputError`s."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; `{self.prog} --help` lists what it takes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # text that the terminal cannot show is no error
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has gone: nothing to say, and nobody to say it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in FULL:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        try:
            return _fail(f"the output cannot be written ({error.strerror})", 2, as_json=False)
        except OSError:  # it was that of errors, or both
            os.dup2(nowhere, sys.stderr.fileno())
            return 2


def _run(words: list[str]) -> int:
    as_json = "--json" in words
    try:
        # With --json whatever a command prints goes to stderr, and stdout is the one object.
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
            outcome = dispatch(words)
    except SystemExit:  # argparse has printed the help or the version
        return 0
    except InputError as error:
        return _fail(str(error), 2, as_json)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS:
            raise
        message = f"this needs the Python package {library}: {install(EXTRAS[library])}"
        return _fail(message, 2, as_json)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED, as_json)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:  # the output is full, or a bug
            raise
        return _fail(f"{error.filename}: {error.strerror}", 2, as_json)
    except MemoryError:
        return _fail("there is not enough memory for this: free some of it first", 2, as_json)
    except Exception as error:
        if as_json:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    if as_json:
        print(json.dumps(outcome.report, allow_nan=False))
    if outcome.interrupted:
        return _fail("interrupted", INTERRUPTED, as_json=False)
    if outcome.problem:
        return _fail(outcome.problem, 2, as_json=False)
    return 0 if outcome.passed else 1


def dispatch(words: list[str]) -> Outcome:
    """Run a command and return its outcome; for the commands that need another one."""
    if not words or words[0] not in COMMANDS:
        return _top_level(words)
    parser = parser_for(words[0])
    command = importlib.import_module(COMMANDS[words[0]][0])
    outcome: Outcome = command.run(parser.parse_args(words[1:]))
    return outcome


def parser_for(name: str) -> argparse.ArgumentParser:
    """The parser of a command; only now its module is imported."""
    module_name, summary = COMMANDS[name]
    parser = _Parser(
        prog=f"eagle-chain {name}",
        allow_abbrev=False,
        description=f"{summary[0].upper()}{summary[1:]}.",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on stdout and everything else on stderr",
        default=argparse.SUPPRESS,
    )
    importlib.import_module(module_name).add_arguments(parser)
    return parser


def numbers(wanted: str) -> Callable[[str], tuple[int, ...]]:
    """A type for argparse: whole numbers with commas between, or as a JSON list."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            return tuple(map(int, text.strip().removeprefix("[").removesuffix("]").split(",")))
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, wanted {wanted}") from None

    return parse


def _top_level(words: list[str]) -> Outcome:
    """`--help` (also without a word), `--version`, or a word that is no command."""
    if "--version" in words and set(words) <= {"--version", "--json"}:
        print(_version())
        return Outcome({"version": VERSION})
    listing = "\n".join(f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items())
    parser = _Parser(
        prog="eagle-chain",
        usage="eagle-chain COMMAND ... | --help | --version",
        description="EAGLE-3 speculative decoding: the exact greedy chain in fewer trunk passes.",
        epilog=f"commands (each has --help and --json):\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.parse_args(words or ["--help"])
    raise AssertionError("parse_args returns only for a command, which is dispatched before")


def _version() -> str:
    return f"eagle-chain {VERSION}"


def _fail(message: str, code: int, as_json: bool) -> int:
    try:
        print(f"eagle-chain: {message}", file=sys.stderr)
    finally:  # either may be full
        if as_json:
            print(json.dumps({"error": message}), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
