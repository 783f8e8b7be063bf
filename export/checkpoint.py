"""Open a trunk or draft folder: its config and its tensors under one set of names, all or nothing.

Whatever prefix a file uses, the set of tensors must be exactly the one that the config implies
(`tensor_shapes.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.fields import raise_all, read_json
from eagle_chain.engines.overrides import NONE, DraftOverrides
from eagle_chain.engines.progress import counted
from eagle_chain.export import draft_tensors
from eagle_chain.export.tensor_shapes import CONV, Shape, draft_shapes, mtp_shapes, trunk_shapes
from eagle_chain.export.tensor_values import Array, array, mapped, same
from eagle_chain.export.weight_files import StoredTensor, WeightFolder, read_folder

if TYPE_CHECKING:
    import torch

FLOATS = ("BF16", "F16", "F32")
# In front of `embed_tokens`, `layers` and `norm`, and the name of the head that goes with it.
TRUNK_PREFIXES = {
    "model.language_model.": "lm_head.weight",
    "model.": "lm_head.weight",
    "language_model.model.": "language_model.lm_head.weight",
    "": "lm_head.weight",
}
SHOWN = 10  # names of each kind in an error


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one model, located in their files."""

    folder: Path
    tensors: dict[str, StoredTensor]  # by canonical name
    ignored: dict[str, int]  # tensors that are not used: kind -> count
    mtp: dict[str, StoredTensor] = field(default_factory=dict)  # the trunk's own draft head
    notices: tuple[str, ...] = ()  # what a user should know, in sentences

    def array(self, name: str) -> Array:
        """The tensor as a memory-mapped array; bfloat16 as the type of ml_dtypes."""
        return array(self.tensors[name])

    def torch(self, name: str) -> torch.Tensor:
        """The tensor in torch, memory-mapped: pages are read when used, writes stay private."""
        import torch

        tensor = self.tensors[name]
        if tensor.dtype == "BF16":
            bits = torch.from_numpy(mapped(tensor).view(np.int16))
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
    tensors, mtp, stray, ignored = _sorted(stored.tensors)
    if config.tied_head and "lm_head.weight" in tensors:
        if not same(tensors.pop("lm_head.weight"), tensors.get("embed_tokens.weight")):
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
    return config, Checkpoint(folder, tensors, ignored, mtp, notices=stored.notices)


def _sorted(
    stored: dict[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor], list[str], dict[str, int]]:
    """The trunk's tensors by canonical name, its draft head's, stray names, what is ignored."""
    prefixes = [p for p in TRUNK_PREFIXES if f"{p}embed_tokens.weight" in stored]
    prefix = prefixes[0] if len(prefixes) == 1 else ""
    tensors: dict[str, StoredTensor] = {}
    mtp: dict[str, StoredTensor] = {}
    stray: list[str] = []
    ignored: Counter[str] = Counter()
    for name, tensor in stored.items():
        if re.match(r"(model\.|language_model\.)?visual\.", name):
            ignored["visual"] += 1
        elif name.endswith("rotary_emb.inv_freq"):  # a buffer of old exports, made from the config
            ignored["rotary_emb"] += 1
        elif head := re.match(r"(model\.|language_model\.)?mtp\.", name):
            mtp["mtp." + name[head.end() :]] = tensor
            ignored["mtp"] += 1
        elif name == TRUNK_PREFIXES[prefix]:
            tensors["lm_head.weight"] = tensor
        elif name.startswith(prefix):
            tensors[name.removeprefix(prefix)] = tensor
        else:
            stray.append(name)
    return tensors, mtp, stray, dict(ignored)


def open_mtp(trunk: Checkpoint, config: TrunkConfig) -> Checkpoint | None:
    """The trunk's own draft head, `mtp.*` under the names of the file; None if there is none.

    Raises:
        InputError: Missing, unexpected or misshapen tensors.
    """
    if not trunk.mtp:
        return None
    hints = {
        "mtp.layers.1.input_layernorm.weight": "heads of one layer only",
        "mtp.embed_tokens.weight": "the head must share the trunk's embedding",
    }
    try:
        _check(trunk.folder, trunk.mtp, mtp_shapes(config), hints=hints)
    except InputError as error:
        raise InputError(f"{error}; --no-mtp leaves the head out") from None
    return Checkpoint(trunk.folder, trunk.mtp, {})


def open_draft(
    folder: Path | str,
    trunk_config: TrunkConfig,
    trunk: Checkpoint | None = None,
    *,
    overrides: DraftOverrides = NONE,
) -> tuple[DraftConfig, Checkpoint]:
    """Open an EAGLE-3 draft made for a trunk, in any of the published layouts.

    Args:
        folder: With `config.json` and safetensors.
        trunk_config: Of the trunk.
        trunk: The trunk's tensors: what the draft holds in the same values is then left out and
            shared. Without them the draft's own are used.
        overrides: What to take instead of the values of its config.

    Raises:
        InputError: Bad config, damaged files, missing, unexpected or misshapen tensors, or tensors
            that contradict the config.
    """
    folder = Path(folder)
    stored = _open(folder)
    where = folder / "config.json"
    data = read_json(where)
    config = DraftConfig.from_json(data, trunk_config, str(where), overrides)
    found = draft_tensors.canonical(stored.tensors)
    draft_tensors.split_fused(found.tensors, config)
    config = draft_tensors.fit(config, found, data, trunk_config, trunk.tensors if trunk else {})
    raise_all(str(folder), found.problems[:SHOWN])

    tensors = found.tensors
    wanted = {"d2t": ("I64", "I32"), "t2d": ("BOOL",)}
    optional = {"t2d"} if config.draft_vocab_size < config.vocab_size else {"t2d", "d2t"}
    _check(
        folder,
        tensors,
        draft_shapes(config),
        optional=optional,
        dtypes=wanted,
        hints=_draft_hints(config),
    )
    absolute = draft_tensors.has_absolute_ids(config, tensors)
    notices = (*stored.notices, *found.notices)
    checkpoint = Checkpoint(folder, tensors, dict(found.ignored), notices=notices)
    return replace(config, absolute_d2t=absolute), checkpoint


def open_pair(
    trunk_folder: Path | str, draft_folder: Path | str, overrides: DraftOverrides = NONE
) -> tuple[tuple[TrunkConfig, Checkpoint], tuple[DraftConfig, Checkpoint]]:
    """Open a trunk and its draft; what both hold alike is taken from the trunk.

    Raises:
        InputError: As `open_trunk` and `open_draft`.
    """
    trunk = open_trunk(trunk_folder)
    return trunk, open_draft(draft_folder, *trunk, overrides=overrides)


def _draft_hints(config: DraftConfig) -> dict[str, str]:
    """What to think of when a tensor of a draft is missing, unexpected or misshapen."""
    count, width = len(config.aux_layers), config.trunk_hidden_size
    source = f"as aux layers are {config.aux_source}" if config.aux_source else ""
    fc_norm = f"fc_norm is {_yes(config.fc_norm)} in config.json"
    return {
        "fc.weight": f"reads {count} features of {width}, so it must be "
        f"[{config.hidden_size}, {count} * {width}], {source}",
        "lm_head.weight": "a draft needs its own head, unless it has the trunk's vocabulary "
        "and width",
        "embed_tokens.weight": "a draft of another width than its trunk needs an embedding of its "
        "own",
        "d2t": "maps the draft vocabulary to the trunk's",
        "midlayer.self_attn.q_proj.weight": "reads [embedding; hidden]; is it an EAGLE-3 draft?",
        "midlayer.self_attn.q_norm.weight": "a config of type qwen3 says so",
        "input_norm.weight": f"norm_before_fc is {_yes(config.norm_before_fc)} in config.json",
        **{f"fc_norm.{i}.weight": fc_norm for i in range(max(3, count))},
    }


def _yes(value: bool) -> str:
    return "true" if value else "false or not"


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
    unexpected = [f"{t.name}{hint(n)}" for n, t in tensors.items() if n not in shapes]
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
            problems.append(
                f"{counted(len(names), 'tensor')} {what}: {', '.join(names[:SHOWN])}{rest}"
            )
    raise_all(str(folder), problems)
