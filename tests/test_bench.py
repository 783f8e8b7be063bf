"""The command `bench` on the CPU: what it counts and refuses; times are the machine's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from eagle_chain.engines.cli import main
from eagle_chain.engines.spec import TensorSpec
from eagle_chain.runtime import bench
from eagle_chain.runtime.buffers import HostMemory
from eagle_chain.runtime.measure import Clock, random_tensors, state_bytes
from eagle_chain.runtime.stand import Stand
from tests.toy import Toy
from tests.toy_pair import write_pair


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


def test_several_positions_are_compared(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(bundle), "--position", "4,20", "--runs", "2", "--json"]) == 0
    output = capsys.readouterr()
    rows = json.loads(output.out)["sweep"]
    assert [(row["width"], row["capacity"], row["position"]) for row in rows] == [
        (5, 48, 4),
        (5, 48, 20),
    ]
    assert "    width  capacity  position" in output.err


def test_the_plot_is_a_picture(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    assert main(["bench", str(bundle), "--sweep", "--runs", "2", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", str(bundle), "--runs", "1", "--plot", str(tmp_path / "no/p.png")]) == 2


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
    found = bench._round(3, taken, parts)
    assert (found["floor_ms"], found["over_floor"]) == (2.0, 2.0)
    assert bench._round(1, taken, parts)["floor_ms"] == 1.75
    assert "floor_ms" not in bench._round(1, taken, {n: {} for n in parts})


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
        (["BUNDLE", "-k", "5"], "k 5"),
        (["BUNDLE", "--position", "48"], "position 48"),
        (["BUNDLE", "--runs", "0"], "runs is 0"),
        (["--shapes", "qwen3.5-9b", "--backend", "onnxruntime-cpu"], "GPU"),
        (["--shapes", "qwen3.5-9b", "--width", "5,8", "--position", "1,2,3"], "2 widths"),
        (["--shapes", "qwen3.5-9b", "--text", "x"], "accept nothing"),
        (["BUNDLE", "--position", "few"], "whole_numbers"),
    ],
    ids=["nothing", "k", "position", "runs", "shapes on a CPU", "lists", "text", "numbers"],
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
