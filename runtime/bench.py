"""The command `bench`: how long every part of a round takes, and what that makes in tokens.

Weights need not exist: `--shapes` takes the sizes of a published pair and fills them with random
values on the device, which is as fast and proves the speed without a download.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_chain.engines.bound import read_bound
from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.kernel_library import build_cuda, cache_folder
from eagle_chain.engines.kv import KV_TYPES
from eagle_chain.engines.manifest import PROFILES, engine_specs
from eagle_chain.engines.outcome import Outcome
from eagle_chain.engines.spec import DTYPES, Options, TensorSpec
from eagle_chain.runtime.buffers import Memory
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.cuda import CudaMemory
from eagle_chain.runtime.drafters import EagleDrafter, NoDrafter
from eagle_chain.runtime.load import BACKEND_HELP, BACKENDS, open_engines
from eagle_chain.runtime.measure import (
    Clock,
    clock,
    copy_bandwidth,
    fill_states,
    host_time,
    pretend,
    random_tensors,
    state_bytes,
    weight_bytes,
)
from eagle_chain.runtime.ort_cuda import OrtCudaSession
from eagle_chain.runtime.session import Binding, Session

SHAPES = ("qwen3.5-9b",)


@dataclass(frozen=True)
class Engines:
    """What is measured."""

    sessions: Mapping[str, Session]
    weights: Mapping[str, int]  # engine -> bytes of weights that one call reads
    options: Options
    label: str

    @property
    def memory(self) -> Memory:
        """Where they run."""
        return self.sessions["trunk"].memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `eagle-chain bench` takes."""
    parser.add_argument(
        "bundle", metavar="BUNDLE", type=Path, nargs="?", help="what `export` wrote"
    )
    parser.add_argument("--shapes", choices=SHAPES, help="sizes of this pair, random weights")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help=BACKEND_HELP)
    parser.add_argument("-k", type=int, help="guesses per round (as many as the width allows)")
    parser.add_argument("--sweep", action="store_true", help="whole rounds for every k up to that")
    parser.add_argument("--position", type=int, help="where the sequence stands (1000)")
    parser.add_argument("--runs", type=int, default=50, help="timed runs of each part (50)")
    parser.add_argument(
        "--tokens-per-round", type=float, help="acceptance to count with (a row for each)"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (all)")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the results into a PNG")
    parser.add_argument("--width", type=int, default=5, help="with --shapes: rows of a call (5)")
    parser.add_argument("--capacity", type=int, default=4096, help="with --shapes (4096)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="with --shapes (bf16)")
    parser.add_argument("--kv", choices=KV_TYPES, help="with --shapes (as --dtype)")
    parser.add_argument(
        "--profile", choices=PROFILES, default="ort-fused", help="with --shapes (ort-fused)"
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Measure, tell, and hand back the numbers."""
    if (arguments.bundle is None) == (arguments.shapes is None):
        raise InputError("name a BUNDLE, or the sizes to measure with --shapes")
    if arguments.runs < 1:
        raise InputError(f"runs is {arguments.runs}, expected 1 or more")
    with ExitStack() as stack:
        alone: Engines | None = None
        if arguments.shapes:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engines = _of_shapes(folder, arguments, arguments.width)
            alone = _of_shapes(folder / "one", arguments, 1, engines)
        else:
            engines = _of_bundle(arguments)
        report = measure(engines, arguments, alone)
    print(table(report))
    if arguments.plot:
        plot(report, arguments.plot)
        print(f"wrote {arguments.plot}")
    return Outcome(report)


def measure(
    engines: Engines, arguments: argparse.Namespace, alone: Engines | None = None
) -> dict[str, Any]:
    """Every number of the report; `alone` is a trunk for one row, the best plain decoding."""
    options, memory = engines.options, engines.memory
    on_gpu = isinstance(memory, CudaMemory)
    most = options.width - 1 if "draft" in engines.sessions else 0
    k = most if arguments.k is None else arguments.k
    position = arguments.position
    if position is None:
        position = min(1000, options.capacity // 2)
    if not 0 <= k <= most or not 0 <= position <= options.capacity - options.width:
        raise InputError(f"k {k} or position {position} is outside what the engines take")
    bandwidth = copy_bandwidth(memory) if isinstance(memory, CudaMemory) else None
    runs = arguments.runs

    def stand(k: int, of: Engines = engines) -> Stand:
        return Stand(of.sessions, options.capacity, k, position)

    plain, drafted = stand(0), stand(k)
    clocks = {"plain": plain.part("plain", runs)}
    for name in ("verify", "encoder", "draft", "draft_step"):
        if name in drafted.parts:
            clocks[name] = drafted.part(name, runs)
    if alone is not None:
        clocks["plain, width 1"] = Stand(alone.sessions, options.capacity, 0, position).part(
            "plain", runs
        )
    rounds = {
        j: Stand(engines.sessions, options.capacity, j, position).whole(runs)
        for j in range(1, k)
        if arguments.sweep
    }
    standing = drafted if k else plain
    round_clock = standing.whole(runs)
    host_ms = standing.host(min(runs, 20))
    rounds[k] = round_clock

    parts = {}
    for name, taken in clocks.items():
        engine = "trunk" if name in ("plain", "verify", "plain, width 1") else name
        spec = engines.sessions[engine].spec
        moved = engines.weights[engine] + state_bytes(spec, position)
        parts[name] = {**taken.to_json(), "bytes": moved}
        if bandwidth:
            parts[name]["floor_ms"] = moved / bandwidth * 1e3
            parts[name]["over_floor"] = taken.median / (moved / bandwidth * 1e3)
    best = min(clocks[n].median for n in ("plain", "plain, width 1") if n in clocks)
    report = {
        "engines": engines.label,
        "options": {
            "width": options.width,
            "capacity": options.capacity,
            "dtype": options.dtype,
            "kv": options.kv_type,
        },
        "device": memory.info.name if isinstance(memory, CudaMemory) else "cpu",
        "position": position,
        "k": k,
        "bandwidth": bandwidth,
        "parts": parts,
        "rounds": {str(j): taken.to_json() for j, taken in sorted(rounds.items())},
        "host_ms": host_ms,
        "host_share": host_ms / round_clock.median if on_gpu else None,
        "plain_ms": best,
        "break_even": round_clock.median / best,
        "speed": _speeds(k, round_clock.median, best, arguments.tokens_per_round),
    }
    if isinstance(memory, CudaMemory):
        report["device_bytes"] = memory.info.total_bytes - memory.free_bytes()
    return report


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


class Stand:
    """A chain that stands at a position, with something in every state."""

    def __init__(
        self, sessions: Mapping[str, Session], capacity: int, k: int, position: int
    ) -> None:
        self.k, self.position = k, position
        trunk = sessions["trunk"]
        self.memory = trunk.memory
        self.cache = Cache(trunk.spec, trunk.memory, capacity)
        self.drafter = None
        if k:
            engines = (sessions["encoder"], sessions["draft"], sessions["draft_step"])
            self.drafter = EagleDrafter(self.cache, *engines)
        drafter = self.drafter or NoDrafter()
        self.chain = Chain(trunk, self.cache, drafter, vocab_size=1, ahead=True)
        self.device = self.chain.device
        fill_states(self.cache.states)
        self.stand()

    @property
    def parts(self) -> Mapping[str, Binding]:
        """The engines of a round by name."""
        return dict(self.device.parts(self.drafter, self.k, 0))

    def part(self, name: str, runs: int) -> Clock:
        """Time the engine of one part of a round."""
        return clock(self.memory, self.parts[name].run, runs)

    def whole(self, runs: int) -> Clock:
        """Time whole rounds; each starts over at the position."""
        return clock(self.memory, self.launch, runs, 6, self.stand)

    def host(self, runs: int) -> float:
        """Milliseconds that the host is busy with one round."""
        return host_time(self.memory, self.launch, runs, self.stand)

    def launch(self) -> None:
        """Queue one round."""
        self.device.launch(self.drafter, self.k, 0)

    def stand(self) -> None:
        """Go back to the position."""
        pretend(self.cache, self.position)
        self.device.stage(self.k)


def _of_bundle(arguments: argparse.Namespace) -> Engines:
    loaded = open_engines(arguments.bundle, arguments.backend, threads=arguments.threads)
    manifest = loaded.manifest
    read = {name: 0 for name in manifest.specs}
    for name, weight in manifest.weights.items():
        if name.endswith(("embed_tokens.weight", "d2t", "t2d")):
            continue
        engine = "trunk" if not name.startswith("draft.") else "draft"
        targets = [engine, "draft_step"] if engine == "draft" else [engine]
        if name.startswith(("draft.fc.", "draft.fc_norm.", "draft.input_norm.")):
            targets = ["encoder"]
        for target in targets:
            read[target] += weight.nbytes
    label = f"{arguments.bundle.name} on {loaded.backend}, profile {manifest.options.profile}"
    return Engines(loaded.sessions, read, manifest.options, label)


def _of_shapes(
    folder: Path, arguments: argparse.Namespace, width: int, shared: Engines | None = None
) -> Engines:
    """Engines of a published pair's sizes; `shared` lends its device and its weights."""
    backend = arguments.backend
    if backend not in ("auto", "onnxruntime-cuda"):
        raise InputError(f"--shapes runs on a GPU with onnxruntime-cuda, not on {backend}")
    memory = shared.memory if shared else CudaMemory()
    assert isinstance(memory, CudaMemory), "shapes are measured on a GPU"
    words = [
        *("--width", width, "--capacity", arguments.capacity),
        *("--dtype", arguments.dtype, "--profile", arguments.profile),
        *(("--kv", arguments.kv) if arguments.kv else ()),
    ]
    command = [sys.executable, "-m", "eagle_chain.export.shapes", arguments.shapes]
    subprocess.run([*command, "-o", str(folder), *map(str, words)], check=True)
    described = json.loads((folder / "shapes.json").read_text())
    options = Options(
        width, arguments.capacity, arguments.dtype, arguments.profile, kv=arguments.kv
    )
    specs = engine_specs(
        TrunkConfig.from_plain(described["trunk"], "trunk"),
        DraftConfig.from_plain(described["draft"], "draft"),
        options,
    )
    library = None
    if arguments.profile == "ort-fused":
        library = build_cuda(cache_folder(), memory.info.compute_capability)
    sessions = {}
    for name, spec in specs.items() if shared is None else [("trunk", specs["trunk"])]:
        model = read_bound(folder / f"{name}.onnx", arguments.dtype)
        sessions[name] = OrtCudaSession(model, spec, memory, library=library)
    _give(sessions, memory, shared)
    read = {name: weight_bytes(session.weights) for name, session in sessions.items()}
    return Engines(sessions, read, options, f"{arguments.shapes}, profile {arguments.profile}")


def _give(
    sessions: Mapping[str, OrtCudaSession], memory: CudaMemory, shared: Engines | None
) -> None:
    """Random weights, or those of the engines that are measured already."""
    if shared is not None:
        trunk = shared.sessions["trunk"]
        assert isinstance(trunk, OrtCudaSession), "shapes run on this backend"
        for session in sessions.values():
            session.bound = {t.name: trunk.bound[t.name] for t in session.weights}
        return
    wanted: dict[TensorSpec, None] = {}
    for session in sessions.values():
        wanted |= dict.fromkeys(session.weights)
    made = random_tensors(wanted, memory)
    for session in sessions.values():
        session.bound = {t.name: made[t] for t in session.weights}


def table(report: Mapping[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"{report['engines']}, {report['device']}, {report['options']['dtype']}, "
        f"KV {report['options']['kv']}, "
        f"position {report['position']}",
        "",
        f"{'part':16} {'median':>10} {'p10':>9} {'p90':>9} {'MB':>9} {'floor':>9} {'over':>6}",
    ]
    for name, part in report["parts"].items():
        floor = f"{part['floor_ms']:9.3f} {part['over_floor']:5.2f}x" if "floor_ms" in part else ""
        lines.append(
            f"{name:16} {part['median_ms']:7.3f} ms {part['p10_ms']:9.3f} {part['p90_ms']:9.3f} "
            f"{part['bytes'] / 1e6:9.1f} {floor}"
        )
    for k, taken in report["rounds"].items():
        lines.append(
            f"{'round, k = ' + k:16} {taken['median_ms']:7.3f} ms {taken['p10_ms']:9.3f} "
            f"{taken['p90_ms']:9.3f}"
        )
    lines += ["", f"break-even at {report['break_even']:.2f} tokens per round"]
    if report["host_share"] is not None:
        lines.append(f"host: {report['host_ms']:.3f} ms a round ({report['host_share']:.1%})")
    lines += [
        f"{speed['tokens_per_round']:.2f} tokens per round: {speed['tokens_per_second']:.0f} "
        f"tokens/s, {speed['over_plain']:.2f}x of plain decoding"
        for speed in report["speed"]
    ]
    return "\n".join(lines)


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Time per round by part against the floor, and tokens per second over acceptance."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    k, parts = report["k"], report["parts"]
    counts = {"verify": 1, "encoder": 1, "draft": 1, "draft_step": max(0, k - 1)}
    for kind, key in (("measured", "median_ms"), ("floor", "floor_ms")):
        bottom = 0.0
        for i, (name, times) in enumerate(counts.items()):
            height = times * parts.get(name, {}).get(key, 0.0)
            label = name if kind == "measured" else None
            left.bar(kind, height, bottom=bottom, color=f"C{i}", label=label)
            bottom += height
    left.set_ylabel("ms a round")
    left.legend()
    speeds = report["speed"]
    right.plot(
        [s["tokens_per_round"] for s in speeds], [s["tokens_per_second"] for s in speeds], "o-"
    )
    right.axhline(1e3 / report["plain_ms"], color="grey", linestyle="--", label="plain decoding")
    right.set_xlabel("tokens per round")
    right.set_ylabel("tokens/s")
    right.legend()
    figure.suptitle(f"{report['engines']} ({report['device']})")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
