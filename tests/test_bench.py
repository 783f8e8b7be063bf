"""The command `bench` on the CPU: what it counts and refuses; times are the machine's own."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from safetensors import safe_open

from eagle_chain.engines import progress
from eagle_chain.engines.bound import with_bound_weights
from eagle_chain.engines.cli import main
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.spec import Options, TensorSpec
from eagle_chain.export import shapes
from eagle_chain.export.graph import build_graphs
from eagle_chain.runtime import bench
from eagle_chain.runtime.bench_engines import head_of
from eagle_chain.runtime.buffers import HostMemory
from eagle_chain.runtime.drafters import engine_calls
from eagle_chain.runtime.load import open_engines
from eagle_chain.runtime.measure import Clock, random_tensors, state_bytes, weight_bytes
from eagle_chain.runtime.stand import Stand
from tests import qwen_9b
from tests.toy import Toy
from tests.toy_pair import draft_parts, exported, save, trunk_parts, write_pair, write_tokenizer


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    trunk, draft = write_pair(folder, tokenizer=True)
    words = ["export", str(trunk), str(draft), "-o", str(folder / "bundle"), "--capacity", "48"]
    assert main(words) == 0
    return folder / "bundle"


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["bench", *words, "--runs", "3", "--threads", "1", "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_every_part_and_every_k_is_timed(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    found = report(capsys, str(bundle), "--sweep")
    parts, rounds = found["parts"], found["rounds"]
    assert isinstance(parts, dict) and isinstance(rounds, dict)
    assert list(parts) == ["plain", "verify", "encoder", "draft", "draft_step"]
    assert list(rounds) == ["1", "2", "3", "4"]
    assert all(part["p10_ms"] <= part["median_ms"] <= part["p90_ms"] for part in parts.values())
    # the draft's layer and head, fp32: q, k, v, o, mlp, norms, 96 rows of a head
    wide, hidden = 2 * 64, 64
    layer = (128 + 64 + 64) * wide + hidden * 128 + 3 * 128 * hidden + 4 * hidden + 96 * hidden
    kv = 2 * 4 * 16 * 4 * 24  # keys and values, 4 heads of 16, at position 24
    assert parts["draft_step"]["weight_bytes"] == 4 * layer
    assert parts["draft_step"]["state_bytes"] == kv
    assert parts["encoder"]["weight_bytes"] == 4 * 3 * 64 * 64
    assert found["wall"] is None, "too few rounds fit behind position 24 of 48"
    speeds = found["speed"]
    assert isinstance(speeds, list) and [s["tokens_per_round"] for s in speeds] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_counted_once(
    tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedding is read by rows, unless it is the head as well; the oracle is the files'."""
    trunk, draft = write_pair(tmp_path, tied=tied, tokenizer=True)
    words = ["export", str(trunk), str(draft), "-o", str(tmp_path / "bundle"), "--capacity", "48"]
    assert main(words) == 0
    capsys.readouterr()
    found = report(capsys, str(tmp_path / "bundle"), "-k", "1")
    stored = {}
    for file in trunk.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            stored |= {n: tensors.get_tensor(n).nbytes for n in tensors.keys()}
    stored = {n: size for n, size in stored.items() if "mtp." not in n and "visual." not in n}
    embedding = next(size for name, size in stored.items() if name.endswith("embed_tokens.weight"))
    assert any("lm_head" in name for name in stored) != tied
    want = sum(stored.values()) - (0 if tied else embedding)
    parts = found["parts"]
    assert isinstance(parts, dict) and parts["verify"]["weight_bytes"] == want


@pytest.mark.parametrize("alone", [True, False])
def test_the_trunks_own_head_is_measured(
    tmp_path: Path, alone: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its layer and fc, and the head of the trunk, which its step reads whole: 512 rows of 64."""
    trunk, draft = write_pair(tmp_path, tied=alone, tokenizer=True, dtype="bf16")
    bundle, folders = str(tmp_path / "bundle"), [str(trunk), *([] if alone else [str(draft)])]
    assert main(["export", *folders, "-o", bundle, "--capacity", "48"]) == 0
    capsys.readouterr()
    found = report(capsys, bundle, "--sweep", *([] if alone else ["--drafter", "mtp"]))
    parts, rounds = found["parts"], found["rounds"]
    assert isinstance(parts, dict) and isinstance(rounds, dict)
    assert found["drafter"] == "mtp" and list(rounds) == ["1", "2", "3", "4"]
    assert list(parts) == ["plain", "verify", "mtp", "mtp_step"]
    attention = 2 * 128 * 64 + 64 * 64 + 64 * 64 + 64 * 128 + 2 * 32  # q, gate, k, v, o, norms
    layer = 64 * 128 + attention + 3 * 160 * 64 + 5 * 64
    for name in ("mtp", "mtp_step"):
        assert parts[name]["weight_bytes"] == 2 * (layer + 512 * 64)
    assert parts["mtp_step"]["state_bytes"] == 2 * 2 * 32 * 4 * 24  # 2 heads of 32, at position 24
    if alone:
        assert main(["bench", bundle, "--drafter", "eagle"]) == 2
        assert "no engines of the drafter eagle, only of mtp" in capsys.readouterr().err
    else:
        assert report(capsys, bundle, "-k", "1")["drafter"] == "eagle"


@pytest.mark.parametrize("tied", [True, False], ids=["embedding", "head of the trunk"])
def test_a_head_shared_with_the_trunk_is_part_of_the_drafts_floor(
    tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config, tensors = trunk_parts(tied=tied)
    save(tmp_path / "trunk", config, tensors)
    made, weights = draft_parts(config, draft_vocab_size=512)
    del weights["lm_head.weight"]
    save(tmp_path / "draft", made, weights)
    write_tokenizer(tmp_path / "trunk")
    folders = [str(tmp_path / name) for name in ("trunk", "draft")]
    assert main(["export", *folders, "-o", str(tmp_path / "bundle"), "--capacity", "48"]) == 0
    capsys.readouterr()
    found = report(capsys, str(tmp_path / "bundle"), "-k", "2")
    parts = found["parts"]
    assert isinstance(parts, dict)
    wide, hidden = 2 * 64, 64
    layer = (128 + 64 + 64) * wide + hidden * 128 + 3 * 128 * hidden + 4 * hidden
    for name in ("draft", "draft_step"):
        assert parts[name]["weight_bytes"] == 4 * (layer + 512 * hidden)
    assert parts["encoder"]["weight_bytes"] == 4 * 3 * 64 * 64


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("drafter", ["eagle", "mtp"])
def test_the_floor_of_published_sizes(tmp_path: Path, drafter: str, shared: bool) -> None:
    """From the graph that --shapes runs, whose weights are its inputs, in bf16."""
    trunk, draft = shapes.configs("qwen3.5-9b")
    head, mtp = 32000 * 4096, drafter == "mtp"
    if mtp or shared:
        head = 248320 * 4096
    if shared:
        trunk = replace(trunk, tied_head=True)
        draft = replace(draft, head="embed_tokens.weight", draft_vocab_size=248320)
    options = Options(5, 64, "bf16", "ort-fused")
    step = "mtp_step" if mtp else "draft_step"
    graphs = build_graphs(trunk, draft, shapes.stored(trunk, draft), options, mtp, only=(step,))
    bound = with_bound_weights(graphs[step], converted="bf16")
    spec = engine_specs(trunk, draft, options, mtp)[step]
    kinds = {TensorProto.BFLOAT16: "bf16", TensorProto.FLOAT: "fp32", TensorProto.INT32: "int32"}
    states = {tensor.name for tensor in spec.all_inputs}
    weights = [
        TensorSpec(value.name, kinds[t.elem_type], tuple(d.dim_value for d in t.shape.dim))
        for value in bound.graph.input
        if value.name not in states
        for t in [value.type.tensor_type]
    ]
    inner, keys = 12288, 4 * 256
    matrices = 4096 * 4096 + 3 * inner * 4096 + head  # o, mlp
    if mtp:  # fc, rows and gates of q, k, v
        matrices += 4096 * 8192 + (2 * 4096 + 2 * keys) * 4096
        norms = 5 * 4096 + 2 * 256  # before fc, the layer's, of q and k, the last
    else:  # q, k, v of embedding and feature
        matrices += (4096 + 2 * keys) * 8192
        norms = 4 * 4096  # of embedding and feature, the layer's, the last
    read = weight_bytes(weights, head=head_of(step, trunk, draft))
    assert read == 2 * matrices + 4 * norms


def test_shapes_have_the_drafter_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["shapes", "qwen3.5-9b", "-o", str(tmp_path), "--drafter", "mtp", "--capacity", "64"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(shapes, "configs", lambda name: qwen_9b.configs(4))
    shapes.main()
    made = {path.stem for path in tmp_path.glob("*.onnx")}
    assert made == {"trunk", "mtp", "mtp_step"}
    described = json.loads((tmp_path / "shapes.json").read_text())
    assert described["draft"] is None and described["mtp"] is True


def test_acceptance_is_measured_on_a_text(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, range(2000))))
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "NEW_TOKENS", 8)
        found = report(capsys, str(bundle), "--text", str(text))
    measured = found["measured"]
    assert isinstance(measured, dict) and 1 <= measured["tokens_per_round"] <= 5
    assert measured["tokens_per_second"] > 0 and measured["plain_tokens_per_second"] > 0
    speed = measured["tokens_per_round"] / measured["round_ms"] * 1e3  # the same clock
    assert measured["tokens_per_second"] == pytest.approx(speed)


def test_several_positions_are_compared(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    assert main(["bench", str(bundle), "--position", "4,20", "--runs", "2", "--json"]) == 0
    output = capsys.readouterr()
    rows = json.loads(output.out)["sweep"]
    assert [(row["width"], row["capacity"], row["position"]) for row in rows] == [
        (5, 48, 4),
        (5, 48, 20),
    ]
    assert "    width  capacity  position" in output.err
    counts = re.findall(r"(\d+) of (\d+), \d+ s$", output.err, re.MULTILINE)
    assert counts == [("0", "2"), ("1", "2")]


def test_a_position_is_timed_where_a_chain_would_run(
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = (bundle.parent / name for name in ("trunk", "draft"))
    several = exported(pair, tmp_path / "several", "--capacity", "24,48")
    stood = list[tuple[int, int, int]]()

    class Seen(Stand):
        def __init__(self, sessions: Any, capacity: int, k: int, position: int, *rest: Any) -> None:
            key = next(s for s in sessions["trunk"].spec.states if s.rows_axis is not None)
            stood.append((position, capacity, key.shape[2] - 5))
            super().__init__(sessions, capacity, k, position, *rest)

    monkeypatch.setattr(bench, "Stand", Seen)
    capsys.readouterr()
    words = ["--position", "19,20,40", "--runs", "1", "--threads", "1", "--json"]
    assert main(["bench", str(several), *words]) == 0
    output = capsys.readouterr()
    wanted = [(19, 24), (20, 48), (40, 48)]  # a call writes 5 rows
    assert set(stood) == {(position, size, size) for position, size in wanted}
    found = json.loads(output.out)
    assert [(row["position"], row["capacity"]) for row in found["sweep"]] == wanted
    assert list(found["parts"]) == ["plain", "verify", "encoder", "draft", "draft_step"]
    assert found["options"]["capacities"] == [24, 48]
    assert "W = 5, position 19 of 24, the smallest that holds it of 24, 48\n" in output.err
    chain = open_engines(several, threads=1).chain(drafter="none")
    for position, size in wanted:  # the second new token is that of a call which stands there
        chain.generate(range(position), max_new_tokens=2, stop_ids=())
        assert chain.cache.capacity == size
    assert main(["bench", str(several), "--position", "44"]) == 2
    assert "expected 1 to 43, the capacity of 48" in capsys.readouterr().err


def test_the_plot_is_a_picture(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    assert main(["bench", str(bundle), "--sweep", "--runs", "2", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", str(bundle), "--runs", "1", "--plot", str(tmp_path / "no/p.png")]) == 2


def test_a_plot_that_fails_costs_no_numbers(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / "full.png"
    full.symlink_to("/dev/full")
    capsys.readouterr()
    words = ["--runs", "1", "--threads", "1", "--plot", str(full), "--json"]
    assert main(["bench", str(bundle), *words]) == 2
    output = capsys.readouterr()
    assert json.loads(output.out)["break_even"] > 0
    assert "break-even at" in output.err
    last = output.err.splitlines()[-1]
    assert last.startswith(f"eagle-chain: {full}: the plot cannot be written: ") and "space" in last


def test_states_that_give_no_numbers_are_timed_as_zeros() -> None:
    """A chain stops at such logits; random bits of a quantised KV can give them."""
    toy = Toy(1)
    stand = Stand(toy.sessions, toy.capacity, 4, 10)
    for _, buffers in stand.cache.states:
        buffers[0].write(np.nan)
    taken = stand.wall(3)
    assert taken is not None and len(taken.times) == 2, "as many as fit behind the warm-up"


def test_the_floor_is_that_of_the_weights() -> None:
    """Of a round: verify, encoder, extend and k - 1 steps; states are not in it."""
    taken = Clock((2.0, 4.0, 6.0))
    parts = {n: {"floor_ms": f} for n, f in (("verify", 1), ("encoder", 0.5), ("draft", 0.25))}
    parts["draft_step"] = {"floor_ms": 0.125}
    found = bench._round(engine_calls(3, "eagle"), taken, parts)
    assert (found["floor_ms"], found["over_floor"]) == (2.0, 2.0)
    assert bench._round(engine_calls(1, "eagle"), taken, parts)["floor_ms"] == 1.75
    assert "floor_ms" not in bench._round(engine_calls(1, "eagle"), taken, {n: {} for n in parts})
    own = {"verify": {"floor_ms": 1}, "mtp": {"floor_ms": 0.25}, "mtp_step": {"floor_ms": 0.125}}
    assert bench._round(engine_calls(3, "mtp"), taken, own)["floor_ms"] == 1.5


def test_no_drafts_is_plain_decoding(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    found = report(capsys, str(bundle), "-k", "0", "--position", "7")
    assert found["position"] == 7 and list(found["parts"]) == ["plain"]  # type: ignore[call-overload]
    wall = found["wall"]
    assert isinstance(wall, dict) and wall["runs"] == 3 and wall["p10_ms"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--shapes"),
        (["BUNDLE", "-k", "5"], "-k is 5, expected 0 to 4"),
        (["BUNDLE", "--position", "48"], "--position is 48, expected 1 to 43"),
        (["BUNDLE", "--tokens-per-round", "5.5"], "is 5.5, expected 1 to 5"),
        (["BUNDLE", "--tokens-per-round", "nan"], "is nan, expected 1 to 5"),
        (["BUNDLE", "--text", "absent.txt"], "absent.txt: cannot be read"),
        (["BUNDLE", "-k", "2", "--tokens-per-round", "4"], "is 4, expected 1 to 3"),
        (["BUNDLE", "--shapes"], "not both"),
        (["--shapes"], "--shapes is '', expected --shapes qwen3.5-9b"),
        (["BUNDLE", "--runs", "0"], "runs is 0"),
        (["--shapes", "qwen3.5-9b", "--backend", "onnxruntime-cpu"], "GPU"),
        (["--shapes", "qwen3.5-9b", "--width", "5,8", "--position", "1,2,3"], "2 widths"),
        (["--shapes", "qwen3.5-9b", "--text", "x"], "accept nothing"),
        (["BUNDLE", "--position", "few"], "--position: got 'few', wanted a number, or"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_it_says_what_is_wrong(
    bundle: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(bundle) if word == "BUNDLE" else word for word in words]
    assert main(["bench", *given]) == 2
    assert said in capsys.readouterr().err


def test_a_clock_is_its_middle_time_and_its_spread() -> None:
    clock = Clock(tuple(float(n) for n in range(1, 102)))
    assert (clock.median, *clock.spread) == (51.0, 11.0, 91.0)


def test_random_weights_look_like_weights() -> None:
    norm = TensorSpec("layers.0.input_layernorm.weight", "fp32", (4096,))
    plain = TensorSpec("draft.norm.weight", "fp32", (4096,))
    matrix = TensorSpec("layers.0.mlp.up_proj.weight", "bf16", (64, 512))
    made = random_tensors([norm, plain, matrix, matrix], HostMemory())
    assert len(made) == 3
    assert abs(made[norm].read().mean()) < 0.02 and abs(made[plain].read().mean() - 1) < 0.02
    values = (made[matrix].read().astype(np.uint32) << 16).view(np.float32)
    assert 0.019 < values.std() < 0.021


def test_states_are_read_up_to_the_position() -> None:
    from eagle_chain.engines.spec import EngineSpec, StatePair

    pairs = (
        StatePair("layers.3.key", "layers.3.key.next", "bf16", (1, 4, 100, 256), True, 2),
        StatePair("layers.0.S", "layers.0.S.next", "fp32", (32, 128, 128)),
    )
    spec = EngineSpec("trunk", (), (), pairs)
    assert state_bytes(spec, 10) == 4 * 256 * 10 * 2 + 2 * 32 * 128 * 128 * 4
