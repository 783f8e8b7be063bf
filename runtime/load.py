"""From a bundle on disk to a chain: which sessions, which drafter, which defaults."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.flavours import FLAVOURS, load_flavour
from eagle_chain.engines.gpu import NoDevice, device_info
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.plans import find_plans, machine
from eagle_chain.engines.spec import Options
from eagle_chain.engines.stop_ids import stop_token_ids
from eagle_chain.runtime import ort_cuda, trt
from eagle_chain.runtime.buffers import HostMemory, Memory
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.capacity import Larger, Rung
from eagle_chain.runtime.chain import Chain, Rollback
from eagle_chain.runtime.drafters import (
    DRAFT_ENGINES,
    Drafter,
    DraftKV,
    EagleDrafter,
    NoDrafter,
)
from eagle_chain.runtime.ngram import NgramDrafter
from eagle_chain.runtime.ort import OrtSession
from eagle_chain.runtime.ort_bound import open_bound
from eagle_chain.runtime.prefill import Follower, Prefill
from eagle_chain.runtime.request import Limits
from eagle_chain.runtime.session import Session

Backend = Literal["auto", "onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx"]
DrafterName = Literal["eagle", "mtp", "ngram", "none"]
BACKENDS: tuple[Backend, ...] = (
    "auto",
    "onnxruntime-cpu",
    "onnxruntime-cuda",
    "tensorrt",
    "tensorrt-rtx",
)
MOST_THREADS = 1024  # ONNX Runtime starts whatever it is told to, until the machine stands still
DRAFTERS: tuple[DrafterName, ...] = ("eagle", "mtp", "ngram", "none")  # the best first
DRAFTER_HELP = (
    "who guesses: eagle, the draft; mtp, the trunk's own head; ngram, what followed the last time "
    "the text read like this; none decodes plainly"
)
WITH_KV: tuple[DrafterName, ...] = ("eagle", "mtp")  # drafters that know `draft_kv`


def add_backend_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command takes that runs a bundle."""
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="what runs it; onnxruntime-cuda is made for the profiles ort-fused and ort-cuda, the "
        "tensorrt ones need the plans of `build` (auto: plans that suit this GPU, else the ONNX "
        "Runtime of the profile)",
    )
    parser.add_argument("--threads", type=int, help="CPU threads (all)")


@dataclass(frozen=True)
class Engines:
    """The loaded engines of a bundle; any number of chains may run on them."""

    manifest: Manifest
    backend: str
    memory: Memory
    sessions: dict[str, Session]
    stop_ids: frozenset[int]  # where a text or a turn ends, see engines/stop_ids.py

    @property
    def drafters(self) -> tuple[DrafterName, ...]:
        """The drafters that this bundle has."""
        return bundle_drafters(self.manifest)

    def chain(
        self,
        *,
        drafter: DrafterName | None = None,
        draft_kv: DraftKV = "kept",
        rollback: Rollback = "log",
        ahead: bool | None = None,
    ) -> Chain:
        """Make a chain with a cache of its own.

        Args:
            drafter: One of `drafters`; None is the best that has weights, see `chosen_drafter`.
            draft_kv: "kept" over the whole sequence, or "scratch" per round.
            rollback: "log" or "replay", see `Chain`.
            ahead: Whether the device decides, see `Chain`.

        Raises:
            InputError: There is no such drafter or option, or the bundle does not have it.
        """
        manifest = self.manifest
        first, *larger = manifest.options.capacities

        def parts(capacity: int) -> tuple[Session, Cache, Drafter, Prefill | None]:
            sessions = self.of_capacity(capacity)
            trunk = sessions["trunk"]
            cache = Cache(trunk.spec, self.memory, capacity, engines=self.identity)
            guesses = self._drafter(sessions, cache, drafter, draft_kv)
            return trunk, cache, guesses, _prefill(sessions, cache, guesses)

        def rung(capacity: int) -> Rung:
            with self.memory.lock:
                return Rung(*parts(capacity))

        with self.memory.lock:
            trunk, cache, guesses, prefill = parts(first)
            return Chain(
                trunk,
                cache,
                guesses,
                vocab_size=manifest.trunk.vocab_size,
                stop_ids=self.stop_ids,
                rollback=rollback,
                ahead=ahead,
                prefill=prefill,
                larger=[
                    Larger(size, manifest.options.at(size).prefill, partial(rung, size))
                    for size in larger
                ],
            )

    @property
    def identity(self) -> Hashable:
        """What two chains must have in common to exchange snapshots."""
        return identity(self.manifest, self.backend)

    def of_capacity(self, capacity: int) -> dict[str, Session]:
        """The sessions of one capacity by their plain names, with those that serve any."""
        return of_capacity(self.sessions, self.manifest.options, capacity)

    def _drafter(
        self,
        sessions: Mapping[str, Session],
        cache: Cache,
        name: DrafterName | None,
        draft_kv: DraftKV,
    ) -> Drafter:
        name = chosen_drafter(self.manifest, name)
        if name in DRAFT_ENGINES:
            return engine_drafter(name, sessions, cache, draft_kv)
        return NgramDrafter(cache) if name == "ngram" else NoDrafter()


def of_capacity(
    sessions: Mapping[str, Session], options: Options, capacity: int
) -> dict[str, Session]:
    """Sessions of one capacity by their plain names, with those that serve any."""
    specs = {name: session.spec for name, session in sessions.items()}
    return {plain: sessions[name] for plain, name in options.engines_at(capacity, specs).items()}


def engine_drafter(
    name: str, sessions: Mapping[str, Session], cache: Cache, draft_kv: DraftKV = "kept"
) -> EagleDrafter:
    """One of `DRAFT_ENGINES` over the sessions of one capacity."""
    encoder, draft, step = DRAFT_ENGINES[name]
    first = sessions[encoder] if encoder else None
    return EagleDrafter(cache, first, sessions[draft], sessions[step], draft_kv)


def bundle_drafters(manifest: Manifest) -> tuple[DrafterName, ...]:
    """The drafters that a bundle has, the best first."""
    missing = {"eagle": manifest.draft is None, "mtp": not manifest.mtp}
    return tuple(name for name in DRAFTERS if not missing.get(name))


def chosen_drafter(manifest: Manifest, name: DrafterName | None) -> DrafterName:
    """The drafter of that name; of none, the first that has weights in the bundle.

    Raises:
        InputError: There is no such drafter, or the bundle does not have it.
    """
    held = bundle_drafters(manifest)
    name = name or next((name for name in WITH_KV if name in held), "none")
    if name not in DRAFTERS:
        raise InputError(f"drafter is {name!r}, expected one of {', '.join(DRAFTERS)}")
    if name not in held:
        lacks = {"eagle": "no EAGLE draft", "mtp": "no MTP head"}[name]
        raise InputError(
            f"this bundle holds {lacks}: export it with one, or use one of the drafters "
            f"{', '.join(held)}"
        )
    return name


def identity(manifest: Manifest, backend: str) -> Hashable:
    """What a sequence was computed with: the backend, the graphs and the weights."""
    weights = tuple(sorted((name, file.sha256) for name, file in manifest.files.items()))
    return (backend, tuple(sorted(manifest.graphs.items())), weights)


def bundle_stop_ids(folder: Path, manifest: Manifest) -> frozenset[int]:
    """Ends of text of the trunk's config and those that the tokenizer's files name."""
    return stop_token_ids(folder) | set(manifest.trunk.eos_ids)


def limits(manifest: Manifest) -> Limits:
    """What a chain of a bundle can be asked for."""
    options = manifest.options
    return Limits(options.width, options.capacity, manifest.trunk.vocab_size, options.sampling)


def _prefill(sessions: Mapping[str, Session], cache: Cache, drafter: Drafter) -> Prefill | None:
    """Wide calls, if the bundle has engines for them."""
    trunk = sessions.get("prefill")
    if trunk is None:
        return None
    follower = None
    if isinstance(drafter, EagleDrafter) and not drafter.scratch:
        engine = "draft_prefill" if drafter.encoded else "mtp_prefill"
        follower = Follower(sessions[engine], drafter.kv)
    return Prefill(trunk, cache, follower)


def load(
    bundle: str | os.PathLike[str],
    backend: Backend = "auto",
    *,
    drafter: DrafterName | None = None,
    draft_kv: DraftKV = "kept",
    rollback: Rollback = "log",
    threads: int | None = None,
) -> Chain:
    """Load a bundle and make a chain on it.

    Args:
        bundle: The folder that `eagle-chain export` wrote.
        backend: "auto" takes plans that suit this GPU, else the ONNX Runtime of the profile.
        drafter: As in `Engines.chain`, like the next two.
        draft_kv: See there.
        rollback: See there.
        threads: CPU threads of one operator; None leaves it to the backend.

    Raises:
        InputError: The bundle is not whole, does not suit the backend, or an option does not exist.
    """
    engines = open_engines(bundle, backend, threads=threads)
    return engines.chain(drafter=drafter, draft_kv=draft_kv, rollback=rollback)


def open_engines(
    bundle: str | os.PathLike[str],
    backend: Backend = "auto",
    *,
    threads: int | None = None,
    bound: bool = False,
) -> Engines:
    """Load the engines of a bundle once, for several chains; arguments and errors as in `load`.

    `bound` is for ONNX Runtime on a CPU: see `open_bound`.
    """
    check_threads(threads)
    folder = Path(bundle)
    manifest = Manifest.load(folder)
    backend = backend_for(folder, manifest, backend)
    stop_ids = bundle_stop_ids(folder, manifest)
    if backend in FLAVOURS:
        return Engines(manifest, backend, *trt.open_sessions(folder, manifest, backend), stop_ids)
    if backend == "onnxruntime-cuda":
        with _naming_the_way_out(folder, manifest):
            return Engines(manifest, backend, *ort_cuda.open_sessions(folder, manifest), stop_ids)
    if bound:
        return Engines(manifest, backend, *open_bound(folder, manifest, threads), stop_ids)
    memory = HostMemory()
    sessions: dict[str, Session] = {
        name: OrtSession(folder / f"{name}.onnx", spec, memory, manifest.files, threads=threads)
        for name, spec in manifest.specs.items()
    }
    return Engines(manifest, backend, memory, sessions, stop_ids)


@contextmanager
def _naming_the_way_out(folder: Path, manifest: Manifest) -> Iterator[None]:
    """Say, where there is no GPU, what somebody with a bundle for ONNX Runtime on one can do."""
    options = manifest.options
    way_out = "--backend onnxruntime-cpu runs this bundle"
    if options.for_cuda or options.dtype == "bf16":
        way_out = (
            f"{folder} ({options.dtype}, profile {options.profile}) is for one: for the CPU "
            "export it again with --profile portable"
            f"{' --dtype fp32' if options.dtype == 'bf16' else ''}"
        )
    try:
        yield
    except NoDevice as error:
        raise InputError(f"{error}; {way_out}") from None


def check_threads(threads: int | None) -> None:
    """Refuse a number of CPU threads that no machine should be told to start."""
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise InputError(f"threads is {threads}, expected 1 to {MOST_THREADS}")


def backend_for(folder: Path, manifest: Manifest, backend: Backend) -> Backend:
    """The backend that a name stands for, "auto" as well; whether it can run here shows later.

    Raises:
        InputError: There is no such backend, or it has no kernels for the bundle.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = _best(manifest)
    if backend == "onnxruntime-cpu" and manifest.options.dtype == "bf16":
        raise InputError(
            f"{folder}: was exported as bf16, which ONNX Runtime has no CPU kernels for; "
            "export it again with --dtype fp32, or use --backend onnxruntime-cuda on a GPU"
        )
    if backend == "onnxruntime-cpu" and manifest.options.profile == "ort-fused":
        raise InputError(
            f"{folder}: was exported for the profile ort-fused, whose kernels are for GPUs; "
            "export it again with --profile portable, or use --backend onnxruntime-cuda on a GPU"
        )
    return backend


def check_runs(folder: Path, manifest: Manifest, backend: Backend) -> None:
    """Whether `open_engines` has what it needs here, as far as that shows before it loads a thing.

    Raises:
        InputError: There is no GPU, no TensorRT, or no plan for them.
        ModuleNotFoundError: There is no ONNX Runtime.
    """
    if backend in FLAVOURS:
        find_plans(folder, manifest, machine(load_flavour(backend), device_info()))
        return
    if backend == "onnxruntime-cuda":
        with _naming_the_way_out(folder, manifest):
            device_info()
    importlib.import_module("onnxruntime")


def runnable(folder: Path, manifest: Manifest, backend: Backend) -> Backend:
    """`backend_for` and `check_runs`, for commands that have work to do before they load."""
    backend = backend_for(folder, manifest, backend)
    check_runs(folder, manifest, backend)
    return backend


def _best(manifest: Manifest) -> Backend:
    """Plans that this machine can run, else the ONNX Runtime that the profile is for."""
    if trt.serves(manifest, "tensorrt"):
        return "tensorrt"
    if trt.serves(manifest, "tensorrt-rtx"):
        return "tensorrt-rtx"
    return onnxruntime_for(manifest.options)


def onnxruntime_for(options: Options) -> Backend:
    """The ONNX Runtime that a profile is for."""
    return "onnxruntime-cuda" if options.for_cuda else "onnxruntime-cpu"
