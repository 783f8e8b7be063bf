"""Long prompts on a GPU, measured: the kernels, one layer, whole prompts against calls of W rows.

    python -m tests.gpu.prefill_series --out FOLDER [--only kernels,layers,prompts]
        [--profiles ort-fused,ort-stock,ort-chunked,ort-cuda] [--rows 256,512,1024,2048]
        [--tokens 4096] [--capacity 4608]

The 9B's shapes with random weights, bf16. `kernels`: each launch of the rule in ort-fused alone.
`layers`: device time of a linear layer with its MLP, from calls of six and of two of them.
`prompts`: seconds for a prompt, bytes on the device against what `inspect` would predict and, in
the profiles that are shipped, how far states of the two ways are apart. `--tokens 30000 --capacity
32768 --rows 512` is the long prompt.

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from eagle_chain.engines.kernel_library import SOURCES, build_cuda, cache_folder
from eagle_chain.engines.memory import chain_needs
from eagle_chain.engines.spec import Options, TensorSpec
from eagle_chain.export import graph, shapes
from eagle_chain.export.prefill import Prefill, PrefillRows
from eagle_chain.export.prefill_cuda import FusedPrefill, OrtCudaPrefill
from eagle_chain.export.shapes import configs
from eagle_chain.runtime.bench_engines import Engines, of_shapes
from eagle_chain.runtime.buffers import Buffer
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.cuda import CudaMemory
from eagle_chain.runtime.drafters import EagleDrafter
from eagle_chain.runtime.measure import clock, random_tensors
from eagle_chain.runtime.prefill import Follower
from eagle_chain.runtime.prefill import Prefill as WideCalls
from tests.gpu.ort_series import Bench

SHAPES = "qwen3.5-9b"
VOCABULARY = 248320
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


def kernels(_: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of each launch of the rule, as the benchmark of kernels prints them."""
    compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    capability = CudaMemory().info.compute_capability.replace(".", "")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "kernel_bench"
        flags = ["-std=c++17", "-O3", f"-arch=sm_{capability}", "-I", str(SOURCES)]
        source = Path(__file__).with_name("kernel_bench.cu")
        subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
        found = subprocess.run(
            [str(program), "prompts"], capture_output=True, text=True, check=True
        )
    return {"us": found.stdout.splitlines()}


def layers(given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of one linear layer with its MLP, by profile and P."""
    memory = CudaMemory()
    library = build_cuda(cache_folder(), memory.info.compute_capability)
    trunk, draft = configs(SHAPES)
    made: dict[TensorSpec, Buffer] = {}
    found: dict[str, Any] = {}
    for name in given.profiles.split(","):
        for rows in map(int, given.rows.split(",")):
            taken = {}
            for count in (2, 6):
                few = replace(trunk, layer_types=("linear_attention",) * count, vocab_size=1024)
                eagle = replace(draft, aux_layers=(0, 1), vocab_size=1024, draft_vocab_size=512)
                with profile_of(name) as profile:
                    options = Options(5, given.capacity, "bf16", profile, prefill=rows)
                    bench = Bench(memory, (few, eagle), options, library, engines=("prefill",))
                made |= random_tensors((t for t in bench.wanted if t not in made), memory)
                bench.give(made)
                session = bench.sessions["prefill"]
                tensors = {
                    t.name: memory.allocate(t)
                    for t in dict.fromkeys((*session.spec.all_inputs, *session.spec.all_outputs))
                }
                tensors["rows"].write(rows)
                taken[count] = clock(memory, session.bind(tensors).run, 20).median
            found[f"{name}, P = {rows}"] = (taken[6] - taken[2]) / 4
            print(f"a layer, {name}, P = {rows}: {found[f'{name}, P = {rows}']:.3f} ms", flush=True)
    return {"layer_ms": found}


def chain_of(engines: Engines, *, wide: bool) -> Chain:
    """A chain with its draft, with or without wide calls."""
    s = engines.sessions
    cache = Cache(s["trunk"].spec, engines.memory, engines.options.capacity)
    drafter = EagleDrafter(cache, s["encoder"], s["draft"], s["draft_step"])
    prefill = None
    if wide:
        prefill = WideCalls(s["prefill"], cache, Follower(s["draft_prefill"], drafter.kv))
    return Chain(s["trunk"], cache, drafter, vocab_size=VOCABULARY, prefill=prefill)


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
            values = buffers[cache.parity].read()
            if values.dtype == np.uint16:  # bf16
                values = (values.astype(np.uint32) << 16).view(np.float32)
            if pair.rows_axis is not None:
                values = values[:, :, : len(ids)]
            found[pair.input] = values.astype(np.float32)
    return found


def apart(got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """Root mean square of the difference over that of the values: the worst layer of each kind."""
    worst: dict[str, float] = {}
    for name, values in want.items():
        error = float(np.sqrt(np.square(got[name] - values).mean() / np.square(values).mean()))
        kind = name.rpartition(".")[2] if not name.startswith("draft") else name
        worst[kind] = max(worst.get(kind, 0.0), error)
    return worst


def measure(profile: str, rows: int, given: argparse.Namespace) -> dict[str, Any]:
    """One profile at one P."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, given.tokens).tolist()
    probe = CudaMemory()
    before = probe.free_bytes()
    with tempfile.TemporaryDirectory() as folder, profile_of(profile) as operators:
        options = Options(5, given.capacity, "bf16", operators, prefill=rows)
        engines = of_shapes(Path(folder), SHAPES, options)
    weights = before - probe.free_bytes()
    chain = chain_of(engines, wide=True)
    found: dict[str, Any] = {"wide_seconds": seconds(chain, ids, given.runs)}
    used = before - probe.free_bytes()
    trunk, _ = configs(SHAPES)
    specs = {session.spec.name: session.spec for session in engines.sessions.values()}
    needs = chain_needs(specs, options, trunk)[options.capacity]
    found |= {"device_bytes": used, "weights_bytes": weights, "predicted_chain": needs.total}
    found["memory_off"] = (weights + needs.total) / used - 1
    stepped = chain_of(engines, wide=False)
    part = ids if given.tokens <= 4096 else ids[:4096]
    found["step_seconds"] = seconds(stepped, part, 2) * len(ids) / len(part)
    found["speedup"] = found["step_seconds"] / found["wide_seconds"]
    if profile not in COMPARED:  # those do not share every form of a weight with the trunk
        found["apart"] = apart(read(chain, part), read(stepped, part))
    return found


def prompts(given: argparse.Namespace) -> dict[str, Any]:
    """Every profile and P; a failure does not end the others."""
    found: dict[str, Any] = {}
    for profile in given.profiles.split(","):
        for rows in map(int, given.rows.split(",")):
            name = f"{profile}, P = {rows}, {given.tokens} tokens"
            try:
                found[name] = measure(profile, rows, given)
            except Exception as error:  # the next may still work
                found[name] = {"error": f"{type(error).__name__}: {error}"}
            print(name, json.dumps(found[name]), flush=True)
            gc.collect()
    return found


STAGES = {stage.__name__: stage for stage in (kernels, layers, prompts)}


def main() -> None:
    """Stage by stage; what is known is written after each."""
    parser = argparse.ArgumentParser(description="Measure prompts in wide calls.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(STAGES))
    parser.add_argument("--profiles", default=f"ort-fused,{','.join(COMPARED)},ort-cuda")
    parser.add_argument("--rows", default="256,512,1024,2048")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--capacity", type=int, default=4608)
    parser.add_argument("--runs", type=int, default=4)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for stage in given.only.split(","):
        try:
            results[stage] = STAGES[stage](given)
        except Exception as error:  # the next may still work
            results[stage] = {"error": f"{type(error).__name__}: {error}"}
        print(stage, json.dumps(results[stage], indent=1), flush=True)
        (given.out / "prefill.json").write_text(json.dumps(results, indent=1))
        gc.collect()


if __name__ == "__main__":
    main()
