"""The settings of a draft that no file can tell, and the search for those that suit a text.

What a wrong setting does shows at different drafts: features from other layers and another rotation
spoil the first draft, a recurrence before the wrong norm the later ones, a residual before the
wrong norm all of them. So layers and rotation are tried together, then both norms together on the
best of those, and again from there until nothing gets better.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from eagle_chain.engines.config import DraftConfig
from eagle_chain.engines.overrides import DraftOverrides
from eagle_chain.runtime.along import Found, gain
from eagle_chain.runtime.evidence import NOISE

FIELDS = ("aux_layers", "rotary_dim", "rope_theta", "norm_output", "norm_before_residual")
PARTIAL = 0.25  # of a head rotates in Qwen3.5 trunks, from whose configs those of drafts are made
THETAS = (1e7, 1e4, 1e6)  # of Qwen3.5; what trainers take that find none; of Qwen3

Change = dict[str, Any]  # fields of a `DraftConfig`
Judge = Callable[[DraftConfig], Found]


def changes(draft: DraftConfig, filed: DraftConfig, depth: int) -> list[list[Change]]:
    """What is tried together, group by group; the first of each group changes nothing.

    Args:
        draft: As it is.
        filed: As its file has it.
        depth: Layers of the trunk.
    """
    aux = [tuple(layer + by for layer in draft.aux_layers) for by in (0, -1, 1)]
    aux = [layers for layers in aux if layers[0] >= 0 and layers[-1] < depth]
    known = (draft.rotary_dim, filed.rotary_dim, draft.head_dim, int(PARTIAL * draft.head_dim))
    dims = [dim for dim in dict.fromkeys(known) if dim >= 2 and dim % 2 == 0]
    thetas = list(dict.fromkeys((draft.rope_theta, filed.rope_theta, *THETAS)))
    output, residual = draft.norm_output, draft.norm_before_residual
    groups: list[dict[str, list[Any]]] = [
        {"aux_layers": aux, "rotary_dim": dims, "rope_theta": thetas},
        {"norm_output": [output, not output], "norm_before_residual": [residual, not residual]},
    ]
    return [
        [dict(zip(group, values, strict=True)) for values in itertools.product(*group.values())]
        for group in groups
    ]


def every_setting(draft: DraftConfig, groups: Sequence[Sequence[Change]]) -> list[DraftConfig]:
    """All settings that a search may ask about, the one it starts from first."""
    combined = itertools.product(*groups)
    return [
        replace(draft, **{k: v for change in each for k, v in change.items()}) for each in combined
    ]


def search(
    start: DraftConfig, filed: DraftConfig, groups: Sequence[Sequence[Change]], judge: Judge, k: int
) -> DraftConfig:
    """The setting with most tokens a pass, without the changes that the text does not speak for.

    A setting with two mistakes is found because both are mended in one group, or one after the
    other: each helps on its own. It ends because every step is to a better setting.
    """

    def tokens_per_pass(draft: DraftConfig) -> float:
        return judge(draft).tokens_per_pass(k)

    best, before = start, None
    while best != before:
        before = best
        for group in groups:
            best = max([best, *(replace(best, **c) for c in group)], key=tokens_per_pass)
    top = judge(best)  # what all that is taken back is held against: little by little adds up
    for name in FIELDS:
        for usual in (start, filed):
            plainer = replace(best, **{name: getattr(usual, name)})
            if not surely_better(top, judge(plainer), k):
                best = plainer
                break
    return best


def surely_better(a: Found, b: Found, k: int) -> bool:
    """Whether `a` gives more tokens a pass than `b` by more than noise."""
    more, error = gain(a, b, k)
    return more > NOISE * error


def difference(draft: DraftConfig, start: DraftConfig) -> DraftOverrides:
    """What must be overridden to get from one setting to another."""
    changed = {
        name: getattr(draft, name)
        for name in FIELDS
        if getattr(draft, name) != getattr(start, name)
    }
    return DraftOverrides(**changed)


def overrides_for(draft: DraftConfig, start: DraftConfig, given: DraftOverrides) -> DraftOverrides:
    """All overrides of a setting, for a bundle that was exported with those `given`."""
    changed = difference(draft, start)
    if changed.aux_layers is not None:
        given = replace(given, aux_convention=None)  # they are layer outputs
    return replace(given, **{k: v for k, v in vars(changed).items() if v is not None})
