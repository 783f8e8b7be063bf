"""TensorRT on a GPU: parity with a recording, the chain, the 9B's shapes by the clock.

    python tests/gpu/trt_series.py OUT --bundle NAME=BUNDLE,RECORDING ... [--layers 32]
        [--level 2] [--seconds 540] [--only STAGE,...] [--pins build sums none ...]

One process, stages in order of worth; each prints its result at once and adds it to
OUT/results.json, and a stage that fails does not end the others. Needs TensorRT, cuda-python, onnx,
onnx-ir, Polygraphy and rich; no PyTorch. RECORDING is what `eagle-chain record` wrote. `--pins`
(of TensorRT 8.6, see `trt_variant.py`) runs all stages once for each; results of all but `build`
have its name behind theirs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle_chain.engines import worker
from eagle_chain.engines.cli import dispatch
from eagle_chain.engines.cli import main as command
from eagle_chain.engines.compiler import Job, Request
from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.flavours import load_flavour
from eagle_chain.engines.graphs import bound_graph
from eagle_chain.engines.manifest import Manifest, Plan
from eagle_chain.engines.plans import layer_dtypes
from eagle_chain.engines.spec import EngineSpec, Options
from eagle_chain.engines.worker import compile_all
from eagle_chain.export.graph import build_graphs
from eagle_chain.runtime.buffers import Buffer
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.cuda import CudaMemory, Replay
from eagle_chain.runtime.load import Engines, open_engines
from eagle_chain.runtime.measure import (
    clock,
    copy_bandwidth,
    fill_states,
    random_tensors,
    state_bytes,
    weight_bytes,
)
from eagle_chain.runtime.stand import Stand
from eagle_chain.runtime.trt import TrtBinding, TrtEngine, TrtSession, open_sessions
from tests import qwen_9b
from tests.gpu import trt_forms, trt_variant
from tests.gpu.steps import Stage, Steps, chosen
from tests.gpu.trt_forms import FORMS
from tests.gpu.trt_variant import VARIANTS

POSITION = 1000
VARIANT = trt_variant.__file__
PROMPTS = ([5, 9, 2], [7, 7, 7, 1, 30, 4, 12, 3], list(range(40, 57)))
NEW_TOKENS = 48
RUNS = 40  # by the clock


class Series(Steps):
    """The stages and what they found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments.out / "results.json", arguments.seconds)
        self.out: Path = arguments.out
        self.level: int | None = arguments.level
        self.pins = "build"
        self.inspected = self.out / "none"  # the inspector's report on the last trunk

    # --- a bundle ----------------------------------------------------------------------------

    def build(self, bundle: Path, *words: str) -> Any:
        """`eagle-chain build`, and what the plans are."""
        level = [] if self.level is None else ["--level", str(self.level)]
        begin = time.monotonic()
        code = command(["build", str(bundle), "--force", *level, *words])
        manifest = Manifest.load(bundle)
        folders = {str(Path(name).parent) for name in manifest.plans}
        found: dict[str, Any] = {"exit": code, "seconds": round(time.monotonic() - begin, 1)}
        for folder in folders:
            for plan in sorted((bundle / folder).glob("*.plan")):
                layers = plan.with_suffix(".layers.json")
                found[plan.name] = {"bytes": plan.stat().st_size, **layer_report(layers)}
            log = (bundle / folder / "build.log").read_text().splitlines()
            found["warnings"] = len(log)
            found["some"] = sorted({line[:200] for line in log})[:6]
        return found

    def built(self, bundle: Path) -> Any:
        """The same, and a failure where it fails; `build` has told why on stderr."""
        found = self.build(bundle)
        if found["exit"]:
            raise RuntimeError(f"build ended with {found}")
        return found

    def parity(self, bundle: Path, recording: Path) -> Any:
        """Every output of every engine against PyTorch."""
        words = ["--backend", "tensorrt", "--load", str(recording)]
        report = dispatch(["parity", str(bundle), *words]).report
        worst: dict[str, float] = {}
        for tensor in report["tensors"]:
            if tensor["worst"] is not None:
                kind = f"{tensor['engine']} {tensor['kind']}"
                worst[kind] = max(worst.get(kind, 0.0), number(tensor["worst"]["error"]))
        return {name: report[name] for name in ("passed", "first_fault")} | {"worst": worst}

    def chains(self, bundle: Path) -> Any:
        """Tokens: plain, drafted, replayed as graphs and not, whole rounds, two chains at once."""
        manifest = Manifest.load(bundle)
        engines = open_engines(bundle, "tensorrt")
        memory, plain_sessions = open_sessions(bundle, manifest, "tensorrt", graphs=False)
        ungraphed = dataclasses.replace(engines, memory=memory, sessions=plain_sessions)
        found: dict[str, Any] = {}
        for i, prompt in enumerate(PROMPTS):
            plain = tokens(engines.chain(), prompt, 0)
            result: dict[str, Any] = {}
            for k in (1, 4):
                chain = engines.chain()
                result[f"k{k}"] = same(tokens(chain, prompt, k), plain)
                result[f"k{k}_again"] = same(tokens(chain, prompt, k), plain)
                host = engines.chain(ahead=False)
                result[f"host_k{k}"] = same(tokens(host, prompt, k), plain)
            result["no_graphs"] = same(tokens(ungraphed.chain(ahead=False), prompt, 4), plain)
            result["replay"] = same(tokens(engines.chain(rollback="replay"), prompt, 4), plain)
            found[f"prompt{i}"] = result
        found["interleaved"] = interleaved(engines)
        return found

    def soak(self, bundle: Path) -> Any:
        """A thousand rounds: device and host memory, and the speed at both ends."""
        engines = open_engines(bundle, "tensorrt")
        assert isinstance(engines.memory, CudaMemory)
        chain = engines.chain()
        capacity = engines.manifest.options.capacity
        random = np.random.default_rng(0)

        def some_rounds(count: int) -> float:
            begin, done = time.perf_counter(), 0
            while done < count:
                prompt = random.integers(0, engines.manifest.trunk.vocab_size, 3).tolist()
                for _ in chain.rounds(prompt, max_new_tokens=capacity - 10, stop_ids=()):
                    done += 1
            return (time.perf_counter() - begin) / done * 1e3

        some_rounds(60)
        gc.collect()
        before = engines.memory.free_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        first = some_rounds(100)
        some_rounds(800)
        last = some_rounds(100)
        gc.collect()
        after = engines.memory.free_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "device_bytes_lost": before[0] - after[0],
            "host_kB_grown": after[1] - before[1],
            "round_ms": [first, last],
        }

    def aliasing(self, bundle: Path) -> Any:
        """KV in place against KV in two buffers: the same bits from every output."""
        manifest = Manifest.load(bundle)
        _, sessions = open_sessions(bundle, manifest, "tensorrt", graphs=False)
        found = {}
        for name in ("trunk", "draft", "draft_step"):
            session = sessions[name]
            outputs = []
            for in_place in (True, False):
                tensors = buffers(session, in_place=in_place)
                fill_states([(p, [tensors[p.input]]) for p in session.spec.states])
                for tensor in session.spec.inputs:
                    if tensor.dtype == "int32":
                        tensors[tensor.name].write({"position": 7, "row": 0}.get(tensor.name, 1))
                session.bind(tensors).run()
                outputs.append({t.name: tensors[t.name].read() for t in session.spec.all_outputs})
            found[name] = [n for n in outputs[0] if not same_bits(outputs[0][n], outputs[1][n])]
        return {"differ": found}

    def baked(self, bundle: Path) -> Any:
        """Plans with the weights in them: size, build, memory and step, against bound ones."""
        found: dict[str, Any] = {}
        for weights in ("bound", "baked"):
            report = self.build(bundle, "--weights", weights)
            if report["exit"]:  # 8.6 cannot bake what is stored as bf16
                found[weights] = report
                continue
            gc.collect()
            free = CudaMemory().free_bytes()
            begin = time.monotonic()
            engines = open_engines(bundle, "tensorrt")
            assert isinstance(engines.memory, CudaMemory)
            chain = engines.chain()
            engines.memory.synchronize()
            opened = time.monotonic() - begin
            timed = clock(engines.memory, chain._ladder.rung.trunk[0].run, RUNS).to_json()
            found[weights] = {
                "build": report,
                "open_s": opened,
                "device_bytes": free - engines.memory.free_bytes(),
                "trunk": timed,
            }
            del engines, chain
        return found

    # --- shapes without a checkpoint -----------------------------------------------------------

    def engines_of(
        self,
        name: str,
        configs: tuple[TrunkConfig, DraftConfig],
        options: Options,
        only: tuple[str, ...] = ("trunk", "encoder", "draft", "draft_step"),
    ) -> tuple[CudaMemory, dict[str, TrtSession], dict[str, Any]]:
        """Engines of these shapes with random weights made on the device."""
        folder = self.out / name / self.pins
        folder.mkdir(parents=True, exist_ok=True)
        specs = engine_specs(*configs, options)
        models = build_graphs(*configs, qwen_9b.weights(*configs), options)
        jobs = []
        for engine in only:
            bound, weights = bound_graph(models[engine], specs[engine], options.dtype)
            graph = folder / f"{engine}.onnx"
            graph.write_bytes(bound.SerializeToString())
            inputs = (*specs[engine].all_inputs, *weights)
            plan = str(folder / f"{engine}.plan")
            jobs.append(Job(engine, str(graph), plan, inputs, specs[engine].all_outputs))
        memory, sessions, built = self.opened(folder, jobs, specs)
        self.inspected = folder / "trunk.layers.json"
        return memory, sessions, built

    def opened(
        self, folder: Path, jobs: list[Job], specs: Mapping[str, EngineSpec]
    ) -> tuple[CudaMemory, dict[str, TrtSession], dict[str, Any]]:
        """Sessions of graphs, built unless their plans are there, and what building them told."""
        flavour = load_flavour("tensorrt")
        cache = str(self.out / "timing.cache")
        missing = tuple(job for job in jobs if not Path(job.plan).exists())
        request = Request("tensorrt", missing, level=self.level, timing_cache=cache)
        built = compile_all(request, folder)
        memory = CudaMemory()
        sessions = {}
        for job in jobs:
            digest = hashlib.sha256(Path(job.plan).read_bytes()).hexdigest()
            plan = Plan(digest, "tensorrt", flavour.version, "", "", "", "bound", ())
            engine = TrtEngine(flavour, Path(job.plan), plan, specs[job.name], "trt_series.py")
            sessions[job.name] = TrtSession(engine, memory)
        wanted = [t for s in sessions.values() for t in s.engine.weights]
        made = random_tensors(wanted, memory)
        for session in sessions.values():
            session.engine.bound = {t.name: made[t] for t in session.engine.weights}  # type: ignore[misc]
        for engine, report in built.items():
            report |= layer_report(folder / f"{engine}.layers.json")
        return memory, sessions, built

    def nine(self, layers: int, dtype: str = "fp16") -> Any:
        """The 9B's shapes: every part of a round, the round, and plain decoding, by the clock."""
        configs = qwen_9b.configs(layers)
        options = Options(5, 4096, dtype)
        memory, sessions, built = self.engines_of(f"nine-{layers}", configs, options)
        trunk = sessions["trunk"]
        moved = weight_bytes(trunk.engine.weights)
        stands = {k: Stand(sessions, options.capacity, k, POSITION) for k in (0, 4)}
        found: dict[str, Any] = {}
        for k, stand in stands.items():
            parts = {name: stand.part(name, RUNS).to_json() for name in stand.parts}
            parts["round"] = stand.whole(RUNS).to_json()
            parts["host_ms"] = stand.host(RUNS)
            found[f"k{k}"] = parts
        step = found["k0"]["plain"]["median_ms"]
        found["TBps_of_weights"] = moved / step * 1e3 / 1e12
        found["free_bytes"] = memory.free_bytes()
        found["pieces"] = self.piece_times(stands[0].parts["plain"])
        found["weight_bytes"] = moved
        found["state_bytes"] = state_bytes(trunk.spec, POSITION)
        found["scratch_bytes"] = {n: s.engine.scratch_bytes for n, s in sessions.items()}
        found["built"] = built
        return found

    def piece_times(self, binding: Any) -> Any:
        """The runs of each distinct piece one behind the other, as a graph, by the clock."""
        assert isinstance(binding, TrtBinding)
        engine, memory = binding._engine, binding._memory
        sizes = {t.name: t for t in engine.weights}
        about = pieces_of(self.inspected)
        rows = []
        for plan in range(len(engine.plans)):
            replay = Replay(memory)

            def work(replay: Replay = replay, plan: int = plan) -> None:
                replay.run(None, lambda: binding.run_plan(plan))

            work()
            steps = [step for step in engine.steps if step.plan == plan]
            read = [sizes[n] for step in steps for n in step.names.values() if n in sizes]
            total = clock(memory, work, RUNS).median * 1e3
            row = {"us": round(total, 1), "runs": len(steps), "us_a_run": total / len(steps)}
            if weights := weight_bytes(read):
                row["TBps_of_weights"] = weights / total * 1e6 / 1e12
            rows.append(row | about[plan] if plan < len(about) else row)
            rate = f"{row['TBps_of_weights']:.2f} TB/s" if weights else ""
            last = rows[-1]
            kinds = [k for k in last.get("kinds", []) if k not in ("Reformat", "NoOp", "Constant")]
            self.say(
                f"  {total:8.1f} us = {len(steps)} x {total / len(steps):.1f} us {rate:>10} "
                f"{last.get('pins', ''):7} {last.get('piece', '')} | {last.get('kernels')} layers, "
                f"scratch {last.get('scratch', 0) / 1e6:.1f} MB, {' '.join(kinds)}"
            )
        return {"sum_us": sum(row["us"] for row in rows), "each": rows}

    def delta(self) -> Any:
        """Four linear layers around a tiny hidden size: what is not a projection, per layer."""
        trunk, draft = qwen_9b.configs(4)
        trunk = dataclasses.replace(
            trunk,
            layer_types=("linear_attention",) * 4,
            hidden_size=64,
            intermediate_size=64,
            vocab_size=512,
        )
        small = {"vocab_size": 512, "draft_vocab_size": 256}
        draft = dataclasses.replace(draft, trunk_hidden_size=64, **small)
        return self.per_layer("delta", (trunk, draft), 4)

    def mlp(self) -> Any:
        """Four layers whose mixer is tiny: what the MLP takes, per layer."""
        trunk, draft = qwen_9b.configs(4)
        trunk = dataclasses.replace(
            trunk,
            layer_types=("linear_attention",) * 4,
            vocab_size=512,
            linear_key_heads=1,
            linear_value_heads=1,
            linear_key_dim=16,
            linear_value_dim=16,
        )
        draft = dataclasses.replace(draft, vocab_size=512, draft_vocab_size=256)
        return self.per_layer("mlp", (trunk, draft), 4)

    def form(self, form: str) -> Any:
        """One MLP of the 9B's widths in one of its forms: time, kernels, distance from float64."""
        model, spec, weights = trt_forms.mlp(form)
        folder = self.out / f"mlp-{form}" / self.pins
        folder.mkdir(parents=True, exist_ok=True)
        graph, plan = (folder / f"mlp.{end}" for end in ("onnx", "plan"))
        graph.write_bytes(model.SerializeToString())
        job = Job("mlp", str(graph), str(plan), (*spec.inputs, *weights), spec.outputs)
        memory, sessions, built = self.opened(folder, [job], {"mlp": spec})
        session = sessions["mlp"]
        tensors = buffers(session, in_place=False)
        random = np.random.default_rng(0)
        tensors["x"].write(random.standard_normal(tensors["x"].spec.shape))
        if "order" in tensors:
            tensors["order"].write(np.arange(trt_forms.ROWS))
        binding = session.bind(tensors)
        timed = clock(memory, binding.run, RUNS)
        held = {**tensors, **session.engine.bound}
        return {
            "us": timed.median * 1e3,
            "TBps_of_weights": weight_bytes(session.engine.weights) / timed.median * 1e3 / 1e12,
            "error": trt_forms.error(form, {name: b.read() for name, b in held.items()}),
            "built": built,
        }

    def per_layer(self, name: str, configs: tuple[TrunkConfig, DraftConfig], layers: int) -> Any:
        """Time a trunk and divide."""
        memory, sessions, built = self.engines_of(
            name, configs, Options(5, 256, "fp16"), ("trunk",)
        )
        session = sessions["trunk"]
        tensors = buffers(session, in_place=True)
        fill_states([(p, [tensors[p.input]]) for p in session.spec.states])
        binding = session.bind(tensors)
        timed = clock(memory, binding.run, RUNS)
        moved = weight_bytes(session.engine.weights)
        return {
            "layer_us": timed.median / layers * 1e3,
            "step": timed.to_json(),
            "TBps_of_weights": moved / timed.median * 1e3 / 1e12,
            "pieces": self.piece_times(binding),
            "built": built,
        }

    def device(self) -> Any:
        """What this is."""
        memory = CudaMemory()
        flavour = load_flavour("tensorrt")
        info = dataclasses.asdict(memory.info)
        return {**info, "tensorrt": flavour.version, "copy_TBps": copy_bandwidth(memory) / 1e12}


def number(value: Any) -> float:
    """A distance of a report, in which one that is not finite is a word."""
    return float("inf") if value == "infinite" else float(value)


def layer_report(path: Path) -> dict[str, Any]:
    """How many layers a plan has, by the dtypes of what they write; of a file of pieces, each."""
    kinds = layer_dtypes(path)
    found: dict[str, Any] = {"plan_layers": sum(kinds.values()), "writes": kinds}
    if pieces := pieces_of(path):
        found["pieces"] = pieces
    return found


def pieces_of(path: Path) -> list[dict[str, Any]]:
    """The distinct pieces of an engine: what they are, and which kernels TensorRT took."""
    data = json.loads(path.read_text(encoding="utf-8"), strict=False)
    rows = []
    for piece in data.get("Pieces", []):
        layers = [layer for layer in piece["Layers"] if isinstance(layer, dict)]
        tactics = sorted({str(layer.get("TacticName"))[:70] for layer in layers} - {"None", ""})
        kinds = sorted({str(layer.get("LayerType")) for layer in layers})
        rows.append(
            {
                "piece": piece["piece"][:80],
                "pins": piece["pins"],
                "built_s": round(piece["seconds"], 2),
                "scratch": piece["scratch_bytes"],
                "kernels": piece["plan_layers"],
                "kinds": kinds,
                "tactics": tactics,
            }
        )
    return rows


def buffers(session: Any, *, in_place: bool) -> dict[str, Buffer]:
    """A zeroed buffer for every tensor of a session."""
    memory, spec = session.memory, session.spec
    tensors = {t.name: memory.allocate(t) for t in (*spec.inputs, *spec.outputs)}
    for pair in spec.states:
        tensors[pair.input] = memory.allocate(pair.tensors[0])
        shared = in_place and pair.in_place
        tensors[pair.output] = tensors[pair.input] if shared else memory.allocate(pair.tensors[1])
    return tensors


def tokens(chain: Chain, prompt: list[int], k: int) -> list[int]:
    return chain.generate(prompt, max_new_tokens=NEW_TOKENS, k=k, stop_ids=()).tokens


def same(one: list[int], other: list[int]) -> Any:
    """True, or where they part."""
    parted = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
    return True if parted is None else {"differ_at": parted}


def same_bits(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return one.tobytes() == other.tobytes()


def interleaved(engines: Engines) -> bool:
    """Two requests in turn on two chains over one set of engines, against one after the other."""
    prompts = PROMPTS[:2]
    alone = [tokens(engines.chain(), prompt, 4) for prompt in prompts]
    options = {"max_new_tokens": NEW_TOKENS, "k": 4, "stop_ids": ()}
    open_ = [engines.chain().rounds(prompt, **options) for prompt in prompts]
    out: list[list[int]] = [[], []]
    while any(len(o) < NEW_TOKENS for o in out):
        for i, request in enumerate(open_):
            step = next(request, None)
            out[i] += step.tokens if step else ()
    return out == alone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=lambda text: Path(text).resolve())
    parser.add_argument("--bundle", action="append", default=[], metavar="NAME=BUNDLE,RECORDING")
    parser.add_argument("--layers", type=int, nargs="*", default=[])
    parser.add_argument("--level", type=int)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--only", default="")
    parser.add_argument("--pins", choices=VARIANTS, nargs="+", default=["build"])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    series = s = Series(arguments)
    worker.module_command = lambda _, *words: [sys.executable, VARIANT, series.pins, *words]
    stages: list[Stage] = [("device", s.device, 5)]
    for word in arguments.bundle:
        name, _, paths = word.partition("=")
        bundle, recording = (Path(p).resolve() for p in paths.split(","))
        stages += [
            (f"{name}-build", lambda b=bundle: s.built(b), 30),
            (f"{name}-parity", lambda b=bundle, r=recording: s.parity(b, r), 15),
            (f"{name}-chains", lambda b=bundle: s.chains(b), 20),
            (f"{name}-aliasing", lambda b=bundle: s.aliasing(b), 10),
            (f"{name}-soak", lambda b=bundle: s.soak(b), 20),
            (f"{name}-baked", lambda b=bundle: s.baked(b), 120),
        ]
    stages += [("delta", s.delta, 20), ("mlp", s.mlp, 20)]
    stages += [(f"nine-{n}", lambda n=n: s.nine(n), 40) for n in arguments.layers]
    stages += [(f"mlp-{form}", lambda f=form: s.form(f), 20) for form in FORMS]
    wanted = chosen(parser, arguments.only, stages)
    for series.pins in arguments.pins:
        for name, work, needs in wanted:
            variant = "" if series.pins == "build" else f"@{series.pins}"
            series.stage(f"{name}{variant}", work, needs)
    return series.close()


if __name__ == "__main__":
    sys.exit(main())
