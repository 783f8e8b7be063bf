"""Which plan of a bundle serves which machine, and whether it is still the one that was built."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.files import read_plain
from eagle_chain.engines.flavours import RTX, Flavour, is_weakly_typed
from eagle_chain.engines.gpu import Device
from eagle_chain.engines.integrity import file_hash
from eagle_chain.engines.manifest import Manifest, Plan
from eagle_chain.engines.pieces import VERSION

PLANS = "plans"
LAYERS = ".layers.json"  # beside a plan: what TensorRT's inspector says of it

_DTYPE_KEYS = ("Format/Datatype", "DataType", "Datatype")
_DTYPE = re.compile(r"FP32|FP16|BF16|FP8|INT8|INT32|INT64|UINT8|BOOL|FLOAT|HALF")


@dataclass(frozen=True)
class Target:
    """What a plan is built for; a TensorRT plan is tied to all of it."""

    flavour: str
    version: str
    gpu: str  # empty: any GPU of these compute capabilities
    compute_capabilities: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Where its plans lie in a bundle."""
        place = self.gpu or "sm" + "-sm".join(c.replace(".", "") for c in self.compute_capabilities)
        return f"{PLANS}/{self.flavour}-{self.version}-{re.sub(r'[^A-Za-z0-9.]+', '-', place)}"

    def runs(self, plan: Plan) -> bool:
        """Whether a machine of this kind can load the plan."""
        return (
            (plan.flavour, plan.version) == (self.flavour, self.version)
            and (not plan.gpu or plan.gpu == self.gpu)
            and set(self.compute_capabilities) <= set(plan.compute_capability.split())
        )

    def __str__(self) -> str:
        """TensorRT 8.6.0 on NVIDIA L4 (compute capability 8.9)."""
        return described(self.flavour, self.version, self.gpu, " ".join(self.compute_capabilities))


def machine(flavour: Flavour, device: Device) -> Target:
    """What plans must have been built for to run here."""
    return Target(flavour.name, flavour.version, device.name, (device.compute_capability,))


def described(flavour: str, version: str, gpu: str, capability: str) -> str:
    """A target in words."""
    title = "TensorRT-RTX" if flavour == RTX else "TensorRT"
    place = (
        f"{gpu} (compute capability {capability})" if gpu else f"compute capability {capability}"
    )
    return f"{title} {version} on {place}"


def source_hash(manifest: Manifest, engine: str, weights: str, version: str) -> str:
    """SHA-256 of what a plan depends on besides the machine and the builder's options.

    Args:
        manifest: Of the bundle.
        engine: Whose plan.
        weights: bound or baked.
        version: Of TensorRT; for one that gets graphs in pieces, how they are cut is part of it.
    """
    parts = [manifest.graphs[f"{engine}.onnx"]]
    if weights == "baked":
        parts += [f"{name} {file.sha256}" for name, file in sorted(manifest.files.items())]
    if is_weakly_typed(version):
        parts.append(f"pieces {VERSION}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def build_command(folder: Path, target: Target, like: Plan | None = None) -> str:
    """The command that builds plans for a target, with the options of one that was built before."""
    words = [str(folder), "--backend", target.flavour]
    if target.flavour == RTX:
        words += ["--compute-capability", *target.compute_capabilities]
    if like is not None:
        words += [] if like.weights == "bound" else ["--weights", like.weights]
        words += [word for option in like.options for word in option.split()]
    return f"eagle-chain build {shlex.join(words)}"


def rebuild_command(folder: Path, plan: Plan) -> str:
    """The command that builds a plan again."""
    capabilities = tuple(plan.compute_capability.split())
    return build_command(folder, Target(plan.flavour, plan.version, plan.gpu, capabilities), plan)


def find_plans(folder: Path, manifest: Manifest, target: Target) -> dict[str, tuple[Path, Plan]]:
    """The plan of every engine for this machine.

    Raises:
        InputError: There is none, or it was built for another machine or from another graph.
    """
    found: dict[str, tuple[Path, Plan]] = {}
    for engine in manifest.specs:
        plans = {
            name: plan
            for name, plan in manifest.plans.items()
            if Path(name).stem == engine and plan.flavour == target.flavour
        }
        fitting = [name for name, plan in plans.items() if target.runs(plan)]
        if not fitting:
            others = sorted({_described(plan) for plan in plans.values()})
            command = build_command(folder, target, next(iter(plans.values()), None))
            what = f"was built with {', '.join(others)}" if others else "has not been built"
            raise InputError(
                f"{folder}: the {engine} plan {what}, this process has {target}; "
                f"build it: {command}"
            )
        name = fitting[-1]
        plan = plans[name]
        if plan.source != source_hash(manifest, engine, plan.weights, plan.version):
            cut = ", or by a version that cuts it differently" * is_weakly_typed(plan.version)
            raise InputError(
                f"{folder / name}: was built from another graph than {engine}.onnx{cut}; "
                f"build it again: {build_command(folder, target, plan)}"
            )
        found[engine] = (folder / name, plan)
    return found


def check_plan(path: Path, plan: Plan, command: str) -> None:
    """The file is the one that was built; an `InputError` otherwise, before TensorRT sees it."""
    try:
        digest = file_hash(path)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); build it again: {command}"
        ) from None
    if digest != plan.sha256 or not path.stat().st_size:  # nothing cannot be mapped
        raise InputError(
            f"{path}: is not the plan that was built ({path.stat().st_size} bytes, SHA-256 "
            f"{digest[:12]}, the manifest has {plan.sha256[:12]}); build it again: {command}"
        )


def _described(plan: Plan) -> str:
    return described(plan.flavour, plan.version, plan.gpu, plan.compute_capability)


def plan_report(folder: Path, name: str, plan: Plan) -> dict[str, Any]:
    """What there is to know about one plan, its layers by the dtypes they write included."""
    path = folder / name
    return {
        "file": name,
        "bytes": path.stat().st_size if path.is_file() else None,
        "target": _described(plan),
        "weights": plan.weights,
        "options": list(plan.options),
        "pieces": [runs for runs, _ in _inspected(path.with_suffix(LAYERS))],
        "layers": layer_dtypes(path.with_suffix(LAYERS)),
    }


def layer_dtypes(path: Path) -> dict[str, int]:
    """How many layers of an engine write which dtypes, from TensorRT's inspector; {} without it.

    A layer counts as often as its piece runs.
    """
    counts: Counter[str] = Counter()
    for runs, layers in _inspected(path):
        for layer in layers:
            outputs = layer.get("Outputs") if isinstance(layer, dict) else None
            rows = outputs if isinstance(outputs, list) else []
            dtypes = " + ".join(sorted({_dtype(row) for row in rows if isinstance(row, dict)}))
            counts[dtypes or "none"] += runs
    return dict(counts)


def _inspected(path: Path) -> list[tuple[int, list[Any]]]:
    """How often each plan of an engine runs, and its layers."""
    try:
        data = json.loads(read_plain(path), strict=False)  # TensorRT escapes nothing
    except (OSError, ValueError, RecursionError):  # not there, or no report of TensorRT's
        return []
    pieces = data.get("Pieces", [data]) if isinstance(data, dict) else []
    found = []
    for piece in pieces if isinstance(pieces, list) else []:
        if isinstance(piece, dict):
            runs, layers = piece.get("runs", 1), piece.get("Layers")
            if isinstance(layers, list) and type(runs) is int:
                found.append((runs, layers))
    return found


def _dtype(output: dict[str, Any]) -> str:
    words = str(next((output[key] for key in _DTYPE_KEYS if key in output), "")).upper()
    match = _DTYPE.search(words)  # "Row major linear FP16 format" in 8.6, "Half" later
    return match[0] if match else "unknown"
