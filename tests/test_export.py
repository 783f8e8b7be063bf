"""Writing a bundle: what is in it, and that it appears complete or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from eagle_chain.engines.cli import main
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.staging import locked
from eagle_chain.engines.version import VERSION
from tests.toy_pair import draft_parts, save, trunk_parts, write_pair

GRAPHS = (
    *("draft", "draft_prefill", "draft_step", "encoder"),
    *("mtp", "mtp_prefill", "mtp_step", "prefill", "trunk"),
)
SMALL = ("--capacity", "32")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a toy trunk and draft; tests only read them."""
    return write_pair(tmp_path_factory.mktemp("pair"), layers=4, aux=[0, 1, 2], tokenizer=True)


@pytest.fixture(scope="module")
def exported(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the pair; tests only read it."""
    bundle = tmp_path_factory.mktemp("exported") / "bundle"
    assert export(pair, bundle) == 0
    return bundle


def export(pair: tuple[Path, Path], bundle: Path, *options: str) -> int:
    words = options if "--capacity" in options else (*SMALL, *options)
    aux = () if "--aux-layers" in words else ("--aux-layers", "0,1,2")
    return main(["export", str(pair[0]), str(pair[1]), "-o", str(bundle), *aux, *words])


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, links not followed."""
    return {
        str(path.relative_to(folder)): os.readlink(path).encode()
        if path.is_symlink()
        else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_a_bundle_holds_graphs_links_tokenizer_and_manifest(exported: Path) -> None:
    assert sorted(tree(exported)) == sorted(
        [
            *(f"{name}.onnx" for name in GRAPHS),
            "manifest.json",
            *(f"tokenizer/{name}" for name in sorted(os.listdir(exported / "tokenizer"))),
            "weights/draft",
            "weights/trunk",
        ]
    )
    assert "tokenizer.json" in os.listdir(exported / "tokenizer")
    assert sum(len(content) for content in tree(exported).values()) < 1_000_000
    assert Manifest.load(exported).arguments == ("--capacity", "32", "--aux-layers", "0,1,2")


@pytest.mark.parametrize("name", GRAPHS)
def test_the_ends_of_a_graph_are_its_spec(exported: Path, name: str) -> None:
    spec = Manifest.load(exported).specs[name]
    graph = onnx.load(exported / f"{name}.onnx", load_external_data=False).graph
    kinds = {"fp32": TensorProto.FLOAT, "int32": TensorProto.INT32}
    for values, tensors in ((graph.input, spec.all_inputs), (graph.output, spec.all_outputs)):
        assert [
            (
                v.name,
                v.type.tensor_type.elem_type,
                [d.dim_value for d in v.type.tensor_type.shape.dim],
            )
            for v in values
        ] == [(t.name, kinds[t.dtype], list(t.shape)) for t in tensors]


def test_a_wrong_spec_is_caught_before_anything_is_written(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_chain.export import bundle

    def other_names(*arguments: object) -> object:
        graphs = original(*arguments)  # type: ignore[arg-type]
        graphs["encoder"].graph.output[0].name = "h"
        graphs["encoder"].graph.node[-1].output[0] = "h"
        return graphs

    original = bundle.build_graphs
    monkeypatch.setattr(bundle, "build_graphs", other_names)
    with pytest.raises(RuntimeError, match="encoder: outputs are"):
        export(pair, tmp_path / "bundle")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("profile", ["portable", "standard"])
def test_an_operator_of_one_runtime_is_not_written(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    from eagle_chain.export import bundle

    def with_foreign_node(*arguments: object) -> object:
        graphs = original(*arguments)  # type: ignore[arg-type]
        model = graphs["draft"]
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
        (node,) = [node for node in model.graph.node if "token" in node.output]
        node.output[0] = "before"
        odd = onnx.helper.make_node("Gelu", ["before"], ["token"], "odd one", None, "com.microsoft")
        model.graph.node.append(odd)
        return graphs

    original = bundle.build_graphs
    monkeypatch.setattr(bundle, "build_graphs", with_foreign_node)
    with pytest.raises(RuntimeError) as caught:
        export(pair, tmp_path / "bundle", "--profile", profile)
    words = f"draft: node 'odd one' is com.microsoft.Gelu, and a graph of profile {profile} holds"
    assert words in str(caught.value) and "use a profile for ONNX Runtime" in str(caught.value)
    assert os.listdir(tmp_path) == []


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 18000000000\n"


def overlapping(content: bytes) -> bytes:
    """The second tensor lies where the first one does."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    entries = [entry for name, entry in header.items() if name.endswith("norm.weight")]
    entries[1]["data_offsets"] = entries[0]["data_offsets"]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "4 bytes": lambda content: content[:4],
    "cut in the header": lambda content: content[:600],
    "cut by one byte": lambda content: content[:-1],
    "junk behind": lambda content: content + b"junk",
    "overlap": overlapping,
    "LFS pointer": lambda content: POINTER,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("role", ["trunk", "draft"])
def test_damaged_weights_write_nothing(
    pair: tuple[Path, Path],
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: str,
    role: str,
) -> None:
    trunk, draft = (Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in pair)
    weights = tmp_path / role / "model.safetensors"
    weights.write_bytes(DAMAGES[damage](weights.read_bytes()))
    before = sorted(os.listdir(tmp_path))
    assert export((trunk, draft), tmp_path / "new" / "bundle") == 2
    words = capsys.readouterr().err
    assert str(weights) in words and "download it again" in words
    assert sorted(os.listdir(tmp_path)) == before
    kept = Path(shutil.copytree(exported, tmp_path / "kept", symlinks=True))
    assert export((trunk, draft), kept) == 2
    assert tree(kept) == tree(exported)


def test_exporting_twice_gives_the_same_bytes_and_nothing_beside(
    pair: tuple[Path, Path], exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert export(pair, Path("bundle")) == 0
        assert tree(Path("bundle")) == tree(exported)
        assert os.listdir(tmp_path) == ["bundle"]


def test_weights_are_linked_relatively_only_beside_the_checkpoint(
    pair: tuple[Path, Path], exported: Path, tmp_path: Path
) -> None:
    assert os.readlink(exported / "weights/trunk") == str(pair[0])
    both = Path(shutil.copytree(pair[0].parent, tmp_path / "here"))
    assert export((both / "trunk", both / "draft"), both / "bundle") == 0
    assert os.readlink(both / "bundle/weights/trunk") == "../../trunk"
    both.rename(tmp_path / "there")
    Manifest.load(tmp_path / "there/bundle")


def test_links_of_a_hub_cache_are_followed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A hub cache keeps files as links to blobs; ONNX tools refuse those, a bundle does not."""
    for source in pair:
        snapshot, blobs = tmp_path / source.name / "snapshots/abc", tmp_path / source.name / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for file in source.iterdir():
            shutil.copyfile(file, blobs / file.name)
            (snapshot / file.name).symlink_to(Path("../../blobs", file.name))
    cached = (tmp_path / "trunk/snapshots/abc", tmp_path / "draft/snapshots/abc")
    assert export(cached, tmp_path / "linked") == 0
    assert export(cached, tmp_path / "copied", "--weights", "copy") == 0
    weights = tmp_path / "copied/weights/trunk/model.safetensors"
    assert not weights.is_symlink()
    assert not weights.parent.is_symlink()
    assert weights.read_bytes() == (pair[0] / "model.safetensors").read_bytes()
    Manifest.load(tmp_path / "linked")


def test_a_copied_bundle_stands_alone(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Other tools open its graphs by path, wherever it is moved."""
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    assert export(pair, tmp_path / "bundle", "--weights", "copy") == 0
    moved = (tmp_path / "bundle").rename(tmp_path / "moved")
    for name in GRAPHS:
        path = str(moved / f"{name}.onnx")
        onnx.checker.check_model(path, full_check=True)
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        assert [i.name for i in session.get_inputs()] == [
            t.name for t in Manifest.load(moved).specs[name].all_inputs
        ]


def test_sharded_weights(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, layers=4, aux=[0, 1, 2], shards=3)
    assert export(pair, tmp_path / "bundle") == 0
    names = [name for name in Manifest.load(tmp_path / "bundle").files if "trunk" in name]
    assert len(names) == 3


def test_the_weight_table_points_at_the_tensors(pair: tuple[Path, Path], exported: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file

    manifest = Manifest.load(exported)
    stored = load_file(pair[1] / "model.safetensors")
    for name, array in stored.items():
        weight = manifest.weights[f"draft.{name}"]
        data = (exported / weight.file).read_bytes()[weight.offset :][: weight.nbytes]
        assert np.array_equal(np.frombuffer(data, array.dtype).reshape(weight.shape), array)


def test_options_reach_the_graphs(pair: tuple[Path, Path], tmp_path: Path) -> None:
    options = ("--width", "3", "--dtype", "bf16", "--debug", "logits,S_rows", "--rotary-dim", "8")
    aux = ("--aux-layers", "0,2", "--rope-theta", "5e5")
    with pytest.MonkeyPatch.context():
        assert export(pair, tmp_path / "bundle", *options, *aux) == 2  # fc reads three features
    assert export(pair, tmp_path / "bundle", *options, "--rope-theta", "5e5") == 0
    manifest = Manifest.load(tmp_path / "bundle")
    names = [tensor.name for tensor in manifest.specs["trunk"].outputs]
    assert {"logits", "layers.0.S_rows"} <= set(names)
    assert manifest.draft is not None
    assert (manifest.draft.rope_theta, manifest.draft.rotary_dim) == (5e5, 8)
    assert (manifest.options.width, manifest.options.dtype) == (3, "bf16")
    assert "--rotary-dim 8" in manifest.export_command(tmp_path / "bundle")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--width", "1"), "width is 1"),
        (("--width", "300"), "width is 300, expected at most 64: every row is computed"),
        (("--capacity", "0"), "capacity is 0"),
        (("--capacity", "99999999"), "the trunk was made for 4096 positions"),
        (("--debug", "losses"), "debug is losses"),
        (("--debug", ""), "argument --debug: got '', wanted some of logits, S_rows"),
        (("--dtype", "fp8"), "invalid choice"),
        (("--aux-layers", "0,x"), "--aux-layers"),
        (("--aux-layers", "0,1,9"), "got [0, 1, 9], wanted layers from 0 to 3"),
        (("--profile", "fast"), "invalid choice"),
        (("--nonsense",), "unrecognized arguments"),
    ],
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, tuple) else "",
)
def test_bad_options_write_nothing(
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    expected: str,
) -> None:
    assert export(pair, tmp_path / "deep/bundle", *options) == 2
    assert expected in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_the_capacity_is_what_the_trunk_has(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, layers=4, aux=[0, 1, 2], sizes={"max_position_embeddings": 48})
    words = ["export", *map(str, pair), "-o", str(tmp_path / "bundle"), "--aux-layers", "0,1,2"]
    assert main(words) == 0
    assert Manifest.load(tmp_path / "bundle").options.capacity == 48


@pytest.mark.parametrize(
    ("profile", "capacity", "rows"),
    [
        ("portable", 600, 256),
        ("ort-cuda", 600, 512),
        ("ort-fused", 4096, 512),
        ("ort-cuda", 99, 96),
    ],
)
def test_how_wide_calls_over_a_prompt_are(
    pair: tuple[Path, Path], tmp_path: Path, profile: str, capacity: int, rows: int
) -> None:
    words = ("--profile", profile, "--capacity", str(capacity), "--dtype", "bf16")
    assert export(pair, tmp_path / "bundle", *words) == 0
    assert Manifest.load(tmp_path / "bundle").options.prefill == rows


def test_the_report_names_what_was_resolved(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(pair, tmp_path / "bundle", "--json") == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["aux_layers"] == [0, 1, 2]
    assert report["ignored"] == {"visual": 2} and report["mtp"]
    assert report["memory"]["states"] > 0
    assert "features outputs of layers 0, 1, 2" in output.err
    assert "2 visual" in output.err and "the trunk's own draft head" in output.err


def test_source_folders_need_no_installed_distribution(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert export(pair, tmp_path / "bundle") == 0
    made_with = Manifest.load(tmp_path / "bundle").made_with
    assert made_with == {name: "unknown" for name in made_with} | {"eagle-chain": VERSION}


def test_torch_is_not_needed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'safetensors', 'onnxruntime'):\n"
        "    sys.modules[name] = None\n"  # an import of it fails
        "from eagle_chain.engines.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["export", *map(str, pair), "-o", str(tmp_path / "bundle"), "--aux-layers", "0,1,2"]
    subprocess.run([sys.executable, "-c", code, *words], check=True, timeout=60)
    Manifest.load(tmp_path / "bundle")


def test_a_tensor_of_more_than_two_gigabytes(tmp_path: Path) -> None:
    """One protobuf message holds no more than 2 GB, so weights must never pass through one."""
    vocab, hidden = 8_600_000, 64
    config, tensors = trunk_parts(layers=4, tied=True, vocab_size=512)
    del tensors["model.language_model.embed_tokens.weight"]
    config["text_config"]["vocab_size"] = vocab
    trunk = save(tmp_path / "trunk", config, tensors)
    draft = save(tmp_path / "draft", *draft_parts(config, aux=[0, 1, 2]))
    size = vocab * hidden * 4
    entry = {"dtype": "F32", "shape": [vocab, hidden], "data_offsets": [0, size]}
    header = json.dumps({"model.language_model.embed_tokens.weight": entry}).encode()
    with open(trunk / "embedding.safetensors", "wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + size)  # a hole: takes no room on the disk
    assert export((trunk, draft), tmp_path / "bundle") == 0
    weight = Manifest.load(tmp_path / "bundle").weights["embed_tokens.weight"]
    assert weight.nbytes == size > 2**31
    assert sum(len(content) for content in tree(tmp_path / "bundle").values()) < 1_000_000


# What is at the target ------------------------------------------------------------------------


def test_only_a_bundle_is_replaced(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/notes.txt").write_text("mine")
    (tmp_path / "mixed").mkdir()
    assert export(pair, tmp_path / "mixed") == 0  # an empty folder is filled
    (tmp_path / "mixed/notes.txt").write_text("mine")
    before = tree(tmp_path)
    for name, expected in (
        ("file", "is a file"),
        ("folder", "notes.txt"),
        ("mixed", "it holds notes.txt"),
    ):
        assert export(pair, tmp_path / name) == 2
        assert expected in capsys.readouterr().err
    assert tree(tmp_path) == before


def test_a_checkpoint_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = write_pair(tmp_path, layers=4, aux=[0, 1, 2])
    assert export(pair, tmp_path / "bundle", "--weights", "copy") == 0
    inside = (tmp_path / "bundle/weights/trunk", tmp_path / "bundle/weights/draft")
    for source, copied in zip(pair, inside, strict=True):
        shutil.copyfile(source / "config.json", copied / "config.json")
    before = tree(tmp_path)
    for source, target in ((inside, tmp_path / "bundle"), (pair, pair[0]), (pair, tmp_path)):
        assert export(source, target) == 2
        assert "choose another folder" in capsys.readouterr().err
    assert tree(tmp_path) == before


def test_a_bundle_can_be_made_again_from_its_own_links(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    assert export(pair, tmp_path / "bundle") == 0
    links = (tmp_path / "bundle/weights/trunk", tmp_path / "bundle/weights/draft")
    assert export(links, tmp_path / "bundle", "--width", "3") == 0
    assert Manifest.load(tmp_path / "bundle").options.width == 3
    assert os.readlink(links[0]) == str(pair[0])


def test_a_link_to_a_bundle_stays_a_link(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere/bundle")
    for width in ("3", "4"):
        assert export(pair, tmp_path / "link", "--width", width) == 0
        assert (tmp_path / "link").is_symlink()
        assert Manifest.load(tmp_path / "elsewhere/bundle").options.width == int(width)
    assert os.listdir(tmp_path / "elsewhere") == ["bundle"]


# Failures -------------------------------------------------------------------------------------

# Where the child is stopped: the function that is replaced by the stop, and on which of its calls.
POINTS = {
    "staging": ("pathlib.Path.mkdir", 1),
    "first graph": ("pathlib.Path.write_bytes", 1),
    "last graph": ("pathlib.Path.write_bytes", 4),
    "links": ("pathlib.Path.symlink_to", 2),
    "hashing": ("eagle_chain.export.bundle.file_hash", 2),
    "manifest": ("os.fsync", 1),
    "exchange": ("eagle_chain.engines.staging._exchange", 1),
    "deleting the old one": ("shutil.rmtree", 1),
}
CHILD = """
import importlib, os, sys
from eagle_chain.engines import entry
from eagle_chain.export import bundle
path, call, when, signal = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
owner, _, name = path.rpartition(".")
try:
    owner = importlib.import_module(owner)
except ModuleNotFoundError:
    module, _, kind = owner.rpartition(".")
    owner = getattr(importlib.import_module(module), kind)
original, calls = getattr(owner, name), 0
def stop(*arguments, **options):
    global calls
    calls += 1
    if calls == call and when == "before":
        os.kill(os.getpid(), signal)
    result = original(*arguments, **options)
    if calls == call and when == "after":
        os.kill(os.getpid(), signal)
    return result
setattr(owner, name, stop)
sys.argv[1:] = sys.argv[5:]
sys.exit(entry.main())
"""


def stopped(
    pair: tuple[Path, Path], bundle: Path, point: str, when: str, signal: int
) -> subprocess.CompletedProcess[str]:
    """An export with width 3 that gets a signal before or after the call at `point`."""
    function, call = POINTS[point]
    words = ["export", *map(str, pair), "-o", str(bundle), "--aux-layers", "0,1,2", "--width", "3"]
    command = [sys.executable, "-c", CHILD, function, str(call), when, str(signal), *words, *SMALL]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_leaves_the_old_bundle_or_the_new_one(
    pair: tuple[Path, Path], exported: Path, tmp_path: Path, point: str, when: str
) -> None:
    bundle = Path(shutil.copytree(exported, tmp_path / "bundle", symlinks=True))
    assert stopped(pair, bundle, point, when, 9).returncode == -9
    width = Manifest.load(bundle).options.width
    done = point == "deleting the old one" or (point == "exchange" and when == "after")
    assert width == (3 if done else 5)
    if not done:
        assert tree(bundle) == tree(exported)
    assert export(pair, bundle, "--width", "4") == 0  # the next run clears what is left
    assert Manifest.load(bundle).options.width == 4
    assert os.listdir(tmp_path) == ["bundle"]


@pytest.mark.parametrize("point", POINTS)
def test_ctrl_c_leaves_no_trace(
    pair: tuple[Path, Path], exported: Path, tmp_path: Path, point: str
) -> None:
    bundle = Path(shutil.copytree(exported, tmp_path / "bundle", symlinks=True))
    child = stopped(pair, bundle, point, "before", 2)
    assert child.returncode == 130
    assert child.stderr.splitlines()[-1] == "eagle-chain: interrupted"
    assert os.listdir(tmp_path) == ["bundle"]
    Manifest.load(bundle)


def test_sigterm_is_as_ctrl_c(pair: tuple[Path, Path], exported: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(exported, tmp_path / "bundle", symlinks=True))
    child = stopped(pair, bundle, "hashing", "before", 15)
    assert child.returncode == 143
    assert child.stderr.splitlines()[-1] == "eagle-chain: interrupted"
    assert os.listdir(tmp_path) == ["bundle"] and tree(bundle) == tree(exported)


def test_ctrl_c_removes_the_folders_it_made(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert stopped(pair, tmp_path / "a/b/bundle", "links", "before", 2).returncode == 130
    assert os.listdir(tmp_path) == []


def test_without_an_atomic_exchange_a_kill_between_the_renames_is_mended(
    pair: tuple[Path, Path], exported: Path, tmp_path: Path
) -> None:
    shutil.copytree(exported, tmp_path / ".bundle.old", symlinks=True)
    (tmp_path / ".bundle.partial").mkdir()
    assert stopped(pair, tmp_path / "bundle", "first graph", "before", 2).returncode == 130
    assert tree(tmp_path / "bundle") == tree(exported)
    assert os.listdir(tmp_path) == ["bundle"]


def test_without_an_atomic_exchange_the_bundle_is_still_replaced(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_chain.engines.staging._exchange", lambda a, b: False)
    for width in ("3", "4"):
        assert export(pair, tmp_path / "bundle", "--width", width) == 0
        assert Manifest.load(tmp_path / "bundle").options.width == int(width)
        assert os.listdir(tmp_path) == ["bundle"]


def test_a_live_export_is_respected(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".bundle.partial").mkdir()
    with locked(tmp_path / "bundle"):
        assert export(pair, tmp_path / "bundle") == 2
        assert "another process is writing this folder" in capsys.readouterr().err
        assert (tmp_path / ".bundle.partial").is_dir()
    (tmp_path / ".bundle.lock").touch()  # the lock file of a dead process is no lock
    assert export(pair, tmp_path / "bundle") == 0
    assert os.listdir(tmp_path) == ["bundle"]


def test_a_full_disk_is_one_sentence_and_no_leftovers(
    pair: tuple[Path, Path], exported: Path, tmp_path: Path
) -> None:
    """A limit on the size of files makes the system refuse a write half way."""
    bundle = Path(shutil.copytree(exported, tmp_path / "bundle", symlinks=True))
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "from eagle_chain.engines.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["export", *map(str, pair), "-o", str(bundle), "--aux-layers", "0,1,2"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words, *SMALL, "--weights", "copy"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("eagle-chain: ")
    assert "File too large; nothing was written" in done.stderr
    assert "Traceback" not in done.stderr
    assert tree(bundle) == tree(exported)
    assert os.listdir(tmp_path) == ["bundle"]


def test_too_little_room_is_said_before_copying(
    pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage = shutil._ntuple_diskusage(1000, 900, 100)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert export(pair, tmp_path / "bundle", "--weights", "copy") == 2
    assert "the disk has 100 B free" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_one_sentence(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(pair, Path("/proc/eagle/bundle")) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "/proc/eagle" in error
