"""Long prompts on a GPU, measured: the kernels, one layer, whole prompts against calls of W rows.

    python -m tests.gpu.prefill_series --out FOLDER [--only kernels,layers,prompts]
        [--profiles ort-fused,ort-stock,ort-chunked,ort-cuda] [--rows 256,512,1024,2048]
        [--tokens 4096] [--capacity 4608] [--runs 4] [--seconds 540] [--dtype bf16] [--graphs]
        [--library LIBRARY] [--bench PROGRAM]

The 9B's shapes with random weights. `kernels`: each launch of the rule in ort-fused alone.
`layers`: device time of a linear layer with its MLP, from calls of six and of two of them.
`prompts`: seconds for a prompt with every wide call launched and, in the profiles that are shipped,
how far states of the two ways are apart. `--tokens 30000 --capacity 32768 --rows 512` is the long
prompt. With `--graphs` both are measured once more with each wide call replayed as a CUDA graph,
and states compared bit for bit.

`used_bytes` is what the device holds beyond the start of a step, shared weights counted in: with
the sessions made, with their weights, with a chain, after a call of W rows, after the first wide
calls, after the prompts, after those replayed. `memory_off` compares weights and chain as `inspect`
would predict them with what is held after the prompts, `memory_off_chain` the chain alone.

Every step has a line on stdout and a place in FOLDER/prefill.json as soon as it is done. LIBRARY
and PROGRAM are the operators of ort-fused and `kernel_bench`, built before: else nvcc does it.

Two profiles exist for comparison only: ort-fused with ONNX Runtime's GatedDeltaNet (`ort-stock`)
and with the fp32 chunk form of the other profiles (`ort-chunked`) in the place of its kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from eagle_chain.engines.kernel_library import SOURCES, build_cuda, cache_folder
from eagle_chain.engines.memory import chain_needs
from eagle_chain.engines.spec import DTYPES, PROFILES, Options, TensorSpec
from eagle_chain.export import graph, shapes
from eagle_chain.export.prefill import Prefill, PrefillRows
from eagle_chain.export.prefill_cuda import FusedPrefill, OrtCudaPrefill
from eagle_chain.export.shapes import configs
from eagle_chain.runtime import bench_engines, ort_cuda
from eagle_chain.runtime.bench_engines import Engines, of_shapes
from eagle_chain.runtime.buffers import Buffer
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.cuda import CudaMemory
from eagle_chain.runtime.drafters import EagleDrafter
from eagle_chain.runtime.measure import clock, random_tensors
from eagle_chain.runtime.ort import onnxruntime
from eagle_chain.runtime.prefill import Follower
from eagle_chain.runtime.prefill import Prefill as WideCalls
from tests.gpu.ort_series import Bench, to_float
from tests.gpu.steps import Steps

SHAPES = "qwen3.5-9b"
WIDTH = 5
RUNS = 20  # of a layer, by the clock
WIDE = ("prefill", "draft_prefill")
started = subprocess.run


class StockPrefill(FusedPrefill, OrtCudaPrefill):
    """ONNX Runtime's operators for a linear layer, over the states of ort-fused."""

    linear_mixer = OrtCudaPrefill.linear_mixer

    def past(self, window: str, columns: ir.Value) -> ir.Value:
        """The conv's inputs before row 0, [3, C]; the window is [C, 3 + W] here."""
        g = self.g
        return g.Transpose(g.Gather(g.input(window), columns, axis=1), perm=[1, 0])

    def window(self, name: str, inputs: ir.Value) -> None:
        """The conv's inputs [3 + P, C] that the next call may read."""
        self.g.output(name, self.g.Transpose(self.window_columns(inputs), perm=[1, 0]))

    def state_before(self, i: int) -> ir.Value:
        """S with the log of the last call folded in, transposed for the operator."""
        S = self.g.reshape(self.committed_state(i), 1, *self.state_shape())
        return self.g.Transpose(S, perm=[0, 1, 3, 2])

    def state_after(self, i: int, S: ir.Value) -> None:
        """S [1, Hv, dv, dk] as it leaves, transposed back."""
        S = self.g.Transpose(S, perm=[0, 1, 3, 2])
        self.g.output(f"layers.{i}.S.next", self.g.reshape(S, *self.state_shape()))


class ChunkedPrefill(StockPrefill):
    """The chunk form in fp32 in the place of ONNX Runtime's operator."""

    def linear_mixer(self, x: ir.Value, i: int) -> ir.Value:
        """As in the profiles of standard ONNX."""
        return Prefill.linear_mixer(self, x, i)  # type: ignore[arg-type]

    def conv(self, x: ir.Value, i: int) -> ir.Value:
        """In one operator as well."""
        g, prefix = self.g, f"layers.{i}.linear_attn"
        u = g.linear(x, f"{prefix}.in_proj_qkv.weight")
        columns = g.Add(g.input("kept"), g.int32(*range(self.config.conv_kernel - 1)))
        past = self.past(f"layers.{i}.window", columns)
        self.window(f"layers.{i}.window.next", g.Concat(past, u, axis=0))
        return self.convolved(u, past, prefix)


COMPARED: dict[str, type[PrefillRows]] = {
    "ort-stock": StockPrefill,
    "ort-chunked": ChunkedPrefill,
}


@contextmanager
def profile_of(name: str) -> Iterator[str]:
    """The profile behind a name, whose graphs read prompts as the name says."""
    with pytest.MonkeyPatch.context() as patch:
        if name in COMPARED:
            patch.setitem(graph.PREFILLS, "ort-fused", COMPARED[name])
            patch.setattr(subprocess, "run", written_here)
        yield "ort-fused" if name in COMPARED else name


def written_here(command: list[str], **rest: Any) -> Any:
    """The graphs that a process of its own would write, in this one, where a class is another."""
    if "eagle_chain.export.shapes" not in command:  # nvcc
        return started(command, **rest)
    before, sys.argv = sys.argv, command[2:]
    try:
        shapes.main()
    finally:
        sys.argv = before


class Series(Steps):
    """The steps, and what several of them need."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given.out / "prefill.json", given.seconds)
        self.given = given
        self.memory = CudaMemory()
        self.library: Path = given.library
        self.profiles = given.profiles.split(",")
        self.rows = [int(rows) for rows in given.rows.split(",")]

    def build(self) -> Any:
        """The operators of ort-fused, where all engines of this process look for them."""
        if self.library is None:
            self.library = build_cuda(cache_folder(), self.memory.info.compute_capability)
        if not self.library.is_file():
            raise FileNotFoundError(self.library)
        ort_cuda.build_cuda = lambda *_: self.library  # type: ignore[assignment]
        return {
            "library": self.library.name,
            "device": str(self.memory.info),
            "free_bytes": self.memory.free_bytes(),
            "onnxruntime": onnxruntime().__version__,
        }

    # --- the kernels alone -------------------------------------------------------------------

    def kernels(self) -> None:
        """Microseconds of each launch of the rule, as the benchmark of kernels prints them."""
        self.stage("kernels", self.launches, 15)

    def launches(self) -> Any:
        """Lines of the program, those before it failed included."""
        with tempfile.TemporaryDirectory() as folder:
            program = self.given.bench
            if program is None:
                program = Path(folder) / "kernel_bench"
                compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
                capability = self.memory.info.compute_capability.replace(".", "")
                flags = ["-std=c++17", "-O3", f"-arch=sm_{capability}", "-I", str(SOURCES)]
                source = Path(__file__).with_name("kernel_bench.cu")
                ran([compiler, *flags, str(source), "-o", str(program)], self.left)
            return {"us": ran([str(program.resolve()), "prompts"], self.left).splitlines()}

    # --- a layer -----------------------------------------------------------------------------

    def layers(self) -> None:
        """Milliseconds of one linear layer with its MLP, by profile and P."""
        made: dict[TensorSpec, Buffer] = {}
        for name in self.profiles:
            for rows in self.rows:
                self.stage(
                    f"layer, {name}, P = {rows}", lambda n=name, r=rows: self.layer(n, r, made)
                )

    def layer(self, name: str, rows: int, made: dict[TensorSpec, Buffer]) -> Any:
        """A quarter of what four more layers take."""
        memory, given = self.memory, self.given
        trunk, draft = configs(SHAPES)
        found: dict[str, Any] = {}
        taken: dict[tuple[bool, int], float] = {}
        for count in (2, 6):
            few = replace(trunk, layer_types=("linear_attention",) * count, vocab_size=1024)
            eagle = replace(draft, aux_layers=(0, 1), vocab_size=1024, draft_vocab_size=512)
            with profile_of(name) as profile:
                options = Options(WIDTH, given.capacity, given.dtype, profile, prefill=rows)
                bench = Bench(memory, (few, eagle), options, self.library, engines=("prefill",))
            made |= random_tensors((t for t in bench.wanted if t not in made), memory)
            bench.give(made)
            session = bench.sessions["prefill"]
            tensors = {
                t.name: memory.allocate(t)
                for t in dict.fromkeys((*session.spec.all_inputs, *session.spec.all_outputs))
            }
            tensors["rows"].write(rows)
            session.graphs = False
            taken[False, count] = clock(memory, session.bind(tensors).run, RUNS).median
            if given.graphs and "replayed" not in found:
                session.graphs = True
                try:
                    with graphs_or_failure():
                        taken[True, count] = clock(memory, session.bind(tensors).run, RUNS).median
                except Exception as error:  # what is not replayed is worth knowing without
                    found["replayed"] = failure(error)
        for replayed, name in ((False, "layer_ms"), (True, "layer_replayed_ms")):
            if (replayed, 6) in taken:
                found[name] = (taken[replayed, 6] - taken[replayed, 2]) / 4
        return found

    # --- a prompt ----------------------------------------------------------------------------

    def prompts(self) -> None:
        """Every profile and P; a profile's engines share weights, and what calls of W rows give."""
        for profile in self.profiles:
            told = Told()
            gc.collect()  # the engines of the profile before
            for rows in self.rows:
                name = f"{profile}, P = {rows}, {self.given.tokens} tokens"
                self.stage(name, lambda p=profile, r=rows, t=told: self.prompt(p, r, t), 20)

    def prompt(self, profile: str, rows: int, told: Told) -> Any:
        """One profile at one P."""
        given, memory = self.given, self.memory
        trunk, _ = configs(SHAPES)
        ids = np.random.default_rng(0).integers(0, trunk.vocab_size, given.tokens).tolist()
        part = ids[:4096]  # of what goes through calls of W rows, which is slow
        held = sum(spec.nbytes for spec in told.weights)
        used, before, begin = {}, memory.free_bytes() + held, time.perf_counter()

        def mark(name: str) -> None:
            memory.synchronize()
            used[name] = before - memory.free_bytes()

        with (
            tempfile.TemporaryDirectory() as folder,
            profile_of(profile) as operators,
            around_weights(lambda: mark("sessions")),
        ):
            options = Options(WIDTH, given.capacity, given.dtype, operators, prefill=rows)
            engines = of_shapes(Path(folder), SHAPES, options, told.engines)
        mark("weights")
        for name in WIDE:
            engines.sessions[name].graphs = False
        found: dict[str, Any] = {"set_up_s": round(time.perf_counter() - begin, 1)}
        chain = chain_of(engines, wide=True)
        mark("chain")
        chain.extend(ids[:1])
        mark("step")
        seconds(chain, ids[: 2 * rows + 1], 1)
        mark("wide")
        found["wide_seconds"] = seconds(chain, ids, given.runs)
        mark("prompts")
        self.say(f"  {profile}, P = {rows}: {json.dumps(found)}")
        specs = {session.spec.name: session.spec for session in engines.sessions.values()}
        predicted = chain_needs(specs, options, trunk)[options.capacity].total
        weights = sum(spec.nbytes for spec in weights_of(engines))
        found |= {"used_bytes": used, "weights_bytes": weights, "predicted_chain": predicted}
        found["memory_off"] = (weights + predicted) / used["prompts"] - 1
        found["memory_off_chain"] = predicted / (used["prompts"] - weights) - 1
        told.engines = told.engines or engines
        if profile in COMPARED:  # they do not share every form of a weight with the trunk
            return found
        got = read(chain, part)
        if given.graphs:
            try:
                with graphs_or_failure():
                    found |= self.replayed(engines, ids, part, got)
            except Exception as error:  # what is not replayed is worth knowing without
                found["replayed"] = failure(error)
            mark("replayed")
            self.say(f"  {profile}, P = {rows}: {json.dumps(found)}")
        if not told.states:
            stepped = chain_of(engines, wide=False)
            told.seconds = seconds(stepped, part, 1) * len(ids) / len(part)
            told.states = read(stepped, part)
        found["step_seconds"] = told.seconds
        found["speedup"] = told.seconds / found["wide_seconds"]
        found["apart"] = apart(got, told.states)
        return found

    def replayed(
        self, engines: Engines, ids: list[int], part: list[int], plain: dict[str, Any]
    ) -> dict[str, Any]:
        """The same with wide calls as CUDA graphs; the states have to be those of plain runs."""
        for name in WIDE:
            engines.sessions[name].graphs = True
        chain = chain_of(engines, wide=True)
        found: dict[str, Any] = {"replayed_seconds": seconds(chain, ids, self.given.runs + 2)}
        again = [read(chain, part) for _ in range(2)]
        found["replayed_differ"] = [
            name for name in plain if any(not same(r[name], plain[name]) for r in again)
        ]
        return found


@dataclass
class Told:
    """What is known of a profile: its engines at the first P, and a prompt in calls of W rows."""

    engines: Engines | None = None
    seconds: float = 0.0
    states: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> set[TensorSpec]:
        """Those on the device."""
        return weights_of(self.engines) if self.engines else set()


def weights_of(engines: Engines) -> set[TensorSpec]:
    """Every weight once."""
    sessions: list[Any] = list(engines.sessions.values())
    return {spec for session in sessions for spec in session.weights}


@contextmanager
def around_weights(before: Callable[[], None]) -> Iterator[None]:
    """Call `before` when the sessions of a profile are made and their weights are not."""
    give = bench_engines._give

    def given(*arguments: Any) -> None:
        before()
        give(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_engines, "_give", given)
        yield


@contextmanager
def graphs_or_failure() -> Iterator[None]:
    """Plain runs in the place of graphs that cannot be captured are not what is measured here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def ran(command: list[str], seconds: float) -> str:
    """What a program prints; an error that says so if it fails or hangs."""
    try:
        done = started(
            command, capture_output=True, text=True, check=False, timeout=max(10.0, seconds)
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} hangs after {error.stdout!r}") from None
    if done.returncode:
        raise RuntimeError(
            f"{command[0]} failed with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}"
        )
    return str(done.stdout)


def failure(error: Exception) -> str:
    """What happened, with its place on stderr and no frame left to hold memory."""
    traceback.print_exception(error)
    traceback.clear_frames(error.__traceback__)
    return f"failed: {type(error).__name__}: {error}"


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    return bool(one.tobytes() == other.tobytes())


def chain_of(engines: Engines, *, wide: bool) -> Chain:
    """A chain with its draft, with or without wide calls."""
    s = engines.sessions
    cache = Cache(s["trunk"].spec, engines.memory, engines.options.capacity)
    drafter = EagleDrafter(cache, s["encoder"], s["draft"], s["draft_step"])
    prefill = None
    if wide:
        prefill = WideCalls(s["prefill"], cache, Follower(s["draft_prefill"], drafter.kv))
    return Chain(
        s["trunk"], cache, drafter, vocab_size=configs(SHAPES)[0].vocab_size, prefill=prefill
    )


def seconds(chain: Chain, ids: list[int], runs: int) -> float:
    """The fastest of some runs over a prompt; the first ones warm up and capture."""
    taken = []
    for _ in range(runs):
        chain.reset()
        start = time.perf_counter()
        chain.extend(ids)
        taken.append(time.perf_counter() - start)
    return min(taken)


def read(chain: Chain, ids: list[int]) -> dict[str, Any]:
    """S, hidden of the last row and live KV, with one more token fed so that S is folded."""
    chain.reset()
    chain.extend(ids)
    chain.extend([1])
    cache, found = chain.cache, {}
    for pair, buffers in cache.states:
        if pair.input.endswith((".S", ".key", ".value")):
            values = to_float(buffers[cache.parity])
            if pair.rows_axis is not None:  # a draft has not run over the rows of the last call yet
                late = WIDTH if pair.input.startswith("draft") else 0
                values = values[:, :, : len(ids) - late]
            found[pair.input] = values
    return found


def apart(got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """Root mean square of the difference over that of the values: the worst layer of each kind."""
    worst: dict[str, float] = {}
    for name, values in want.items():
        error = float(np.sqrt(np.square(got[name] - values).mean() / np.square(values).mean()))
        kind = name.rpartition(".")[2] if not name.startswith("draft") else name
        worst[kind] = max(worst.get(kind, 0.0), error)
    return worst


STEPS = ("kernels", "layers", "prompts")


def main() -> int:
    """Step by step; what is known is written after each."""
    parser = argparse.ArgumentParser(description="Measure prompts in wide calls.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(STEPS))
    parser.add_argument("--profiles", default=f"ort-fused,{','.join(COMPARED)},ort-cuda")
    parser.add_argument("--rows", default="256,512,1024,2048")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--capacity", type=int, default=4608)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--library", type=Path)
    parser.add_argument("--bench", type=Path)
    given = parser.parse_args()
    only = given.only.split(",")
    if unknown := set(only) - set(STEPS):
        parser.error(f"--only is {', '.join(unknown)}, expected of {', '.join(STEPS)}")
    if unknown := set(given.profiles.split(",")) - {*COMPARED, *PROFILES}:
        parser.error(f"--profiles is {', '.join(unknown)}, expected of {COMPARED}, {PROFILES}")
    if "prompts" in only and given.tokens + 1 > given.capacity:
        parser.error(f"a prompt of {given.tokens} tokens and one more need a larger --capacity")
    series = Series(given)
    if only == ["kernels"] or series.stage("build", series.build, 0) is not None:
        for step in only:
            getattr(series, step)()
    return series.close()


if __name__ == "__main__":
    sys.exit(main())
