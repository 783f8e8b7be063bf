"""The command `build`: the graphs of a bundle become TensorRT plans inside it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from eagle_chain.engines.bound import as_exported
from eagle_chain.engines.compiler import Job, Request
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.flavours import (
    FLAVOURS,
    RTX,
    TENSORRT,
    Flavour,
    is_installed,
    load_flavour,
)
from eagle_chain.engines.gpu import device_info
from eagle_chain.engines.graphs import baked_weights, bound_graph, load_graph
from eagle_chain.engines.integrity import file_hash
from eagle_chain.engines.manifest import Manifest, Plan
from eagle_chain.engines.memory import Estimate, chain_bytes, check_room, estimate
from eagle_chain.engines.outcome import Outcome
from eagle_chain.engines.plans import PLANS, Target, machine, source_hash
from eagle_chain.engines.progress import human_bytes
from eagle_chain.engines.savings import savings
from eagle_chain.engines.spec import EngineSpec, Options, TensorSpec
from eagle_chain.engines.staging import locked, staged
from eagle_chain.engines.worker import compile_all

if TYPE_CHECKING:
    import onnx

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kMG]B)?")
_UNITS = {None: 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `eagle-chain build` takes."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="folder made by export")
    parser.add_argument(
        "--backend",
        choices=FLAVOURS,
        default=TENSORRT,
        help="tensorrt builds for the GPU of this machine, tensorrt-rtx on any machine for named "
        "compute capabilities (tensorrt)",
    )
    parser.add_argument(
        "--compute-capability",
        nargs="+",
        default=[],
        metavar="X.Y",
        help="tensorrt-rtx only: what to build for, for example 8.6 8.9 12.0",
    )
    parser.add_argument(
        "--device", type=int, default=0, help="tensorrt only: which GPU of this machine (0)"
    )
    parser.add_argument(
        "--weights",
        choices=("bound", "baked"),
        default="bound",
        help="bound: inputs of the engines, which share them; the plans are a few MB. baked: part "
        "of each plan (bound)",
    )
    parser.add_argument(
        "--level",
        type=int,
        choices=range(6),
        help="TensorRT's optimisation level, higher takes longer (TensorRT's own, 2 for 8.6)",
    )
    parser.add_argument(
        "--workspace", type=_size, metavar="SIZE", help="most scratch memory, like 2GB (no limit)"
    )
    parser.add_argument(
        "--force", action="store_true", help="build even if the plans are those of this request"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be built and what it takes, and stop"
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Build what is not built yet, put it into the bundle, and say what came of it."""
    folder: Path = arguments.bundle
    if arguments.dry_run and not is_installed(arguments.backend):
        return _dry_run_elsewhere(folder, arguments)
    flavour = load_flavour(arguments.backend)
    manifest = Manifest.load(folder)
    flavour.refuse(manifest.options)
    if arguments.weights == "baked":
        flavour.refuse_baked({weight.dtype for weight in manifest.weights.values()})
    recipe = Recipe(_target(arguments, flavour), arguments.weights, _options(arguments))
    report = {"target": asdict(recipe.target), "weights": recipe.weights, "built": False}
    if not arguments.force and built_plans(folder, manifest, recipe):
        print(f"{folder}: the plans for {recipe.target} are up to date; --force builds them again")
        return Outcome({**report, "plans": _listing(folder, manifest, recipe)})

    engines = _engines(folder, manifest, recipe.weights)
    needed = _needed(manifest, engines, recipe.weights)
    for line in _announcement(manifest, str(recipe.target), recipe.weights, needed):
        print(line, flush=True)
    device = None if flavour.ahead_of_time else arguments.device
    check_room(folder, needed, recipe.weights, device, partial(_smaller, manifest, flavour))
    report["memory"] = asdict(needed)
    if arguments.dry_run:
        print(f"would write {folder / recipe.target.folder}")
        return Outcome({**report, "plans": []})
    with locked(Path(os.path.realpath(folder))):
        manifest = _unchanged(folder, manifest)
        place, jobs = _build(folder, manifest, engines, recipe, arguments)
    plans = _listing(folder, Manifest.load(folder), recipe)
    print(f"wrote    {folder / place}")
    return Outcome({**report, "built": True, "jobs": jobs, "plans": plans})


@dataclass(frozen=True)
class Recipe:
    """What plans are built for and how."""

    target: Target
    weights: str  # bound or baked
    options: tuple[str, ...]  # of the builder, as typed

    def plan(self, manifest: Manifest, engine: str, sha256: str) -> Plan:
        """The manifest's entry for a plan made by this recipe."""
        target = self.target
        return Plan(
            sha256=sha256,
            flavour=target.flavour,
            version=target.version,
            gpu=target.gpu,
            compute_capability=" ".join(target.compute_capabilities),
            source=source_hash(manifest, engine, self.weights, target.version),
            weights=self.weights,
            options=self.options,
        )


@dataclass(frozen=True)
class Engine:
    """A graph to compile and the weights it uses."""

    model: onnx.ModelProto
    weights: list[TensorSpec]


def built_plans(folder: Path, manifest: Manifest, recipe: Recipe) -> list[str]:
    """The plan of every engine, if all are there, unchanged, and made by this recipe."""
    found = {}
    for name, plan in manifest.plans.items():
        engine = PurePosixPath(name).stem
        if engine not in manifest.specs or plan != recipe.plan(manifest, engine, plan.sha256):
            continue
        if (folder / name).is_file() and file_hash(folder / name) == plan.sha256:
            found[engine] = name
    return [found[engine] for engine in manifest.specs] if len(found) == len(manifest.specs) else []


def _engines(folder: Path, manifest: Manifest, weights: str) -> dict[str, Engine]:
    engines = {}
    for name, spec in manifest.specs.items():
        model = load_graph(folder, name)
        with as_exported(folder / f"{name}.onnx"):
            if weights == "bound":
                engines[name] = Engine(*bound_graph(model, spec, manifest.options.dtype))
            else:
                engines[name] = Engine(model, baked_weights(model, manifest))
    return engines


def _needed(manifest: Manifest, engines: dict[str, Engine], weights: str) -> Estimate:
    used = {name: engine.weights for name, engine in engines.items()}
    nodes = max(len(engine.model.graph.node) for engine in engines.values())
    states = chain_bytes(manifest.specs, manifest.options, manifest.trunk)
    return estimate(states, used, nodes, weights == "baked")


def _smaller(manifest: Manifest, flavour: Flavour, lacking: int) -> str:
    """What to export with to save so many bytes on the device."""

    def held(specs: Mapping[str, EngineSpec], options: Options) -> int:
        return chain_bytes(specs, options, manifest.trunk)

    return savings(manifest, held, lacking, quantised=flavour.strongly_typed)


def _dry_run_elsewhere(folder: Path, arguments: argparse.Namespace) -> Outcome:
    """What a build would take on a machine that has the library; this one has not."""
    manifest = Manifest.load(folder)
    needed = _needed(manifest, _engines(folder, manifest, arguments.weights), arguments.weights)
    wanted = " ".join(arguments.compute_capability)
    gpu = f"compute capability {wanted}" if wanted else "GPU unknown"
    target = f"{arguments.backend}, version unknown (not installed here), {gpu}"
    for line in _announcement(manifest, target, arguments.weights, needed):
        print(line)
    print(f"would write {folder / PLANS}/{arguments.backend}-...")
    report = {"target": None, "weights": arguments.weights, "built": False}
    return Outcome({**report, "memory": asdict(needed), "plans": []})


def _announcement(manifest: Manifest, target: str, weights: str, needed: Estimate) -> list[str]:
    return [
        f"target   {target}",
        f"engines  {', '.join(manifest.specs)}; weights {weights}",
        f"memory   {human_bytes(needed.device)} on the GPU ({human_bytes(needed.weights)} weights, "
        f"{human_bytes(needed.states)} states and outputs of a chain) and TensorRT's scratch; "
        f"about {human_bytes(needed.build_host)} here to build",
    ]


def _build(
    folder: Path,
    manifest: Manifest,
    engines: dict[str, Engine],
    recipe: Recipe,
    arguments: argparse.Namespace,
) -> tuple[str, dict[str, Any]]:
    """Compile everything into a folder that no plan is in yet; then the manifest changes over.

    The manifest is the one place that says which plans count, so that there is no moment in which
    plans and hashes do not belong together.
    """
    target = recipe.target
    _check_inside(folder)
    place, others = _places(manifest, target)
    final = Path(os.path.realpath(folder), place)
    plans = {n: p for n, p in manifest.plans.items() if str(PurePosixPath(n).parent) not in others}
    with staged(final, lambda there: None) as staging:
        jobs = tuple(
            _job(folder, staging, manifest.specs[name], engine, recipe.weights)
            for name, engine in engines.items()
        )
        request = Request(
            flavour=target.flavour,
            jobs=jobs,
            compute_capabilities=target.compute_capabilities,
            device=arguments.device,
            level=arguments.level,
            workspace=arguments.workspace,
            timing_cache=str(final.with_name(f"{Path(target.folder).name}.timing.cache")),
        )
        reports = compile_all(request, staging)
        for job in jobs:
            digest = file_hash(Path(job.plan))
            plans[f"{place}/{job.name}.plan"] = recipe.plan(manifest, job.name, digest)
            Path(staging / f".{job.name}.onnx").unlink(missing_ok=True)
    try:
        replace(manifest, plans=plans).save(folder)
    except OSError as error:
        shutil.rmtree(final, ignore_errors=True)
        raise InputError(
            f"{folder}: the manifest cannot be written ({error.strerror}); the plans are as before"
        ) from None
    for other in others:
        shutil.rmtree(folder / other, ignore_errors=True)
    return place, reports


def _job(folder: Path, staging: Path, spec: EngineSpec, engine: Engine, weights: str) -> Job:
    """What the compiler gets: a graph of the bundle, or one beside the plan with bound weights."""
    graph, inputs = folder / f"{spec.name}.onnx", spec.all_inputs
    if weights == "bound":
        graph = staging / f".{spec.name}.onnx"
        graph.write_bytes(engine.model.SerializeToString())
        inputs += tuple(engine.weights)
    path = str(Path(os.path.realpath(graph.parent), graph.name))
    return Job(spec.name, path, str(staging / f"{spec.name}.plan"), inputs, spec.all_outputs)


def _unchanged(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest as it is now that nobody else writes it: another build may have added plans."""
    now = Manifest.load(folder)
    if replace(now, plans={}) != replace(manifest, plans={}):
        raise InputError(f"{folder}: was exported again in the meantime; build it again")
    return now


def _check_inside(folder: Path) -> None:
    """Refuse a bundle whose folder of plans is a link to somewhere else, as ours never is."""
    inside, found = os.path.join(os.path.realpath(folder), PLANS), os.path.realpath(folder / PLANS)
    if found != inside:
        raise InputError(
            f"{folder / PLANS}: leads to {found}, out of the bundle, and plans are written there; "
            "remove the link"
        )


def _places(manifest: Manifest, target: Target) -> tuple[str, list[str]]:
    """The folder for new plans, and the folders of a target whose plans they replace.

    Two names take turns: the one that the manifest names may be in use until it names the other.
    """
    names = [target.folder, f"{target.folder}~"]
    used = {str(PurePosixPath(name).parent) for name in manifest.plans}
    place = next(name for name in names if name not in used or name == names[-1])
    return place, [name for name in names if name != place]


def _listing(folder: Path, manifest: Manifest, recipe: Recipe) -> list[dict[str, Any]]:
    names = built_plans(folder, manifest, recipe)
    return [{"file": name, "bytes": (folder / name).stat().st_size} for name in names]


def _target(arguments: argparse.Namespace, flavour: Flavour) -> Target:
    wanted = tuple(dict.fromkeys(arguments.compute_capability))
    if not flavour.ahead_of_time:
        if wanted:
            raise InputError(
                f"--compute-capability is for --backend {RTX}; {flavour.name} builds for the GPU "
                "of this machine"
            )
        return machine(flavour, device_info(arguments.device))
    known = flavour.capabilities
    if not wanted:
        raise InputError(
            f"--backend {RTX} needs --compute-capability, some of {', '.join(known)}: that of the "
            "GPUs that will run the plans (8.6: RTX 30, 8.9: RTX 40, 12.0: RTX 50)"
        )
    unknown = [capability for capability in wanted if capability not in known]
    if unknown:
        raise InputError(
            f"TensorRT-RTX {flavour.version} cannot build for compute capability "
            f"{', '.join(unknown)}, only for {', '.join(known)}"
        )
    return Target(flavour.name, flavour.version, "", wanted)


def _options(arguments: argparse.Namespace) -> tuple[str, ...]:
    options = {"--level": arguments.level, "--workspace": arguments.workspace}
    return tuple(f"{name} {value}" for name, value in options.items() if value is not None)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 500MB or 2GB")
    return int(float(match[1]) * _UNITS[match[2]])
