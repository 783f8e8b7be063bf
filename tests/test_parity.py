"""The command `parity`: what it compares, what it finds right, what it saves and loads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle_chain.engines.cli import main, parser_for
from eagle_chain.engines.contract import trunk_spec
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.gpu import Device
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.recording import read_calls, read_index
from eagle_chain.engines.schedule import PROMPT, schedule
from eagle_chain.export import kv_reference
from eagle_chain.export.eager import zero_states
from eagle_chain.export.few_layers import remapped
from eagle_chain.export.teacher import reference_sessions
from eagle_chain.runtime import kv_planes, parity
from eagle_chain.runtime.comparison import LOGGED, Comparison, distance
from eagle_chain.runtime.player import Player
from tests.torch_engine import torch_engines
from tests.toy_pair import write_pair

CACHES = ("layers.3", "layers.7", "draft", "mtp")
DEMO = Path(__file__).resolve().parents[1] / "demo"


def command(*words: str | Path) -> None:
    assert main([*map(str, words)]) == 0


def report(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return write_pair(folder, tokenizer=True, draft_sizes={"head_dim": 32})


@pytest.fixture(scope="module")
def bundle(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "toy"
    words = ["--capacity", "64", "--prefill", "0", "--debug", "logits,S_rows"]
    command("export", *pair, "-o", folder, *words)
    return folder


@pytest.fixture(scope="module")
def recording(bundle: Path) -> Path:
    folder = bundle.parent / "recording"
    command("parity", bundle, "--save", folder)
    return folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundle of the shipped pair and its recording."""
    folder = tmp_path_factory.mktemp("demo")
    pair = DEMO / "trunk", DEMO / "draft"
    words = ["--capacity", "64", "--prefill", "0", "--debug", "logits"]
    command("export", *pair, "-o", folder / "bundle", *words)
    command("parity", folder / "bundle", "--save", folder / "recording")
    return folder / "bundle", folder / "recording"


@pytest.mark.parametrize("width", [2, 3, 5, 9])
def test_rounds_go_through_every_accepted_count(width: int) -> None:
    rounds = schedule(width, 4096)
    counts = [r.accepted for r in rounds if r.rows == width and r.accepted != PROMPT]
    assert set(counts) == set(range(width))
    assert all(round.joins <= round.rows <= width for round in rounds)
    assert {r.rows for r in rounds if r.accepted == PROMPT} == {width, (width + 1) // 2}
    assert any(round.rows == 1 for round in rounds) and rounds[-1].at_end


@pytest.mark.parametrize(
    ("width", "capacity", "prefill"),
    [(5, 160, 32), (5, 64, 32), (5, 64, 64), (9, 4096, 512), (2, 40, 32), (5, 39, 32)],
)
def test_wide_calls_fit_where_they_stand(width: int, capacity: int, prefill: int) -> None:
    rounds = schedule(width, capacity, prefill)
    assert [r for r in rounds if not r.wide] == list(schedule(width, capacity))
    position, written = 0, 0
    for round in rounds[:-1]:
        written = position + (prefill if round.wide else width)
        assert round.rows >= 1 and written <= capacity + width
        position += round.joins
    assert position <= capacity
    wide = [r for r in rounds if r.wide]
    assert wide and all(r.kept == 0 and r.rows <= prefill for r in wide)
    if capacity >= 2 * prefill + 60:  # one resumes from a trunk call, the other from a wide one
        assert len(wide) == 2 and rounds[0].kept == width and rounds[1].wide


def test_a_capacity_that_holds_no_rounds_is_refused() -> None:
    with pytest.raises(InputError, match=r"capacity is 20, .* take 38 tokens"):
        schedule(5, 20)


def test_the_bundle_is_right(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "parity", bundle)
    assert found["passed"] and found["first_fault"] is None and not found["not_compared"]
    specs = Manifest.load(bundle).specs
    wanted = {
        (name, t.name.removesuffix(".next")) for name, s in specs.items() for t in s.all_outputs
    }
    got = {(t["engine"], t["tensor"].partition(" (")[0]) for t in found["tensors"]}
    assert got == wanted  # every output of every engine
    assert [t["layer"] for t in found["tensors"] if t["tensor"].startswith("features")] == [1, 3, 4]
    assert all(t["calls"] == 12 for t in found["tensors"] if t["engine"] == "trunk")
    hidden = next(t for t in found["tensors"] if t["tensor"] == "hidden")
    assert 0 < hidden["worst"]["error"] < hidden["limit"]["error"]  # two computations, not one


@pytest.mark.parametrize(
    "options",
    [
        ["--prefill", "32"],
        ["--prefill", "0", "--kv", "q8_0/q5_1"],
        ["--prefill", "0", "--kv", "fp16"],
        ["--prefill", "64", "--profile", "standard", "--width", "2"],
        ["--prefill", "32", "--sampling"],
    ],
    ids=" ".join,
)
def test_other_bundles_are_right(
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    command("export", *pair, "-o", tmp_path / "b", "--capacity", "96", *options)
    found = report(capsys, "parity", tmp_path / "b")
    assert found["passed"] and not found["not_compared"]
    assert {t["engine"] for t in found["tensors"]} == set(Manifest.load(tmp_path / "b").specs)
    caches = {t["tensor"] for t in found["tensors"] if t["kind"] in ("kv", "codes")}
    assert caches == {f"{cache}.{part}" for cache in CACHES for part in ("key", "value")}


@pytest.mark.parametrize(("kind", "dims"), [("q8_0", 64), ("q5_1", 96)])
def test_planes_are_read_as_the_reference_reads_them(kind: str, dims: int) -> None:
    random = np.random.default_rng(0)
    blocks = dims // 32
    planes = {"scale": random.standard_normal((1, 2, 3, blocks)).astype(np.float16)}
    if kind == "q8_0":
        planes["codes"] = random.integers(-127, 128, (1, 2, 3, dims), np.int8)
    else:
        planes["min"] = random.standard_normal((1, 2, 3, blocks)).astype(np.float16)
        planes["nibbles"] = random.integers(-128, 128, (1, 2, 3, dims // 2), np.int8)
        planes["high"] = random.integers(-128, 128, (1, 2, 3, dims // 8), np.int8)
    tensors = {f".{name}": torch.from_numpy(plane) for name, plane in planes.items()}
    want = kv_reference.decoded(tensors, torch.float32).numpy()
    assert np.array_equal(kv_planes.decoded(planes), want)


def test_what_is_saved_is_all_that_loading_needs(
    bundle: Path, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process without PyTorch, from the saved folder."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from eagle_chain.engines.cli import main\n"
        f"sys.exit(main(['parity', {str(bundle)!r}, '--load', {str(recording)!r}, '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    there, here = json.loads(done.stdout), report(capsys, "parity", bundle)
    assert there == here


def test_recorded_rounds_accept_what_was_planned(bundle: Path, recording: Path) -> None:
    index = read_index(recording)
    trunk = [call for call in read_calls(recording, index) if call.engine == "trunk"]
    assert len(trunk) == len(index.accepted) == 12
    position = 0
    for call, planned, following in zip(trunk, index.accepted, [*trunk[1:], None], strict=True):
        kept = int(call.inputs["rows"][0])
        if planned != PROMPT:
            assert int(call.outputs["accepted"][0]) == planned
            ids, chosen = call.inputs["ids"], call.outputs["next_ids"]
            rows = int(call.inputs["rows"][0])
            if planned + 2 < rows:  # right again behind the wrong one: counting would not do
                assert ids[planned + 2] == chosen[planned + 1]
            kept = planned + 1
        if following is not None:
            assert int(following.inputs["kept"][0]) == kept
            if following is not trunk[-1]:
                position += kept
                assert int(following.inputs["position"][0]) == position
    assert int(trunk[-1].inputs["position"][0]) == Manifest.load(bundle).options.capacity - 1


def test_few_layers(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "parity", bundle, "--layers", "4", "--capacity", "50")
    assert found["passed"] and found["layers"] == 4 and found["options"]["capacity"] == 50
    assert [t["layer"] for t in found["tensors"] if t["tensor"].startswith("features")] == [0, 1, 2]
    for profile in ("standard",):
        again = report(capsys, "parity", bundle, "--layers", "5", "--profile", profile)
        assert again["passed"] and again["options"]["profile"] == profile


@pytest.mark.parametrize(
    ("aux", "depth", "count", "wanted"),
    [
        ((1, 15, 28), 32, 4, (0, 1, 3)),
        ((1, 15, 28), 32, 3, (0, 1, 2)),
        ((1, 3, 4), 8, 4, (0, 1, 2)),
        ((5, 6, 7), 8, 4, (1, 2, 3)),
        ((7,), 8, 1, (0,)),
        ((1, 15, 28), 32, 32, (1, 15, 28)),
    ],
)
def test_aux_layers_of_a_slice(
    aux: tuple[int, ...], depth: int, count: int, wanted: tuple[int, ...]
) -> None:
    assert remapped(aux, depth, count) == wanted


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_limits_hold_what_rounding_does(demo: tuple[Path, Path], dtype: str) -> None:
    """The reference itself, computing in `dtype`, is within the limits of that dtype."""
    bundle, recording = demo
    engines = torch_engines(bundle, dtype)
    comparison = Comparison(engines.manifest)
    player = Player(engines.sessions, engines.memory)
    for call in read_calls(recording, read_index(recording)):
        comparison.add(call, player.play(call))
    failed = [(v.tensor, v.worst, v.failed) for v in comparison.ordered() if v.failed]
    assert not failed


def test_distances_by_hand() -> None:
    want = np.array([[3.0, 4.0], [0.3, 0.4]])
    assert distance(want, want).error == 0
    scaled = distance(want * 1.01, want)
    assert scaled.cosine == pytest.approx(0, abs=1e-15) and scaled.norm == pytest.approx(0.01)
    assert scaled.error == pytest.approx(0.01)
    typical = np.sqrt((25 + 0.25) / 2)  # a small row is measured against a typical one
    assert distance(want + np.array([[0, 0], [0, 0.1]]), want).error == pytest.approx(0.1 / typical)
    assert distance(np.full((2, 2), np.nan), want).error == np.inf
    assert distance(np.zeros((2, 2)), want).norm == np.inf
    assert distance(np.zeros((2, 2)), np.zeros((2, 2))).error == 0


def test_polygraphy_reads_the_recording(demo: tuple[Path, Path], tmp_path: Path) -> None:
    """The recipe of docs/parity.md, its commands as they stand there."""
    bundle, recording = demo
    whole = tmp_path / "whole"
    subprocess.run(["cp", "-rL", bundle, whole], check=True)
    polygraphy = Path(sys.executable).with_name("polygraphy")
    for engine in ("trunk", "draft"):
        words = [str(whole / f"{engine}.onnx"), "--onnxrt", "--atol", "1e-3", "--rtol", "1e-3"]
        words += ["--load-inputs", str(recording / engine / "inputs")]
        words += ["--load-outputs", str(recording / engine / "outputs")]
        done = subprocess.run([polygraphy, "run", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert "Passed: 12/12 iterations" in done.stdout


def test_the_layout_of_ort_cuda_is_understood(bundle: Path, recording: Path) -> None:
    """Its S and windows lie the other way round, and its log holds what the rows were made of."""
    plain = Manifest.load(bundle)
    options = replace(plain.options, profile="ort-cuda")
    spec = trunk_spec(plain.trunk, plain.aux_layers, options)
    manifest = replace(plain, options=options, specs={**plain.specs, "trunk": spec})
    session = reference_sessions(bundle, manifest)["trunk"]
    names = {t.name for t in session.spec.outputs}
    states, comparison = zero_states(session.spec), Comparison(manifest)
    for call in read_calls(recording, read_index(recording)):
        if call.engine != "trunk":
            continue
        feeds = {name: torch.from_numpy(value) for name, value in call.inputs.items()}
        out = {n: t.numpy() for n, t in session.run({**feeds, **states}).items()}
        states = {p.input: torch.from_numpy(out[p.output]) for p in session.spec.states}
        got = dict(out)
        for tensor in spec.all_outputs:
            layer, _, part = tensor.name.removesuffix(".next").rpartition(".")
            if part in ("S", "window", "S_rows"):
                got[tensor.name] = out[tensor.name].swapaxes(-1, -2)
            elif f"{layer}.{LOGGED.get(part)}" in names:
                got[tensor.name] = out[f"{layer}.{LOGGED[part]}"]
            assert got[tensor.name].shape == tensor.shape
        last = replace(call, outputs=out)
        comparison.add(last, got)
    assert comparison.passed and not comparison.unknown
    wrong = {**got, "layers.1.log_beta.next": got["layers.1.log_beta.next"] * 1.01}
    comparison.add(last, wrong)
    fault = comparison.first_fault()
    assert fault is not None and fault.tensor == "layers.1.log_beta"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "recording.json").unlink(), "no recording; make one where PyTorch is"),
        (lambda f: (f / "recording.json").write_text("{"), "recording.json: "),
        (lambda f: (f / "recording.json").write_text("[]"), "recording.json: "),
        (lambda f: _first(f, "outputs").unlink(), "is missing; record it again"),
        (lambda f: _cut(_first(f, "inputs")), "is damaged"),
        (lambda f: _first(f, "outputs").write_text("{}"), "is not what was recorded"),
        (lambda f: _first(f, "inputs").write_text("{}"), "the recording has nothing for ids"),
        (lambda f: _first(f, "inputs").write_text("[1]"), "is not what was recorded"),
        (lambda f: _replaced(f, '"width": 5', '"width": 4'), "with width 4, the bundle has 5"),
        (lambda f: _replaced(f, '"layers": 8', '"layers": 4'), "with layers 4, the bundle has 8"),
        (lambda f: _replaced(f, '["encoder", 0]', '["../x", 0]'), "was recorded with engines"),
        (lambda f: _replaced(f, '"format": 1', '"format": 9'), "format is 9"),
    ],
)
def test_a_damaged_recording_is_one_sentence(
    bundle: Path,
    recording: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Any,
    words: str,
) -> None:
    folder = tmp_path / "recording"
    shutil.copytree(recording, folder)
    damage(folder)
    capsys.readouterr()
    assert main(["parity", str(bundle), "--load", str(folder)]) == 2
    printed = capsys.readouterr().err
    assert words in printed and "Traceback" not in printed


def _first(folder: Path, kind: str) -> Path:
    return folder / "trunk" / kind / "0000000000.json"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _replaced(folder: Path, old: str, new: str) -> None:
    path = folder / "recording.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_bad_words_are_refused_before_work_begins(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "letter.txt").write_text("mine")
    for words, said in (
        (["--save", "a", "--load", "b"], "give one of them"),
        (["--dtype", "fp16"], "is for the few layers of --layers N"),
        (["--layers", "9"], "--layers is 9, expected 3 to 8"),
        (["--layers", "2"], "--layers is 2, expected 3 to 8"),
        (["--layers", "4", "--dtype", "bf16", "--backend", "onnxruntime-cpu"], "exported as bf16"),
        (["--load", str(tmp_path / "none")], "so it is no recording"),
        (["--save", str(taken)], "is there and is no recording"),
    ):
        capsys.readouterr()
        assert main(["parity", str(bundle), *words]) == 2, words
        assert said in capsys.readouterr().err
    assert (taken / "letter.txt").read_text() == "mine"


@pytest.mark.parametrize(("flavour", "wanted"), [("tensorrt", []), ("tensorrt-rtx", ["8.9"])])
def test_few_layers_are_built_for_this_gpu(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flavour: str, wanted: list[str]
) -> None:
    """TensorRT-RTX has to be told which, and `parity` has no option for that."""
    asked = list[list[str]]()
    monkeypatch.setattr(parity, "dispatch", asked.append)
    monkeypatch.setattr(parity, "_check_backend", lambda *_: None)
    monkeypatch.setattr(parity, "device_info", lambda: Device(0, "GPU", "8.9", 1))
    words = [str(bundle), "--layers", "4", "--backend", flavour]
    parity._few_layers(parser_for("parity").parse_args(words), tmp_path / "few")
    (command, *rest), building = asked[-1], parser_for("build")
    assert command == "build" and building.parse_args(rest).compute_capability == wanted


@pytest.mark.parametrize("profile", ["ort-fused", "ort-cuda"])
def test_gpu_profiles_are_exported_and_recorded(tmp_path: Path, profile: str) -> None:
    """What `parity --load` needs on a GPU machine; some weights are inputs of these graphs."""
    pair, bundle = (DEMO / "trunk", DEMO / "draft"), tmp_path / "bundle"
    words = ["--profile", profile, "--dtype", "bf16", "--capacity", "64", "--prefill", "32"]
    command("export", *pair, "-o", bundle, *words)
    command("record", bundle, "-o", tmp_path / "recording", "--part")
    manifest, index = Manifest.load(bundle), read_index(tmp_path / "recording")
    index.check(manifest, tmp_path)
    comparison = Comparison(manifest)
    for call in read_calls(tmp_path / "recording", index):
        for tensor in manifest.specs[call.engine].all_outputs:
            want = comparison.wanted(call, tensor.name)
            if call.engine == "prefill" and ".log_" in tensor.name:
                continue  # blank
            assert want is not None, tensor.name
            axes = [i for i, n in enumerate(tensor.shape) if n != want.shape[i]]
            assert axes in ([], [2]), tensor.name  # KV buffers end at the rows so far
