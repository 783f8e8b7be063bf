"""The graphs that read a prompt in wide chunks, against the same prompt in calls of W rows.

The chunked delta rule itself is judged by a float64 loop over the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

from eagle_chain.engines.spec import EngineSpec, Options, TensorSpec
from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.chunked import ChunkRows, Sizes, delta_rule
from tests.onnx_engine import Arrays, OnnxEngine, engines
from tests.toy_pair import draft_parts, save, trunk_parts

WIDTH, ROWS, CAPACITY = 5, 64, 200
RULE = 1e-5  # largest difference over largest value: the chunked rule itself
TOLERANCE = 5e-5  # whole graphs, whose products and softmax sum in another order as well
PROFILES = ("portable", "standard")
POISON = 511  # a token whose embedding is not a number

Chunks = Sequence[tuple[str, int]]  # engine and valid rows, call by call


def distance(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-6))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    config, tensors = trunk_parts(layers=8, seed=0, dtype="bf16")
    tensors["model.language_model.embed_tokens.weight"][POISON] = torch.nan
    draft = draft_parts(config, seed=1, dtype="bf16", head_dim=32)
    return save(folder / "trunk", config, tensors), save(folder / "draft", *draft)


@pytest.fixture(scope="module", params=PROFILES)
def made(folders: tuple[Path, Path], request: pytest.FixtureRequest) -> dict[str, OnnxEngine]:
    options = Options(WIDTH, CAPACITY, "fp32", request.param, ("logits",), prefill=ROWS)
    return engines(*folders, options)


def feed(
    made: Any, ids: Sequence[int], chunks: Chunks, pad: int = -1
) -> tuple[np.ndarray[Any, Any], Arrays, Arrays]:
    """A prompt in the given calls: features of every row, the last call's outputs, the states."""
    features, states, at, kept = [], Arrays(), 0, 0
    for name, rows in chunks:
        full = made[name].width
        padded = [*ids[at : at + rows], *[pad if name == "prefill" else -1] * (full - rows)]
        inputs = {"ids": padded, "position": [at], "rows": [rows], "kept": [kept]}
        out, states = made[name].run(states, **inputs)
        features.append(out["features"][:rows])
        at, kept = at + rows, 0 if name == "prefill" else rows
        if name == "prefill":
            assert out["next_kept"] == 0 and out["next_position"] == at
    return np.concatenate(features), out, states


def in_steps(length: int) -> Chunks:
    steps = [("trunk", min(WIDTH, length - at)) for at in range(0, length, WIDTH)]
    return steps


def compare(got: tuple[Any, Arrays, Arrays], want: tuple[Any, Arrays, Arrays], live: int) -> None:
    """Two ways to the same place, both ending in a single row."""
    assert distance(got[0], want[0]) < TOLERANCE
    np.testing.assert_array_equal(got[1]["next_ids"][0], want[1]["next_ids"][0])
    assert distance(got[1]["logits"][0], want[1]["logits"][0]) < TOLERANCE
    compared = 0
    for name, mine in got[2].items():
        theirs = want[2][name]
        if name.endswith(".S"):
            assert distance(mine, theirs) < TOLERANCE, name
        elif name.endswith(".window"):
            assert distance(mine[:, :4], theirs[:, :4]) < TOLERANCE, name
        elif ".log_" in name:
            assert distance(mine[:1], theirs[:1]) < TOLERANCE, name
        else:
            assert distance(mine[:, :, :live], theirs[:, :, :live]) < TOLERANCE, name
        compared += 1
    assert compared == 6 * 5 + 2 * 2


@pytest.mark.parametrize(
    "chunks",
    [
        [("prefill", ROWS)],
        [("prefill", 1)],
        [("prefill", 2)],
        [("prefill", 3), ("prefill", 63)],
        [("prefill", ROWS), ("prefill", 17)],
        [("trunk", 5), ("prefill", ROWS), ("trunk", 3), ("prefill", 5), ("prefill", 33)],
    ],
    ids=lambda chunks: "-".join(f"{name[0]}{rows}" for name, rows in chunks),
)
def test_wide_calls_lead_where_steps_lead(made: dict[str, OnnxEngine], chunks: Chunks) -> None:
    """Features, logits, S, window, log and KV after a last row, whatever the calls before it."""
    length = sum(rows for _, rows in chunks)
    ids = np.random.default_rng(length).integers(0, 500, length + 1)
    want = feed(made, ids, [*in_steps(length), ("trunk", 1)])
    got = feed(made, ids, [*chunks, ("trunk", 1)])
    compare(got, want, length + 1)


def test_the_choice_after_a_chunk_is_that_of_its_last_valid_row(
    made: dict[str, OnnxEngine],
) -> None:
    ids = np.random.default_rng(1).integers(0, 500, 41)
    for rows in (1, 40, 41):
        _, out, _ = feed(made, ids, [("prefill", rows)])
        _, step, _ = feed(made, ids, in_steps(rows))
        last = (rows - 1) % WIDTH
        assert out["pending"] == step["next_ids"][last]
        assert distance(out["logits"][0], step["logits"][last]) < TOLERANCE
        assert distance(out["hidden"][rows - 1], step["hidden"][last]) < TOLERANCE


def test_rows_that_only_fill_a_call_change_nothing(made: dict[str, OnnxEngine]) -> None:
    """Not one bit of what is kept, though they are not even numbers."""
    ids = np.random.default_rng(2).integers(0, 500, 60)
    chunks = [("prefill", 7), ("prefill", 40), ("trunk", 1)]
    clean, poisoned = (feed(made, ids, chunks, pad)[2] for pad in (-1, POISON))
    for name, array in poisoned.items():
        if name.endswith((".key", ".value")):
            rows = 47 + WIDTH
            np.testing.assert_array_equal(array[:, :, :rows], clean[name][:, :, :rows])
            assert not array[:, :, rows:].any()
        elif ".log_" in name:
            np.testing.assert_array_equal(array[:1], clean[name][:1])
        elif name.endswith(".window"):
            np.testing.assert_array_equal(array[:, :4], clean[name][:, :4])
        else:
            np.testing.assert_array_equal(array, clean[name])


@pytest.mark.parametrize("kept", range(WIDTH + 1))
def test_the_kept_rows_of_the_call_before_are_folded_in_first(
    made: dict[str, OnnxEngine], kept: int
) -> None:
    """And the others of its log are not looked at: they hold no numbers here."""
    ids = np.random.default_rng(3).integers(0, 500, 60)
    _, _, states = feed(made, ids, [("prefill", 20), ("trunk", WIDTH)])
    for name in (n for n in states if ".log_" in n):
        states[name] = states[name].copy()
        states[name][kept:] = np.nan
    inputs = {"position": [20 + kept], "rows": [30], "kept": [kept]}
    padded = [*ids[20 + kept : 50 + kept], *[-1] * (ROWS - 30)]
    got, after = made["prefill"].run(states, ids=padded, **inputs)
    want, _, clean = feed(made, ids, [*in_steps(20 + kept), ("prefill", 30)])
    assert distance(got["features"][:30], want[20 + kept :]) < TOLERANCE
    for name in (n for n in after if n.endswith(".S")):
        assert distance(after[name], clean[name]) < TOLERANCE


def test_the_drafts_rows_are_those_of_its_own_calls(made: dict[str, OnnxEngine]) -> None:
    random = np.random.default_rng(4)
    ids = random.integers(0, 500, 48)
    features = random.normal(size=(48, 3 * 64)).astype(np.float32)
    want: Arrays = {}
    for at in range(0, 48, WIDTH):
        rows = min(WIDTH, 48 - at)
        given = np.zeros((WIDTH, 3 * 64), np.float32)
        given[:rows] = features[at : at + rows]
        g = made["encoder"].run({}, features=given)[0]["g"]
        padded = [*ids[at : at + rows], *[-1] * (WIDTH - rows)]
        inputs = {"ids": padded, "g": g, "position": [at], "row": [rows - 1]}
        _, want = made["draft"].run(want, **inputs)
    states: Arrays = {}
    for at, rows in ((0, 31), (31, 17)):
        given = np.full((ROWS, 3 * 64), np.nan, np.float32)
        given[:rows] = features[at : at + rows]
        padded = [*ids[at : at + rows], *[POISON] * (ROWS - rows)]
        inputs = {"ids": padded, "features": given, "position": [at], "rows": [rows]}
        _, states = made["draft_prefill"].run(states, **inputs)
    for name in ("draft.key", "draft.value"):
        assert distance(states[name][:, :, :48], want[name][:, :, :48]) < TOLERANCE
        assert not states[name][:, :, 48:].any()


@pytest.mark.parametrize("kv", ["fp16", "q8_0/q5_1"])
def test_stored_rows_of_another_type(folders: tuple[Path, Path], kv: str) -> None:
    """The same codes but where rounding decides, and rows of a call that see each other rounded."""
    options = Options(WIDTH, 96, "fp32", "portable", ("logits",), kv=kv, prefill=32)
    made = engines(*folders, options)
    ids = np.random.default_rng(6).integers(0, 500, 50)
    _, want, _ = feed(made, ids, [*in_steps(45), ("trunk", 1)])
    _, got, states = feed(made, ids, [("prefill", 32), ("prefill", 13), ("trunk", 1)])
    assert got["next_ids"][0] == want["next_ids"][0]
    assert distance(got["logits"][0], want["logits"][0]) < 2e-3
    assert not any(states[n][:, :, 46 + WIDTH :].any() for n in states if ".3." in n)


def by_rows(S: Any, query: Any, key: Any, value: Any, log_decay: Any, beta: Any) -> tuple[Any, Any]:
    """The rule as it is defined, row by row in float64."""
    group = value.shape[1] // key.shape[1]
    outputs = []
    for t in range(len(key)):
        k, q = (np.repeat(x[t], group, 0)[:, :, None] for x in (key, query))
        S = S * np.exp(log_decay[t])[:, None, None]
        delta = beta[t][:, None] * (value[t] - (S * k).sum(1))
        S = S + k * delta[:, None, :]
        outputs.append((S * q).sum(1))
    return np.stack(outputs), S


@pytest.mark.parametrize("rows", [32, 64, 192])
@pytest.mark.parametrize("kind", ["usual", "one key", "no decay", "sudden decay", "empty"])
def test_the_chunked_rule_is_the_rule(kind: str, rows: int) -> None:
    """Hard cases too: rows that all write one key without forgetting, and rows that forget all."""
    sizes = Sizes(rows, 2, 4, 16, 24)
    random = np.random.default_rng(rows)
    shapes = {
        "query": (rows, 2, 16),
        "key": (rows, 2, 16),
        "value": (rows, 4, 24),
        "log_decay": (rows, 4),
        "beta": (rows, 4),
    }
    given = {name: random.normal(size=shape) for name, shape in shapes.items()}
    for name in ("query", "key"):
        given[name] /= np.linalg.norm(given[name], axis=-1, keepdims=True)
    given["log_decay"] = -np.exp(given["log_decay"] - 2)
    given["beta"] = 1 / (1 + np.exp(-given["beta"]))
    if kind in ("one key", "no decay"):
        given["log_decay"] *= 0
    if kind == "one key":
        given["key"][:] = given["key"][0]
        given["beta"][:] = 1
    if kind == "sudden decay":
        given["log_decay"][rows // 3 :: 7] = -60
        given["log_decay"][5] = -2000
    if kind == "empty":
        given = {name: array * 0 for name, array in given.items()}
    given = {name: array.astype(np.float32) for name, array in given.items()}
    S = random.normal(size=(4, 16, 24)).astype(np.float32)

    inputs = tuple(TensorSpec(name, "fp32", shape) for name, shape in shapes.items())
    state = TensorSpec("S", "fp32", (1, 4, 16, 24))
    outputs = (
        TensorSpec("out", "fp32", (rows, 4, 24)),
        TensorSpec("after", "fp32", (1, 4, 16, 24)),
    )
    g = GraphBuilder(EngineSpec("rule", (*inputs, state), outputs), {}, "fp32", 17)
    out, after = delta_rule(g, g.input("S"), ChunkRows(*map(g.input, shapes)), sizes)
    g.output("out", out)
    g.output("after", after)
    session = ort.InferenceSession(g.model().SerializeToString())
    got = session.run(None, {**given, "S": S.reshape(1, 4, 16, 24)})
    exact = [array.astype(np.float64) for array in (S, *given.values())]
    for mine, theirs in zip(got, by_rows(*exact), strict=True):
        assert distance(mine.reshape(theirs.shape), theirs) < RULE
