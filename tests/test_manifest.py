"""The manifest: what is written is what is read, and everything else is one sentence."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.integrity import file_hash, sample_hash
from eagle_chain.engines.manifest import (
    FORMAT,
    Manifest,
    Plan,
    Weight,
    WeightFile,
)
from eagle_chain.engines.spec import Options, check_options

WEIGHTS = "weights/trunk/model.safetensors"
TRUNK = TrunkConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    layer_types=("linear_attention",) * 3 + ("full_attention",),
    attention_heads=4,
    kv_heads=2,
    head_dim=32,
    linear_key_heads=2,
    linear_value_heads=4,
    linear_key_dim=16,
    linear_value_dim=24,
    conv_kernel=4,
    norm_eps=1e-6,
    rope_theta=1e7,
    rotary_dim=8,
    tied_head=True,
    max_positions=4096,
    eos_ids=(5, 6),
)
DRAFT = DraftConfig(
    hidden_size=64,
    intermediate_size=128,
    attention_heads=4,
    kv_heads=2,
    head_dim=32,
    norm_eps=1e-6,
    rope_theta=1e6,
    rotary_dim=32,
    draft_vocab_size=96,
    vocab_size=512,
    trunk_hidden_size=64,
    aux_layers=(0, 1, 2),
    aux_source="given",
)
OPTIONS = Options(capacity=64, debug=("logits",))

Data = dict[str, Any]


def write_bundle(folder: Path) -> Manifest:
    """A bundle with stand-in graphs and one weight file: all that the manifest looks at."""
    weights = folder / WEIGHTS
    weights.parent.mkdir(parents=True)
    header = b'{"embed": {"dtype": "BF16", "shape": [512, 64], "data_offsets": [0, 65536]}}'
    header += b" " * (-len(header) % 8)
    data = random.Random(0).randbytes(300_000)
    weights.write_bytes(len(header).to_bytes(8, "little") + header + data)
    specs = engine_specs(TRUNK, DRAFT, OPTIONS)
    for name in specs:
        (folder / f"{name}.onnx").write_bytes(f"graph of {name}".encode())
    manifest = Manifest(
        options=OPTIONS,
        trunk=TRUNK,
        draft=DRAFT,
        specs=specs,
        graphs={f"{name}.onnx": file_hash(folder / f"{name}.onnx") for name in specs},
        files={
            WEIGHTS: WeightFile(weights.stat().st_size, file_hash(weights), sample_hash(weights))
        },
        weights={"embed": Weight(WEIGHTS, 8 + len(header), "BF16", (512, 64))},
        ignored={"visual": 3, "mtp": 15},
        made_with={"eagle-chain": "0.1.0"},
        arguments=("--capacity", "64"),
        plans={
            "plans/a/trunk.plan": Plan(
                "0" * 64, "tensorrt", "11.0", "H200", "9.0", "1" * 64, "bound", ()
            )
        },
    )
    manifest.save(folder)
    return manifest


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifest") / "bundle"
    write_bundle(folder)
    return folder


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(original, tmp_path / "bundle"))


def edit(folder: Path, change: Callable[[Data], Any]) -> None:
    """Change the parsed manifest.json in place."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def refusal(folder: Path) -> str:
    """The one sentence with which the bundle is refused."""
    with pytest.raises(InputError) as caught:
        Manifest.load(folder)
    message = str(caught.value)
    assert "eagle-chain export" in message, "every refusal names the command that mends it"
    assert str(folder) in message
    return message


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    manifest = write_bundle(tmp_path / "bundle")
    assert Manifest.load(tmp_path / "bundle") == manifest


def test_saving_is_deterministic_and_leaves_nothing_else(bundle: Path) -> None:
    first = (bundle / "manifest.json").read_bytes()
    before = sorted(os.listdir(bundle))
    manifest = Manifest.load(bundle)
    swapped = dict(reversed(list(manifest.graphs.items())))
    assert swapped == manifest.graphs
    manifest.graphs.clear()
    manifest.graphs.update(swapped)  # another insertion order
    manifest.save(bundle)
    assert (bundle / "manifest.json").read_bytes() == first
    assert sorted(os.listdir(bundle)) == before


def put(*path: str | int, to: Any) -> Callable[[Data], None]:
    """An edit that sets one value."""

    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return change


def drop(*path: str | int) -> Callable[[Data], None]:
    """An edit that deletes one value."""

    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


BROKEN: dict[str, tuple[Callable[[Data], None], str]] = {
    "newer format": (put("format", to=FORMAT + 1), f"format is {FORMAT + 1}, this version"),
    "format as text": (put("format", to="1"), 'format is "1"'),
    "format true": (put("format", to=True), "format is true"),
    "no format": (drop("format"), "format is null"),
    "no specs": (drop("specs"), "lacks specs"),
    "unknown key": (put("nonsense", to=1), "unknown key nonsense"),
    "unknown key deep": (put("options", "tree", to=1), "options has the unknown key tree"),
    "options a list": (put("options", to=[]), "options is [], expected an object"),
    "width text": (put("options", "width", to="5"), 'options.width is "5", expected a whole'),
    "width float": (put("options", "width", to=5.0), "options.width is 5.0, expected a whole"),
    "width bool": (put("options", "width", to=True), "options.width is true, expected a whole"),
    "width 0": (put("options", "width", to=0), "width is 0"),
    "width other": (put("options", "width", to=6), "specs.trunk.inputs[0] is"),
    "capacity negative": (put("options", "capacity", to=-1), "capacity is -1"),
    "capacity other": (put("options", "capacity", to=128), "the configs give"),
    "dtype unknown": (put("options", "dtype", to="fp8"), "dtype is 'fp8', expected one of"),
    "profile unknown": (put("options", "profile", to="odd"), "profile is 'odd'"),
    "debug unknown": (put("options", "debug", to=["x"]), "debug is x"),
    "debug text": (put("options", "debug", to="logits"), "expected a list"),
    "layer kind": (put("trunk", "layer_types", 0, to="mamba"), "mamba"),
    "layer number": (put("trunk", "layer_types", 0, to=3), "layer_types[0] is 3, expected text"),
    "tied 1": (put("trunk", "tied_head", to=1), "tied_head is 1, expected true or false"),
    "eps text": (put("trunk", "norm_eps", to="tiny"), "norm_eps"),
    "theta null": (put("trunk", "rope_theta", to=None), "rope_theta is null"),
    "kv heads 3": (put("trunk", "kv_heads", to=3), "kv_heads"),
    "heads 0": (put("trunk", "attention_heads", to=0), "attention_heads"),
    "huge": (put("trunk", "hidden_size", to=10**30), "hidden_size"),
    "other vocabulary": (put("draft", "vocab_size", to=600), "draft.vocab_size is 600"),
    "other trunk": (put("draft", "trunk_hidden_size", to=32), "trunk_hidden_size is 32"),
    "aux beyond": (put("draft", "aux_layers", to=[0, 1, 9]), "aux_layers has 9"),
    "aux empty": (put("draft", "aux_layers", to=[]), "aux_layers"),
    "aux twice": (put("draft", "aux_layers", to=[1, 1, 2]), "aux_layers"),
    "no draft": (put("draft", to=None), "specs has draft, draft_step, encoder, trunk, expected"),
    "draft a number": (put("draft", to=3), "draft is 3, expected an object"),
    "engine missing": (drop("specs", "encoder"), "specs has"),
    "engine unknown": (put("specs", "eye", to={}), "specs['eye'] lacks"),
    "tensor short": (put("specs", "trunk", "inputs", 0, to=["ids"]), "has 1 entries, expected 3"),
    "state key": (drop("specs", "trunk", "states", 0, "shape"), "lacks shape"),
    "state axis": (put("specs", "draft", "states", 0, "rows_axis", to="2"), 'rows_axis is "2"'),
    "state renamed": (put("specs", "draft", "states", 0, "input", to="k"), "the configs give"),
    "output lost": (drop("specs", "trunk", "outputs", 0), "has 7 entries, expected 8"),
    "graph missing": (drop("graphs", "draft.onnx"), "graphs has"),
    "graph hash short": (put("graphs", "draft.onnx", to="abc"), "expected 64 hexadecimal"),
    "graph hash other": (put("graphs", "draft.onnx", to="0" * 64), "was changed since the export"),
    "graph hash null": (put("graphs", "draft.onnx", to=None), "is null, expected text"),
    "size text": (put("files", WEIGHTS, "size", to="1"), "expected a whole number"),
    "size other": (put("files", WEIGHTS, "size", to=400_000), "400000 at export"),
    "size of no file": (put("files", WEIGHTS, "size", to=7), "expected 8 bytes or more"),
    "file hash": (put("files", WEIGHTS, "sha256", to="0" * 63), "64 hexadecimal digits"),
    "sample long": (put("files", WEIGHTS, "sample", to="0" * 65), "64 hexadecimal digits"),
    "sample other": (put("files", WEIGHTS, "sample", to="0" * 64), "is not the file"),
    "weight file": (put("weights", "embed", "file", to="x"), "which files does not list"),
    "weight dtype": (put("weights", "embed", "dtype", to="FP8"), "dtype is 'FP8'"),
    "weight offset": (put("weights", "embed", "offset", to=0), "offset 0"),
    "weight negative": (put("weights", "embed", "shape", to=[-1, 64]), "extents of 1 or more"),
    "weight beyond": (put("weights", "embed", "shape", to=[5120, 64]), "ends at byte"),
    "ignored negative": (put("ignored", "mtp", to=-1), "expected 0 or more"),
    "plan hash": (put("plans", "plans/a/trunk.plan", "sha256", to=""), "64 hexadecimal digits"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_value_is_named(bundle: Path, name: str) -> None:
    change, expected = BROKEN[name]
    edit(bundle, change)
    assert expected in refusal(bundle)


def test_a_weight_ends_with_its_file_or_before(bundle: Path) -> None:
    manifest = Manifest.load(bundle)
    inside = (w for w in manifest.weights.values() if w.file == WEIGHTS)
    end = max(weight.offset + weight.nbytes for weight in inside)
    assert manifest.files[WEIGHTS].size >= end
    edit(bundle, put("files", WEIGHTS, "size", to=end - 1))
    assert f"ends at byte {end}, {WEIGHTS} has {end - 1}" in refusal(bundle)


ESCAPES = [
    "../secret",
    "/etc/passwd",
    "weights/../../x",
    "weights//x",
    "./x",
    "a\\b",
    "",
    ".",
    "x\0",
    "x\ud800",
]


@pytest.mark.parametrize("path", ESCAPES)
@pytest.mark.parametrize("table", ["files", "plans"])
def test_a_path_that_leaves_the_folder_is_refused(bundle: Path, table: str, path: str) -> None:
    def change(data: Data) -> None:
        data[table][path] = data[table].popitem()[1]

    edit(bundle, change)
    assert "path" in refusal(bundle)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe{}", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"null", "holds null, expected an object"),
        (b"[1]", "holds [1], expected an object"),
        (b'{"format": 1, "format": 1}', "key given twice: format"),
        (b'{"format": NaN}', "format is NaN"),
        (b'{"format": -Infinity}', "format is -Infinity"),
        (b'{"format": 1' + b"0" * 5000 + b"}", "manifest.json"),
        (b'{"format": 1}', "lacks "),
    ],
    ids=lambda value: value[:12].decode(errors="replace") if isinstance(value, bytes) else "",
)
def test_a_file_that_is_no_manifest_is_refused(bundle: Path, text: bytes, expected: str) -> None:
    (bundle / "manifest.json").write_bytes(text)
    assert expected in refusal(bundle)


def test_infinite_numbers_are_refused(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text().replace("1e-06", "1e999")
    (bundle / "manifest.json").write_text(text)
    assert "norm_eps is Infinity" in refusal(bundle)


def test_every_value_of_another_type_is_refused(bundle: Path) -> None:
    """Replace each value in turn by one of another type: never a traceback, never a pass."""
    data = json.loads((bundle / "manifest.json").read_text())
    places: list[tuple[str | int, ...]] = []

    def walk(value: Any, path: tuple[str | int, ...]) -> None:
        if path:
            places.append(path)
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, (*path, key))
        elif isinstance(value, list):
            for i, item in enumerate(value):
                walk(item, (*path, i))

    walk(data, ())
    assert len(places) > 400
    for path in places:
        broken = copy.deepcopy(data)
        value: Any = data
        for key in path:
            value = value[key]
        for other in ({"a": 1}, [None], "text", 1.5, None):
            same = type(other) is type(value) or (value is None and other == 1.5)
            if same or (path == ("draft",) and other is None):
                continue
            if isinstance(value, float) and isinstance(other, float):
                continue
            put(*path, to=other)(broken)
            (bundle / "manifest.json").write_text(json.dumps(broken))
            refusal(bundle)


def test_cutting_the_file_anywhere_is_refused(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_bytes().rstrip()
    for length in random.Random(2).sample(range(len(text)), 60):
        (bundle / "manifest.json").write_bytes(text[:length])
        refusal(bundle)


def test_no_folder_and_no_manifest(tmp_path: Path, bundle: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nothing")
    assert "is a file, expected a bundle" in refusal(bundle / "manifest.json")
    (bundle / "manifest.json").unlink()
    assert "is not a bundle" in refusal(bundle)


def test_changed_graph(bundle: Path) -> None:
    (bundle / "draft.onnx").write_bytes(b"another graph")
    message = refusal(bundle)
    assert "draft.onnx: was changed since the export" in message
    assert "--capacity 64" in message, "the command repeats the options of this bundle"


def test_missing_graph(bundle: Path) -> None:
    (bundle / "trunk.onnx").unlink()
    assert "trunk.onnx: cannot be read (No such file or directory)" in refusal(bundle)


def test_missing_weights(bundle: Path) -> None:
    (bundle / WEIGHTS).unlink()
    assert "model.safetensors: cannot be read (No such file" in refusal(bundle)


def test_a_name_too_long_for_a_file_is_refused(bundle: Path) -> None:
    def change(data: Data) -> None:
        data["files"][f"weights/{'x' * 5000}/m"] = data["files"].popitem()[1]
        data["weights"] = {}

    edit(bundle, change)
    assert "cannot be read (File name too long)" in refusal(bundle)


def test_weights_are_a_folder(bundle: Path) -> None:
    (bundle / WEIGHTS).unlink()
    (bundle / WEIGHTS).mkdir()
    refusal(bundle)


@pytest.mark.parametrize("kept", [0, 4, 8, 200, -1], ids=str)
def test_truncated_weights(bundle: Path, kept: int) -> None:
    content = (bundle / WEIGHTS).read_bytes()
    (bundle / WEIGHTS).write_bytes(content[:kept])
    message = refusal(bundle)
    assert f"has {len(content[:kept])} bytes, {len(content)} at export" in message
    assert "incomplete download?" in message


def test_grown_weights(bundle: Path) -> None:
    with open(bundle / WEIGHTS, "ab") as stream:
        stream.write(b"x")
    assert "another file?" in refusal(bundle)


@pytest.mark.parametrize("place", [0, 20, 100, 65_000, -65_000, -1], ids=str)
def test_other_weights_of_the_same_size(bundle: Path, place: int) -> None:
    content = bytearray((bundle / WEIGHTS).read_bytes())
    content[place] ^= 1
    (bundle / WEIGHTS).write_bytes(content)
    assert "is not the file that was exported" in refusal(bundle)


def test_a_change_in_the_middle_is_left_to_the_whole_hash(bundle: Path) -> None:
    before = Manifest.load(bundle).files[WEIGHTS]
    content = bytearray((bundle / WEIGHTS).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / WEIGHTS).write_bytes(content)
    Manifest.load(bundle)
    assert sample_hash(bundle / WEIGHTS) == before.sample
    assert file_hash(bundle / WEIGHTS) != before.sha256


def test_a_link_to_a_checkpoint_that_moved(bundle: Path, tmp_path: Path) -> None:
    (bundle / "weights/trunk").rename(tmp_path / "checkpoint")
    (bundle / "weights/trunk").symlink_to("../../checkpoint")
    Manifest.load(bundle)
    (tmp_path / "checkpoint").rename(tmp_path / "elsewhere")
    message = refusal(bundle)
    assert f"the checkpoint folder {tmp_path}/checkpoint is not there" in message
    assert f"point {bundle}/weights/trunk at the checkpoint folder" in message
    assert f"eagle-chain export TRUNK DRAFT -o {bundle}" in message


def test_saving_leaves_the_old_file_when_it_fails(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest.load(bundle)
    before = {path.name: path.read_bytes() for path in bundle.iterdir() if path.is_file()}

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        manifest.save(bundle)
    after = {path.name: path.read_bytes() for path in bundle.iterdir() if path.is_file()}
    assert after == before


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Options(width=1), "width is 1"),
        (Options(width=5, capacity=4), "capacity is 4"),
        (Options(dtype="int4"), "dtype is 'int4'"),
        (Options(profile="fast"), "profile is 'fast'"),
        (Options(debug=("logits", "logits")), "debug is logits, logits"),
    ],
    ids=["width", "capacity", "dtype", "profile", "debug"],
)
def test_options_that_no_graph_can_have(options: Options, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        check_options(options)
