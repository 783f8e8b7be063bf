"""ONNX Runtime on a GPU, measured: every profile against the CPU, then the 9B's shapes by clock.

    python -m tests.gpu.ort_series --out FOLDER [--seconds 480] [--only self,fused-bf16,...]

One process, several stages in order of worth; each prints its result at once and adds it to
FOLDER/results.json, and a stage that fails does not end the others. Needs onnxruntime-gpu,
cuda-python and, for the kernel tables, torch. Weights are random, made on the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

try:  # its libraries are those that ONNX Runtime needs as well
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

from eagle_chain.engines.bound import with_bound_weights
from eagle_chain.engines.cli import main as command
from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.derived import Derived
from eagle_chain.engines.kernel_library import build_cuda
from eagle_chain.engines.spec import Options, TensorSpec
from eagle_chain.export.graph import build_graphs
from eagle_chain.runtime import verify
from eagle_chain.runtime.buffers import Buffer, HostMemory, Memory
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.cuda import CudaMemory
from eagle_chain.runtime.drafters import EagleDrafter
from eagle_chain.runtime.exactness import Comparison, decode_plainly
from eagle_chain.runtime.load import open_engines
from eagle_chain.runtime.measure import (
    Clock,
    copy_bandwidth,
    random_tensors,
    state_bytes,
    weight_bytes,
)
from eagle_chain.runtime.ort import SPEC_DTYPES, OrtBinding, onnxruntime
from eagle_chain.runtime.ort_cuda import OrtCudaSession
from eagle_chain.runtime.prompts import cut_prompts, read_text
from eagle_chain.runtime.stand import Stand
from eagle_chain.runtime.tokenizer import Tokenizer
from eagle_chain.runtime.weights import from_bf16, to_bf16
from tests import qwen_9b
from tests.gpu.steps import Stage, Steps, chosen
from tests.told import Plan, table_spec, told_graphs, told_specs

ROOT = Path(__file__).resolve().parents[2]
POSITION = 1000


def small_configs() -> tuple[TrunkConfig, DraftConfig]:
    """Eight layers in sizes that every kernel of the 9B takes, heads and dims all unlike."""
    trunk, draft = qwen_9b.configs(8)
    trunk = dataclasses.replace(
        trunk,
        vocab_size=1536,
        hidden_size=256,
        intermediate_size=640,
        attention_heads=4,
        kv_heads=2,
        head_dim=64,
        rotary_dim=16,
        linear_key_heads=2,
        linear_value_heads=4,
        linear_key_dim=64,
        linear_value_dim=96,
    )
    draft = dataclasses.replace(
        draft,
        hidden_size=256,
        trunk_hidden_size=256,
        intermediate_size=384,
        attention_heads=4,
        kv_heads=2,
        head_dim=32,
        rotary_dim=16,
        draft_vocab_size=512,
        vocab_size=1536,
    )
    return trunk, draft


class HostSession:
    """A graph with its weights as inputs on ONNX Runtime's CPU provider: the reference."""

    def __init__(self, model: bytes, spec: Any, memory: HostMemory) -> None:
        ort = onnxruntime()
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self.spec, self.memory = spec, memory
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        known = {t.name for t in spec.all_inputs}
        self.weights = tuple(
            TensorSpec(t.name, SPEC_DTYPES[t.type], tuple(t.shape))
            for t in self.session.get_inputs()
            if t.name not in known
        )
        self.bound: dict[str, Buffer] = {}

    def bind(self, tensors: dict[str, Buffer]) -> Any:
        """Bind the weights with the rest."""
        spec = dataclasses.replace(self.spec, inputs=(*self.spec.inputs, *self.weights))
        return OrtBinding(self.session, spec, {**tensors, **self.bound})


class Bench:
    """Sessions of one profile over one set of weights."""

    def __init__(
        self,
        memory: Memory,
        configs: tuple[TrunkConfig, DraftConfig],
        options: Options,
        library: Path | None,
        *,
        graphs: bool = True,
        engines: tuple[str, ...] = ("trunk", "encoder", "draft", "draft_step"),
    ) -> None:
        self.memory, self.options, self.configs = memory, options, configs
        table = qwen_9b.weights(*configs)
        models = build_graphs(*configs, table, options)
        specs = engine_specs(*configs, options)
        self.sessions: dict[str, Any] = {}
        for name in engines:
            model = with_bound_weights(models[name], converted=options.dtype).SerializeToString()
            if isinstance(memory, CudaMemory):
                lib = library if options.profile == "ort-fused" else None
                session: Any = OrtCudaSession(
                    model, specs[name], memory, library=lib, graphs=graphs
                )
            else:
                session = HostSession(model, specs[name], HostMemory())
                session.memory = memory
            self.sessions[name] = session

    @property
    def wanted(self) -> list[TensorSpec]:
        """Every weight that a session wants."""
        return list(dict.fromkeys(t for s in self.sessions.values() for t in s.weights))

    def give(self, made: dict[TensorSpec, Buffer]) -> None:
        """Hand the weights to the sessions."""
        for session in self.sessions.values():
            session.bound = {t.name: made[t] for t in session.weights}


def values_of(bench: Bench, stored: dict[str, np.ndarray[Any, Any]]) -> dict[TensorSpec, Buffer]:
    """Small weights from fp32 values by checkpoint name, in whatever form the graphs want them."""
    made = {}
    for spec in bench.wanted:
        form = Derived.parse(spec.name)
        if form:
            values = np.concatenate([stored[n] for n in form.sources]) + np.float32(form.offset)
        else:
            values = stored[spec.name]
        buffer = bench.memory.allocate(spec)
        if spec.dtype == "bf16":
            values = to_bf16(values.astype(np.float32))
        buffer.write(values)
        made[spec] = buffer
    return made


def stored_values(configs: tuple[TrunkConfig, DraftConfig]) -> dict[str, np.ndarray[Any, Any]]:
    """A lively small model, every value exact in bf16 so that all dtypes hold the same one."""
    random = np.random.default_rng(0)
    stored = {}
    for name, weight in qwen_9b.weights(*configs).items():
        if name.endswith(("d2t", "t2d")):
            stored[name] = np.zeros(weight.shape, np.float32)
            continue
        values = random.standard_normal(weight.shape).astype(np.float32)
        if "norm" in name:
            plain = name.startswith("draft.") or "linear_attn.norm" in name
            values = values * 0.2 + (1.0 if plain else 0.0)
        elif len(weight.shape) == 2:
            values *= 1.2 * weight.shape[1] ** -0.5
        elif name.endswith("A_log"):
            values = np.log(np.abs(values) + 0.05)
        stored[name] = (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    return stored


def to_float(buffer: Buffer) -> np.ndarray[Any, Any]:
    values = buffer.read()
    if buffer.spec.dtype == "bf16":
        return from_bf16(values)
    return values.astype(np.float32)


CALLS = ((5, 5), (2, 2), (5, 1), (5, 5), (5, 3), (3, 2), (5, 4), (1, 1), (5, 2))


class Runner:
    """One trunk over explicit buffers, call by call, with everything it gives as arrays."""

    def __init__(self, bench: Bench, width: int = 5) -> None:
        self.session, memory = bench.sessions["trunk"], bench.memory
        spec = self.session.spec
        plain = {t.name: memory.allocate(t) for t in (*spec.inputs, *spec.outputs)}
        self.plain, self.width = plain, width
        self.states = [(p, *self.pair(memory, p)) for p in spec.states]
        self.bindings = []
        for parity in (0, 1):
            tensors = dict(plain)
            for pair, first, second in self.states:
                a, b = (first, second) if parity == 0 else (second, first)
                tensors |= {pair.input: a, pair.output: b}
            self.bindings.append((self.session.bind(tensors), tensors))
        self.parity = 0

    @staticmethod
    def pair(memory: Memory, pair: Any) -> tuple[Buffer, Buffer]:
        """The buffers of a state."""
        first = memory.allocate(pair.tensors[0])
        return first, first if pair.in_place else memory.allocate(pair.tensors[1])

    def reset(self) -> None:
        """Zero every state."""
        for _, *buffers in self.states:
            for buffer in buffers:
                buffer.zero()
        self.parity = 0

    def run(self, ids: list[int], position: int, rows: int, kept: int) -> dict[str, Any]:
        """One call; everything it gives, in fp32."""
        for name, value in (("position", position), ("rows", rows), ("kept", kept)):
            self.plain[name].write(value)
        self.plain["ids"].write([*ids, *[-1] * (self.width - len(ids))])
        binding, tensors = self.bindings[self.parity]
        binding.run()
        self.parity = 1 - self.parity
        spec = self.session.spec
        return {t.name: to_float(tensors[t.name]) for t in spec.all_outputs}


def forced(runner: Runner, vocabulary: int) -> list[dict[str, Any]]:
    """Random tokens through every pattern of rows and kept rows."""
    random = np.random.default_rng(0)
    runner.reset()
    outs, position, kept = [], 0, 0
    for rows, keep in CALLS:
        ids = [int(i) for i in random.integers(0, vocabulary, 5)][:rows]
        outs.append(runner.run(ids, position, rows, kept))
        position, kept = position + keep, keep
    return outs


def check_rows(runner: Runner, vocabulary: int, steps: int = 30) -> dict[str, Any]:
    """Row i of a verify against row 0 of the padded step of the same token, bit for bit."""
    runner.reset()
    tokens = [int(i) for i in np.random.default_rng(2).integers(0, vocabulary, 7)]
    plain: list[dict[str, Any]] = []
    while len(plain) < steps:
        at = len(plain)
        out = runner.run([tokens[at]], at, 1, min(at, 1))
        plain.append(out)
        if len(tokens) == len(plain):
            tokens.append(int(out["next_ids"][0]))
    runner.reset()
    position, kept, worst, compared = 0, 0, 0.0, 0
    wrong = Counter[str]()
    for accepted in (4, 1, 0, 4, 2, 3, 4, 1, 0):
        if position + accepted + 1 > steps:
            break
        ids = [
            tokens[position + j] if j <= accepted else (tokens[position + j] + 1) % vocabulary
            for j in range(5)
            if position + j < len(tokens)
        ]
        out = runner.run(ids, position, len(ids), kept)
        for j in range(accepted + 1):
            for name in ("features", "hidden", "logits"):
                a, b = out[name][j], plain[position + j][name][0]
                compared += 1
                if not np.array_equal(a, b):
                    wrong[name] += 1
                    worst = max(worst, float(np.abs(a - b).max()))
        position, kept = position + accepted + 1, accepted + 1
    return {"compared": compared, "different": dict(wrong), "worst": worst}


def check_fold(runner: Runner, vocabulary: int) -> dict[str, Any]:
    """The next call's S against S after the last kept row, exact bits."""
    ids = np.random.default_rng(3).integers(0, vocabulary, (3, 5)).tolist()
    different = 0
    for kept in range(6):
        runner.reset()
        runner.run(ids[0], 0, 5, 0)
        second = runner.run(ids[1], 3, 5, 3)
        third = runner.run(ids[2], 3 + kept, 5, kept)
        for name in third:
            if name.endswith(".S.next"):
                rows = second[name.replace(".S.next", ".S_rows")]
                want = rows[kept - 1] if kept else second[name]
                different += not np.array_equal(third[name], want)
    return {"different": different}


class Series(Steps):
    """The stages and what they found."""

    def __init__(self, out: Path, seconds: float, library: Path | None, libraries: Path) -> None:
        super().__init__(out / "results.json", seconds)
        self.out, self.libraries = out, libraries
        self.memory = CudaMemory()
        self.library = library
        self.weights: dict[TensorSpec, Buffer] = {}

    # -- stages -----------------------------------------------------------------------------

    def library_stage(self) -> Any:
        """Build the fused kernels."""
        begin = time.monotonic()
        if self.library is None:
            self.library = build_cuda(self.libraries, self.memory.info.compute_capability)
        return {"name": self.library.name, "took_s": time.monotonic() - begin}

    def self_stage(self) -> Any:
        """Small models: each profile and dtype against the fp32 portable graph on the CPU."""
        configs = small_configs()
        vocabulary = configs[0].vocab_size
        stored = stored_values(configs)
        debug = ("logits", "S_rows")
        reference = Bench(HostMemory(), configs, Options(5, 64, "fp32", "portable", debug), None)
        reference.give(values_of(reference, stored))
        want = forced(Runner(reference), vocabulary)
        found: dict[str, Any] = {}
        for profile in ("ort-fused", "ort-cuda", "portable"):
            for dtype in os.environ.get("DRY_DTYPES", "fp32,fp16,bf16").split(","):
                if (profile, dtype) == ("ort-cuda", "fp32"):  # no fp32 kernel of this attention
                    continue
                key = f"{profile}/{dtype}"
                try:
                    options = Options(5, 64, dtype, profile, debug)
                    bench = Bench(self.memory, configs, options, self.library)
                    bench.give(values_of(bench, stored))
                    runner = Runner(bench)
                    got = forced(runner, vocabulary)
                    errors = {}
                    for name in ("logits", "features", "hidden", "layers.3.key.next"):
                        a = np.stack([o[name] for o in want])
                        b = np.stack([o[name] for o in got])
                        errors[name] = float(np.sqrt(np.square(a - b).mean() / np.square(a).mean()))
                    found[key] = {
                        "rms": errors,
                        "rows": check_rows(runner, vocabulary),
                        "fold": check_fold(runner, vocabulary),
                        "round": self.small_round(bench, configs),
                    }
                except Exception as error:
                    traceback.print_exc()
                    found[key] = f"failed: {error}"[:600]
                self.say(f"  {key}: {json.dumps(found[key])}")
        return found

    def small_round(self, bench: Bench, configs: tuple[TrunkConfig, DraftConfig]) -> Any:
        """Replayed rounds against plain decoding: equal tokens, also once graphs take over."""
        prompt = [int(i) for i in np.random.default_rng(5).integers(0, configs[0].vocab_size, 7)]
        chain = chain_of(bench.sessions, bench.options.capacity, configs[0].vocab_size)
        want = chain.generate(prompt, max_new_tokens=40, k=0).tokens
        rounds = list(chain.rounds(prompt, max_new_tokens=40, k=4))
        got = [token for round in rounds for token in round.tokens]
        return {"equal": got == want, "accepted": [r.accepted for r in rounds[1:]]}

    def pipe_stage(self) -> Any:
        """What the memory does."""
        return {"copy_TBps": copy_bandwidth(self.memory) / 1e12}

    def bench_of(
        self,
        profile: str,
        dtype: str,
        width: int = 5,
        capacity: int = 4096,
        engines: tuple[str, ...] = ("trunk", "encoder", "draft", "draft_step"),
        configs: tuple[TrunkConfig, DraftConfig] | None = None,
        graphs: bool = True,
    ) -> Bench:
        """Sessions of one profile on the 9B's shapes, with random weights shared where they fit."""
        options = Options(width, capacity, dtype, profile)
        bench = Bench(
            self.memory,
            configs or qwen_9b.configs(),
            options,
            self.library,
            graphs=graphs,
            engines=engines,
        )
        wanted = bench.wanted
        if not all(spec in self.weights for spec in wanted):
            keep = {s: b for s, b in self.weights.items() if s in set(wanted)}
            self.weights = {}
            gc.collect()
            fresh = [s for s in wanted if s not in keep]
            self.weights = keep | random_tensors(fresh, self.memory)
        bench.give(self.weights)
        return bench

    def timed(
        self,
        profile: str,
        dtype: str,
        width: int = 5,
        capacity: int = 4096,
        position: int = POSITION,
        *,
        dependent: bool = True,
        whole: bool = True,
    ) -> Any:
        """Times of every part and of whole rounds, against the floor of the weights."""
        os.environ["EAGLE_CHAIN_DEPENDENT_LAUNCH"] = "1" if dependent else "0"
        names = ("trunk", "encoder", "draft", "draft_step") if whole else ("trunk",)
        begin = time.monotonic()
        bench = self.bench_of(profile, dtype, width, capacity, names)
        found: dict[str, Any] = {"set_up_s": round(time.monotonic() - begin, 1)}
        k = width - 1 if whole else 0
        stand = Stand(bench.sessions, capacity, k, position)
        parts = {name: stand.part(name, 40).to_json() for name in stand.parts}
        found["parts"] = parts
        trunk = bench.sessions["trunk"]
        moved = weight_bytes(trunk.weights) + state_bytes(trunk.spec, position)
        found["trunk_bytes"] = moved
        found["trunk_floor_ms"] = moved / 4.27e12 * 1e3
        found["trunk_over_floor"] = next(
            parts[n]["median_ms"] for n in ("verify", "plain") if n in parts
        ) / (weight_bytes(trunk.weights) / 4.27e12 * 1e3)
        if whole:
            found["round"] = stand.whole(40).to_json()
            found["launch_ms"] = stand.host(20)
            wall = stand.wall(40)
            found["wall"] = wall.to_json() if wall else None
        found["free_GB"] = self.memory.free_bytes() / 1e9
        return found

    def generate(self, profile: str, dtype: str, new: int = 60) -> Any:
        """The chain whose rounds the device decides against the one that asks the host.

        The same tokens and counts; time per round by the wall, and over the device's own time.
        """
        bench = self.bench_of(profile, dtype)
        vocabulary = bench.configs[0].vocab_size
        prompt = [int(i) for i in np.random.default_rng(6).integers(0, vocabulary, 7)]
        found: dict[str, Any] = {}
        for k in (4, 0):
            settled = []
            for ahead in (True, False):
                chain = chain_of(bench.sessions, bench.options.capacity, vocabulary, ahead)
                for _ in range(2):  # the second is warm: all graphs are captured
                    rounds = list(chain.rounds(prompt, max_new_tokens=new, k=k))
                settled.append([(r.tokens, r.drafted, r.accepted) for r in rounds])
                # random weights accept next to nothing: a round a token, the last by the host
                times = [r.seconds * 1e3 for r in rounds[8 : -2 * k - 2]]
                found[f"k{k} {'device' if ahead else 'host'} wall_ms"] = Clock(
                    tuple(times)
                ).to_json()
            found[f"k{k} same"] = settled[0] == settled[1]
            device = Stand(bench.sessions, bench.options.capacity, k, 40).whole(40)
            found[f"k{k} device_ms"] = device.median
            wall = found[f"k{k} device wall_ms"]["median_ms"]
            found[f"k{k} host_share"] = wall / device.median - 1
        return found

    def exact_demo(self, profile: str, dtype: str, prompts: int = 33) -> Any:
        """The shipped pair: `verify` (plain, scripted, EAGLE-3), then told rounds on the device."""
        folder = self.out / f"demo-{profile}-{dtype}"
        words = ["--dtype", dtype, "--profile", profile, "--debug", "logits", "--capacity", "256"]
        text = ROOT / "README.md"
        with redirect_stdout(sys.stderr):
            if not folder.exists():
                pair = (str(ROOT / "demo" / name) for name in ("trunk", "draft"))
                assert command(["export", *pair, "-o", str(folder), *words]) == 0
            parser = argparse.ArgumentParser()
            verify.add_arguments(parser)
            words = ["--text", str(text), "--prompts", str(prompts), "-k", "4"]
            given = parser.parse_args([str(folder), *words, "--backend", "onnxruntime-cuda"])
            report = verify.run(given).report
        engines = open_engines(folder, "onnxruntime-cuda")
        options = engines.manifest.options
        told = told_sessions(engines.memory, engines.manifest.specs, options)
        told["trunk"] = engines.sessions["trunk"]
        vocabulary = engines.manifest.trunk.vocab_size
        given_prompts = cut_prompts(read_text(text), Tokenizer(folder), count=prompts, length=64)
        return {
            **{name: report[name] for name in ("verdict", "tokens", "mismatches", "passed")},
            "accepted_counts": {r["drafter"]: r["accepted_counts"] for r in report["runs"]},
            "largest_logit_difference": report["largest_logit_difference"],
            "told": told_rounds(told, options, vocabulary, given_prompts, 128, self.end),
        }

    def exact_slice(self, profile: str, dtype: str, layers: int = 8, prompts: int = 12) -> Any:
        """Random layers of the 9B's widths, told rounds; prompts are short, as it soon repeats."""
        configs, options = qwen_9b.configs(layers), Options(5, 512, dtype, profile, ("logits",))
        bench = Bench(self.memory, configs, options, self.library, engines=("trunk",))
        bench.give(random_tensors(bench.wanted, self.memory))
        sessions = told_sessions(self.memory, engine_specs(*configs, options), options)
        sessions["trunk"] = bench.sessions["trunk"]
        vocabulary = configs[0].vocab_size
        random = np.random.default_rng(8)
        asked = [[int(i) for i in random.integers(0, vocabulary, 16)] for _ in range(prompts)]
        until = min(self.end, time.monotonic() + 20)
        return told_rounds(sessions, options, vocabulary, asked, 64, until)

    def grown(self, profile: str, dtype: str, seconds: float = 60) -> Any:
        """Positions at matching capacities, then widths: trunk call and, at W = 5, whole rounds."""
        end, rows = time.monotonic() + seconds, []
        sizes = [(5, 4096, 1000), (5, 8192, 8000), (5, 32768, 32000)]
        sizes += [(width, 4096, POSITION) for width in (2, 3, 4, 6, 7, 8)]
        for width, capacity, position in sizes:
            if time.monotonic() > end:
                rows.append({"width": width, "capacity": capacity, "left out": True})
                continue
            found = self.timed(profile, dtype, width, capacity, position, whole=width == 5)
            parts = found["parts"]
            row = {
                "width": width,
                "capacity": capacity,
                "position": position,
                "trunk_ms": parts["verify" if width == 5 else "plain"]["median_ms"],
                "over_floor": found["trunk_over_floor"],
            }
            if width == 5:
                row |= {"round_ms": found["round"]["median_ms"], "wall": found["wall"]}
            rows.append(row)
            self.say(f"  {json.dumps(row)}")
        return rows

    def kernels(self, profile: str, dtype: str) -> Any:
        """Every kernel of one uncaptured verify step, by CUPTI through torch's profiler."""
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as record

        os.environ["EAGLE_CHAIN_DEPENDENT_LAUNCH"] = "0"  # or kernels overlap in the trace
        bench = self.bench_of(profile, dtype, engines=("trunk",), graphs=False)
        run = Stand(bench.sessions, 4096, 0, POSITION).parts["plain"].run
        for _ in range(3):
            run()
        self.memory.synchronize()
        torch.cuda.init()
        with record(activities=[ProfilerActivity.CUDA]) as trace:
            run()
            self.memory.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/trace.json"
            trace.export_chrome_trace(path)
            events = json.loads(Path(path).read_text())["traceEvents"]
        found = sorted(
            (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
            key=lambda e: e["ts"],
        )
        table: dict[str, list[float]] = {}
        for event in found:
            table.setdefault(event["name"][:90], []).append(event["dur"])
        rows = sorted(table.items(), key=lambda item: -sum(item[1]))
        lines = [f"{sum(t):9.1f} us {len(t):4d} x {np.median(t):7.2f}  {n}" for n, t in rows]
        name = f"kernels-{profile}-{dtype}.txt"
        order = [
            f"{e['ts'] - found[0]['ts']:10.2f} {e['dur']:8.2f}  {e['name'][:120]}" for e in found
        ]
        (self.out / name).write_text("\n".join([*lines, "", "in order:", *order[:120]]))
        print("\n".join(lines[:28]), flush=True)
        span = found[-1]["ts"] + found[-1]["dur"] - found[0]["ts"] if found else 0.0
        return {
            "launches": len(found),
            "busy_us": sum(e["dur"] for e in found),
            "span_us": span,
            "nodes": len(rows),
        }

    def slice_rows(self, profile: str, dtype: str) -> Any:
        """Row invariance on four layers of the 9B, random weights, capacity 4096."""
        os.environ["EAGLE_CHAIN_DEPENDENT_LAUNCH"] = "1"
        configs = qwen_9b.configs(4)
        options = Options(5, 4096, dtype, profile, ("logits",))
        bench = Bench(self.memory, configs, options, self.library, engines=("trunk",))
        bench.give(random_tensors(bench.wanted, self.memory))
        return check_rows(Runner(bench), configs[0].vocab_size, 24)


def chain_of(
    sessions: dict[str, Any], capacity: int, vocabulary: int, ahead: bool | None = None
) -> Chain:
    """A chain with an EAGLE drafter over these sessions."""
    trunk = sessions["trunk"]
    cache = Cache(trunk.spec, trunk.memory, capacity)
    engines = (sessions[name] for name in ("encoder", "draft", "draft_step"))
    drafter = EagleDrafter(cache, *engines)
    return Chain(trunk, cache, drafter, vocab_size=vocabulary, ahead=ahead)


def told_sessions(memory: CudaMemory, specs: Any, options: Options) -> dict[str, Any]:
    """Draft engines that guess from one table, which the caller fills."""
    graphs = told_graphs(specs, options.capacity, options.width)
    table = memory.allocate(table_spec(options.capacity, options.width))
    sessions: dict[str, Any] = {}
    for name, spec in told_specs(specs).items():
        sessions[name] = session = OrtCudaSession(graphs[name], spec, memory)
        session.bound = {t.name: table for t in session.weights}
    return sessions


def told_rounds(
    sessions: dict[str, Any],
    options: Options,
    vocabulary: int,
    prompts: list[list[int]],
    new: int,
    end: float,
) -> dict[str, Any]:
    """Chain against plain, both decided on the device, every accepted count equally often."""
    k = options.width - 1
    plain = chain_of(sessions, options.capacity, vocabulary)
    chain = chain_of(sessions, options.capacity, vocabulary)
    table = sessions["draft"].bound["table"]
    plan = Plan(k, vocabulary)
    comparison = Comparison(chain, k, None, new, len(prompts) * new, bit_exact=False)
    planned, distinct, done = Counter[int](), 0, 0
    begin = time.monotonic()
    for number, prompt in enumerate(prompts):
        if time.monotonic() > end:
            break
        want = decode_plainly(plain, prompt, new)
        length = table.spec.shape[0]
        guesses, counts = plan.table(len(prompt), [*prompt, *want.tokens], length)
        table.write(guesses)
        comparison.add(number, want)
        planned.update(counts)
        distinct += len(set(want.tokens))
        done += 1
    differences = comparison.differences
    return {
        "prompts": done,
        "tokens": comparison.tokens,
        "distinct": distinct,
        "mismatches": [dataclasses.asdict(m) for m in comparison.mismatches[:5]],
        "mismatch_count": len(comparison.mismatches),
        "accepted_counts": comparison.counts,
        "planned_counts": [planned[c] for c in range(k + 1)],
        "largest_logit_difference": differences.largest if differences else None,
        "passed": comparison.passed,
        "took_s": round(time.monotonic() - begin, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--library", type=Path, help="built already")
    parser.add_argument("--libraries", type=Path, help="where libraries are kept; default: --out")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    series = Series(
        arguments.out,
        arguments.seconds,
        arguments.library,
        arguments.libraries or arguments.out,
    )
    series.say(f"{series.memory.info} onnxruntime {onnxruntime().__version__}")
    s = series
    stages: list[Stage] = [
        ("library", s.library_stage, 5),
        ("self", s.self_stage, 20),
        ("pipe", s.pipe_stage, 5),
        ("fused-bf16", lambda: s.timed("ort-fused", "bf16"), 20),
        ("kernels-fused-bf16", lambda: s.kernels("ort-fused", "bf16"), 6),
        ("fused-bf16-w1", lambda: s.timed("ort-fused", "bf16", 1, whole=False), 5),
        ("fused-bf16-8k", lambda: s.timed("ort-fused", "bf16", 5, 8192, 8000, whole=False), 5),
        ("fused-bf16-32k", lambda: s.timed("ort-fused", "bf16", 5, 32768, 32000, whole=False), 5),
        ("fused-fp16", lambda: s.timed("ort-fused", "fp16"), 6),
        ("rows-fused-bf16", lambda: s.slice_rows("ort-fused", "bf16"), 5),
        ("rows-fused-fp16", lambda: s.slice_rows("ort-fused", "fp16"), 5),
        ("fused-bf16-serial", lambda: s.timed("ort-fused", "bf16", dependent=False), 5),
        *[
            (f"fused-bf16-w{w}", lambda w=w: s.timed("ort-fused", "bf16", w, whole=False), 5)
            for w in (2, 3, 9)
        ],
        ("generate-fused-bf16", lambda: s.generate("ort-fused", "bf16"), 15),
        ("generate-stock-bf16", lambda: s.generate("ort-cuda", "bf16"), 25),
        *[
            (f"exact-demo-{p}-{d}", lambda p=p, d=d: s.exact_demo(p, d), 15)
            for p in ("ort-fused", "ort-cuda", "portable")
            for d in ("bf16", "fp16", "fp32")
            if (p, d) != ("ort-cuda", "fp32")  # no fp32 kernel of this attention
        ],
        *[
            (f"exact-slice-{p}-{d}", lambda p=p, d=d: s.exact_slice(p, d), 20)
            for p, d in (("ort-fused", "bf16"), ("ort-cuda", "bf16"), ("ort-fused", "fp16"))
        ],
        ("grown-fused-bf16", lambda: s.grown("ort-fused", "bf16"), 20),
        ("grown-stock-bf16", lambda: s.grown("ort-cuda", "bf16"), 40),
        ("stock-bf16", lambda: s.timed("ort-cuda", "bf16"), 20),
        ("kernels-stock-bf16", lambda: s.kernels("ort-cuda", "bf16"), 15),
        ("stock-bf16-w1", lambda: s.timed("ort-cuda", "bf16", 1, whole=False), 12),
        ("rows-stock-bf16", lambda: s.slice_rows("ort-cuda", "bf16"), 12),
        ("rows-stock-fp16", lambda: s.slice_rows("ort-cuda", "fp16"), 12),
        ("stock-fp16", lambda: s.timed("ort-cuda", "fp16"), 20),
        ("portable-fp16", lambda: s.timed("portable", "fp16"), 25),
    ]
    for name, work, needs in chosen(parser, arguments.only, stages):
        series.stage(name, work, needs)
    return series.close()


if __name__ == "__main__":
    sys.exit(main())
