"""ONNX graphs in, TensorRT plans out: a process of its own, which can be killed at any moment.

`python -m eagle_chain.engines.compiler REQUEST FD` reads a `Request` as JSON and writes one JSON
object a line to the file descriptor FD: progress, warnings, and what came of each job. TensorRT
takes minutes inside one call, and ends the process when something in it goes wrong: neither is the
business of the command that asked.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_chain.engines.bound import as_exported
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.files import read_plain
from eagle_chain.engines.flavours import Flavour, dtype_names, load_flavour, logger
from eagle_chain.engines.gpu import cuda_runtime
from eagle_chain.engines.pieces import HALF, Form, cut
from eagle_chain.engines.plan_file import IO, Contents, interface, layout, packed
from eagle_chain.engines.plans import LAYERS
from eagle_chain.engines.spec import TensorSpec
from eagle_chain.engines.strict_json import decode, encode

Send = Callable[[dict[str, Any]], None]
_PR_SET_PDEATHSIG = 1
SECONDS_BETWEEN_MESSAGES = 0.1
LARGEST_CACHE = 1 << 30  # bytes of a timing cache; those of a 9B have a few MB
TACTICS_8 = ("EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS")  # of 8.6; cuBLAS and cuDNN take 1.1 GB
LARGEST_SHARED = 1 << 24  # bytes of a plan that is kept for other jobs: has no weights in it
WEAK_LEVEL = 2  # of 8.6: higher levels take many times longer for plans that are no faster


@dataclass(frozen=True)
class Job:
    """One graph to compile."""

    name: str
    graph: str  # path of the ONNX file; its weights are inputs, or files beside it
    plan: str  # path to write
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Request:
    """What to compile and how; the same for all jobs."""

    flavour: str
    jobs: tuple[Job, ...]
    compute_capabilities: tuple[str, ...] = ()  # ahead of time only
    device: int = 0  # otherwise: which GPU
    level: int | None = None  # builder_optimization_level; None is the default
    workspace: int | None = None  # bytes; None is all memory
    timing_cache: str | None = None  # path; read if it is there, written after each job

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(encode(self))

    @staticmethod
    def loads(text: str) -> Request:
        """Inverse of `dumps`."""
        return decode(Request, json.loads(text))


class Compiler:
    """Compiles the jobs of one request, one after the other, with one builder."""

    def __init__(self, request: Request, flavour: Flavour, send: Send) -> None:
        self.request = request
        self.flavour = flavour
        self.send = send
        self.said: list[str] = []
        self.log = logger(flavour.trt, self._note)
        try:
            self.builder = flavour.trt.Builder(self.log)
        except TypeError:  # what the bindings make of a builder that could not be had
            words = " | ".join(dict.fromkeys(self.said))
            raise InputError(f"TensorRT {flavour.version} cannot start here: {words}") from None
        self._monitor: Any = None  # TensorRT only borrows it: it must outlive the build
        self._timings: Any = None  # and so must the timing cache
        self._made: dict[Form, _Made] = {}  # pieces that other jobs may have

    def compile(self, job: Job) -> dict[str, Any]:
        """Write one plan; returns what is worth telling about it."""
        start = time.monotonic()
        made = self._whole(job) if self.flavour.strongly_typed else self._in_pieces(job)
        return {
            **made,
            "bytes": Path(job.plan).stat().st_size,
            "seconds": time.monotonic() - start,
            "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }

    def _whole(self, job: Job) -> dict[str, Any]:
        """The graph as one plan."""
        built = self._built(job, job.name, job.inputs, job.outputs)
        Path(job.plan).write_bytes(built.plan)
        report: dict[str, Any] = {"layers": built.layers}
        if not self.flavour.ahead_of_time:
            back = self._read_back(job.name, built.plan, job.inputs, job.outputs)
            _write_layers(job, back.inspected)
            report |= {"scratch_bytes": back.scratch, "plan_layers": back.layers}
        return report

    def _in_pieces(self, job: Job) -> dict[str, Any]:
        """The graph as pieces of one float type, each distinct one compiled once."""
        import onnx

        with as_exported(f"{job.name}.onnx"):
            parts = cut(onnx.load(job.graph, load_external_data=False))
        made: list[_Made] = []
        reports = []
        for number, form in enumerate(parts.forms, 1):
            self.send({"phase": "pieces", "done": number, "total": len(parts.forms)})
            start = time.monotonic()
            title = f"{job.name}, piece {number} of {len(parts.forms)} ({form.title})"
            if form not in self._made:
                self._made[form] = self._piece(job, title, form)
            piece = self._made[form]
            if piece.plan.nbytes > LARGEST_SHARED:
                del self._made[form]
            made.append(piece)
            reports.append(
                {
                    "piece": form.title,
                    "pins": piece.pins,
                    "layers": piece.built.layers,
                    "plan_layers": piece.back.layers,
                    "scratch_bytes": piece.back.scratch,
                    "bytes": piece.plan.nbytes,
                    "seconds": time.monotonic() - start,
                    "Layers": _layers(piece.back),
                }
            )
        types = tuple(form.type for form in parts.forms)
        sizes = tuple(piece.plan.nbytes for piece in made)
        contents = Contents(types, sizes, parts.pieces, parts.crossing)
        found = interface(contents, [piece.back.found for piece in made])
        check_io(job.name, job.inputs, job.outputs, found, "the plan")
        Path(job.plan).write_bytes(packed(contents, [piece.plan for piece in made]))
        told = zip(reports, contents.runs, strict=True)
        _write_layers(job, json.dumps({"Pieces": [{**one, "runs": runs} for one, runs in told]}))
        _, between = layout(parts.pieces, parts.crossing)
        return {
            "layers": sum(piece.built.layers for piece in made),
            "plan_layers": sum(piece.back.layers for piece in made),
            "scratch_bytes": max(piece.back.scratch for piece in made) + between,
            "pieces": len(parts.pieces),
            "plans": len(made),
        }

    def _piece(self, job: Job, title: str, form: Form) -> _Made:
        """Build a piece with the strictest pins that leave its weights as they are.

        Which these are is told in the log if they are not the first.
        """
        from eagle_chain.engines.precision import PINS, best, converts

        found: dict[str, _Made] = {}
        failure: InputError | None = None
        for pins in PINS if form.half_products else [""]:
            try:
                built = self._built(job, title, form.inputs, form.outputs, form, pins)
                back = self._read_back(title, built.plan, form.inputs, form.outputs)
            except _UnbuildableError as error:
                failure = failure or error
                continue
            found[pins] = _Made(pins, built, back)
            if not converts(back.scratch, form.inputs):
                break
        if not found:
            assert failure is not None, "a piece is built at least once"
            raise failure
        scratches = {pins: piece.back.scratch for pins, piece in found.items()}
        chosen = best(scratches)
        if len(found) > 1 or failure:
            sizes = ", ".join(f"{pins} {size:,}" for pins, size in scratches.items())
            self.send({"log": f"{title}: built with pins {chosen!r}; bytes of scratch: {sizes}"})
        return found[chosen]

    def _built(
        self,
        job: Job,
        title: str,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        form: Form | None = None,
        pins: str = "",
    ) -> _Built:
        """Compile a graph, or a piece of it."""
        network, parser = self._network(job, title, form)
        found = _network_io(self.flavour.trt, network)
        check_io(title, inputs, outputs, found, "the parsed network")
        config = self._config(network, form, pins)
        self.log.errors.clear()
        serialized = self.builder.build_serialized_network(network, config)
        if serialized is None:
            raise _UnbuildableError(f"{title}: TensorRT cannot build it: {self.log.last_errors()}")
        self._save_timing_cache(config)
        del parser
        return _Built(memoryview(serialized), network.num_layers)

    def _note(self, text: str) -> None:
        self.said.append(text)
        self.send({"log": text})

    def _network(self, job: Job, title: str, form: Form | None) -> tuple[Any, Any]:
        """Parse the graph, or a piece; the parser owns what the network refers to."""
        trt, flavour = self.flavour.trt, self.flavour
        kind = "STRONGLY_TYPED" if flavour.strongly_typed else "EXPLICIT_BATCH"
        network = self.builder.create_network(
            1 << int(getattr(trt.NetworkDefinitionCreationFlag, kind))
        )
        parser = trt.OnnxParser(network, self.log)
        if form is None:
            parsed = parser.parse_from_file(job.graph)
        else:
            parsed = parser.parse(form.model, job.graph)  # beside it lie baked weights
        if not parsed:
            raise InputError(
                f"{title}: TensorRT {flavour.version} cannot read the graph: "
                + _parser_errors(job, parser, form)
            )
        linear = 1 << int(trt.TensorFormat.LINEAR)
        for i in range(network.num_inputs):
            network.get_input(i).allowed_formats = linear
        for i in range(network.num_outputs):
            network.get_output(i).allowed_formats = linear
        return network, parser

    def _config(self, network: Any, form: Form | None, pins: str) -> Any:
        trt, request, flavour = self.flavour.trt, self.request, self.flavour
        config = self.builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)  # the recurrence is fp32, and means it
        level = request.level
        if level is None and not flavour.strongly_typed:
            level = WEAK_LEVEL
        if level is not None:
            config.builder_optimization_level = level
        if request.workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, request.workspace)
        if flavour.ahead_of_time:
            config.num_compute_capabilities = len(request.compute_capabilities)
            for i, capability in enumerate(request.compute_capabilities):
                known = getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}")
                config.set_compute_capability(known, i)
        else:
            config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
            self._load_timing_cache(config)
        if form is not None:
            self._weakly_typed(config, network, form, pins)
        if hasattr(trt, "IProgressMonitor"):
            self._monitor = _monitor(trt, self.send)
            config.progress_monitor = self._monitor
        return config

    def _weakly_typed(self, config: Any, network: Any, form: Form, pins: str) -> None:
        """Let 8.6 use fp16 in a half piece; a single piece has nothing else than fp32."""
        from eagle_chain.engines.precision import PINS

        trt = self.flavour.trt
        config.set_tactic_sources(sum(1 << int(getattr(trt.TacticSource, s)) for s in TACTICS_8))
        if form.type == HALF:
            config.set_flag(trt.BuilderFlag.FP16)
            config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
        if pins:
            PINS[pins](trt, network)

    def _load_timing_cache(self, config: Any) -> None:
        """Give a config the timings of this process, which begin as those of the file."""
        self.log.errors.clear()
        if self._timings is not None:
            config.set_timing_cache(self._timings, ignore_mismatch=False)
            return
        path = self.request.timing_cache
        stored = b""
        if path and os.path.lexists(path):
            try:
                stored = read_plain(path, LARGEST_CACHE)
            except OSError as error:
                self.send({"warning": f"{path}: cannot be read ({error.strerror}); ignored"})
        self._timings = config.create_timing_cache(stored)
        if self._timings is None or not config.set_timing_cache(
            self._timings, ignore_mismatch=False
        ):
            self.send({"warning": f"{path}: not a timing cache of this TensorRT and GPU; ignored"})
            self._timings = config.create_timing_cache(b"")
            config.set_timing_cache(self._timings, ignore_mismatch=False)

    def _save_timing_cache(self, config: Any) -> None:
        """Keep what was measured, whatever becomes of the jobs still to come."""
        path = self.request.timing_cache
        cache = None if path is None or self.flavour.ahead_of_time else config.get_timing_cache()
        if path is None or cache is None:
            return
        temporary = f"{path}.partial"  # of a killed process: overwritten by the next
        Path(temporary).write_bytes(memoryview(cache.serialize()))
        os.replace(temporary, path)

    def _read_back(
        self,
        title: str,
        plan: memoryview,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
    ) -> _Back:
        """Load a plan as a runtime would, check its I/O, and ask TensorRT's inspector."""
        trt = self.flavour.trt
        self.log.errors.clear()
        engine = trt.Runtime(self.log).deserialize_cuda_engine(plan)
        if engine is None:
            raise InputError(f"{title}: the new plan does not load: {self.log.last_errors()}")
        found = engine_io(trt, engine)
        check_io(title, inputs, outputs, found, "the plan")
        inspector = engine.create_engine_inspector()
        text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
        return _Back(found, scratch_bytes(engine), engine.num_layers, text)


class _UnbuildableError(InputError):
    """TensorRT finds no plan for a network."""


@dataclass(frozen=True)
class _Built:
    """A new plan."""

    plan: memoryview
    layers: int  # of the network


@dataclass(frozen=True)
class _Back:
    """A plan as it is once it is loaded again."""

    found: IO
    scratch: int  # bytes
    layers: int
    inspected: str  # the inspector's report, nearly JSON


@dataclass(frozen=True)
class _Made:
    """A piece that is compiled, and the pins with which it is."""

    pins: str
    built: _Built
    back: _Back

    @property
    def plan(self) -> memoryview:
        return self.built.plan


def _layers(back: _Back) -> Any:
    """The layers of a report; none if it is no JSON: TensorRT escapes nothing."""
    with suppress(ValueError, AttributeError, RecursionError):
        return json.loads(back.inspected, strict=False).get("Layers", [])
    return []


def _write_layers(job: Job, text: str) -> None:
    Path(job.plan).with_suffix(LAYERS).write_text(text, encoding="utf-8")


def check_io(
    engine: str,
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    found: IO,
    what: str,
) -> None:
    """Compare names, dtypes and shapes with the spec; all differences in one `InputError`."""
    faults = []
    for kind, wanted, got in (("input", inputs, found[0]), ("output", outputs, found[1])):
        names = {t.name: t for t in wanted}
        faults += [f"lacks the {kind} {name}" for name in names.keys() - got.keys()]
        faults += [f"has the {kind} {name} of its own" for name in got.keys() - names.keys()]
        faults += [
            f"{name} is {got[name].dtype} {list(got[name].shape)}, "
            f"expected {names[name].dtype} {list(names[name].shape)}"
            for name in names.keys() & got.keys()
            if names[name] != got[name]
        ]
    if faults:
        raise InputError(f"{engine}: {what} {'; '.join(sorted(faults))}")


def engine_io(trt: Any, engine: Any) -> IO:
    """Inputs and outputs of an engine by name; a format other than dense shows in the dtype."""
    names = dtype_names(trt)
    found: IO = ({}, {})
    for name in (engine.get_tensor_name(i) for i in range(engine.num_io_tensors)):
        dtype = names[engine.get_tensor_dtype(name)]
        if engine.get_tensor_format(name) != trt.TensorFormat.LINEAR:
            dtype += f" in the format {engine.get_tensor_format(name).name}"
        shape = tuple(engine.get_tensor_shape(name))
        side = engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT
        found[side][name] = TensorSpec(name, dtype, shape)
    return found


def scratch_bytes(engine: Any) -> int:
    """Device memory that an execution context needs while it runs."""
    size = getattr(engine, "device_memory_size_v2", None)
    return int(engine.device_memory_size if size is None else size)


def _parser_errors(job: Job, parser: Any, form: Form | None) -> str:
    """The parser's errors with the nodes they are about."""
    import onnx

    if form is None:
        nodes = onnx.load(job.graph, load_external_data=False).graph.node
    else:
        nodes = onnx.load_from_string(form.model).graph.node
    texts = []
    for error in (parser.get_error(i) for i in range(parser.num_errors)):
        index = error.node()
        where = f"{nodes[index].op_type} (node {index}): " if 0 <= index < len(nodes) else ""
        texts.append(f"{where}{error.desc()}")
    return "; ".join(dict.fromkeys(texts))


def _network_io(trt: Any, network: Any) -> IO:
    names = dtype_names(trt)

    def specs(count: int, get: Callable[[int], Any]) -> dict[str, TensorSpec]:
        tensors = (get(i) for i in range(count))
        return {t.name: TensorSpec(t.name, names[t.dtype], tuple(t.shape)) for t in tensors}

    return (
        specs(network.num_inputs, network.get_input),
        specs(network.num_outputs, network.get_output),
    )


def _monitor(trt: Any, send: Send) -> Any:
    """A progress monitor that reports phases; TensorRT calls it from several threads."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.steps: dict[str, int] = {}
            self.sent = 0.0

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps
            self.show(phase, 0)

        def step_complete(self, phase: str, step: int) -> bool:
            self.show(phase, step + 1)
            return True

        def phase_finish(self, phase: str) -> None:
            pass

        def show(self, phase: str, done: int) -> None:
            if time.monotonic() - self.sent >= SECONDS_BETWEEN_MESSAGES:
                self.sent = time.monotonic()
                send({"phase": phase, "done": done, "total": self.steps[phase]})

    return Monitor()


def _die_with(parent: int) -> None:
    """End this process when the one that started it is gone."""
    with suppress(OSError, AttributeError):  # Linux does it at once, inside a call of TensorRT too
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main(request_path: str, descriptor: str) -> int:
    """Serve one request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us decides
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    lock = threading.Lock()
    with open(int(descriptor), "w", encoding="utf-8", buffering=1) as pipe:

        def send(message: dict[str, Any]) -> None:
            with lock:
                pipe.write(json.dumps(message) + "\n")

        try:
            request = Request.loads(Path(request_path).read_text(encoding="utf-8"))
            flavour = load_flavour(request.flavour)
            if not flavour.ahead_of_time:
                cuda_runtime().cudaSetDevice(request.device)
            compiler = Compiler(request, flavour, send)
            for job in request.jobs:
                send({"report": compiler.compile(job)})
        except InputError as error:
            send({"error": str(error)})
            return 2
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            send({"error": f"{where}{error.strerror}"})
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
