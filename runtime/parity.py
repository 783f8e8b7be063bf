"""The command `parity`: every tensor of a bundle's engines against the PyTorch reference."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eagle_chain.engines.cli import dispatch
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.extras import require
from eagle_chain.engines.flavours import FLAVOURS, RTX, load_flavour
from eagle_chain.engines.gpu import device_info
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.outcome import Outcome
from eagle_chain.engines.progress import phases
from eagle_chain.engines.recording import Recording, check_target, read_calls, read_index
from eagle_chain.engines.spec import DTYPES, PREFILL_STEP, PROFILES
from eagle_chain.runtime.comparison import Comparison, Distance, Verdict
from eagle_chain.runtime.load import (
    Engines,
    add_backend_arguments,
    backend_for,
    check_runs,
    open_engines,
    runnable,
)
from eagle_chain.runtime.player import Player

CAPACITY = 128  # tokens, with --layers
WIDE = 64  # rows of a prompt call, with --layers
SHOWN = 12  # tensors out of tolerance that people are shown; the JSON has them all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `eagle-chain parity` takes."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="what `export` wrote")
    add_backend_arguments(parser)
    parser.add_argument(
        "--save",
        metavar="FOLDER",
        type=Path,
        help="keep what PyTorch gives in FOLDER and stop, for --load on a machine without PyTorch, "
        "or for `polygraphy run`",
    )
    parser.add_argument(
        "--load", metavar="FOLDER", type=Path, help="compare with what --save kept: no PyTorch"
    )
    parser.add_argument(
        "--layers",
        metavar="N",
        type=int,
        help="check the first N layers only, exported from the same checkpoints for the occasion",
    )
    parser.add_argument("--capacity", type=int, help="of that export, with --layers (128)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of that export, with --layers (the bundle's)"
    )
    parser.add_argument(
        "--profile", choices=PROFILES, help="of that export, with --layers (the bundle's)"
    )
    parser.add_argument("--all", action="store_true", help="show every tensor")


def run(arguments: argparse.Namespace) -> Outcome:
    """Record the reference unless it is there, play it on the backend, compare."""
    _check(arguments)
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eagle-chain-")))
        bundle = arguments.bundle
        if arguments.layers is not None:
            bundle = _few_layers(arguments, temporary / "bundle")
        if arguments.save is not None:
            return dispatch(["record", str(bundle), "-o", str(arguments.save)])
        manifest, folder = Manifest.load(bundle), arguments.load
        backend = runnable(bundle, manifest, arguments.backend)  # before the work begins
        if folder is None:
            folder = temporary / "reference"
            dispatch(["record", str(bundle), "-o", str(folder), "--part"])
        recording = read_index(folder)
        recording.check(manifest, folder)
        lean = arguments.layers is not None
        engines = open_engines(bundle, backend, threads=arguments.threads, bound=lean)
        comparison = _compare(engines, folder, recording)
    report = _report(arguments, engines, recording, comparison)
    _print_report(report, comparison, everything=arguments.all)
    return Outcome(report, passed=comparison.passed)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.save is not None and arguments.load is not None:
        raise InputError("--save records and --load compares with a recording: give one of them")
    given = [n for n in ("capacity", "dtype", "profile") if getattr(arguments, n) is not None]
    if arguments.layers is None and given:
        raise InputError(f"--{given[0]} is for the few layers of --layers N: a bundle has its own")
    if arguments.save is not None:
        check_target(arguments.save)  # before the work begins
    require("polygraphy", *(() if arguments.load is not None else ("torch",)))
    if arguments.layers is not None:
        require("onnx", "onnx_ir")


def _few_layers(arguments: argparse.Namespace, target: Path) -> Path:
    """A bundle of the first layers of a bundle's checkpoints, with its own options otherwise."""
    manifest = Manifest.load(arguments.bundle)
    folders = [arguments.bundle / "weights" / role for role in ("trunk", "draft")]
    if not all((folder / "config.json").is_file() for folder in folders):
        raise InputError(
            f"{arguments.bundle}: holds copies of its weights, and --layers exports from the "
            "checkpoints: run it on a bundle that links to them (export without --weights copy)"
        )
    if arguments.save is None:
        _check_backend(arguments, manifest)
    words = [*manifest.arguments, "--weights", "link", "--layers", str(arguments.layers)]
    asked = CAPACITY if arguments.capacity is None else arguments.capacity
    capacity = min(asked, manifest.options.capacity)
    prefill = min(manifest.options.prefill, WIDE, capacity // PREFILL_STEP * PREFILL_STEP)
    words += ["--capacity", str(capacity), "--prefill", str(prefill)]
    words += ["--debug", ",".join(dict.fromkeys((*manifest.options.debug, "logits")))]
    for option in ("dtype", "profile"):
        if value := getattr(arguments, option):
            words += [f"--{option}", value]
    dispatch(["export", *map(str, folders), "-o", str(target), *words])
    if arguments.backend in FLAVOURS and arguments.save is None:
        building = ["build", str(target), "--backend", arguments.backend]
        if arguments.backend == RTX:  # which has to be told for which GPUs: for this one
            building += ["--compute-capability", device_info().compute_capability]
        dispatch(building)
    return target


def _check_backend(arguments: argparse.Namespace, manifest: Manifest) -> None:
    """What is to run the few layers is here and takes them, before they are exported."""
    asked = {name: getattr(arguments, name) for name in ("dtype", "profile")}
    options = replace(manifest.options, **{name: value for name, value in asked.items() if value})
    planned = replace(manifest, options=options, plans={})
    backend = backend_for(arguments.bundle, planned, arguments.backend)
    if backend in FLAVOURS:
        load_flavour(backend).refuse(options)
        device_info()
    else:
        check_runs(arguments.bundle, planned, backend)


def _compare(engines: Engines, folder: Path, recording: Recording) -> Comparison:
    """Play every call of a recording and compare what comes out."""
    comparison = Comparison(engines.manifest)
    played = {engine for engine, _ in recording.calls}
    comparison.unknown |= {f"{n}: all of it": None for n in engines.sessions if n not in played}
    largest = engines.of_capacity(engines.manifest.options.capacity)
    player = Player(largest, engines.memory)
    with phases("comparing") as show:
        for done, call in enumerate(read_calls(folder, recording)):
            show(f"round {call.round}, {call.engine}", done, len(recording.calls))
            comparison.add(call, player.play(call))
    return comparison


def _report(
    arguments: argparse.Namespace,
    engines: Engines,
    recording: Recording,
    comparison: Comparison,
) -> dict[str, Any]:
    """What `--json` prints."""
    fault = comparison.first_fault()
    verdicts = comparison.ordered()
    return {
        "passed": comparison.passed,
        "first_fault": fault and _tensor_report(fault),
        "bundle": str(arguments.bundle),
        "backend": engines.backend,
        "device": engines.memory.device,
        "options": asdict(engines.manifest.options),
        "layers": recording.layers,
        "accepted": list(recording.accepted),
        "calls": len(recording.calls),
        "not_compared": list(comparison.unknown),
        "tensors": [_tensor_report(verdict) for verdict in verdicts],
    }


def _tensor_report(verdict: Verdict) -> dict[str, Any]:
    numbers = verdict.limit is None
    return {
        "engine": verdict.engine,
        "tensor": verdict.tensor,
        "layer": verdict.layer,
        "dtype": verdict.dtype,
        "kind": verdict.kind,
        "calls": verdict.calls,
        "passed": not verdict.failed,
        "failed_rounds": sorted(set(verdict.failed)),
        "near_ties": verdict.near_ties if numbers else None,
        "worst": None if numbers else _finite(verdict.worst),
        "worst_round": None if numbers else verdict.worst_round,
        "limit": None if verdict.limit is None else asdict(verdict.limit),
    }


def _finite(distance: Distance) -> dict[str, float | str]:
    """JSON has no infinity."""
    return {n: v if v < float("inf") else "infinite" for n, v in asdict(distance).items()}


@dataclass(frozen=True)
class Line:
    """A line of the table: one tensor, or the worst of a kind."""

    verdict: Verdict
    label: str


def _lines(verdicts: Sequence[Verdict], everything: bool) -> list[Line]:
    """Each tensor, or for each kind of each engine the one that comes nearest to its limit."""
    if everything:
        return [Line(verdict, verdict.tensor) for verdict in verdicts]
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        short = verdict.tensor.rpartition(".")[2] if verdict.layer is not None else verdict.tensor
        groups.setdefault((verdict.engine, short.split(" ")[0]), []).append(verdict)
    lines = []
    for (_, short), members in groups.items():
        worst = max(members, key=lambda v: (bool(v.failed), _share(v)))
        count = f" ({len(members)})" if len(members) > 1 else ""
        lines.append(Line(worst, f"{short}{count}"))
    return lines


def _share(verdict: Verdict) -> float:
    """How much of its tolerance a tensor uses."""
    worst, limit = verdict.worst, verdict.limit
    if limit is None:
        return 0.0
    return max(worst.cosine / limit.cosine, worst.norm / limit.norm, worst.error / limit.error)


def _print_report(report: dict[str, Any], comparison: Comparison, everything: bool) -> None:
    """The verdicts for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("engine", "tensor", "worst"):
        table.add_column(name)
    for name in ("1 - cosine", "norm", "error", "limit"):
        table.add_column(name, justify="right")
    table.add_column("")
    verdicts = comparison.ordered()
    for line in _lines(verdicts, everything):
        table.add_row(*_cells(line))
    console = Console(width=None if Console().is_terminal else 110, highlight=False)
    rounds = ", ".join("prompt" if n < 0 else str(n) for n in report["accepted"])
    print(
        f"backend    {report['backend']}, {report['options']['dtype']}, "
        f"profile {report['options']['profile']}\n"
        f"rounds     drafts accepted: {rounds}\n"
    )
    console.print(table)
    for name in comparison.unknown:
        print(f"not compared: {name} (the reference has none)")
    if "logits" not in report["options"]["debug"]:
        print(
            "\nThe bundle gives no logits, so that only ids tell about the heads: export it with\n"
            "--debug logits to have them compared."
        )
    print(f"\nverdict    {_sentence(comparison)}")


def _cells(line: Line) -> tuple[str, ...]:
    verdict, worst = line.verdict, line.verdict.worst
    state = "FAILED" if verdict.failed else "ok"
    if verdict.limit is None:
        note = f"{verdict.near_ties} near-ties" if verdict.near_ties else "the same"
        if verdict.failed:
            note = f"round {verdict.failed[0]}"
        return verdict.engine, line.label, note, "", "", "", "", state
    place = f"round {verdict.worst_round}"
    if verdict.layer is not None:
        place = f"layer {verdict.layer}, {place}"
    numbers = (f"{value:.1e}" for value in (worst.cosine, worst.norm, worst.error))
    limit = f"{verdict.limit.error:.1e}"
    return verdict.engine, line.label, place, *numbers, limit, state


def _sentence(comparison: Comparison) -> str:
    fault = comparison.first_fault()
    verdicts = comparison.ordered()
    if fault is None:
        return f"parity: all {len(verdicts)} tensors are those of the PyTorch reference"
    failed = [verdict for verdict in verdicts if verdict.failed]
    where = fault.engine if fault.layer is None else f"{fault.engine}, layer {fault.layer}"
    before = [
        v for v in verdicts[: verdicts.index(fault)] if v.engine == fault.engine and not v.failed
    ]
    good = f"; the last one before it that is right: {before[-1].tensor}" if before else ""
    others = [f"{v.engine} {v.tensor}" for v in failed if v is not fault]
    more = f"\n           also: {', '.join(others[:SHOWN])}" if others else ""
    if len(others) > SHOWN:
        more += f" and {len(others) - SHOWN} more"
    return (
        f"FAILED: {len(failed)} of {len(verdicts)} tensors are too far off, first in the order of "
        f"the graph {fault.tensor} ({where}) in round {fault.failed[0]}{good}{more}"
    )
