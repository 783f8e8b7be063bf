"""The bundle's manifest: everything a runtime knows about a model, and the hashes it trusts.

`manifest.json` is plain JSON of the dataclasses below. Reading is strict and total: whatever is
wrong with the file, or with the files it names, becomes one `InputError` that ends with the command
that makes the bundle again.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.fields import parse_json
from eagle_chain.engines.files import read_plain
from eagle_chain.engines.integrity import check_graph, check_weight_file
from eagle_chain.engines.overrides import NONE, DraftOverrides
from eagle_chain.engines.spec import EngineSpec, Options, check_options
from eagle_chain.engines.strict_json import decode, dumps, encode, listed, shown

FORMAT = 1
MANIFEST = "manifest.json"
HALF_WRITTEN = f".{MANIFEST}.partial"  # what a killed process leaves of one
STORED_BYTES = {  # dtypes of safetensors
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "F32": 4,
    "I64": 8,
    "F64": 8,
}

_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class WeightFile:
    """One safetensors file of the bundle."""

    size: int
    sha256: str  # of the whole file; taken at export, checked by `inspect --check`
    sample: str  # of the header and both ends of the data; checked at every load


@dataclass(frozen=True)
class Weight:
    """Where one tensor lies."""

    file: str  # a key of `Manifest.files`
    offset: int  # bytes from the start of the file
    dtype: str  # as safetensors names it: BF16, F32, I64, ...
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the dense tensor in bytes."""
        return STORED_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Plan:
    """A compiled engine and the only machine it may be loaded on."""

    sha256: str
    flavour: str  # tensorrt or tensorrt-rtx
    version: str
    gpu: str  # its name; empty if any GPU of the compute capability will do
    compute_capability: str  # "9.0", or several: "8.6 8.9"
    source: str  # SHA-256 of what it was built from: the graph, and the weights if they are baked
    weights: str  # "bound" (inputs, uploaded by the runtime) or "baked" (part of the plan)
    options: tuple[str, ...]  # of the builder, as typed


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a bundle holds; the order of the fields is the order in the file."""

    format: int = FORMAT
    options: Options
    trunk: TrunkConfig
    draft: DraftConfig | None
    mtp: bool = False  # whether the trunk's own head is part of it
    specs: dict[str, EngineSpec]
    graphs: dict[str, str]  # file -> sha256
    files: dict[str, WeightFile]  # weights/trunk/model.safetensors -> ...
    weights: dict[str, Weight]  # checkpoint name, draft tensors with `draft.` before it
    ignored: dict[str, int]  # tensors of the checkpoints that are not used: kind -> count
    made_with: dict[str, str]  # library -> version
    arguments: tuple[str, ...]  # of the export command, after the folders
    overrides: DraftOverrides = NONE  # what was taken instead of the draft's config
    plans: dict[str, Plan] = field(default_factory=dict)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Trunk layers whose outputs are the features, counted from 0."""
        return self.draft.aux_layers if self.draft else ()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `manifest.json`; same manifest, same bytes; a kill leaves the old file.

        What a killed process left half written is overwritten by the next: one writes at a time.
        """
        path = Path(folder, MANIFEST)
        temporary = path.with_name(HALF_WRITTEN)
        try:
            with open(temporary, "w", encoding="utf-8") as stream:
                stream.write(dumps(encode(self)))
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> Manifest:
        """Read and check the manifest and every file it names; `InputError` if anything is off."""
        folder = Path(folder)
        manifest = Manifest.read(folder)
        command = manifest.export_command(folder)
        for name, digest in manifest.graphs.items():
            check_graph(folder / name, digest, command)
        for name, file in manifest.files.items():
            check_weight_file(folder, name, file, command)
        return manifest

    @staticmethod
    def read(folder: str | os.PathLike[str]) -> Manifest:
        """Read and check the manifest alone; `InputError` if anything is off."""
        return _parse(Path(folder))

    def export_command(self, folder: str | os.PathLike[str]) -> str:
        """The command that makes this bundle again."""
        sources = _sources(Path(folder), self.draft is not None)
        words = shlex.join([*sources, "-o", str(folder), *self.arguments])
        return f"eagle-chain export {words}"


def _sources(folder: Path, draft: bool = True) -> list[str]:
    """The checkpoint folders as far as the bundle's links still lead to them."""
    links = [folder / "weights" / role for role in (("trunk", "draft") if draft else ("trunk",))]
    return [
        str(link.resolve()) if link.is_symlink() and link.exists() else link.name.upper()
        for link in links
    ]


def _parse(folder: Path) -> Manifest:
    """Read `manifest.json` and check everything that needs no other file."""
    path = folder / MANIFEST
    command = shlex.join([*_sources(folder), "-o", str(folder)])
    again = f"export it again: eagle-chain export {command}"
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "no such folder"
        place = shlex.quote("BUNDLE" if folder.exists() else str(folder))
        raise InputError(
            f"{folder}: {found}, expected a bundle; "
            f"make one: eagle-chain export TRUNK DRAFT -o {place}"
        )
    if not path.is_file() and (folder / "config.json").exists():
        raise InputError(
            f"{folder}: is a checkpoint, so it is not a bundle; export it to another folder: "
            "eagle-chain export TRUNK DRAFT -o BUNDLE"
        )
    if not path.is_file():
        was = any((folder / name).exists() for name in ("weights", "plans", "trunk.onnx"))
        make = again if was else "make one: eagle-chain export TRUNK DRAFT -o BUNDLE"
        raise InputError(f"{folder}: has no {MANIFEST}, so it is not a bundle; {make}")
    try:
        data = parse_json(read_plain(path).decode("utf-8"))
        return _checked(data)
    except InputError as error:
        raise InputError(f"{path}: {error}; {again}") from None
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}); {again}") from None


def _checked(data: Any) -> Manifest:
    """The manifest that plain JSON data stands for."""
    if not isinstance(data, dict):
        raise InputError(f"holds {shown(data)}, expected an object")
    version = data.get("format")
    if type(version) is not int or version != FORMAT:
        raise InputError(f"format is {shown(version)}, this version of eagle-chain reads {FORMAT}")
    manifest = decode(Manifest, data)
    check_options(manifest.options)
    if manifest.draft is not None:
        _check_fit(manifest.trunk, manifest.draft)
    depth = len(manifest.trunk.layer_types)
    manifest.overrides.check(manifest.draft.head_dim if manifest.draft else None, depth)
    _check_names(manifest)
    wanted = engine_specs(manifest.trunk, manifest.draft, manifest.options, manifest.mtp)
    if manifest.specs.keys() != wanted.keys():
        raise InputError(
            f"specs has {listed(manifest.specs)}, expected {listed(wanted)} for these configs"
        )
    for name, spec in wanted.items():
        _check_spec(f"specs.{name}", manifest.specs[name], spec)
    if manifest.graphs.keys() != {f"{name}.onnx" for name in wanted}:
        files = [f"{name}.onnx" for name in wanted]
        raise InputError(f"graphs has {listed(manifest.graphs)}, expected {listed(files)}")
    return manifest


def _check_fit(trunk: TrunkConfig, draft: DraftConfig) -> None:
    """The draft is one for this trunk."""
    shares = draft.embedding.startswith("draft.") and draft.head.startswith("draft.")
    for name, got, wanted in (
        ("vocab_size", draft.vocab_size, trunk.vocab_size),
        ("hidden_size", trunk.hidden_size if shares else draft.hidden_size, trunk.hidden_size),
        ("trunk_hidden_size", draft.trunk_hidden_size, trunk.hidden_size),
    ):
        if got != wanted:
            raise InputError(f"draft.{name} is {got}, expected {wanted} as in the trunk")
    depth = len(trunk.layer_types)
    if draft.aux_layers[-1] >= depth:
        raise InputError(f"draft.aux_layers has {draft.aux_layers[-1]}, the trunk has {depth}")


def _check_names(manifest: Manifest) -> None:
    """Paths stay inside the bundle, hashes look like hashes, weights lie inside their files."""
    for name, file in manifest.files.items():
        if file.size < 8:
            raise InputError(f"files[{name!r}].size is {file.size}, expected 8 bytes or more")
    for where, digest in _hashes(manifest):
        if not _HASH.fullmatch(digest):
            raise InputError(f"{where} is {shown(digest)}, expected 64 hexadecimal digits")
    for name in (*manifest.graphs, *manifest.files, *manifest.plans):
        _check_path(name)
    for name, weight in manifest.weights.items():
        _check_weight(f"weights[{name!r}]", weight, manifest.files)
    for kind, count in manifest.ignored.items():
        if count < 0:
            raise InputError(f"ignored[{kind!r}] is {count}, expected 0 or more")


def _hashes(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Every hash, and where it stands."""
    for name, digest in manifest.graphs.items():
        yield f"graphs[{name!r}]", digest
    for name, file in manifest.files.items():
        yield f"files[{name!r}].sha256", file.sha256
        yield f"files[{name!r}].sample", file.sample
    for name, plan in manifest.plans.items():
        yield f"plans[{name!r}].sha256", plan.sha256


def _check_path(name: str) -> None:
    """It names a file and stays inside the bundle."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name:
        raise InputError(f"path {name!r} is not a plain path inside the bundle")
    if not path.parts or any(c == "\0" or "\ud800" <= c <= "\udfff" for c in name):
        raise InputError(f"path {name!r} is not a file name")


def _check_weight(where: str, weight: Weight, files: Mapping[str, WeightFile]) -> None:
    """It lies inside one of the files, behind the length of the header."""
    if weight.file not in files:
        raise InputError(f"{where}.file is {weight.file!r}, which files does not list")
    if weight.dtype not in STORED_BYTES:
        raise InputError(
            f"{where}.dtype is {weight.dtype!r}, expected one of {listed(STORED_BYTES)}"
        )
    if weight.offset < 8 or any(extent < 1 for extent in weight.shape):
        raise InputError(
            f"{where} has offset {weight.offset} and shape {list(weight.shape)}, "
            "expected an offset of 8 or more and extents of 1 or more"
        )
    end, size = weight.offset + weight.nbytes, files[weight.file].size
    if end > size:
        raise InputError(f"{where} ends at byte {end}, {weight.file} has {size}")


def _check_spec(where: str, got: EngineSpec, wanted: EngineSpec) -> None:
    """Name the first thing in which a stored spec differs from the one its configs give."""
    for part in ("name", "inputs", "outputs", "states"):
        stored, derived = getattr(got, part), getattr(wanted, part)
        if stored == derived:
            continue
        if part == "name":
            raise InputError(f"{where}.name is {stored!r}, expected {derived!r}")
        if len(stored) != len(derived):
            raise InputError(f"{where}.{part} has {len(stored)} entries, expected {len(derived)}")
        i = next(i for i, item in enumerate(stored) if item != derived[i])
        raise InputError(f"{where}.{part}[{i}] is {stored[i]}, the configs give {derived[i]}")
