"""Writes a bundle: the graphs, links to the weights or copies of them, tokenizer and manifest."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from eagle_chain.engines.bound import tensor_spec, with_bound_weights
from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.derived import Derived
from eagle_chain.engines.draft_keys import is_draft
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.fields import read_json
from eagle_chain.engines.integrity import file_hash, sample_hash
from eagle_chain.engines.manifest import (
    HALF_WRITTEN,
    MANIFEST,
    Manifest,
    Weight,
    WeightFile,
)
from eagle_chain.engines.overrides import NONE, DraftOverrides
from eagle_chain.engines.progress import human_bytes, progress
from eagle_chain.engines.spec import EngineSpec, Options
from eagle_chain.engines.staging import staged
from eagle_chain.engines.version import library_version
from eagle_chain.export.checkpoint import Checkpoint, open_mtp, open_pair, open_trunk
from eagle_chain.export.graph import STANDARD_PROFILES, build_graphs
from eagle_chain.export.kept_plans import carry

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
LIBRARIES = ("eagle-chain", "onnx", "onnx-ir", "numpy")

_BLOCK = 4 * 1024 * 1024


@dataclass(frozen=True)
class Pair:
    """A trunk and what drafts for it, read but not loaded."""

    trunk_config: TrunkConfig
    draft_config: DraftConfig | None
    trunk: Checkpoint
    draft: Checkpoint | None
    overrides: DraftOverrides = NONE  # with which the draft was opened
    mtp: Checkpoint | None = None  # the trunk's own head, if it is to be exported

    @property
    def checkpoints(self) -> list[tuple[str, str, Checkpoint]]:
        """Folder below `weights`, what stands before a tensor's name there, the tensors."""
        held = (("trunk", "", self.trunk), ("draft", "draft.", self.draft), ("trunk", "", self.mtp))
        return [(role, prefix, found) for role, prefix, found in held if found is not None]


def read_pair(
    trunk: Path, draft: Path | None, overrides: DraftOverrides = NONE, *, mtp: bool = True
) -> Pair:
    """Open the checkpoints and check that they fit each other.

    Args:
        trunk: Folder of the trunk.
        draft: Folder of its EAGLE draft; None if there is none.
        overrides: What to take instead of the draft's config.
        mtp: Whether to take the trunk's own head, if it has one.
    """
    _check_order(trunk, draft)
    if draft is None:
        config, files = open_trunk(trunk)
        pair = Pair(config, None, files, None, overrides)
    else:
        (config, files), (draft_config, draft_files) = open_pair(trunk, draft, overrides)
        pair = Pair(config, draft_config, files, draft_files, overrides)
    return replace(pair, mtp=open_mtp(files, config)) if mtp else pair


def _check_order(trunk: Path, draft: Path | None) -> None:
    """Refuse a draft in the place of the trunk by that name, not by a missing key of a trunk."""
    config = trunk / "config.json"
    if config.is_file() and is_draft(read_json(config)):
        order = "TRUNK DRAFT" if draft is None else f"{draft} {trunk}"
        raise InputError(f"{trunk}: is a draft by its config.json; the trunk comes first: {order}")


def export_bundle(
    trunk: Path,
    draft: Path | None,
    target: Path,
    options: Options,
    *,
    overrides: DraftOverrides = NONE,
    copy: bool = False,
    arguments: tuple[str, ...] = (),
) -> Manifest:
    """Make a bundle of two checkpoint folders; see `write_bundle`.

    Args:
        trunk: Folder of the trunk.
        draft: Folder of the draft.
        target: Where to.
        options: Of all engines.
        overrides: What to take instead of the draft's config.
        copy: Whether weight files are copied.
        arguments: Of the export command, but for the overrides.
    """
    pair = read_pair(trunk, draft, overrides)
    return write_bundle(target, pair, options, copy, (*arguments, *overrides.words()))


def write_bundle(
    target: Path, pair: Pair, options: Options, copy: bool, arguments: tuple[str, ...]
) -> Manifest:
    """Make the bundle in the place of `target`; on any failure what was there stays as it was.

    Of a bundle that is replaced the TensorRT plans stay, if they are of the same graphs.

    Args:
        target: A folder that does not exist, is empty or is a bundle.
        pair: The checkpoints.
        options: Of all engines.
        copy: Whether weight files are copied into the bundle instead of linked.
        arguments: Of the export command, for the sentence that says how to make it again.
    """
    _check_apart(target, pair)
    table = weight_table(pair)
    mtp = pair.mtp is not None
    specs = engine_specs(pair.trunk_config, pair.draft_config, options, mtp)
    with staged(target, _check_replaceable) as folder:
        hashes = {}
        graphs = build_graphs(pair.trunk_config, pair.draft_config, table, options, mtp)
        for name, model in graphs.items():
            check_graph(model, specs[name], options.profile)
            path = folder / f"{name}.onnx"
            hashes[path.name] = write_graph(path, model)
        files = _place_weights(folder, target, pair, copy)
        if copy:  # the bundle stands alone: what any ONNX tool sees must hold together
            for name in hashes:
                onnx.checker.check_model(str(folder / name))
        _copy_tokenizer(pair.trunk.folder, folder / "tokenizer")
        manifest = Manifest(
            options=options,
            trunk=pair.trunk_config,
            draft=pair.draft_config,
            mtp=mtp,
            specs=specs,
            graphs=hashes,
            files=files,
            weights=table,
            ignored=ignored_tensors(pair),
            made_with={name: library_version(name) for name in LIBRARIES},
            arguments=arguments,
            overrides=pair.overrides,
        )
        manifest = replace(manifest, plans=carry(target, folder, manifest))
        manifest.save(folder)
        return manifest


def write_graph(path: Path, model: onnx.ModelProto) -> str:
    """Write a graph, the same one always in the same bytes, and return its SHA-256."""
    content = model.SerializeToString(deterministic=True)
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def weight_table(pair: Pair) -> dict[str, Weight]:
    """Every tensor under its canonical name, those of an EAGLE draft with `draft.` before it."""
    return {
        f"{prefix}{name}": Weight(
            f"weights/{role}/{tensor.file.name}", tensor.offset, tensor.dtype, tensor.shape
        )
        for role, prefix, checkpoint in pair.checkpoints
        for name, tensor in checkpoint.tensors.items()
    }


def ignored_tensors(pair: Pair) -> dict[str, int]:
    """Tensors of the checkpoints that no engine uses: kind -> count."""
    counts = sum((Counter(found.ignored) for _, _, found in pair.checkpoints), Counter[str]())
    if pair.mtp is not None:
        del counts["mtp"]
    return dict(counts)


def check_graph(model: onnx.ModelProto, spec: EngineSpec, profile: str) -> None:
    """Check operators, shapes and dtypes all through the graph, and that its ends are the spec."""
    for node in model.graph.node:
        if node.domain and profile in STANDARD_PROFILES:
            raise RuntimeError(
                f"{spec.name}: node {node.name!r} is {node.domain}.{node.op_type}, and a graph of "
                f"profile {profile} holds operators of standard ONNX only; take it out, or use a "
                "profile for ONNX Runtime"
            )
    onnx.checker.check_model(with_bound_weights(model), full_check=True)
    weights = {tensor.name for tensor in model.graph.initializer}

    def is_weight(name: str) -> bool:
        return name in weights or Derived.parse(name) is not None

    for what, values, tensors in (
        ("inputs", [v for v in model.graph.input if not is_weight(v.name)], spec.all_inputs),
        ("outputs", model.graph.output, spec.all_outputs),
    ):
        found = tuple(tensor_spec(value) for value in values)
        if found != tensors:
            raise RuntimeError(f"{spec.name}: {what} are {found}, the spec has {tensors}")


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _check_apart(target: Path, pair: Pair) -> None:
    """Refuse to put a bundle where a checkpoint is, or around one."""
    for _, _, checkpoint in pair.checkpoints:
        place = _resolved(checkpoint.folder)
        if _resolved(target) in (place, *place.parents):
            raise InputError(
                f"{target}: holds the checkpoint {checkpoint.folder} and would replace it; "
                "choose another folder for the bundle"
            )


def _check_replaceable(target: Path) -> None:
    """Only an empty folder or a bundle with nothing of the user's own in it is replaced."""
    if not target.is_dir():
        raise InputError(f"{target}: is a file, expected a folder; choose another name")
    names = sorted(os.listdir(target))
    known = {MANIFEST, HALF_WRITTEN, "weights", "tokenizer", "plans"}
    foreign = [name for name in names if name not in known and not name.endswith(".onnx")]
    if names and (foreign or MANIFEST not in names):
        shown = ", ".join((foreign or names)[:3])
        raise InputError(
            f"{target}: is not a bundle, or not only that (it holds {shown}), and only a bundle "
            "is replaced; choose another folder, or move these files away"
        )


def _place_weights(folder: Path, target: Path, pair: Pair, copy: bool) -> dict[str, WeightFile]:
    """Link or copy the weight files into `folder`, which will stand at `target`, and hash them."""
    found = {
        (tensor.file, f"weights/{role}/{tensor.file.name}")
        for role, _, checkpoint in pair.checkpoints
        for tensor in checkpoint.tensors.values()
    }
    jobs = sorted(found, key=lambda job: job[1])
    total = sum(source.stat().st_size for source, _ in jobs)
    (folder / "weights").mkdir()
    if copy:
        _check_room(folder, target, total)
    else:
        folders = {role: checkpoint.folder for role, _, checkpoint in pair.checkpoints}
        for role, checkpoint_folder in folders.items():
            (folder / "weights" / role).symlink_to(_aim(target, checkpoint_folder))
    for role, _, checkpoint in pair.checkpoints if copy else ():
        (folder / "weights" / role).mkdir(exist_ok=True)
        shutil.copyfile(  # so that the folder is a checkpoint, which can be exported again
            checkpoint.folder / "config.json", folder / "weights" / role / "config.json"
        )
    files = {}
    with progress("copying weights" if copy else "hashing weights", total) as advance:
        for source, name in jobs:
            placed = folder / name
            if copy:
                digest = _copy(source, placed, advance)
            else:
                digest = file_hash(placed, advance)
            files[name] = WeightFile(placed.stat().st_size, digest, sample_hash(placed))
    return files


def _aim(target: Path, checkpoint: Path) -> Path:
    """What the link in `target`/weights says: relative if both folders may move together."""
    bundle, source = _resolved(target), _resolved(checkpoint)
    return Path("..", "..", source.name) if source.parent == bundle.parent else source


def _check_room(folder: Path, target: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{target}: copying the weights needs {human_bytes(needed)}, the disk has "
            f"{human_bytes(free)} free; use --weights link or another disk"
        )


def _copy(source: Path, target: Path, advance: Callable[[int], None]) -> str:
    """Copy a file block by block and return its SHA-256."""
    digest = hashlib.sha256()
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while block := reader.read(_BLOCK):
            digest.update(block)
            writer.write(block)
            advance(len(block))
    return digest.hexdigest()


def _copy_tokenizer(checkpoint: Path, folder: Path) -> None:
    """Copy what text needs, as far as the checkpoint has it."""
    names = [name for name in TOKENIZER_FILES if (checkpoint / name).is_file()]
    if names:
        folder.mkdir()
    for name in names:
        shutil.copyfile(checkpoint / name, folder / name)
