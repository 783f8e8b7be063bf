"""The command `inspect`: what a bundle or a checkpoint holds and what it needs."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle_chain.engines.description import pair_lines, source_lines
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.gpu import device_info
from eagle_chain.engines.integrity import file_hash
from eagle_chain.engines.manifest import MANIFEST, STORED_BYTES, Manifest
from eagle_chain.engines.memory import (
    LIBRARIES,
    chain_needs,
    host_bytes_available,
    of_one_drafter,
)
from eagle_chain.engines.outcome import Outcome
from eagle_chain.engines.plans import plan_report
from eagle_chain.engines.progress import counted, human_bytes, progress
from eagle_chain.engines.savings import savings
from eagle_chain.engines.spec import (
    ITEM_BYTES,
    EngineSpec,
    Options,
    StatePair,
    TensorSpec,
    kv_row_bytes,
)
from eagle_chain.engines.stop_ids import stop_line, stop_sources
from eagle_chain.engines.strict_json import encode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `eagle-chain inspect` takes."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a bundle or a checkpoint")
    parser.add_argument(
        "--check", action="store_true", help="hash the weight files of a bundle from end to end"
    )
    parser.add_argument(
        "--tensors",
        action="store_true",
        help="list what each engine of a bundle takes and gives (those of the largest capacity)",
    )
    parser.add_argument(
        "--trunk", metavar="TRUNK", type=Path, help="trunk checkpoint, when FOLDER is a draft"
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Describe the folder; with --check a changed weight file fails."""
    folder: Path = arguments.folder
    if not (folder / MANIFEST).exists() and (folder / "config.json").exists():
        if arguments.check:
            raise InputError(f"{folder}: is a checkpoint; --check needs a bundle, which has hashes")
        if arguments.tensors:
            raise InputError(f"{folder}: is a checkpoint; --tensors needs a bundle, with engines")
        checkpoints = importlib.import_module("eagle_chain.export.inspection")
        report: dict[str, Any] = checkpoints.describe(folder, arguments.trunk)
        return Outcome(report)
    if folder.is_file() or (folder.is_dir() and not (folder / MANIFEST).exists()):
        raise InputError(
            f"{folder}: is neither a bundle ({MANIFEST}) nor a checkpoint (config.json); expected "
            "a folder with one of the two files"
        )
    if arguments.trunk is not None:
        raise InputError("--trunk is for a draft checkpoint; a bundle holds its trunk")
    manifest = Manifest.load(folder)
    report = bundle_report(folder, manifest)
    print_bundle(manifest, report)
    if arguments.tensors:
        print_tensors(manifest)
    if not arguments.check:
        return Outcome(report)
    changed = changed_files(folder, manifest)
    for name in changed:
        print(f"changed  {name}: another SHA-256 than at export")
    if not changed:
        print(f"checked  {counted(len(manifest.files), 'weight file')}: unchanged since the export")
    return Outcome({**report, "changed": changed}, passed=not changed)


def bundle_report(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Everything `inspect --json` tells about a bundle."""
    options, stops = manifest.options, stop_sources(folder, manifest.trunk.eos_ids)
    states = {pair.input: pair for spec in _largest(manifest).values() for pair in spec.states}
    return {
        "bundle": str(folder),
        "width": options.width,
        "capacity": options.capacity,
        "capacities": list(options.capacities),
        "dtype": options.dtype,
        "kv": options.kv_type,
        "profile": options.profile,
        "debug": list(options.debug),
        "trunk": encode(manifest.trunk),
        "draft": encode(manifest.draft),
        "overrides": list(manifest.overrides.words()),
        "mtp": manifest.mtp,
        "stop_ids": sorted({id for ids in stops.values() for id in ids}),
        "stop_sources": stops,
        "aux_layers": list(manifest.aux_layers),
        "ignored": manifest.ignored,
        "engines": {name: _engine(spec) for name, spec in manifest.specs.items()},
        "states": [_state(pair) for pair in states.values()],
        "tensors": len(manifest.weights),
        "files": {name: file.size for name, file in manifest.files.items()},
        "memory": memory_report(manifest),
        "made_with": manifest.made_with,
        "plans": [
            plan_report(folder, name, manifest.plans[name]) for name in sorted(manifest.plans)
        ],
    }


def memory_report(manifest: Manifest) -> dict[str, Any]:
    """What the weights take, a chain with one drafter, a token of its KV; and what there is."""
    specs = _largest(manifest)
    one = of_one_drafter(specs)
    states = {pair.input: pair.held_bytes for spec in one.values() for pair in spec.states}
    needs = chain_needs(manifest.specs, manifest.options, manifest.trunk)
    weights, state_bytes, device = _computed_bytes(manifest), sum(states.values()), _device()
    fixed = weights + sum(_libraries(manifest).values())

    def chains(specs: Mapping[str, EngineSpec], options: Options) -> int:
        return sum(part.total for part in chain_needs(specs, options, manifest.trunk).values())

    lacking = fixed + sum(part.total for part in needs.values()) - device["bytes"]
    return {
        "stored_weights": sum(weight.nbytes for weight in manifest.weights.values()),
        "weights": weights,
        "libraries": _libraries(manifest),
        "states": state_bytes,
        "kv_per_token": kv_row_bytes(one.values()),
        "kv_per_token_of": {
            part: kv_row_bytes([specs[engine]])
            for part, engine in (("trunk", "trunk"), ("eagle", "draft"), ("mtp", "mtp"))
            if engine in specs
        },
        "total": weights + state_bytes,
        "chain": {
            str(capacity): {**asdict(part), "total": part.total} for capacity, part in needs.items()
        },
        "device": device,
        "smaller": savings(manifest, chains, lacking) if lacking > 0 else "",
    }


def print_bundle(manifest: Manifest, report: dict[str, Any]) -> None:
    """The report for people."""
    made = manifest.trunk, manifest.draft, manifest.ignored, manifest.options
    for line in pair_lines(*made, manifest.overrides, mtp=manifest.mtp):
        print(line)
    for line in source_lines(manifest.draft) if manifest.draft else []:
        print(line)
    print(f"stops    {stop_line(report['stop_sources'])}")
    names = dict.fromkeys(name.partition("-")[0] for name in manifest.specs)
    each = f" for each of {len(manifest.options.capacities)} capacities"
    print(f"graphs   {', '.join(names)}{each if manifest.options.smaller else ''}")
    memory = report["memory"]
    versions = ", ".join(f"{name} {version}" for name, version in manifest.made_with.items())
    print(f"weights  {report['tensors']} tensors, {human_bytes(memory['stored_weights'])} stored")
    for name, size in report["files"].items():
        print(f"         {name} {human_bytes(size)}")
    print(
        f"memory   weights {human_bytes(memory['weights'])} as {manifest.options.dtype}; a chain "
        "has one drafter, the first that is there of eagle and mtp is counted"
    )
    trunk, *drafts = memory["kv_per_token_of"].items()
    shares = [f"{part} {size:,}" for part, size in (trunk, *drafts[:1])]
    other = [f"; {part} in its place: {size:,}" for part, size in drafts[1:]]
    print(
        f"KV       {manifest.options.kv_type}, {memory['kv_per_token']:,} bytes a token "
        f"({' + '.join(shares)}{''.join(other)}), room for a capacity and the width"
    )
    for line in memory_lines(memory):
        print(line)
    for plan in report["plans"]:
        size = human_bytes(plan["bytes"]) if plan["bytes"] is not None else "missing"
        print(f"plan     {plan['file']}: {size}, {plan['target']}, weights {plan['weights']}")
        if plan["layers"]:
            counts = (f"{count} {dtype}" for dtype, count in plan["layers"].items())
            print(f"         layers by what they write: {', '.join(counts)}")
        if sum(plan["pieces"]) > 1:
            pieces = counted(len(plan["pieces"]), "distinct piece")
            print(f"         {pieces}, {counted(sum(plan['pieces']), 'run')} a call")
    if not report["plans"]:
        print("plans    none")
    print(f"made by  {versions}")


def print_tensors(manifest: Manifest) -> None:
    """What each engine of the largest capacity takes and gives, for people."""
    if manifest.options.smaller:
        print(f"\nat capacity {manifest.options.capacity}; others differ in the rows of their KV")
    for name, spec in _largest(manifest).items():
        print(f"\n{name}.onnx")
        for title, tensors in (("in", spec.inputs), ("out", spec.outputs)):
            for tensor in tensors:
                print(f"  {title:<5} {tensor.name:<28} {tensor.dtype:<6} {list(tensor.shape)}")
        for (name, dtype, shape, kept), pairs in _alike(spec).items():
            size = f"{len(pairs)} x {human_bytes(pairs[0].tensors[0].nbytes)}, {kept}"
            print(f"  state {name:<28} {dtype:<6} {list(shape)} {size}")


def memory_lines(memory: Mapping[str, Any]) -> list[str]:
    """What a chain takes at each capacity, part by part, against what the device has."""
    lines = [f"GPU      libraries of {n} {human_bytes(b)}" for n, b in memory["libraries"].items()]
    needed = memory["weights"] + sum(memory["libraries"].values())
    for capacity, parts in memory["chain"].items():
        shares = ", ".join(f"{n} {human_bytes(size)}" for n, size in parts.items() if n != "total")
        lines.append(f"chain    up to {capacity} tokens: {shares} = {human_bytes(parts['total'])}")
        needed += parts["total"]
    device = memory["device"]
    verdict = "enough" if device["bytes"] >= needed else "TOO LITTLE"
    has = f"{device['name']} has {human_bytes(device['bytes'])}, {verdict}"
    lines.append(f"needs    {human_bytes(needed)} with the weights, all capacities in use; {has}")
    return [*lines, f"         enough with {memory['smaller']}"] if memory["smaller"] else lines


def _libraries(manifest: Manifest) -> dict[str, int]:
    """Bytes of the libraries of the one backend that a profile is for, if it is for one."""
    backend = "onnxruntime-cuda" if manifest.options.for_cuda else ""
    return {name: size for name, size in LIBRARIES.items() if name == backend}


def _device() -> dict[str, Any]:
    """The memory that there is: the first GPU's, else what this machine has free."""
    try:
        gpu = device_info()
    except InputError:
        return {"name": "this machine (no GPU)", "bytes": host_bytes_available()}
    return {"name": gpu.name, "bytes": gpu.total_bytes}


def _alike(spec: EngineSpec) -> dict[tuple[str, str, tuple[int, ...], str], list[StatePair]]:
    """State pairs that differ only in the number of their layer, under one name with `*`."""
    groups: dict[tuple[str, str, tuple[int, ...], str], list[StatePair]] = {}
    for pair in spec.states:
        name = re.sub(r"\.\d+\.", ".*.", pair.input)
        kept = "in place" if pair.in_place else "2 buffers each"
        groups.setdefault((name, pair.dtype, pair.shape, kept), []).append(pair)
    return groups


def changed_files(folder: Path, manifest: Manifest) -> list[str]:
    """The weight files whose SHA-256 is not the one of the export."""
    total = sum(file.size for file in manifest.files.values())
    with progress("hashing weights", total) as advance:
        return [
            name
            for name, file in manifest.files.items()
            if file_hash(folder / name, advance) != file.sha256
        ]


def _largest(manifest: Manifest) -> dict[str, EngineSpec]:
    """The engines of the largest capacity, and those that serve any."""
    return {name: spec for name, spec in manifest.specs.items() if "-" not in name}


def _engine(spec: EngineSpec) -> dict[str, Any]:
    def rows(tensors: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
        return [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in tensors]

    return {
        "inputs": rows(spec.inputs),
        "outputs": rows(spec.outputs),
        "states": [pair.input for pair in spec.states],
    }


def _state(pair: StatePair) -> dict[str, Any]:
    return {
        "name": pair.input,
        "dtype": pair.dtype,
        "shape": list(pair.shape),
        "buffers": 1 if pair.in_place else 2,
        "bytes": pair.held_bytes,
    }


def _computed_bytes(manifest: Manifest) -> int:
    """Size of the weights when all floating ones are raised or lowered to the bundle's dtype."""
    item = ITEM_BYTES[manifest.options.dtype]
    total = 0
    for weight in manifest.weights.values():
        floating = weight.dtype in ("BF16", "F16", "F32", "F64")
        total += weight.nbytes // STORED_BYTES[weight.dtype] * item if floating else weight.nbytes
    return total
