"""The command `bench`: how long every part of a round takes, and what that makes in tokens."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_chain.engines.cli import numbers
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.kv import KV_TYPES
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.outcome import Outcome
from eagle_chain.engines.progress import phases
from eagle_chain.engines.spec import DTYPES, PROFILES, Options
from eagle_chain.runtime.bench_engines import SHAPES, Engines, of_bundle, of_shapes
from eagle_chain.runtime.bench_report import plot, table
from eagle_chain.runtime.cuda import CudaMemory
from eagle_chain.runtime.drafters import DRAFT_ENGINES, engine_calls
from eagle_chain.runtime.load import add_backend_arguments, open_engines, runnable
from eagle_chain.runtime.measure import Clock, copy_bandwidth, state_bytes
from eagle_chain.runtime.plots import PLOT_HELP, check_plot, drawn
from eagle_chain.runtime.prompts import cut_prompts, read_text
from eagle_chain.runtime.stand import Stand
from eagle_chain.runtime.stats import Stats
from eagle_chain.runtime.tokenizer import Tokenizer

TRUNKS = ("plain", "verify", "plain, width 1")  # parts that are a call of the trunk
SHAPE_OPTIONS = {  # with their defaults
    "width": (5,),
    "capacity": (4096,),
    "dtype": "bf16",
    "kv": None,
    "profile": "ort-fused",
}
SEVERAL = numbers("a number, or several with commas between")
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 32, 64  # of a text whose acceptance is measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `eagle-chain bench` takes."""
    parser.add_argument(
        "bundle", metavar="BUNDLE", type=Path, nargs="?", help="what `export` wrote"
    )
    parser.add_argument(
        "--shapes",
        metavar="NAME",
        nargs="?",
        const="",
        help=f"sizes of this pair, random weights: {', '.join(SHAPES)}",
    )
    add_backend_arguments(parser)
    parser.add_argument(
        "--drafter",
        choices=tuple(DRAFT_ENGINES),
        help="whose engines are measured: eagle, the draft, or mtp, the trunk's own head (the "
        "first that is there)",
    )
    parser.add_argument("-k", type=int, help="guesses per round (as many as the width allows)")
    parser.add_argument("--sweep", action="store_true", help="whole rounds for every k up to that")
    parser.add_argument(
        "--position",
        metavar="N,...",
        type=SEVERAL,
        help="where the sequence stands, which is timed at the capacity that a chain has there "
        "(1000, or half the capacity if less); several: see --width",
    )
    parser.add_argument("--runs", type=int, default=50, help="timed runs of each part (50)")
    parser.add_argument(
        "--tokens-per-round", type=float, help="acceptance to count with (a row for each)"
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=Path,
        help=f"measure the acceptance on {PROMPTS} prompts cut out of this text as well",
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help=PLOT_HELP)
    parser.add_argument(
        "--width",
        metavar="N,...",
        type=SEVERAL,
        help="with --shapes: rows of a call (5); of several widths, capacities or positions the "
        "first are measured in full and the others compared with them, one after the other",
    )
    parser.add_argument(
        "--capacity",
        metavar="N,...",
        type=SEVERAL,
        help="with --shapes (4096)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="with --shapes (bf16)")
    parser.add_argument("--kv", choices=KV_TYPES, help="with --shapes (as --dtype)")
    parser.add_argument("--profile", choices=PROFILES, help="with --shapes (ort-fused)")


def run(arguments: argparse.Namespace) -> Outcome:
    """Measure, tell, and hand back the numbers."""
    names = " or ".join(f"--shapes {name}" for name in SHAPES)
    if (arguments.bundle is None) == (arguments.shapes is None):
        both = "not both" if arguments.bundle else "name one of them"
        raise InputError(f"bench measures a BUNDLE, or {names} with random weights: {both}")
    if arguments.shapes is not None and arguments.shapes not in SHAPES:
        raise InputError(f"--shapes is {arguments.shapes!r}, expected {names}")
    if arguments.runs < 1:
        raise InputError(f"--runs is {arguments.runs}, expected 1 or more")
    if arguments.text and arguments.shapes:
        raise InputError("random weights accept nothing: --text needs a BUNDLE")
    _settle_shapes(arguments)
    check_plot(arguments.plot)  # now, not after the minutes that measuring takes
    prompts = _prompts(arguments) if arguments.text else []
    with ExitStack() as stack, phases("measuring") as show:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        reports: list[dict[str, Any]] = []
        for engines, alone, position in _settings(arguments, folder):
            show(engines.label, len(reports), _count(arguments))
            reports.append(measure(engines, arguments, position, alone))
    report = reports[0]
    if len(reports) > 1:
        report["sweep"] = [_row(each) for each in reports]
    if arguments.text:
        report["measured"] = accepted(arguments, report["k"], prompts)
    print(table(report))
    return Outcome(report, problem=drawn(plot, report, arguments.plot))


def _count(arguments: argparse.Namespace) -> int:
    """How many settings are measured: each list has one value, or one for each of them."""
    shapes = (arguments.width, arguments.capacity) if arguments.shapes else ()
    return max(map(len, (arguments.position or (None,), *shapes)))


def _settle_shapes(arguments: argparse.Namespace) -> None:
    """Refuse with a BUNDLE what only --shapes asks for, and give --shapes its defaults."""
    for name, default in SHAPE_OPTIONS.items():
        given = getattr(arguments, name) is not None
        if given and arguments.bundle:
            raise InputError(f"--{name} is for --shapes: {arguments.bundle} has its own")
        if not given:
            setattr(arguments, name, default)


def _settings(
    arguments: argparse.Namespace, folder: Path
) -> Iterator[tuple[Engines, Engines | None, int | None]]:
    """Engines to measure, a trunk for one row of the same capacity, and a position."""
    positions: tuple[int | None, ...] = arguments.position or (None,)
    if arguments.bundle:
        engines = of_bundle(
            arguments.bundle, arguments.backend, arguments.threads, arguments.drafter
        )
        yield from ((engines, None, position) for position in positions)
        return
    if arguments.backend not in ("auto", "onnxruntime-cuda"):
        raise InputError(
            f"--shapes runs on a GPU with onnxruntime-cuda, not on {arguments.backend}"
        )
    lists: list[tuple[Any, ...]] = [arguments.width, arguments.capacity, positions]
    count = _count(arguments)
    if any(len(values) not in (1, count) for values in lists):
        widths, capacities, places = map(len, lists)
        raise InputError(
            f"{widths} widths, {capacities} capacities and {places} positions do not go together: "
            "give one of each, or as many as of the others"
        )
    first: Engines | None = None
    alone: Engines | None = None
    for i in range(count):
        width, capacity, position = (values[min(i, len(values) - 1)] for values in lists)
        if width < 2:
            raise InputError(f"width is {width}, expected 2 or more: a round has a draft")
        options = Options(width, capacity, arguments.dtype, arguments.profile, kv=arguments.kv)
        engines = of_shapes(
            folder / f"{i}", arguments.shapes, options, first, arguments.drafter or "eagle"
        )
        first = first or engines
        if alone is None or alone.options.capacity != capacity:
            one = Options(1, capacity, arguments.dtype, arguments.profile, kv=arguments.kv)
            alone = of_shapes(folder / f"{i}-alone", arguments.shapes, one, first)
        yield engines, alone, position


def measure(
    engines: Engines,
    arguments: argparse.Namespace,
    position: int | None = None,
    alone: Engines | None = None,
) -> dict[str, Any]:
    """Every number of the report; `alone` is a trunk for one row, the best plain decoding."""
    options, memory = engines.options, engines.memory
    capacities = options.capacities
    most = options.width - 1 if engines.drafter else 0
    k = most if arguments.k is None else arguments.k
    if position is None:
        position = min(1000, options.capacity // 2)
    _check(k, most, position, options, arguments.tokens_per_round)
    engines = engines.at(position)
    options = engines.options
    bandwidth = copy_bandwidth(memory) if isinstance(memory, CudaMemory) else None
    times = _timed(engines, alone, k, position, runs=arguments.runs, sweep=arguments.sweep)
    parts = {
        name: _part(engines, name, taken, position, bandwidth)
        for name, taken in times.parts.items()
    }
    whole, wall = times.rounds[k].median, times.wall
    best = min(times.parts[n].median for n in ("plain", "plain, width 1") if n in times.parts)
    report = {
        "engines": engines.label,
        "options": {
            "width": options.width,
            "capacity": options.capacity,
            "capacities": capacities,
            "dtype": options.dtype,
            "kv": options.kv_type,
        },
        "device": memory.info.name if isinstance(memory, CudaMemory) else "cpu",
        "position": position,
        "drafter": engines.drafter,
        "k": k,
        "bandwidth": bandwidth,
        "parts": parts,
        "rounds": {
            str(j): _round(engine_calls(j, engines.drafter), taken, parts)
            for j, taken in sorted(times.rounds.items())
        },
        "wall": wall.to_json() if wall else None,
        "launch_ms": times.launch_ms,
        "host_share": wall.median / whole - 1 if wall and bandwidth else None,
        "plain_ms": best,
        "break_even": whole / best,
        "speed": _speeds(k, whole, best, arguments.tokens_per_round),
        "measured": None,
    }
    if isinstance(memory, CudaMemory):
        report["device_bytes"] = memory.info.total_bytes - memory.free_bytes()
    return report


@dataclass(frozen=True)
class _Times:
    """What was clocked at one position."""

    parts: Mapping[str, Clock]  # engine of a round, or one of `TRUNKS`
    rounds: Mapping[int, Clock]  # by drafts
    wall: Clock | None
    launch_ms: float


def _timed(
    engines: Engines, alone: Engines | None, k: int, position: int, *, runs: int, sweep: bool
) -> _Times:
    """Time the parts of a round of k drafts and whole rounds, with `sweep` of fewer drafts too."""

    def stand(k: int, of: Engines = engines) -> Stand:
        return Stand(of.sessions, of.options.capacity, k, position, engines.drafter or "")

    drafted = stand(k)
    parts = {"plain": stand(0).part("plain", runs)}
    called = engine_calls(k, engines.drafter)
    parts |= {name: drafted.part(name, runs) for name in called if name in drafted.parts}
    if alone is not None:
        parts["plain, width 1"] = stand(0, alone).part("plain", runs)
    rounds = {j: stand(j).whole(runs) for j in range(1, k) if sweep}
    rounds[k] = drafted.whole(runs)
    return _Times(parts, rounds, drafted.wall(runs), drafted.host(min(runs, 20)))


def _check(k: int, most: int, position: int, options: Options, asked: float | None) -> None:
    """Refuse what the engines do not take, and an acceptance that k drafts cannot have."""
    if not 0 <= k <= most:
        why = f"the width is {options.width}" if most else "there are no engines of a drafter"
        raise InputError(f"-k is {k}, expected 0 to {most}: {why}")
    last = options.capacity - options.width
    if not 1 <= position <= last:
        raise InputError(
            f"--position is {position}, expected 1 to {last}, the capacity of {options.capacity} "
            f"less the width"
        )
    if asked is not None and not 1 <= asked <= k + 1:
        raise InputError(
            f"--tokens-per-round is {asked:g}, expected 1 to {k + 1}: a round with {k} drafts "
            "gives no more"
        )


def _part(
    engines: Engines, name: str, taken: Clock, position: int, bandwidth: float | None
) -> dict[str, Any]:
    """One engine's times, and the bytes it moves; the floor is the time of the weights alone."""
    engine = "trunk" if name in TRUNKS else name
    weights = engines.weights[engine]
    part = {
        **taken.to_json(),
        "weight_bytes": weights,
        "state_bytes": state_bytes(engines.sessions[engine].spec, position),
    }
    return part | (_over(taken, weights / bandwidth * 1e3) if bandwidth else {})


def _round(called: Mapping[str, int], taken: Clock, parts: Mapping[str, Any]) -> dict[str, Any]:
    """A whole round's times over the floors of its parts, each called so often."""
    called = {name: times for name, times in called.items() if times}
    if not all("floor_ms" in parts[name] for name in called):
        return taken.to_json()
    floor = sum(times * parts[name]["floor_ms"] for name, times in called.items())
    return taken.to_json() | _over(taken, floor)


def _over(taken: Clock, floor: float) -> dict[str, float]:
    return {"floor_ms": floor, "over_floor": taken.median / floor}


def _row(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is compared between widths, capacities and positions; medians in milliseconds."""
    parts, k, wall = report["parts"], report["k"], report["wall"]
    return {
        "width": report["options"]["width"],
        "capacity": report["options"]["capacity"],
        "position": report["position"],
        "plain": report["plain_ms"],
        "verify": parts["verify"]["median_ms"] if k else None,
        "k": k,
        "round": report["rounds"][str(k)]["median_ms"],
        "wall": wall["median_ms"] if wall else None,
    }


def _speeds(
    k: int, round_ms: float, plain_ms: float, asked: float | None
) -> list[dict[str, float]]:
    counts = [asked] if asked is not None else [float(n) for n in range(1, k + 2)]
    return [
        {
            "tokens_per_round": n,
            "tokens_per_second": n / round_ms * 1e3,
            "over_plain": n * plain_ms / round_ms,
        }
        for n in counts
    ]


def _prompts(arguments: argparse.Namespace) -> list[list[int]]:
    """Prompts cut out of the text; `InputError` if it is too short, or there is no tokenizer."""
    runnable(arguments.bundle, Manifest.load(arguments.bundle), arguments.backend)
    text, tokenizer = read_text(arguments.text), Tokenizer(arguments.bundle)
    return cut_prompts(text, tokenizer, count=PROMPTS, length=PROMPT_TOKENS)


def accepted(
    arguments: argparse.Namespace, k: int, prompts: Sequence[list[int]]
) -> dict[str, float]:
    """Tokens per round and per second on a text, by the wall, with drafts and without.

    The chains stand at other positions than the rounds of the table, and so may their capacity.

    Raises:
        InputError: The prompts do not fit into the bundle.
    """
    engines = open_engines(arguments.bundle, arguments.backend, threads=arguments.threads)
    chain = engines.chain(drafter=arguments.drafter)
    sums = {j: Stats() for j in (k, 0)}
    for prompt in [prompts[0], *prompts]:  # the first one twice: warm
        for j, stats in sums.items():
            for round in chain.rounds(prompt, max_new_tokens=NEW_TOKENS, k=j, stop_ids=()):
                stats.add(round)
        if prompt is prompts[0]:
            sums = {j: Stats() for j in sums}
    return {
        "tokens_per_round": sums[k].acceptance_length or 1.0,
        "tokens_per_second": sums[k].tokens_per_second or 0.0,
        "plain_tokens_per_second": sums[0].tokens_per_second or 0.0,
        "round_ms": sums[k].decode_seconds / max(1, sums[k].rounds) * 1e3,
        "from_position": PROMPT_TOKENS,
        "to_position": PROMPT_TOKENS + NEW_TOKENS,
        "capacity": chain.cache.capacity,
    }
