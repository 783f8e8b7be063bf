"""Which trunk layers a draft reads: the ids of its config, resolved to layer outputs.

Two conventions are in use for one tensor: "layer outputs" i is the residual stream after layer i,
"boundaries" i is the one in front of it, so the output of layer i - 1 and entry i of Hugging Face's
`hidden_states`. Taking one for the other costs most of the acceptance and nothing else.
"""

from __future__ import annotations

from eagle_chain.engines.fields import Place, Reader, is_ascending
from eagle_chain.engines.overrides import DraftOverrides

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
NAME_AUX = (
    "say what the draft was trained on: --aux-convention outputs or boundaries for these ids, or "
    "the layers themselves with --aux-layers"
)


def read_aux(read: Reader, everywhere: list[Place], depth: int, overrides: DraftOverrides) -> None:
    """Set `aux_layers` and `aux_source` for a trunk of `depth` layers, or note what is unclear."""
    found: tuple[list[int], str] | None
    if overrides.aux_layers is None:
        found = _stated(read, everywhere, depth, overrides.aux_convention)
    else:
        ids = list(overrides.aux_layers)
        if overrides.aux_convention == "boundaries":
            found = ([i - 1 for i in ids], f"--aux-layers {ids} given as boundaries")
        else:
            found = (ids, f"--aux-layers {ids} given as layer outputs")
    if found is None:
        return
    count = read.find("num_aux_hidden_states", "num_aux_layers", places=everywhere)
    if count is not None and count[1] != len(found[0]):
        read.note(*count, f"{len(found[0])}, the number of aux layers", NAME_AUX)
    read.values["aux_layers"], read.values["aux_source"] = tuple(found[0]), found[1]


def _stated(
    read: Reader, everywhere: list[Place], depth: int, given: str | None
) -> tuple[list[int], str] | None:
    """Layer outputs and where they come from; without ids in the file, the usual ones."""
    listed = [
        (prefix + AUX_KEY, place[AUX_KEY])
        for prefix, place in everywhere
        if place.get(AUX_KEY) is not None and place[AUX_KEY] != []  # ModelOpt's "the usual ones"
    ]
    if not listed:
        for key in ("target_layer_ids", "layer_ids"):
            read.pin(key, because=f"only {AUX_KEY} is read; {NAME_AUX}", places=everywhere)
        if given is not None:
            read.note(AUX_KEY, None, "ids that --aux-convention can be about", "give --aux-layers")
            return None
        if depth < 8:
            read.note(AUX_KEY, None, "the layers that the features come from", NAME_AUX)
            return None
        ids = usual_outputs(depth)
        return ids, f"{ids}, the usual layer outputs for {depth} layers"
    name, raw = listed[0]
    if len(listed) > 1:
        read.note(*listed[1], f"no ids beside {name}", NAME_AUX)
        return None
    if not isinstance(raw, list) or not is_ascending(raw, (0, depth)):
        wanted = f"layer ids from 0 to {depth}, strictly ascending"
        read.note(name, raw, wanted, "is this draft made for this trunk?")
        return None
    convention = {"outputs": "layer outputs", None: None}.get(given, given)
    if convention is None:
        convention = "boundaries" if name == AUX_KEY else _convention(raw, depth)
    if convention is None:
        read.note(name, raw, "ids that are either layer outputs or boundaries", NAME_AUX)
        return None
    ids = [i - 1 for i in raw] if convention == "boundaries" else raw
    if not is_ascending(ids, (0, depth - 1)):
        wanted = f"layer outputs from 0 to {depth - 1}, or boundaries from 1 to {depth}"
        read.note(name, raw, f"{wanted} (read as {convention})", NAME_AUX)
        return None
    because = ", as --aux-convention says" if given else ""
    if not given and convention == "boundaries" and raw == usual_outputs(depth):
        because = ", though they are the usual layer outputs: compare with --aux-convention outputs"
    return ids, f"{name} {raw} read as {convention}{because}"


def usual_outputs(depth: int) -> list[int]:
    """The layers that every trainer taps by default."""
    return [1, depth // 2 - 1, depth - 4]


def _convention(ids: list[int], depth: int) -> str | None:
    """What ids under `eagle_config` are: "layer outputs", "boundaries", or None when unclear.

    SpecForge and SGLang write outputs there, some others boundaries. The usual ids tell which; for
    others a guess would only show as low acceptance. (At top level, where vLLM and speculators put
    them, they are boundaries.)
    """
    usual = usual_outputs(depth)
    outputs = ids[0] == 1 or ids == usual
    boundaries = ids[0] == 2 or ids[-1] == depth or ids == [i + 1 for i in usual]
    if outputs == boundaries:
        return None
    return "layer outputs" if outputs else "boundaries"
