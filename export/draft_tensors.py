"""The tensors of a draft in any of the published layouts: their names, and what they say of it.

A config leaves some things open that the file itself tells: which products have a bias, whether
queries and keys are normed, whose embedding and head are used, and what `d2t` holds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.draft_keys import LAYER_KEY, stated
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.limits import EMBEDDINGS, HEADS, LINEARS
from eagle_chain.export.tensor_values import Array, array, same
from eagle_chain.export.weight_files import StoredTensor

# Of no use at inference, and written by some trainers.
UNUSED = re.compile(r"(verifier_lm_head|verifier_norm)\.|mask_hidden$|(.*\.)?rotary_emb\.inv_freq$")
OLD_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
ATTENTION = "midlayer.self_attn"
# Which keys of a config speak of the bias of a product; vLLM reads `bias` for o_proj, others for fc
BIAS_KEYS = {
    "fc": ("bias",),
    **{f"{ATTENTION}.{part}_proj": ("attention_bias",) for part in "qkv"},
    f"{ATTENTION}.o_proj": ("attention_bias", "bias"),
    **{f"midlayer.mlp.{part}_proj": ("mlp_bias",) for part in ("gate", "up", "down")},
}


@dataclass
class DraftTensors:
    """The tensors of a draft by their canonical names, and what was noticed on the way."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    notices: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def canonical(stored: Mapping[str, StoredTensor]) -> DraftTensors:
    """Bring every layout to the names of an original EAGLE-3 file, `midlayer.*`."""
    found = DraftTensors()
    for name, tensor in stored.items():
        short = name.removeprefix("model.")
        if UNUSED.match(short):
            found.ignored[next(k for k in ("rotary_emb", "verifier", "mask") if k in short)] += 1
            continue
        short = re.sub(r"^layers\.0\.", "midlayer.", short)
        for old, new in OLD_NORMS.items():
            short = re.sub(rf"^{old}\.", f"{new}.", short)
        if short in found.tensors:
            both = f"{found.tensors[short].name} and {name}"
            found.problems.append(f"{both} are the same tensor; remove one")
        else:
            found.tensors[short] = tensor
    return found


def split_fused(tensors: dict[str, StoredTensor], config: DraftConfig) -> None:
    """Cut `qkv_proj` and `gate_up_proj`, whose parts lie one below the other, into their parts."""
    wide, narrow = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
    inner = config.intermediate_size
    for fused, parts in (
        (f"{ATTENTION}.qkv_proj", {"q_proj": wide, "k_proj": narrow, "v_proj": narrow}),
        ("midlayer.mlp.gate_up_proj", {"gate_proj": inner, "up_proj": inner}),
    ):
        for kind in ("weight", "bias"):
            whole = tensors.get(f"{fused}.{kind}")
            if whole is None or not whole.shape or whole.shape[0] != sum(parts.values()):
                continue  # stays, and is reported as an unexpected tensor
            del tensors[f"{fused}.{kind}"]
            offset = whole.offset
            for part, rows in parts.items():
                piece = replace(whole, offset=offset, shape=(rows, *whole.shape[1:]))
                tensors[f"{fused.rpartition('.')[0]}.{part}.{kind}"] = piece
                offset += piece.nbytes


def fit(
    config: DraftConfig,
    found: DraftTensors,
    data: Mapping[str, Any],
    trunk_config: TrunkConfig,
    trunk: Mapping[str, StoredTensor],
) -> DraftConfig:
    """The config with all that the tensors tell; shared tensors leave `found.tensors`.

    Args:
        config: As `config.json` has it.
        found: Renamed tensors; what contradicts the config is added to its problems.
        data: The parsed `config.json`.
        trunk_config: Of the trunk.
        trunk: The trunk's tensors, empty when they are not at hand: then nothing of the draft's own
            is found to be the trunk's.
    """
    tensors = found.tensors
    if _is_qwen3(data):
        qk_norm = True
    else:
        qk_norm = f"{ATTENTION}.q_norm.weight" in tensors
        if qk_norm:
            found.notices.append(
                "the draft norms queries and keys, which a config of type llama does not say"
            )
    reshapes = len(config.aux_layers) > 1 or config.hidden_size != config.trunk_hidden_size
    return replace(
        config,
        qk_norm=qk_norm,
        fc=reshapes or "fc.weight" in tensors,
        biases=_biases(found, data),
        embedding=_embedding(config, found, trunk),
        head=_head(config, found, trunk_config, trunk),
    )


def _is_qwen3(data: Mapping[str, Any]) -> bool:
    """Whether a config says that its layer is one of a Qwen3."""
    layer, names = data.get(LAYER_KEY), data.get("architectures")
    inner = layer.get("model_type") if isinstance(layer, Mapping) else None
    listed = names if isinstance(names, list) else []
    return "qwen3" in (data.get("model_type"), inner) or "Eagle3Qwen3ForCausalLM" in listed


def _biases(found: DraftTensors, data: Mapping[str, Any]) -> tuple[str, ...]:
    """The products with a bias; a bias that the config denies or lacks is a problem."""
    tensors = found.tensors
    there = tuple(name for name in LINEARS if f"{name}.bias" in tensors)
    said = {key: stated(data, key) for key in ("attention_bias", "mlp_bias", "bias")}
    for name in there:
        keys = BIAS_KEYS[name]
        if any(said[key] is False for key in keys) and not any(said[key] for key in keys):
            denied = " and ".join(key for key in keys if said[key] is False)
            found.problems.append(
                f"{tensors[f'{name}.bias'].name}: is in the file, but {denied} is false in "
                "config.json; correct the config or remove the tensor"
            )
    needs = {
        "attention_bias": [f"{ATTENTION}.{part}_proj" for part in "qkv"],
        "mlp_bias": [f"midlayer.mlp.{part}_proj" for part in ("gate", "up", "down")],
        "bias": [] if f"{ATTENTION}.o_proj" in there else ["fc"],
    }
    for key, names in needs.items():
        some = [name for name in names if name in there]
        lacking = [f"{name}.bias" for name in names if name not in there]
        if lacking and said[key]:
            found.problems.append(f"{key} is true in config.json, but {', '.join(lacking)} is not")
        elif lacking and some:
            found.problems.append(f"{some[0]}.bias is in the file without {', '.join(lacking)}")
    return there


def _embedding(config: DraftConfig, found: DraftTensors, trunk: Mapping[str, StoredTensor]) -> str:
    """Whose embedding the draft reads."""
    own = found.tensors.get("embed_tokens.weight")
    shared, mine = EMBEDDINGS
    if config.hidden_size != config.trunk_hidden_size:
        return mine  # the trunk's has another width; a missing one is reported as such
    if own is None:
        return shared
    if own.shape == (config.vocab_size, config.hidden_size) and same(own, trunk.get(shared)):
        del found.tensors["embed_tokens.weight"]
        found.ignored["embed_tokens"] += 1
        return shared
    if trunk:
        found.notices.append(
            "the draft's own embedding differs from the trunk's and is used for the draft; is the "
            "draft made for this trunk?"
        )
    return mine


def _head(
    config: DraftConfig,
    found: DraftTensors,
    trunk_config: TrunkConfig,
    trunk: Mapping[str, StoredTensor],
) -> str:
    """Whose head the draft chooses with."""
    own = found.tensors.get("lm_head.weight")
    mine, of_trunk, embedding, own_embedding = HEADS
    if config.head == embedding:  # tied, as its config says
        table = found.tensors.get("embed_tokens.weight") or trunk.get(embedding)
        if own is not None:
            if not same(own, table):
                found.problems.append(
                    f"{own.name}: differs from the embedding, but tie_word_embeddings is true in "
                    "config.json; correct the config"
                )
            del found.tensors["lm_head.weight"]
            found.ignored["lm_head"] += 1
        return own_embedding if "embed_tokens.weight" in found.tensors else embedding
    whole = config.draft_vocab_size == config.vocab_size
    if not whole or config.hidden_size != config.trunk_hidden_size:
        return mine
    theirs = embedding if trunk_config.tied_head else of_trunk
    if own is None:
        found.notices.append("the draft has no head of its own: the trunk's serves both")
        return theirs
    if own.shape == (config.vocab_size, config.hidden_size) and same(own, trunk.get(theirs)):
        del found.tensors["lm_head.weight"]
        found.ignored["lm_head"] += 1
        return theirs
    return mine


def has_absolute_ids(config: DraftConfig, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether `d2t` holds ids of the trunk; most hold offsets, target = draft + d2t[draft].

    The reading must give ids of the trunk without repeats, and those that `t2d` marks if it is
    there; without `t2d` they must ascend. Exactly one reading may do.

    Raises:
        InputError: Neither or both do.
    """
    size = config.vocab_size
    marked = np.flatnonzero(array(tensors["t2d"])) if "t2d" in tensors else None
    if "d2t" not in tensors:
        if marked is not None and not np.array_equal(marked, np.arange(config.draft_vocab_size)):
            raise InputError(_other_marks(tensors["t2d"]))
        return False
    stored = array(tensors["d2t"]).astype(np.int64)
    where = f"{tensors['d2t'].file}: {tensors['d2t'].name}"
    if config.draft_vocab_size < size and not stored.any():
        raise InputError(f"{where} is all zeros: an untrained mapping; ask for a whole export")
    readings = {False: np.arange(len(stored)) + stored, True: stored}
    good = [absolute for absolute, ids in readings.items() if _is_mapping(ids, size, marked)]
    if len(good) == 1:
        return good[0]
    if good:
        raise InputError(
            f"{where} may hold offsets or absolute ids, and no t2d tells which; add the t2d of the "
            "training run to the file"
        )
    if marked is not None and any(_is_mapping(ids, size, None) for ids in readings.values()):
        raise InputError(_other_marks(tensors["t2d"]))
    wanted = "ids without repeats" if marked is not None else "strictly ascending ids"
    raise InputError(
        f"{where} must map to {wanted} from 0 to {size - 1}, got "
        f"{readings[False].min()} to {readings[False].max()} read as offsets, {stored.min()} to "
        f"{stored.max()} read as ids; download it again"
    )


def _is_mapping(ids: Array, size: int, marked: Array | None) -> bool:
    """Whether these ids of the trunk can be what draft ids 0, 1, ... stand for."""
    if ids.min() < 0 or ids.max() >= size:
        return False
    if marked is not None:
        return np.array_equal(np.sort(ids), marked)
    return bool((np.diff(ids) > 0).all())


def _other_marks(t2d: StoredTensor) -> str:
    return (
        f"{t2d.file}: {t2d.name} marks other tokens than d2t maps to; the two come from different "
        "vocabularies"
    )
