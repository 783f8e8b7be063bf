"""TensorRT sessions: plans over device buffers, one stream, addresses settled once.

An engine is loaded once; every binding has an execution context of its own, so any number of chains
share it. Contexts of one memory run in the order of its stream, hence they share their scratch
space as well.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from eagle_chain.engines.compiler import check_io, engine_io, scratch_bytes
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.flavours import Flavour, load_flavour, logger
from eagle_chain.engines.gpu import device_info
from eagle_chain.engines.manifest import Manifest, Plan
from eagle_chain.engines.memory import check_load
from eagle_chain.engines.plan_file import IO, DamagedError, interface, layout, unpacked
from eagle_chain.engines.plans import build_command, check_plan, find_plans, machine
from eagle_chain.engines.spec import ALIGNMENT, EngineSpec
from eagle_chain.runtime.buffers import Buffer
from eagle_chain.runtime.cuda import CudaBuffer, CudaError, CudaMemory, Replay
from eagle_chain.runtime.session import Session, check_tensors
from eagle_chain.runtime.weights import upload


class Step(NamedTuple):
    """One run of a plan: which, and the engine's tensor for each of the plan's own."""

    plan: int
    names: Mapping[str, str]


class TrtEngine:
    """An engine in device memory, one plan or several in turn, and the weights bound to it.

    Args:
        flavour: The library that built it.
        path: The plan, or for a TensorRT that is not strongly typed the file of its pieces.
        plan: Its entry in the manifest.
        spec: What the bundle says it takes and gives.
        command: What builds it again, for errors.

    Raises:
        InputError: The file is not the one that was built, does not load, or has another interface.
    """

    def __init__(
        self, flavour: Flavour, path: Path, plan: Plan, spec: EngineSpec, command: str
    ) -> None:
        trt = flavour.trt
        check_plan(path, plan, command)
        self.flavour = flavour
        self.spec = spec
        self.log = logger(trt, lambda text: None)
        self._runtime = trt.Runtime(self.log)
        self.plans: list[Any] = []
        self.steps: list[Step] = []
        self.between: dict[str, int] = {}  # tensors between steps: where each lies in their block
        self._between_bytes = 0
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if flavour.strongly_typed:
                found = self._load_whole(path, data, command)
            else:
                found = self._load_pieces(path, data, command)
        known = {t.name for t in spec.all_inputs}
        self.weights = tuple(t for name, t in found[0].items() if name not in known)
        inputs = (*spec.all_inputs, *(self.weights if plan.weights == "bound" else ()))
        check_io(str(path), inputs, spec.all_outputs, found, "the plan")
        self.bound: dict[str, CudaBuffer] = {}  # by name; filled by whoever uploads `weights`

    def _load_whole(self, path: Path, data: Any, command: str) -> IO:
        found = self._load(path, data, command)
        self.steps.append(Step(0, {name: name for side in found for name in side}))
        return found

    def _load_pieces(self, path: Path, data: Any, command: str) -> IO:
        with memoryview(data) as view, ExitStack() as held:
            try:
                contents, spans = unpacked(view)
                for span in spans:
                    held.enter_context(span)  # the file stays mapped while anything refers to it
                ios = [self._load(path, bytes(span), command) for span in spans]
                found = interface(contents, ios)
            except DamagedError as error:
                raise InputError(f"{path}: {error}; build it again: {command} --force") from None
        self.steps += [Step(piece.form, piece.names()) for piece in contents.pieces]
        self.between, self._between_bytes = layout(contents.pieces, contents.crossing)
        return found

    def _load(self, path: Path, data: Any, command: str) -> IO:
        """Load one more plan; returns its inputs and outputs."""
        self.log.errors.clear()
        engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise InputError(
                f"{path}: TensorRT {self.flavour.version} cannot load it: "
                f"{self.log.last_errors()}; build it again: {command}"
            )
        self.plans.append(engine)
        return engine_io(self.flavour.trt, engine)

    @property
    def scratch_bytes(self) -> int:
        """Device memory that a binding uses while it runs, tensors between steps included."""
        return self.between_at + self._between_bytes

    @property
    def between_at(self) -> int:
        """Where the tensors between steps begin in that memory, behind the scratch of any plan."""
        largest = max(scratch_bytes(plan) for plan in self.plans)
        return -(-largest // ALIGNMENT) * ALIGNMENT

    def aliases(self) -> dict[str, str]:
        """Output -> the input whose buffer it must be given (KV caches that TensorRT updates)."""
        ask = getattr(self.plans[0], "get_aliased_input_tensor", None)
        if ask is None or len(self.plans) > 1:
            return {}
        found = ((pair.output, ask(pair.output)) for pair in self.spec.states)
        return {output: source for output, source in found if source}

    def context(self, plan: int, scratch: CudaBuffer) -> Any:
        """A new execution context of a plan that uses this scratch memory."""
        trt, engine = self.flavour.trt, self.plans[plan]
        self.log.errors.clear()
        strategies = getattr(trt, "ExecutionContextAllocationStrategy", None)
        if strategies is None:
            context = engine.create_execution_context_without_device_memory()
        else:
            context = engine.create_execution_context(strategies.USER_MANAGED)
        if context is None:
            raise InputError(
                f"{self.spec.name}: TensorRT cannot make an execution context, which needs memory "
                f"on the GPU: {self.log.last_errors()}"
            )
        if hasattr(context, "set_device_memory"):
            context.set_device_memory(scratch.address, scratch.spec.nbytes)
        else:
            context.device_memory = scratch.address
        return context


class TrtSession:
    """An engine on the stream of one memory.

    Args:
        engine: May be shared by sessions on other streams.
        memory: Where the buffers live, and the stream that runs the engine.
        graphs: Replay a binding as a CUDA graph from its second run on.
    """

    def __init__(self, engine: TrtEngine, memory: CudaMemory, *, graphs: bool = True) -> None:
        self.engine = engine
        self.spec = engine.spec
        self.memory = memory
        self.graphs = graphs

    def bind(self, tensors: Mapping[str, Buffer]) -> TrtBinding:
        """Make an execution context and give it every address."""
        check_tensors(self.spec, self.memory, tensors)
        for output, source in self.engine.aliases().items():
            if tensors[output].address != tensors[source].address:
                raise InputError(
                    f"{self.spec.name}: {output} is {source} updated in place: bind one buffer"
                )
        return TrtBinding(self, tensors)

    def on(self, memory: CudaMemory) -> TrtSession:
        """The same engine on another stream, for a chain that runs beside this one."""
        return TrtSession(self.engine, memory, graphs=self.graphs)


class TrtBinding:
    """Execution contexts with all their addresses; keeps buffers and weights alive.

    A plan that runs several times has one context, which gets the addresses of each run anew. They
    repeat with every call, so a CUDA graph has all of them.

    TensorRT wants addresses that are multiples of 256. A tensor elsewhere, like one id among the
    rows of the next call, gets a buffer of its own and is copied to or from it with every run.
    """

    def __init__(self, session: TrtSession, tensors: Mapping[str, Buffer]) -> None:
        engine, memory = session.engine, session.memory
        self._engine = engine
        self._memory = memory
        self._held: dict[str, Buffer] = {**engine.bound, **tensors}
        self._scratch = memory.scratch(engine.scratch_bytes)
        memory.cuda.activate()
        self._contexts: dict[int, Any] = {}  # by plan
        self._before: list[tuple[CudaBuffer, Buffer]] = []  # copies: target, source
        self._after: list[tuple[Buffer, CudaBuffer]] = []
        written = {tensor.name for tensor in session.spec.all_outputs}
        between = self._scratch.address + engine.between_at
        addresses = {name: between + offset for name, offset in engine.between.items()}
        for name, buffer in self._held.items():
            addresses[name] = buffer.address
            if buffer.address % ALIGNMENT:
                own = memory.allocate(buffer.spec)
                addresses[name] = own.address
                if name in written:
                    self._after.append((buffer, own))
                else:
                    self._before.append((own, buffer))
        self._steps = [
            (step.plan, [(own, addresses[name]) for own, name in step.names.items()])
            for step in engine.steps
        ]
        self._set: dict[int, int] = {}  # plan -> the step whose addresses its context has
        for number in range(len(self._steps)):
            self._address(number)
        self._replay = Replay(memory) if session.graphs else None

    def run(self) -> None:
        """Queue the engine on the memory's stream; nothing else comes between its steps."""
        with self._memory.lock:  # they leave tensors for each other in shared scratch memory
            if self._replay is None:
                self._enqueue()
            else:
                self._replay.run(None, self._enqueue)

    def run_plan(self, plan: int) -> None:
        """Queue only the steps of one plan, plainly: for measuring."""
        self._memory.cuda.activate()
        for number, (used, _) in enumerate(self._steps):
            if used == plan:
                self._run_step(number)

    def _enqueue(self) -> None:
        self._memory.cuda.activate()
        for own, source in self._before:
            own.copy_from(source)
        for number in range(len(self._steps)):
            self._run_step(number)
        for target, own in self._after:
            target.copy_from(own)

    def _run_step(self, number: int) -> None:
        plan, _ = self._steps[number]
        if self._set[plan] != number:
            self._address(number)
        if not self._contexts[plan].execute_async_v3(self._memory.stream):
            raise CudaError(
                f"{self._engine.spec.name}: TensorRT did not run: {self._engine.log.last_errors()}"
            )

    def _address(self, number: int) -> None:
        """Give the context of a step's plan the addresses of that step."""
        plan, tensors = self._steps[number]
        if plan not in self._contexts:
            self._contexts[plan] = self._engine.context(plan, self._scratch)
        for own, address in tensors:
            if not self._contexts[plan].set_tensor_address(own, address):
                name = self._engine.steps[number].names[own]
                raise InputError(
                    f"{self._engine.spec.name}: TensorRT refuses the address of {name}: "
                    f"{self._engine.log.last_errors()}"
                )
        self._set[plan] = number


def open_sessions(
    folder: Path, manifest: Manifest, backend: str, *, device: int = 0, graphs: bool = True
) -> tuple[CudaMemory, dict[str, Session]]:
    """Load all plans of a bundle for this machine and upload the weights they share.

    Args:
        folder: The bundle.
        manifest: Its manifest.
        backend: tensorrt or tensorrt-rtx.
        device: Which GPU.
        graphs: See `TrtSession`.

    Raises:
        InputError: TensorRT or a GPU is missing, there are no plans for them, a plan was changed,
            or the weights do not fit.
    """
    flavour = load_flavour(backend)
    memory = CudaMemory(device)
    free, target = memory.free_bytes(), machine(flavour, memory.info)
    plans = find_plans(folder, manifest, target)
    engines = {
        name: TrtEngine(
            flavour, path, plan, manifest.specs[name], build_command(folder, target, plan)
        )
        for name, (path, plan) in plans.items()
    }
    wanted = {spec for engine in engines.values() for spec in engine.weights}
    check_load(
        manifest,
        sum(spec.nbytes for spec in wanted),
        free,
        memory.info.name,
        backend,
        quantised=flavour.strongly_typed,
    )
    uploaded = upload(folder, manifest.weights, sorted(wanted, key=lambda t: t.name), memory)
    for engine in engines.values():
        engine.bound = {spec.name: uploaded[spec] for spec in engine.weights}
    memory.scratch(max(engine.scratch_bytes for engine in engines.values()))
    return memory, {n: TrtSession(e, memory, graphs=graphs) for n, e in engines.items()}


def serves(manifest: Manifest, backend: str) -> bool:
    """Whether TensorRT and a GPU are here, and the bundle has plans for them."""
    if not any(plan.flavour == backend for plan in manifest.plans.values()):
        return False
    try:
        target = machine(load_flavour(backend), device_info())
    except InputError:
        return False
    return any(target.runs(plan) for plan in manifest.plans.values())
