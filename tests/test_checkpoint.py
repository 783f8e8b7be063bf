"""Checkpoint folders: every layout in the wild gives the same tensors, every damage a sentence."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eagle_chain.engines.config import TrunkConfig
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.overrides import DraftOverrides
from eagle_chain.export.checkpoint import (
    Checkpoint,
    draft_shapes,
    open_draft,
    open_pair,
    open_trunk,
    trunk_shapes,
)
from eagle_chain.export.weight_files import read_header
from tests.test_config import message, published
from tests.toy_pair import (
    TRUNK_PREFIX,
    Config,
    Tensors,
    draft_parts,
    save,
    trunk_config,
    trunk_parts,
    write_pair,
)

TRUNK = TrunkConfig.from_json(trunk_config(), "config.json")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def trunk(folder: Path, change: Callable[[Config, Tensors], None], **options: Any) -> Path:
    """Write a trunk whose config and tensors were changed first."""
    config, tensors = trunk_parts(**options)
    change(config, tensors)
    return save(folder, config, tensors)


def draft(folder: Path, change: Callable[[Config, Tensors], None], **options: Any) -> Path:
    """Write a draft whose config and tensors were changed first."""
    config, tensors = draft_parts(trunk_config(), **options)
    change(config, tensors)
    return save(folder, config, tensors)


def same_values(checkpoint: Checkpoint, wanted: Tensors, names: Callable[[str], str]) -> None:
    """The checkpoint holds exactly these tensors, by mapping, array and raw bytes."""
    assert sorted(checkpoint.tensors) == sorted(names(name) for name in wanted)
    for name, tensor in wanted.items():
        stored = checkpoint.tensors[names(name)]
        assert torch.equal(checkpoint.torch(names(name)), tensor)
        array = checkpoint.array(names(name))
        assert array.shape == tuple(tensor.shape)
        assert np.array_equal(array.astype("float64"), tensor.double().numpy())
        with stored.file.open("rb") as file:
            file.seek(stored.offset)
            raw = file.read(stored.nbytes)
        assert raw == tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


# Text parameters as transformers counts them on the meta device.
@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("0.8B", 752_393_024),
        ("2B", 1_881_825_088),
        ("4B", 4_205_751_296),
        ("9B", 8_953_803_264),
        ("27B", 26_895_998_464),
    ],
)
def test_parameters_of_the_family(size: str, parameters: int) -> None:
    config = TrunkConfig.from_json(published(size), "config.json")
    assert sum(map(math.prod, trunk_shapes(config).values())) == parameters


def test_a_9B_folder_opens_without_reading_its_weights(tmp_path: Path) -> None:
    """18 GB that are not there: a sparse file with a real header."""
    config = published("9B")
    shapes = trunk_shapes(TrunkConfig.from_json(config, "config.json"))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        stored = name if name == "lm_head.weight" else TRUNK_PREFIX + name
        size = 2 * math.prod(shape)
        header[stored] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    opened, checkpoint = open_trunk(tmp_path)
    assert len(checkpoint.tensors) == 427 and opened.hidden_size == 4096
    last = checkpoint.tensors["lm_head.weight"]
    assert last.offset + last.nbytes == (tmp_path / WEIGHTS).stat().st_size
    assert not checkpoint.torch("norm.weight").any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", [TRUNK_PREFIX, "model.", "language_model.model.", ""])
def test_trunk_layouts(prefix: str, shards: int, dtype: str, tmp_path: Path) -> None:
    config, tensors = trunk_parts(prefix=prefix, dtype=dtype, tied=shards == 3)
    if prefix == "language_model.model." and "lm_head.weight" in tensors:
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    save(tmp_path, config, tensors, shards)
    opened, checkpoint = open_trunk(tmp_path)
    assert opened.tied_head is (shards == 3)
    mtp = {name: t for name, t in tensors.items() if name.startswith("mtp.")}
    used = {n: t for n, t in tensors.items() if n not in mtp and "visual" not in n}

    def canonical(name: str) -> str:
        return (
            name.removeprefix("language_model.")
            .removeprefix("model.")
            .removeprefix("language_model.")
        )

    same_values(checkpoint, used, canonical)
    assert checkpoint.ignored == {"visual": 2, "mtp": len(mtp)}
    assert checkpoint.mtp.keys() == mtp.keys()
    assert checkpoint.notices == ()
    plain = Checkpoint(tmp_path, checkpoint.mtp, {})
    same_values(plain, mtp, str)


@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_draft_layouts(layer: str, prefix: str, dtype: str, tmp_path: Path) -> None:
    config, tensors = draft_parts(trunk_config(), layer=layer, prefix=prefix, dtype=dtype)
    save(tmp_path, config, tensors, shards=2)
    opened, checkpoint = open_draft(tmp_path, TRUNK)
    assert checkpoint.tensors.keys() == draft_shapes(opened).keys()
    assert len(checkpoint.tensors) == 15
    same_values(
        checkpoint,
        tensors,
        lambda name: name.removeprefix("model.").replace("layers.0.", "midlayer."),
    )


def test_values_survive_bf16(tmp_path: Path) -> None:
    def change(config: Config, tensors: Tensors) -> None:
        tensors[TRUNK_PREFIX + "norm.weight"][:3] = torch.tensor([1.0, -0.5, 3.14])

    _, checkpoint = open_trunk(trunk(tmp_path, change, dtype="bf16"))
    for values in (checkpoint.array("norm.weight"), checkpoint.torch("norm.weight").float()):
        assert [float(v) for v in values[:3]] == [1.0, -0.5, 3.140625]


def test_a_mapped_tensor_can_be_written_without_touching_the_file(tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path)
    _, checkpoint = open_trunk(folder)
    before = (folder / WEIGHTS).read_bytes()
    checkpoint.torch("norm.weight").zero_()
    assert (folder / WEIGHTS).read_bytes() == before
    assert checkpoint.torch("norm.weight").any()


def test_tensors_need_not_be_aligned(tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path, dtype="bf16")
    _, tensors = trunk_parts(dtype="bf16")
    content = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(content[:8], "little")
    odd = size + 1  # one more space behind the header
    moved = odd.to_bytes(8, "little") + content[8 : 8 + size] + b" " + content[8 + size :]
    (folder / WEIGHTS).write_bytes(moved)
    _, checkpoint = open_trunk(folder)
    assert checkpoint.tensors["layers.0.linear_attn.A_log"].offset % 4
    for name in ("norm.weight", "layers.0.linear_attn.A_log"):
        assert torch.equal(checkpoint.torch(name), tensors[TRUNK_PREFIX + name])


def test_symlinked_files_like_a_hub_cache(tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path, shards=2)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{i:064x}")
        file.symlink_to(blobs / f"{i:064x}")
    _, checkpoint = open_trunk(folder)
    assert checkpoint.torch("norm.weight").any()


def test_a_file_cut_after_opening_is_not_read_as_zeros(tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path)
    _, checkpoint = open_trunk(folder)
    last = max(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].offset)
    os.truncate(folder / WEIGHTS, checkpoint.tensors[last].offset + 4)
    with pytest.raises(InputError, match="shorter than when it was opened"):
        checkpoint.torch(last)


def drop(*names: str) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def put(**given: torch.Tensor) -> Callable[[Config, Tensors], None]:
    """Set tensors; a double underscore in a name stands for a dot."""

    def change(config: Config, tensors: Tensors) -> None:
        tensors |= {name.replace("__", "."): tensor for name, tensor in given.items()}

    return change


def test_missing_unexpected_and_misshapen_come_in_one_error(tmp_path: Path) -> None:
    def change(config: Config, tensors: Tensors) -> None:
        del tensors[TRUNK_PREFIX + "norm.weight"]
        del tensors[TRUNK_PREFIX + "layers.2.mlp.up_proj.weight"]
        tensors[TRUNK_PREFIX + "layers.8.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["lm_head.weight"] = torch.zeros(64, 512)
        name = TRUNK_PREFIX + "layers.0.linear_attn.dt_bias"
        tensors[name] = tensors[name].double()

    folder = trunk(tmp_path, change)
    assert message(open_trunk, folder).splitlines() == [
        f"{folder}: 4 problems",
        "  2 tensors missing: layers.2.mlp.up_proj.weight, norm.weight",
        f"  2 tensors unexpected: {TRUNK_PREFIX}layers.8.mlp.up_proj.weight, "
        "model.layers.0.mlp.up_proj.weight",
        "  1 tensor misshapen: lm_head.weight: shape [64, 512], expected [512, 64] "
        "(set tie_word_embeddings if the head is the embedding)",
        f"  1 tensor of the wrong type: {TRUNK_PREFIX}layers.0.linear_attn.dt_bias: F64, "
        "expected BF16 or F16 or F32",
    ]


def test_a_prefix_that_nobody_uses_lists_ten_names_of_each_kind(tmp_path: Path) -> None:
    prefix = "model.language_model.language_model."
    lines = message(open_trunk, trunk(tmp_path, drop(), prefix=prefix)).splitlines()
    assert "108 tensors missing: embed_tokens.weight (prefixes known: model.language" in lines[1]
    assert lines[1].endswith("and 98 more") and lines[1].count(", layers.0.") == 9
    assert f"108 tensors unexpected: {prefix}" in lines[2]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"layers": 4}, "53 tensors unexpected"),
        ({"hidden_size": 32}, "tensors misshapen"),
        ({"linear_num_value_heads": 2}, "in_proj_b.weight: shape [4, 64], expected [2, 64]"),
        ({"head_dim": 16}, "q_proj.weight: shape [256, 64], expected [128, 64]"),
    ],
)
def test_tensors_of_another_size(config: Any, words: str, tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path)
    (folder / "config.json").write_text(json.dumps(trunk_config(**config)))
    assert words in message(open_trunk, folder)


def test_a_conversion_for_mlx(tmp_path: Path) -> None:
    """It moves the axes of the conv, by which it is known, and adds 1 to the norms."""

    def change(config: Config, tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("conv1d.weight"):
                tensors[name] = tensors[name].mT.contiguous()

    text = message(open_trunk, trunk(tmp_path, change, prefix="language_model.model."))
    assert "conv1d.weight: shape [160, 4, 1], expected [160, 1, 4] (a conversion for MLX" in text


def test_a_head_beside_a_tied_embedding(tmp_path: Path) -> None:
    def copy(config: Config, tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors[TRUNK_PREFIX + "embed_tokens.weight"].clone()

    _, checkpoint = open_trunk(trunk(tmp_path / "same", copy, tied=True))
    assert "lm_head.weight" not in checkpoint.tensors and checkpoint.ignored["lm_head"] == 1
    other = trunk(tmp_path / "other", put(lm_head__weight=torch.zeros(512, 64)), tied=True)
    assert "lm_head.weight differs from the embedding" in message(open_trunk, other)
    none = trunk(tmp_path / "none", drop("lm_head.weight"))
    assert "set tie_word_embeddings if the head is the embedding" in message(open_trunk, none)


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_fc_must_read_all_features(factor: int, tmp_path: Path) -> None:
    folder = draft(tmp_path, put(fc__weight=torch.zeros(64, factor * 64)))
    text = message(open_draft, folder, TRUNK)
    assert f"fc.weight: shape [64, {factor * 64}], expected [64, 192]" in text
    assert "it must be [64, 3 * 64]" in text


DAMAGED_DRAFTS: dict[str, tuple[Callable[[Config, Tensors], None], str]] = {
    "fc gives another width": (
        put(fc__weight=torch.zeros(32, 192)),
        "fc.weight: shape [32, 192], expected [64, 192]",
    ),
    "q_proj of a plain Llama": (
        put(midlayer__self_attn__q_proj__weight=torch.zeros(128, 64)),
        "expected [128, 128] (reads [embedding; hidden]; is it an EAGLE-3 draft?)",
    ),
    "fc.bias of another size": (
        put(fc__bias=torch.zeros(65)),
        "fc.bias: shape [65], expected [64]",
    ),
    "fc_norm without its flag": (
        put(fc_norm__0__weight=torch.zeros(64)),
        "1 tensor unexpected: fc_norm.0.weight (fc_norm is false or not in config.json)",
    ),
    "input_norm without its flag": (
        put(input_norm__weight=torch.zeros(192)),
        "1 tensor unexpected: input_norm.weight (norm_before_fc is false or not in config.json)",
    ),
    "q_norm without k_norm": (
        put(midlayer__self_attn__q_norm__weight=torch.zeros(16)),
        "1 tensor missing: midlayer.self_attn.k_norm.weight",
    ),
    "no lm_head": (
        drop("lm_head.weight"),
        "1 tensor missing: lm_head.weight (a draft needs its own head, unless it has the trunk's",
    ),
    "no d2t": (drop("d2t"), "1 tensor missing: d2t (maps the draft vocabulary"),
    "float d2t": (put(d2t=torch.zeros(96)), "d2t: F32, expected I64 or I32"),
    "integer t2d": (put(t2d=torch.ones(512, dtype=torch.int64)), "t2d: I64, expected BOOL"),
    "short d2t": (
        put(d2t=torch.zeros(95, dtype=torch.int64)),
        "d2t: shape [95], expected [96]",
    ),
    "the same layer under two names": (
        put(layers__0__hidden_norm__weight=torch.zeros(64)),
        "are the same tensor; remove one",
    ),
    "8-bit weights": (
        put(fc__weight=torch.zeros(64, 192, dtype=torch.int8)),
        "fc.weight: I8, expected BF16 or F16 or F32",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED_DRAFTS)
def test_damaged_drafts(damage: str, tmp_path: Path) -> None:
    change, words = DAMAGED_DRAFTS[damage]
    assert words in message(open_draft, draft(tmp_path, change), TRUNK)


CHOSEN = torch.arange(96) * 4 // 3 + 7  # what a draft token can be; some are neighbours
OFFSETS = CHOSEN - torch.arange(96)
SPARSE = torch.arange(96) * 3 + 7  # no neighbours: its offsets are ascending ids as well
SPARSE_OFFSETS = SPARSE - torch.arange(96)


def marks(ids: torch.Tensor) -> torch.Tensor:
    """The `t2d` of some target ids."""
    return torch.zeros(512, dtype=torch.bool).index_fill(0, ids, True)


@pytest.mark.parametrize(
    ("d2t", "t2d", "words"),
    [
        (OFFSETS * 0, marks(CHOSEN), "d2t is all zeros: an untrained mapping"),
        (CHOSEN, None, "d2t may hold offsets or absolute ids, and no t2d tells which; add the t2d"),
        (SPARSE_OFFSETS, None, "d2t may hold offsets or absolute ids"),
        (OFFSETS.flip(0), None, "strictly ascending ids"),
        (CHOSEN + 500, None, "got 507 to 728 read as offsets, 507 to 633 read as ids"),
        (OFFSETS + 400, marks(CHOSEN), "ids without repeats from 0 to 511, got 407 to 533"),
        (OFFSETS - 8, marks(CHOSEN), "ids without repeats from 0 to 511, got -1"),
        (OFFSETS.flip(0), marks(CHOSEN), "must map to ids without repeats"),
        (OFFSETS, marks(CHOSEN + 1), "t2d marks other tokens than d2t maps to"),
        (SPARSE_OFFSETS, marks(CHOSEN), "t2d marks other tokens than d2t maps to"),
        (OFFSETS, marks(CHOSEN[:0]), "t2d marks other tokens"),
    ],
)
def test_damaged_vocabularies(d2t: Any, t2d: Any, words: str, tmp_path: Path) -> None:
    def change(config: Config, tensors: Tensors) -> None:
        tensors |= {"d2t": d2t, "t2d": t2d}
        if t2d is None:
            del tensors["t2d"]

    assert words in message(open_draft, draft(tmp_path, change), TRUNK)


@pytest.mark.parametrize(
    "change",
    [
        put(d2t=OFFSETS, t2d=marks(CHOSEN)),
        put(d2t=OFFSETS.int(), t2d=marks(CHOSEN)),
        put(d2t=SPARSE_OFFSETS, t2d=marks(SPARSE)),
        drop("t2d"),
    ],
)
def test_sound_vocabularies(change: Any, tmp_path: Path) -> None:
    config, checkpoint = open_draft(draft(tmp_path, change), TRUNK)
    assert len(checkpoint.array("d2t")) == config.draft_vocab_size
    assert not config.absolute_d2t


@pytest.mark.parametrize(
    "change",
    [
        put(d2t=CHOSEN, t2d=marks(CHOSEN)),
        put(d2t=SPARSE.int(), t2d=marks(SPARSE)),
        put(d2t=CHOSEN.flip(0), t2d=marks(CHOSEN)),  # any order, as t2d confirms the set
    ],
)
def test_absolute_ids_in_d2t(change: Any, tmp_path: Path) -> None:
    config, _ = open_draft(draft(tmp_path, change), TRUNK)
    assert config.absolute_d2t


def test_absolute_ids_without_t2d(tmp_path: Path) -> None:
    def change(config: Config, tensors: Tensors) -> None:
        del tensors["t2d"]
        tensors["d2t"] = CHOSEN + 350  # as offsets they would leave the vocabulary

    config, _ = open_draft(draft(tmp_path, change), TRUNK)
    assert config.absolute_d2t


def test_one_vocabulary_needs_no_mapping(tmp_path: Path) -> None:
    full = {"draft_vocab_size": 512}
    for i, change in enumerate((drop("d2t", "t2d"), drop("d2t"), drop())):
        open_draft(draft(tmp_path / str(i), change, **full), TRUNK)
    shifted = put(d2t=torch.ones(512, dtype=torch.int64))
    assert "ids without repeats" in message(open_draft, draft(tmp_path, shifted, **full), TRUNK)


def test_an_embedding_of_the_drafts_own(tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path)
    _, tensors = trunk_parts()
    table = tensors[TRUNK_PREFIX + "embed_tokens.weight"]
    same = draft(tmp_path / "same", put(embed_tokens__weight=table))
    _, (_, checkpoint) = open_pair(folder, same)
    assert checkpoint.ignored == {"embed_tokens": 1}
    assert len(checkpoint.tensors) == 15
    half = draft(tmp_path / "half", put(embed_tokens__weight=table.bfloat16()))
    _, (config, _) = open_pair(folder, half)
    assert config.embedding == "draft.embed_tokens.weight", "other values after rounding"
    other = draft(tmp_path / "other", put(embed_tokens__weight=table + 1))
    _, (config, checkpoint) = open_pair(folder, other)
    assert config.embedding == "draft.embed_tokens.weight"
    assert torch.equal(checkpoint.torch("embed_tokens.weight"), table + 1)
    assert "own embedding differs from the trunk's and is used" in checkpoint.notices[0]
    short = draft(tmp_path / "short", put(embed_tokens__weight=table[:100]))
    assert "embed_tokens.weight: shape [100, 64], expected [512, 64]" in message(
        open_pair, folder, short
    )


def test_overrides_reach_the_config(tmp_path: Path) -> None:
    given = DraftOverrides(aux_layers=(0, 2, 5), rope_theta=1e4, rotary_dim=16)
    _, (config, _) = open_pair(*write_pair(tmp_path), given)
    assert (config.aux_layers, config.rope_theta, config.rotary_dim) == ((0, 2, 5), 1e4, 16)
    text = message(
        open_draft, tmp_path / "draft", TRUNK, overrides=DraftOverrides(aux_layers=(0, 2))
    )
    assert "fc.weight: shape [64, 192], expected [64, 128]" in text


def cut(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size]


def rewrite(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Change the parsed header and keep the data."""

    def damage(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + size :]

    return damage


def edit(**keys: Any) -> Callable[[bytes], bytes]:
    def change(header: dict[str, Any]) -> None:
        first = next(name for name in header if name != "__metadata__")
        header[first] |= keys

    return rewrite(change)


def overlap(header: dict[str, Any]) -> None:
    entries = [entry for entry in header.values() if entry.get("shape") == [64]]
    entries.sort(key=lambda entry: entry["data_offsets"])
    entries[1]["data_offsets"] = entries[0]["data_offsets"]


def hole(header: dict[str, Any]) -> None:
    del header[next(n for n in header if header[n].get("shape") == [160, 64])]


def twice(content: bytes) -> bytes:
    size = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + size].rstrip()
    entry = b',"lm_head.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    text = text[:-1] + entry
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 18000000000\n"
FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (cut(0), "0 bytes, wanted 8 and a header"),
    "4 bytes": (cut(4), "4 bytes, wanted 8 and a header"),
    "only the length": (cut(8), "8 bytes, but its header alone declares "),
    "cut in the header": (cut(1000), "1000 bytes, but its header alone declares "),
    "cut by one byte": (lambda c: c[:-1], " bytes, its header declares "),
    "junk behind": (lambda c: c + b"junk", " bytes, its header declares "),
    "LFS pointer": (lambda c: POINTER, "a Git LFS pointer instead of weights; run `git lfs pull`"),
    "HTML page": (lambda c: b"<!DOCTYPE html><html></html>", "declares a header of "),
    "huge length": (lambda c: b"\xff" * 8 + c[8:], "wanted at most 100000000"),
    "not JSON": (lambda c: c[:8] + b"X" + c[9:], "bad header of "),
    "not UTF-8": (lambda c: c[:9] + b"\xff" + c[10:], "bad header of "),
    "a list": (lambda c: b"\2\0\0\0\0\0\0\0[]", "got [], wanted an object"),
    "a name twice": (twice, "key given twice: lm_head.weight"),
    "overlap": (rewrite(overlap), " overlaps "),
    "hole": (rewrite(hole), " leaves a hole after "),
    "unknown type": (edit(dtype="F4"), 'dtype "F4", wanted one of BOOL'),
    "type is a number": (edit(dtype=3), "dtype 3"),
    "negative extent": (edit(shape=[-1]), "shape [-1]"),
    "float extent": (edit(shape=[1.0]), "shape [1.0]"),
    "endless extent": (edit(shape=[10**30]), "shape [1000"),
    "too small an extent": (edit(shape=[1, 1]), "bytes, but F32 [1, 1] has 4"),
    "offsets reversed": (edit(data_offsets=[8, 0]), "-8 bytes, but F32 "),
    "one offset": (edit(data_offsets=[8]), "data_offsets [8]"),
    "offsets are text": (edit(data_offsets=["0", "8"]), 'data_offsets ["0", "8"]'),
    "an unknown key": (edit(more=1), "wanted dtype, shape and data_offsets"),
    "entry is a number": (rewrite(lambda h: h.update(x=1)), "x is 1, wanted dtype"),
    "metadata is a list": (rewrite(lambda h: h.update(__metadata__=[])), "__metadata__ is []"),
}


@pytest.mark.parametrize("damage", FILES)
def test_damaged_files(damage: str, tmp_path: Path) -> None:
    change, words = FILES[damage]
    folder, _ = write_pair(tmp_path)
    content = change((folder / WEIGHTS).read_bytes())
    (folder / WEIGHTS).write_bytes(content)
    text = message(open_trunk, folder)
    assert words in text and str(folder / WEIGHTS) in text
    assert "download it again" in text
    assert f"{len(content)} bytes" in text or "bad header of" in text


def test_all_damaged_shards_are_named(tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path, shards=4)
    for i in (2, 4):
        path = folder / f"model-0000{i}-of-00004.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    lines = message(open_trunk, folder).splitlines()
    assert len(lines) == 3
    assert "model-00002-of" in lines[1] and "model-00004-of" in lines[2]


def test_any_flipped_byte_of_a_header_is_refused_or_harmless(tmp_path: Path) -> None:
    """Nothing but InputError, whatever a header holds."""
    path = tmp_path / WEIGHTS
    save_file({"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}, path)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    generator = random.Random(0)
    for at in range(header):
        flipped = bytearray(content)
        flipped[at] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
        try:
            tensors = read_header(path)
        except InputError as error:
            assert str(path) in str(error)
        else:
            assert sum(t.nbytes for t in tensors.values()) == 20


def relabel(folder: Path, **changes: Any) -> None:
    """Change entries of an index."""
    data = json.loads((folder / INDEX).read_text())
    data["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(data))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    words = "missing: model-00002-of-00003.safetensors; incomplete download?"
    assert f"1 of the 3 files in {INDEX} are {words}" in message(open_trunk, folder)
    (folder / INDEX).unlink()
    assert f"1 of 3 files are {words}" in message(open_trunk, folder)


def test_a_shard_may_claim_any_number_of_others(tmp_path: Path) -> None:
    """The count is in the name alone: it costs neither time nor memory."""
    trunk, _ = write_pair(tmp_path)
    total = "9" * 100
    (trunk / "model.safetensors").rename(trunk / f"model-00001-of-{total}.safetensors")
    with pytest.raises(
        InputError, match=rf"{int(total) - 1} of {total} files.*-00011-of-9+.* \.\.\."
    ):
        open_trunk(trunk)


def test_a_stray_file_beside_an_index_is_left_aside(tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path, shards=2)
    save_file({"lm_head.weight": torch.zeros(512, 64)}, folder / WEIGHTS)
    _, checkpoint = open_trunk(folder)
    assert checkpoint.notices == (f"{WEIGHTS} is not in {INDEX} and was left aside",)
    assert checkpoint.torch("lm_head.weight").any()


def test_a_tensor_beside_the_index_is_left_aside(tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path, shards=2)
    data = json.loads((folder / INDEX).read_text())
    del data["weight_map"]["mtp.fc.weight"]
    (folder / INDEX).write_text(json.dumps(data))
    _, checkpoint = open_trunk(folder)
    assert checkpoint.notices == (f"left aside, not in {INDEX}: 1 tensor of the shards",)


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "a/b.safetensors", "..", "/etc/x.safetensors", "a\\b.safetensors", "",
     "C:x.safetensors", "weights.bin", 3, None],
)  # fmt: skip
def test_an_index_names_files_of_its_own_folder_only(name: Any, tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path, shards=2)
    shutil.copy(folder / "model-00001-of-00002.safetensors", tmp_path / "model.safetensors")
    relabel(folder, **{"lm_head.weight": name})
    assert "wanted the name of a file in this folder" in message(open_trunk, folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_names(weight_map: Any, tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path, shards=2)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "wanted names and files" in message(open_trunk, folder)


def test_a_name_too_long_for_a_file_is_a_missing_file(tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path, shards=2)
    name = f"{'x' * 5000}.safetensors"
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    assert "1 of the 1 files" in message(open_trunk, folder)


def test_an_index_of_other_files(tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path, shards=2)
    relabel(folder, more="model-00001-of-00002.safetensors")
    assert "more: not in model-00001-of-00002.safetensors" in message(open_trunk, folder)


def test_the_same_tensor_in_two_files_without_an_index(tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path)
    save_file({"lm_head.weight": torch.zeros(512, 64)}, folder / "other.safetensors")
    text = message(open_trunk, folder)
    assert "lm_head.weight: in model.safetensors and in other.safetensors" in text


def test_several_files_without_an_index(tmp_path: Path) -> None:
    config, tensors = trunk_parts()
    head = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
    save(tmp_path, config, tensors)
    save_file(head, tmp_path / "mtp.safetensors")
    _, checkpoint = open_trunk(tmp_path)
    assert len(checkpoint.mtp) == len(head)


@pytest.mark.parametrize("name", [b"m\xff.safetensors", b"a\\b.safetensors"])
def test_a_file_name_that_no_graph_can_hold_is_refused(name: bytes, tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path)
    (folder / WEIGHTS).rename(folder / os.fsdecode(name))
    assert "not a name that a graph can refer to; rename the file" in message(open_trunk, folder)


def test_other_formats_are_never_opened(tmp_path: Path) -> None:
    folder, _ = write_pair(tmp_path)
    (folder / WEIGHTS).unlink()
    assert "no safetensors file" in message(open_trunk, folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    text = message(open_trunk, folder)
    assert "in pytorch_model.bin, a pickle, which is never loaded here; convert it first" in text
    (folder / "pytorch_model.bin").rename(folder / "trunk.gguf")
    assert "in trunk.gguf, but only safetensors are read" in message(open_trunk, folder)


def test_the_command_that_converts_a_pickle(tmp_path: Path) -> None:
    _, folder = write_pair(tmp_path / "it's here")
    _, whole = open_draft(folder, TRUNK)
    names = sorted(whole.tensors)
    for i, part in enumerate((names[:7], names[7:])):
        torch.save({n: whole.torch(n).clone() for n in part}, folder / f"pytorch_model-{i}.bin")
    wanted = {n: whole.torch(n).clone() for n in names}
    (folder / WEIGHTS).unlink()
    command = message(open_draft, folder, TRUNK).partition("convert it first: ")[2]
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, shell=True, check=True, env=os.environ | {"PATH": search})
    same_values(open_draft(folder, TRUNK)[1], wanted, str)


def test_folders_that_are_none(tmp_path: Path) -> None:
    folder, small = write_pair(tmp_path)
    assert "no such folder; give a folder" in message(open_trunk, tmp_path / "Qwen" / "Qwen3.5-9B")
    assert "not a folder" in message(open_trunk, folder / WEIGHTS)
    (tmp_path / "empty").mkdir()
    assert "no config.json" in message(open_trunk, tmp_path / "empty")
    assert "wanted qwen3_5 or qwen3_5_text" in message(open_trunk, small)
    assert "wanted llama" in message(open_draft, folder, TRUNK)
