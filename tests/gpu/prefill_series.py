"""Long prompts on a GPU, measured: wide calls against calls of W rows, memory against the report.

    python -m tests.gpu.prefill_series --out FOLDER [--profiles ort-fused,ort-cuda]
        [--rows 256,512,1024] [--tokens 4096] [--capacity 4608]

The 9B's shapes with random weights, bf16. For every profile and P: seconds for the prompt, how far
states and logits of the two ways are apart, and bytes on the device against what `inspect` would
predict. `--tokens 30000 --capacity 32768 --rows 512` is the long prompt. Profile `ort-chunked` is
ort-fused with the fp32 chunk form of the other profiles in the place of GatedDeltaNet.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from eagle_chain.engines.memory import chain_needs
from eagle_chain.engines.spec import Options
from eagle_chain.export import graph, shapes
from eagle_chain.export.prefill import Prefill
from eagle_chain.export.prefill_cuda import FusedPrefill
from eagle_chain.export.shapes import configs
from eagle_chain.runtime.bench_engines import Engines, of_shapes
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.cuda import CudaMemory
from eagle_chain.runtime.drafters import EagleDrafter
from eagle_chain.runtime.prefill import Follower
from eagle_chain.runtime.prefill import Prefill as WideCalls

SHAPES = "qwen3.5-9b"
CHUNKED = "ort-chunked"
VOCABULARY = 248320


class ChunkedPrefill(FusedPrefill):
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


def written_here(command: list[str], **_: Any) -> None:
    """The graphs that a process of its own would write, in this one, where a class is another."""
    graph.PREFILLS["ort-fused"] = ChunkedPrefill
    before, sys.argv = sys.argv, command[2:]
    try:
        shapes.main()
    finally:
        sys.argv = before
        graph.PREFILLS["ort-fused"] = FusedPrefill


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
    operators = "ort-fused" if profile == CHUNKED else profile
    options = Options(5, given.capacity, "bf16", operators, prefill=rows)
    probe = CudaMemory()
    before = probe.free_bytes()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if profile == CHUNKED:
            patch.setattr(subprocess, "run", written_here)
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
    found["apart"] = apart(read(chain, part), read(stepped, part))
    return found


def main() -> None:
    """Every profile and P; a failure does not end the others."""
    parser = argparse.ArgumentParser(description="Measure prompts in wide calls.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profiles", default=f"ort-fused,{CHUNKED},ort-cuda")
    parser.add_argument("--rows", default="256,512,1024")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--capacity", type=int, default=4608)
    parser.add_argument("--runs", type=int, default=4)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for profile in given.profiles.split(","):
        for rows in map(int, given.rows.split(",")):
            name = f"{profile}, P = {rows}, {given.tokens} tokens"
            try:
                results[name] = measure(profile, rows, given)
            except Exception as error:  # the next may still work
                results[name] = {"error": f"{type(error).__name__}: {error}"}
            print(name, json.dumps(results[name]), flush=True)
            (given.out / "prefill.json").write_text(json.dumps(results, indent=1))
            gc.collect()


if __name__ == "__main__":
    main()
