"""TensorRT plans that outlive an export: those of the bundle it replaces, if of the same graphs.

Files are linked into the new bundle, so that both are whole until they change places.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.flavours import is_weakly_typed
from eagle_chain.engines.manifest import MANIFEST, Manifest, Plan
from eagle_chain.engines.plans import LAYERS, PLANS, rebuild_command, source_hash

Plans = Mapping[str, Plan]  # by file, as in the manifest


def held_plans(target: Path) -> dict[str, Plan]:
    """The plans of the bundle at `target`, none if there is no bundle that can be read."""
    try:
        return Manifest.read(target).plans
    except InputError:
        return {}


def carry(target: Path, folder: Path, manifest: Manifest) -> dict[str, Plan]:
    """Link into `folder`, which will stand at `target`, the plans there that suit the new bundle.

    Args:
        target: The bundle that will be replaced, if there is one.
        folder: The new bundle.
        manifest: Its manifest.

    Returns:
        The entries of the linked plans.

    Raises:
        InputError: The manifest of the bundle that is replaced has gone.
    """
    kept: dict[str, Plan] = {}
    target = Path(os.path.realpath(target))
    held = held_plans(target)
    if (target / PLANS).is_dir() and not (target / MANIFEST).is_file():  # it was there just now
        raise InputError(f"{target / MANIFEST}: has vanished, and with it what plans there are")
    for place, plans in _by_place(held).items():
        if not _suit(target, place, plans, manifest):
            continue
        for name in plans:
            layers = str(PurePosixPath(name).with_suffix(LAYERS))
            for file in (name, layers, f"{place}/build.log"):
                _link(target, folder, file)
        kept |= plans
        _link(target, folder, f"{place.removesuffix('~')}.timing.cache")
    return kept


def plan_lines(folder: Path, held: Plans, kept: Plans) -> list[str]:
    """What became of the plans of the bundle that was at `folder`, a line for each target."""
    lines = []
    for place, plans in _by_place(held).items():
        if plans.keys() <= kept.keys():
            lines.append(f"plans    {place}: kept, the graphs are the same")
            continue
        plan = next(iter(plans.values()))
        other = "graphs" if plan.weights == "bound" else "graphs or weights"
        other += " or cut differently" * is_weakly_typed(plan.version)
        command = rebuild_command(folder, plan)
        lines.append(
            f"plans    {place}: deleted, they are of other {other}; build again: {command}"
        )
    return lines


def _by_place(plans: Plans) -> dict[str, dict[str, Plan]]:
    """The plans of each folder, which a build makes together."""
    places: dict[str, dict[str, Plan]] = {}
    for name, plan in plans.items():
        places.setdefault(str(PurePosixPath(name).parent), {})[name] = plan
    return places


def _suit(target: Path, place: str, plans: Plans, manifest: Manifest) -> bool:
    """Whether they are the plans of all engines, of these graphs, and where a build puts them."""
    if PurePosixPath(place).parts[:-1] != (PLANS,):
        return False
    if plans.keys() != {f"{place}/{engine}.plan" for engine in manifest.specs}:
        return False
    return all(
        _is_inside(target, name)
        and plan.source == source_hash(manifest, engine, plan.weights, plan.version)
        for name, plan in plans.items()
        for engine in [PurePosixPath(name).stem]
    )


def _is_inside(target: Path, name: str) -> bool:
    """Whether it is a plain file in the bundle, reached by no link."""
    path = target / name
    return path.is_file() and os.path.realpath(path) == str(path)


def _link(target: Path, folder: Path, name: str) -> None:
    """Let both bundles have the file, if it is there."""
    if not _is_inside(target, name) or (folder / name).exists():
        return
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(target / name, folder / name)
    except OSError:  # a file system without hard links
        shutil.copyfile(target / name, folder / name)
