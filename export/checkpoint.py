"""Open a trunk or draft folder: its config and its tensors under one set of names, all or nothing.

Trunk names are `embed_tokens.weight`, `layers.N.*` as in Hugging Face, `norm.weight` and
`lm_head.weight` (absent when tied). Draft names are the 15 of an original EAGLE-3 file:
`fc.weight`, `midlayer.*`, `norm.weight`, `lm_head.weight`, `d2t`, `t2d`. Whatever prefix a file
uses, the set of tensors must be exactly the one that the config implies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle_chain.engines.config import DraftConfig, TrunkConfig, read_json
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.fields import raise_all
from eagle_chain.export.weight_files import ITEM_BYTES, StoredTensor, WeightFolder, read_folder

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Array = np.ndarray[Any, np.dtype[Any]]
FLOATS = ("BF16", "F16", "F32")
# In front of `embed_tokens`, `layers` and `norm`, and the name of the head that goes with it.
TRUNK_PREFIXES = {
    "model.language_model.": "lm_head.weight",
    "model.": "lm_head.weight",
    "language_model.model.": "language_model.lm_head.weight",
    "": "lm_head.weight",
}
CONV = "linear_attn.conv1d.weight"
SHOWN = 10  # names of each kind in an error

# Of the types that a checked checkpoint can hold; bfloat16 is not one of NumPy's own.
NUMPY_TYPES = {
    "BOOL": "bool",
    "F16": "float16",
    "F32": "float32",
    "I32": "int32",
    "I64": "int64",
}


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one model, located in their files."""

    folder: Path
    tensors: dict[str, StoredTensor]  # by canonical name
    ignored: dict[str, int]  # tensors that are not used: kind -> count
    mtp: dict[str, StoredTensor] = field(default_factory=dict)  # the trunk's own draft head
    own_embedding: StoredTensor | None = None  # of a draft; the trunk's is used instead
    notices: tuple[str, ...] = ()  # what a user should know, in sentences

    def array(self, name: str) -> Array:
        """The tensor as a memory-mapped array; bfloat16 as the type of ml_dtypes."""
        tensor = self.tensors[name]
        kind: Any = NUMPY_TYPES.get(tensor.dtype)
        if tensor.dtype == "BF16":
            import ml_dtypes

            kind = ml_dtypes.bfloat16
        values: Array = _mapped(tensor).view(kind).reshape(tensor.shape)
        return values

    def torch(self, name: str) -> torch.Tensor:
        """The tensor in torch, memory-mapped: pages are read when used, writes stay private."""
        import torch

        tensor = self.tensors[name]
        if tensor.dtype == "BF16":
            bits = torch.from_numpy(_mapped(tensor).view(np.int16))
            return bits.view(torch.bfloat16).reshape(tensor.shape)
        return torch.from_numpy(self.array(name))


def open_trunk(folder: Path | str) -> tuple[TrunkConfig, Checkpoint]:
    """Open a Qwen3.5 trunk; every tensor of its text part must be there and nothing else.

    Raises:
        InputError: Bad config, damaged files, or missing, unexpected or misshapen tensors.
    """
    folder = Path(folder)
    stored = _open(folder)
    config = TrunkConfig.from_json(read_json(folder / "config.json"), str(folder / "config.json"))
    prefixes = [p for p in TRUNK_PREFIXES if f"{p}embed_tokens.weight" in stored.tensors]
    prefix = prefixes[0] if len(prefixes) == 1 else ""
    tensors: dict[str, StoredTensor] = {}
    mtp: dict[str, StoredTensor] = {}
    stray: dict[str, StoredTensor] = {}
    ignored: Counter[str] = Counter()
    for name, tensor in stored.tensors.items():
        if re.match(r"(model\.|language_model\.)?visual\.", name):
            ignored["visual"] += 1
        elif name.endswith("rotary_emb.inv_freq"):  # a buffer of old exports, made from the config
            ignored["rotary_emb"] += 1
        elif head := re.match(r"(model\.|language_model\.)?mtp\.", name):
            mtp["mtp." + name[head.end() :]] = tensor
        elif name == TRUNK_PREFIXES[prefix]:
            tensors["lm_head.weight"] = tensor
        elif name.startswith(prefix):
            tensors[name.removeprefix(prefix)] = tensor
        else:
            stray[name] = tensor
    if mtp:
        ignored["mtp"] = len(mtp)
    if config.tied_head and "lm_head.weight" in tensors:
        if not _same(tensors.pop("lm_head.weight"), tensors.get("embed_tokens.weight")):
            raise InputError(
                f"{folder}: lm_head.weight differs from the embedding, but tie_word_embeddings is "
                "true in config.json; correct the config"
            )
        ignored["lm_head"] = 1
    mlx = "a conversion for MLX also shifts the norms: use the original checkpoint"
    hints = {
        "lm_head.weight": "set tie_word_embeddings if the head is the embedding",
        "embed_tokens.weight": f"prefixes known: {', '.join(filter(None, TRUNK_PREFIXES))}",
        **{f"layers.{i}.{CONV}": mlx for i in range(len(config.layer_types))},
    }
    _check(folder, tensors, trunk_shapes(config), stray=stray, hints=hints)
    return config, Checkpoint(folder, tensors, dict(ignored), mtp, notices=stored.notices)


def open_draft(
    folder: Path | str,
    trunk: TrunkConfig,
    *,
    aux_layers: Iterable[int] | None = None,
    rope_theta: float | None = None,
    rotary_dim: int | None = None,
) -> tuple[DraftConfig, Checkpoint]:
    """Open an EAGLE-3 draft made for `trunk`; the keywords override its config.

    `d2t` is present unless draft and trunk share one vocabulary. An embedding of the draft's own is
    set aside in `own_embedding`; `open_pair` checks that it is the trunk's.

    Raises:
        InputError: Bad config, damaged files, or missing, unexpected or misshapen tensors.
    """
    folder = Path(folder)
    stored = _open(folder)
    where = folder / "config.json"
    config = DraftConfig.from_json(
        read_json(where), trunk, str(where), aux_layers, rope_theta, rotary_dim
    )
    tensors: dict[str, StoredTensor] = {}
    ignored: Counter[str] = Counter()
    problems = []
    for name, tensor in stored.tensors.items():
        canonical = name.removeprefix("model.")
        canonical = re.sub(r"^layers\.0\.", "midlayer.", canonical)
        if name.endswith("rotary_emb.inv_freq"):
            ignored["rotary_emb"] += 1
        elif canonical in tensors:
            problems.append(f"{tensors[canonical].name} and {name} are the same tensor; remove one")
        else:
            tensors[canonical] = tensor
    raise_all(str(folder), problems[:SHOWN])
    embedding = tensors.pop("embed_tokens.weight", None)
    notices = list(stored.notices)
    if embedding is not None:
        ignored["embed_tokens"] = 1
        notices.append("the draft's own embedding is not used: the trunk's serves both")

    shapes = draft_shapes(config)
    wanted = {"d2t": ("I64", "I32"), "t2d": ("BOOL",)}
    optional = {"t2d"} if config.draft_vocab_size < config.vocab_size else {"t2d", "d2t"}
    count = len(config.aux_layers)
    hints = {
        "fc.weight": f"reads {count} features of {config.trunk_hidden_size}, so it must be "
        f"[{config.hidden_size}, {count} * {config.trunk_hidden_size}]",
        "lm_head.weight": "a draft needs its own head",
        "d2t": "maps the draft vocabulary to the trunk's",
        "midlayer.self_attn.q_proj.weight": "reads [embedding; hidden]; is it an EAGLE-3 draft?",
    }
    _check(folder, tensors, shapes, optional=optional, dtypes=wanted, hints=hints)
    checkpoint = Checkpoint(
        folder, tensors, dict(ignored), own_embedding=embedding, notices=tuple(notices)
    )
    _check_vocabulary(checkpoint, config)
    return config, checkpoint


def open_pair(
    trunk_folder: Path | str,
    draft_folder: Path | str,
    *,
    aux_layers: Iterable[int] | None = None,
    rope_theta: float | None = None,
    rotary_dim: int | None = None,
) -> tuple[tuple[TrunkConfig, Checkpoint], tuple[DraftConfig, Checkpoint]]:
    """Open a trunk and its draft, and check that one embedding serves both.

    Raises:
        InputError: As `open_trunk` and `open_draft`, or the draft has another embedding.
    """
    trunk = open_trunk(trunk_folder)
    draft = open_draft(
        draft_folder,
        trunk[0],
        aux_layers=aux_layers,
        rope_theta=rope_theta,
        rotary_dim=rotary_dim,
    )
    own = draft[1].own_embedding
    if own is not None and not _same(own, trunk[1].tensors["embed_tokens.weight"]):
        raise InputError(
            f"{own.file}: {own.name} differs from the trunk's embedding; drafts with an embedding "
            "of their own are not supported yet (is this draft made for this trunk?)"
        )
    return trunk, draft


def trunk_shapes(config: TrunkConfig) -> dict[str, Shape]:
    """Every tensor of a trunk and its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
    values = config.linear_value_heads * config.linear_value_dim
    channels, heads = config.conv_channels, config.linear_value_heads
    mixers: dict[str, dict[str, Shape]] = {
        "linear_attention": {
            "linear_attn.in_proj_qkv.weight": (channels, hidden),
            "linear_attn.in_proj_z.weight": (values, hidden),
            "linear_attn.in_proj_b.weight": (heads, hidden),
            "linear_attn.in_proj_a.weight": (heads, hidden),
            CONV: (channels, 1, config.conv_kernel),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (config.linear_value_dim,),
            "linear_attn.out_proj.weight": (hidden, values),
        },
        "full_attention": {
            "self_attn.q_proj.weight": (2 * queries, hidden),  # per head: query, then gate
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        },
    }
    shapes: dict[str, Shape] = {"embed_tokens.weight": (config.vocab_size, hidden)}
    for i, kind in enumerate(config.layer_types):
        layer = {"input_layernorm.weight": (hidden,), **mixers[kind], **_mlp_shapes(hidden, inner)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["norm.weight"] = (hidden,)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def draft_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Every tensor of a draft and its shape."""
    hidden = config.hidden_size
    queries, keys = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),  # of the embedding
        "hidden_norm.weight": (hidden,),  # of the feature or the recurrence
        "self_attn.q_proj.weight": (queries, 2 * hidden),
        "self_attn.k_proj.weight": (keys, 2 * hidden),
        "self_attn.v_proj.weight": (keys, 2 * hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        **_mlp_shapes(hidden, config.intermediate_size),
    }
    return {
        "fc.weight": (hidden, config.feature_size),
        **{f"midlayer.{name}": shape for name, shape in layer.items()},
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
    }


def _mlp_shapes(hidden: int, inner: int) -> dict[str, Shape]:
    return {
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def _open(folder: Path) -> WeightFolder:
    """The weight files of a folder that also has a config."""
    if folder.is_dir() and not (folder / "config.json").exists():
        raise InputError(f"{folder}: no config.json; is this a whole checkpoint folder?")
    return read_folder(folder)


def _check(
    folder: Path,
    tensors: dict[str, StoredTensor],
    shapes: dict[str, Shape],
    *,
    stray: Iterable[str] = (),
    optional: Iterable[str] = (),
    dtypes: dict[str, tuple[str, ...]] | None = None,
    hints: dict[str, str] | None = None,
) -> None:
    """Refuse missing, unexpected, misshapen and mistyped tensors, all in one error.

    `stray` are names outside the prefix that the checkpoint uses.
    """
    hints = hints or {}

    def hint(name: str) -> str:
        return f" ({hints[name]})" if name in hints else ""

    missing = [f"{n}{hint(n)}" for n in shapes if n not in tensors and n not in optional]
    unexpected = [tensor.name for name, tensor in tensors.items() if name not in shapes]
    unexpected += stray
    shaped, typed = [], []
    for name, tensor in tensors.items():
        if name in shapes and tensor.shape != shapes[name]:
            wanted = f"expected {list(shapes[name])}{hint(name)}"
            shaped.append(f"{tensor.name}: shape {list(tensor.shape)}, {wanted}")
        allowed = (dtypes or {}).get(name, FLOATS)
        if name in shapes and tensor.dtype not in allowed:
            typed.append(f"{tensor.name}: {tensor.dtype}, expected {' or '.join(allowed)}")
    problems = []
    for names, what in (
        (missing, "missing"),
        (unexpected, "unexpected"),
        (shaped, "misshapen"),
        (typed, "of the wrong type"),
    ):
        if names:
            rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            problems.append(f"{len(names)} tensors {what}: {', '.join(names[:SHOWN])}{rest}")
    raise_all(str(folder), problems)


def _check_vocabulary(checkpoint: Checkpoint, config: DraftConfig) -> None:
    """`d2t` holds offsets to strictly ascending targets, and `t2d` marks the same targets."""
    stored, size = checkpoint.tensors, config.vocab_size
    marked = np.flatnonzero(checkpoint.array("t2d")) if "t2d" in stored else None
    targets = np.arange(config.draft_vocab_size)
    if "d2t" in stored:
        offsets = checkpoint.array("d2t").astype(np.int64)
        targets = targets + offsets
        where = f"{stored['d2t'].file}: {stored['d2t'].name}"
        if config.draft_vocab_size < size and not offsets.any():
            raise InputError(f"{where} is all zeros: an untrained mapping; ask for a whole export")
        as_targets, as_ids = _ascend(targets, size), _ascend(offsets, size)
        if as_ids and (not as_targets or marked is None or np.array_equal(marked, offsets)):
            unclear = as_targets and marked is None
            what = "may be absolute ids (no t2d tells)" if unclear else "holds absolute ids"
            raise InputError(
                f"{where} {what}, wanted offsets: target = draft + d2t[draft]; absolute ids are "
                "not supported yet"
            )
        if not as_targets:
            raise InputError(
                f"{where} must map to strictly ascending ids from 0 to {size - 1}, got "
                f"{targets.min()} to {targets.max()}; download it again"
            )
    if marked is not None and not np.array_equal(marked, targets):
        raise InputError(
            f"{stored['t2d'].file}: {stored['t2d'].name} marks other tokens than d2t maps to; the "
            "two come from different vocabularies"
        )


def _ascend(ids: Array, size: int) -> bool:
    """Whether these are strictly ascending ids below `size`."""
    return bool(ids[0] >= 0 and ids[-1] < size and (np.diff(ids) > 0).all())


def _mapped(tensor: StoredTensor) -> Array:
    """The bytes of a tensor, copy-on-write; never zeros for bytes that a file no longer has."""
    if tensor.nbytes == 0:
        return np.empty(0, np.uint8)
    size = tensor.file.stat().st_size
    if size < tensor.offset + tensor.nbytes:
        raise InputError(f"{tensor.file}: {size} bytes, shorter than when it was opened")
    mapped = np.memmap(tensor.file, np.uint8, "c", tensor.offset, (tensor.nbytes,))
    aligned = tensor.offset % ITEM_BYTES[tensor.dtype] == 0
    return np.asarray(mapped) if aligned else np.array(mapped)


def _same(one: StoredTensor, other: StoredTensor | None) -> bool:
    """Whether two tensors hold the same values in the same type."""
    if other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    a, b, chunk = _mapped(one), _mapped(other), 64 << 20
    return all(np.array_equal(a[i : i + chunk], b[i : i + chunk]) for i in range(0, len(a), chunk))
