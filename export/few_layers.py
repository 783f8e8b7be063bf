"""The first layers of a pair as a pair of its own, for checks that need not run the whole."""

from __future__ import annotations

import re
from dataclasses import replace

from eagle_chain.engines.errors import InputError
from eagle_chain.export.bundle import Pair


def first_layers(pair: Pair, count: int) -> Pair:
    """A trunk with its first `count` layers, final norm and head, and a draft that reads these.

    Nothing is copied: the tensors are those of the files, without the layers left out.

    Raises:
        InputError: There are not so many layers, or fewer than the draft reads.
    """
    config, draft = pair.trunk_config, pair.draft_config
    depth, needed = len(config.layer_types), max(1, len(draft.aux_layers) if draft else 1)
    if not needed <= count <= depth:
        raise InputError(
            f"--layers is {count}, expected {needed} to {depth}: the trunk has {depth} layers"
            + (f" and the draft reads {needed} of them" if draft else "")
        )
    left_out = {f"layers.{i}" for i in range(count, depth)}
    tensors = {
        name: tensor
        for name, tensor in pair.trunk.tensors.items()
        if re.sub(r"^(layers\.\d+)\..*", r"\1", name) not in left_out
    }
    return replace(
        pair,
        trunk_config=replace(config, layer_types=config.layer_types[:count]),
        draft_config=draft and replace(draft, aux_layers=remapped(draft.aux_layers, depth, count)),
        trunk=replace(pair.trunk, tensors=tensors),
        overrides=replace(pair.overrides, aux_layers=None, aux_convention=None),
    )


def remapped(aux_layers: tuple[int, ...], depth: int, count: int) -> tuple[int, ...]:
    """As many layers of the first `count`, ascending, spread as these are over `depth`.

    (1, 15, 28) of 32 become (0, 1, 3) of 4.
    """
    found: list[int] = []
    for rank, layer in enumerate(aux_layers):
        least = found[-1] + 1 if found else 0
        most = count - (len(aux_layers) - rank)
        found.append(min(max(layer * count // depth, least), most))
    return tuple(found)
