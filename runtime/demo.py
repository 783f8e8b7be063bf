"""The command `demo`: the shipped pair, from checkpoint to text, checked against plain greedy."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from eagle_chain.engines.cli import dispatch
from eagle_chain.engines.config import TrunkConfig
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.extras import require
from eagle_chain.engines.fields import read_json
from eagle_chain.engines.outcome import Outcome
from eagle_chain.runtime.answer import Answer, answer, printable
from eagle_chain.runtime.load import Engines, open_engines
from eagle_chain.runtime.tokenizer import Tokenizer

PAIR = Path(__file__).resolve().parent.parent / "demo"  # in a source tree only
HERE = Path("demo")  # of a clone that the package was installed from
PROMPTS = {  # register -> prompt; the pair learnt each kind of text behind its own token
    "code": (
        '<|py|>"""Read a log file and count how often each host appears."""\n\n'
        "import argparse\nfrom collections import Counter\n\n\n"
        "def parse_args(argv=None):\n"
    ),
    "documentation": (
        "<|doc|>.. _plotting:\n\nPlotting a histogram\n--------------------\n\n"
        "A histogram shows how often each value occurs. To draw one"
    ),
    "book": (
        '<|book|>"I assure you, my dear," said Mrs. Winter, "that I never in my life was so '
        "surprised. Mr. Hale is"
    ),
}
COLOURS = ("\033[1;32m", "\033[0m")  # accepted drafts: bold green
PROMPT_ROOM = 256  # tokens of the capacity that are left to a prompt
DIM = ("\033[2m", "\033[0m")  # the prompt, where there is colour
BRACKETS = ("[", "]")
NOTHING = ("", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `eagle-chain demo` takes."""
    parser.add_argument(
        "pair",
        metavar="PAIR",
        type=Path,
        nargs="?",
        help="folder that holds the pair as trunk and draft (demo, in the source tree or the "
        "current folder)",
    )
    parser.add_argument(
        "--bundle", metavar="DIR", type=Path, help="keep the bundle there (a temporary folder)"
    )
    parser.add_argument("-k", type=int, default=4, help="guesses per trunk pass, 1 to 8 (4)")
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=64, help="tokens per prompt (64)"
    )
    parser.add_argument(
        "--marks",
        choices=("auto", "colour", "brackets", "none"),
        default="auto",
        help="how accepted guesses are shown (auto: in colour on a terminal, else in brackets)",
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Export the pair, run every prompt with drafts and without, compare."""
    if not 1 <= arguments.k <= 8:
        raise InputError(f"-k is {arguments.k}, expected 1 to 8")
    pair = _pair(arguments.pair)
    config = pair / "trunk" / "config.json"
    room = TrunkConfig.from_json(read_json(config), str(config)).max_positions - PROMPT_ROOM
    if not 1 <= arguments.max_new_tokens <= room:
        raise InputError(f"--max-new-tokens is {arguments.max_new_tokens}, expected 1 to {room}")
    require("onnx", "onnx_ir")
    if arguments.bundle is None or not (arguments.bundle / "plans").is_dir():
        require("onnxruntime")  # plans of a bundle that is replaced may be kept, and run
    with ExitStack() as stack:
        bundle = arguments.bundle
        if bundle is None:
            temporary = tempfile.TemporaryDirectory(prefix="eagle-chain-")
            bundle = Path(stack.enter_context(temporary), "bundle")
        words = [str(pair / "trunk"), str(pair / "draft"), "-o", str(bundle)]
        width, capacity = max(5, arguments.k + 1), PROMPT_ROOM + max(256, arguments.max_new_tokens)
        dispatch(["export", *words, "--width", str(width), "--capacity", str(capacity)])
        engines = open_engines(bundle)
        tokenizer = Tokenizer(bundle)
        marks = _marks(arguments.marks)
        if marks != NOTHING:
            kind = "green" if marks == COLOURS else "in brackets"
            print(f"\n{_marked(kind, marks)}: guessed by the draft and confirmed by the trunk")
        answers = {
            name: _one(engines, tokenizer, name, prompt, arguments, marks)
            for name, prompt in PROMPTS.items()
        }
    return _outcome(answers)


def _pair(named: Path | None) -> Path:
    """The folder of the pair: as named, else that of the source tree or of the current folder."""
    places = (PAIR, HERE) if named is None else (named,)
    for place in places:
        if (place / "trunk" / "config.json").is_file():
            return place
    if named is not None:
        raise InputError(f"{named}: has no trunk/config.json; name the folder demo of a clone")
    raise InputError(
        "the demo pair is not part of the installed package, and the current folder has no "
        "demo/trunk: run this in a clone of the repository (or scripts/demo.sh there), name its "
        "folder demo, or use `eagle-chain export` on a pair of your own"
    )


def _one(
    engines: Engines,
    tokenizer: Tokenizer,
    name: str,
    prompt: str,
    arguments: argparse.Namespace,
    marks: tuple[str, str],
) -> Answer:
    """Continue one prompt before the reader's eyes."""
    ids = tokenizer.encode(prompt)
    shown = _marked(printable(tokenizer.decode(ids)), DIM if marks == COLOURS else NOTHING)
    print(f"\n--- {name} ---\n{shown}", end="", flush=True)
    run = _Marker(marks)
    given = answer(
        engines.chain(),
        tokenizer,
        ids,
        max_new_tokens=arguments.max_new_tokens,
        k=arguments.k,
        check=True,
        show=run.show,
    )
    run.end()
    print()
    for line in given.summary():
        print(f"--- {line}")
    for warning in given.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    return given


class _Marker:
    """Prints text with a mark before and after each run of accepted drafts."""

    def __init__(self, marks: tuple[str, str]) -> None:
        self._marks = marks
        self._inside = False

    def show(self, piece: str, drafted: bool) -> None:
        """Print one piece of text."""
        mark = "" if drafted == self._inside else self._marks[self._inside]
        self._inside = drafted
        print(f"{mark}{printable(piece)}", end="", flush=True)

    def end(self) -> None:
        """Close the last run."""
        print(self._marks[1] if self._inside else "", end="", flush=True)
        self._inside = False


def _marked(text: str, marks: tuple[str, str]) -> str:
    return f"{marks[0]}{text}{marks[1]}"


def _marks(wish: str) -> tuple[str, str]:
    """What goes around accepted drafts; colour only where it is seen and wanted."""
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if wish == "auto":
        wish = "colour" if terminal and not os.environ.get("NO_COLOR") else "brackets"
    return {"colour": COLOURS, "brackets": BRACKETS, "none": NOTHING}[wish]


def _outcome(answers: dict[str, Answer]) -> Outcome:
    """Add the runs up, for people and for programs."""
    rounds = sum(given.result.stats.rounds for given in answers.values())
    decoded = sum(given.result.stats.decode_tokens for given in answers.values())
    exact = all(given.exact for given in answers.values())
    length = decoded / rounds if rounds else None
    print()
    if length is not None:
        saved = f"{rounds} passes instead of {decoded}"
        print(f"all together: {length:.2f} tokens per trunk pass, {saved}")
    print("every token is that of plain greedy decoding" if exact else "NOT EXACT")
    print("(so small a model soon repeats itself, which is easy to guess; fair numbers are in")
    print("docs/acceptance.md)")
    report = {
        "exact": exact,
        "acceptance_length": length,
        "trunk_passes": rounds,
        "trunk_passes_saved": decoded - rounds,
        "runs": [{"register": name, **given.to_json()} for name, given in answers.items()],
    }
    return Outcome(report, passed=exact)
