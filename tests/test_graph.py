"""The ONNX graphs against the PyTorch reference, and their own promises bit for bit.

Oracle: `export.reference`, which shares no code with the graphs. Every comparison goes over several
calls with partial accepts, so a state that leaves one call wrong is seen in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from eagle_chain.engines.bound import with_bound_weights
from eagle_chain.engines.config import DraftConfig
from eagle_chain.engines.overrides import DraftOverrides
from eagle_chain.engines.spec import Options, StatePair
from eagle_chain.export import eager
from eagle_chain.export.bundle import Pair, weight_table
from eagle_chain.export.checkpoint import open_draft, open_trunk
from eagle_chain.export.graph import STANDARD_PROFILES as PROFILES
from eagle_chain.export.graph import build_graphs
from eagle_chain.export.lowering import Portable
from eagle_chain.export.trunk import TrunkGraph
from tests.onnx_engine import Arrays, OnnxEngine, engines, open_pair
from tests.toy_pair import draft_parts, save, trunk_parts, write_pair

WIDTH, CAPACITY = 5, 48
DEBUG = ("logits", "S_rows")
FP32_TOLERANCE = 1e-4  # largest difference over largest value, per output: sums in another order
# In fp16 the toy trunk amplifies every rounding, PyTorch's own too. So the graph is judged against
# the fp32 reference with PyTorch's fp16 error as the yardstick, by root mean square.
FP16_SHARE = 1.5
# (rows of the call, rows kept of it): a prompt of 7, then every accepted count, not in order
CALLS = ((5, 5), (2, 2), (5, 1), (5, 5), (5, 3), (3, 2), (5, 4), (1, 1), (5, 2))


@pytest.fixture(scope="module")
def pair_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), dtype="bf16")


def options(profile: str = "portable", dtype: str = "fp32") -> Options:
    return Options(WIDTH, CAPACITY, dtype, profile, DEBUG)


def distance(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-6))


def as_arrays(tensors: dict[str, torch.Tensor]) -> Arrays:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def rms_distance(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.sqrt(np.square(got - want).mean() / max(np.square(want).mean(), 1e-12)))


def reference_trunk(folders: tuple[Path, Path], dtype: str) -> eager.EagerSession:
    pair = open_pair(*folders)
    weights = eager.load_weights(pair.trunk, dtype)
    aux = pair.draft_config.aux_layers
    return eager.trunk_session(weights, pair.trunk_config, aux, options(dtype=dtype))


def reference_run(session: eager.EagerSession) -> Callable[..., tuple[Arrays, Arrays]]:
    """The reference with the arguments and results of `OnnxEngine.run`."""
    dtypes = {t.name: eager.TORCH_TYPES[t.dtype] for t in session.spec.all_inputs}
    zeros = eager.zero_states(session.spec)

    def run(states: Arrays, **inputs: Any) -> tuple[Arrays, Arrays]:
        given = {n: torch.as_tensor(np.asarray(v)).to(dtypes[n]) for n, v in inputs.items()}
        held = {n: torch.from_numpy(a.copy()) for n, a in states.items()}
        out = as_arrays(session.run(zeros | held | given))
        return out, {s.input: out[s.output] for s in session.spec.states}

    return run


def teacher_forced(run: Callable[..., tuple[Arrays, Arrays]]) -> Iterator[Arrays]:
    """Every output of each call of CALLS over random tokens, states carried on."""
    tokens = np.random.default_rng(0)
    states: Arrays = {}
    position = kept = 0
    for rows, keep in CALLS:
        ids = tokens.integers(0, 512, WIDTH).astype(np.int32)
        ids[rows:] = -1
        out, states = run(states, ids=ids, position=[position], rows=[rows], kept=[kept])
        yield out
        position, kept = position + keep, keep


def trunk_distances(engine: OnnxEngine, folders: tuple[Path, Path]) -> dict[str, float]:
    """The worst distance of each output from the fp32 reference."""
    worst: dict[str, float] = {}
    reference = reference_run(reference_trunk(folders, "fp32"))
    for want, got in zip(teacher_forced(reference), teacher_forced(engine.run), strict=True):
        for name, array in want.items():
            if array.dtype == np.float32:
                worst[name] = max(worst.get(name, 0.0), distance(got[name], array))
        for name in ("accepted", "next_kept", "next_position"):
            assert got[name] == want[name], name
    return worst


@pytest.mark.parametrize("profile", PROFILES)
def test_trunk_agrees_with_the_reference(pair_folders: tuple[Path, Path], profile: str) -> None:
    engine = engines(*pair_folders, options(profile), ("trunk",))["trunk"]
    worst = trunk_distances(engine, pair_folders)
    assert len(worst) == 3 + 6 * 6 + 2 * 2
    assert max(worst.values()) < FP32_TOLERANCE, max(worst.items(), key=lambda item: item[1])


@pytest.mark.parametrize("profile", PROFILES)
def test_fp16_rounds_no_worse_than_pytorch(pair_folders: tuple[Path, Path], profile: str) -> None:
    engine = engines(*pair_folders, options(profile, "fp16"), ("trunk",))["trunk"]
    exact, rounded = (
        list(teacher_forced(reference_run(reference_trunk(pair_folders, dtype))))
        for dtype in ("fp32", "fp16")
    )
    ours = list(teacher_forced(engine.run))
    for name in (n for n, array in exact[0].items() if array.dtype == np.float32 or ".log" in n):
        want = np.stack([out[name] for out in exact])
        yardstick = rms_distance(np.stack([out[name] for out in rounded]), want)
        error = rms_distance(np.stack([out[name] for out in ours]), want)
        assert error < FP16_SHARE * yardstick + 1e-3, (name, error, yardstick)


@pytest.mark.parametrize("profile", PROFILES)
def test_encoder_and_draft_agree_with_the_reference(
    pair_folders: tuple[Path, Path], profile: str
) -> None:
    pair = open_pair(*pair_folders)
    opts = options(profile)
    ours = engines(*pair_folders, opts, ("encoder", "draft", "draft_step"))
    weights = eager.load_weights(pair.draft, "fp32")
    table = pair.trunk.torch("embed_tokens.weight").float()
    config = pair.draft_config
    encode = reference_run(eager.encoder_session(weights, config, opts))
    extend = reference_run(eager.draft_session(weights, table, config, WIDTH, opts))
    step = reference_run(eager.draft_session(weights, table, config, 1, opts))
    reference = {"encoder": encode, "draft": extend, "draft_step": step}
    assert follow_draft(ours, reference, config, (4, 1, 0, 4, 2), 3) == 16


def follow_draft(
    ours: Mapping[str, Any],
    reference: Mapping[str, Any],
    config: DraftConfig,
    selected: Sequence[int],
    singles: int,
    random: np.random.Generator | None = None,
) -> int:
    """Encoder, extends and single steps of `ours` against the reference; where it ends.

    Each extend selects a row; the rows behind it are overwritten by the next.
    """
    random = random or np.random.default_rng(1)
    theirs, states, position = Arrays(), Arrays(), 0
    for row in selected:
        features = random.normal(size=(WIDTH, config.feature_size)).astype(np.float32)
        g = reference["encoder"]({}, features=features)[0]["g"]
        assert distance(ours["encoder"].run({}, features=features)[0]["g"], g) < 1e-5
        ids = random.integers(0, config.vocab_size, WIDTH)
        inputs: dict[str, Any] = {"ids": ids, "g": g, "position": [position], "row": [row]}
        want, theirs = reference["draft"](theirs, **inputs)
        got, states = ours["draft"].run(states, **inputs)
        compare_draft(want, got)
        for _ in range(singles):  # from the row's own recurrence
            at = want["next_position"]
            inputs = {"ids": want["token"], "g": want["g_next"], "position": at, "row": [0]}
            want, theirs = reference["draft_step"](theirs, **inputs)
            got, states = ours["draft_step"].run(states, **inputs)
            compare_draft(want, got)
        position += row + 1
    return position


def compare_draft(want: Arrays, got: Arrays) -> None:
    assert got["token"] == want["token"] and got["next_position"] == want["next_position"]
    for name in ("g_next", "logits", "draft.key.next", "draft.value.next"):
        assert distance(got[name], want[name]) < FP32_TOLERANCE, name


@pytest.mark.parametrize("profile", PROFILES)
def test_a_row_has_the_same_bits_wherever_it_stands(
    pair_folders: tuple[Path, Path], profile: str
) -> None:
    """Row i of a verify is row 0 of the padded step that decodes the same token plainly."""
    engine = engines(*pair_folders, options(profile), ("trunk",))["trunk"]
    tokens = list(np.random.default_rng(2).integers(0, 512, 7))
    plain: list[Arrays] = []
    states: Arrays = {}
    while len(plain) < 40:
        at = len(plain)
        ids = [tokens[at]] + [-1] * (WIDTH - 1)
        out, states = engine.run(states, ids=ids, position=[at], rows=[1], kept=[min(at, 1)])
        plain.append(out)
        if len(tokens) == len(plain):
            tokens.append(int(out["next_ids"][0]))
    states, position, kept = {}, 0, 0
    for accepted in (4, 1, 0, 4, 2, 3, 4, 1, 0, 3, 2, 4):
        ids = [
            tokens[position + j] if j <= accepted else (tokens[position + j] + 1) % 512
            for j in range(WIDTH)
        ]
        out, states = engine.run(states, ids=ids, position=[position], rows=[WIDTH], kept=[kept])
        if position >= 7:
            assert out["accepted"] == accepted
        for j in range(accepted + 1):
            for name in ("features", "hidden", "logits"):
                np.testing.assert_array_equal(out[name][j], plain[position + j][name][0])
        position, kept = position + accepted + 1, accepted + 1
    assert position == 40


LENGTHS = (1, 63, 64, 65, 127, 128, 129)  # around the chunks of 64 of other implementations


@pytest.fixture(scope="module")
def long_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("long"), layers=4, aux=[0, 1, 2])


@pytest.fixture(scope="module", params=PROFILES)
def long_trunk(
    long_pair: tuple[Path, Path], request: pytest.FixtureRequest
) -> tuple[OnnxEngine, Any]:
    """A graph that holds a long prompt, and the reference over any number of rows at once."""
    trunk, draft = long_pair
    config, checkpoint = open_trunk(trunk)
    draft_config, draft_checkpoint = open_draft(
        draft, config, overrides=DraftOverrides(aux_layers=(0, 1, 2))
    )
    table = weight_table(Pair(config, draft_config, checkpoint, draft_checkpoint))
    opts = Options(WIDTH, max(LENGTHS) + 1, "fp32", request.param, DEBUG)
    graph = build_graphs(config, draft_config, table, opts)["trunk"]
    weights = eager.load_weights(checkpoint, "fp32")

    def at_once(ids: Any) -> Arrays:
        wide = Options(len(ids), max(LENGTHS) + 1, "fp32", "portable", DEBUG)
        run = reference_run(eager.trunk_session(weights, config, (0, 1, 2), wide))
        return run({}, ids=ids, position=[0], rows=[len(ids)], kept=[0])[0]

    return OnnxEngine(graph, {"trunk": trunk, "draft": draft}), at_once


def in_calls(engine: OnnxEngine, ids: Any, pad: int) -> tuple[list[Arrays], Arrays]:
    """All but the last id as a prompt in calls of W rows, then the last one; rows and last call."""
    rows, states, kept = list[Arrays](), Arrays(), 0
    for part in [*np.split(ids[:-1], range(WIDTH, len(ids) - 1, WIDTH)), ids[-1:]]:
        padded = [*part, *[pad] * (WIDTH - len(part))]
        inputs = {"position": [len(rows)], "rows": [len(part)], "kept": [kept]}
        out, states = engine.run(states, ids=padded, **inputs)
        rows += [{n: out[n][r] for n in ("logits", "features")} for r in range(len(part))]
        kept = len(part)
    return rows, out


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_in_calls_is_the_whole_prompt(
    long_trunk: tuple[OnnxEngine, Any], length: int
) -> None:
    """Rows and states of prefill and one token more, and whatever stands in the padding rows."""
    engine, at_once = long_trunk
    ids = np.random.default_rng(length).integers(0, 512, length + 1)
    want = at_once(ids)
    (rows, last), (padded_rows, padded_last) = (in_calls(engine, ids, pad) for pad in (-1, 11))
    assert len(rows) == length + 1
    for name in ("logits", "features"):
        got = np.stack([row[name] for row in rows])
        assert distance(got, want[name]) < FP32_TOLERANCE, name
        np.testing.assert_array_equal(got, np.stack([row[name] for row in padded_rows]))
    compared = 0
    for name in want:
        if name.endswith(".S_rows"):
            mine, other, theirs = last[name][0], padded_last[name][0], want[name][length]
        elif name.endswith(".window.next"):  # the three columns that the next row convolves
            here, there = np.s_[:, 1:4], np.s_[:, length + 1 : length + 4]
            mine, other, theirs = last[name][here], padded_last[name][here], want[name][there]
        elif name.endswith((".key.next", ".value.next")):
            here = np.s_[:, :, : length + 1]
            mine, other, theirs = last[name][here], padded_last[name][here], want[name][here]
        else:
            continue
        assert distance(mine, theirs) < FP32_TOLERANCE, name
        np.testing.assert_array_equal(mine, other)
        compared += 1
    assert compared == 3 * 2 + 2


def test_the_draft_depends_on_its_fc(tmp_path: Path) -> None:
    """A head without its fc would still guess, only badly."""
    config, tensors = trunk_parts(layers=8, extras=False)
    trunk = save(tmp_path / "trunk", config, tensors)
    draft_json, weights = draft_parts(config)
    whole = save(tmp_path / "whole", draft_json, weights)
    zeroed = weights | {"fc.weight": torch.zeros_like(weights["fc.weight"])}
    empty = save(tmp_path / "empty", draft_json, zeroed)
    random = np.random.default_rng(0)
    features = random.normal(size=(WIDTH, 3 * 64)).astype(np.float32)
    ids = random.integers(0, 512, WIDTH)
    logits = []
    for draft in (whole, empty):
        pair = open_pair(trunk, draft)
        graphs = build_graphs(pair.trunk_config, pair.draft_config, weight_table(pair), options())
        outside = [t for t in graphs["encoder"].graph.initializer if t.external_data]
        assert [(t.name, list(t.dims)) for t in outside] == [("draft.fc.weight", [64, 3 * 64])]
        made = engines(trunk, draft, options(), ("encoder", "draft"))
        g = made["encoder"].run({}, features=features)[0]["g"]
        assert g.any() == (draft == whole)
        out, _ = made["draft"].run({}, ids=ids, g=g, position=[0], row=[WIDTH - 1])
        logits.append(out["logits"])
    assert distance(logits[1], logits[0]) > 0.1


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("kept", range(WIDTH + 1))
def test_the_folded_log_is_the_state_after_the_kept_rows(
    pair_folders: tuple[Path, Path], profile: str, kept: int
) -> None:
    """S_rows[kept - 1] is the oracle; kept = 0 is a full rollback."""
    engine = engines(*pair_folders, options(profile), ("trunk",))["trunk"]
    ids = np.random.default_rng(3).integers(0, 512, (3, WIDTH))
    _, states = engine.run({}, ids=ids[0], position=[0], rows=[5], kept=[0])
    second, states = engine.run(states, ids=ids[1], position=[3], rows=[5], kept=[3])
    third, _ = engine.run(states, ids=ids[2], position=[3 + kept], rows=[5], kept=[kept])
    names = [name for name in third if name.endswith(".S.next")]
    assert len(names) == 6
    for name in names:
        rows = second[name.replace(".S.next", ".S_rows")]
        np.testing.assert_array_equal(third[name], rows[kept - 1] if kept else second[name])


def test_a_nan_in_rejected_rows_of_the_log_does_not_spread(
    pair_folders: tuple[Path, Path],
) -> None:
    engine = engines(*pair_folders, options(), ("trunk",))["trunk"]
    ids = np.random.default_rng(4).integers(0, 512, (2, WIDTH))
    _, states = engine.run({}, ids=ids[0], position=[0], rows=[5], kept=[0])
    clean, _ = engine.run(states, ids=ids[1], position=[2], rows=[5], kept=[2])
    for name in states:
        if ".log_" in name:
            states[name] = states[name].copy()
            states[name][2:] = np.nan
    dirty, _ = engine.run(states, ids=ids[1], position=[2], rows=[5], kept=[2])
    np.testing.assert_array_equal(dirty["logits"], clean["logits"])


@pytest.mark.parametrize(
    ("tail", "rows", "accepted"),
    [
        ("right", 5, 4),
        ("right", 3, 2),
        ("right", 1, 0),
        ("no token", 5, 0),
        ("wrong first", 5, 0),
        ("wrong third", 5, 2),
    ],
)
def test_accepted_counts_from_the_front(
    pair_folders: tuple[Path, Path], tail: str, rows: int, accepted: int
) -> None:
    """Drafts are taken from the engine's own answers, then spoiled; a padded row never counts."""
    engine = engines(*pair_folders, options(), ("trunk",))["trunk"]
    ids = np.array([17, -1, -1, -1, -1])
    for j in range(4):
        out, _ = engine.run({}, ids=ids, position=[0], rows=[5], kept=[0])
        ids[j + 1] = out["next_ids"][j]
    if tail == "no token":
        ids[1:] = -1
    elif tail.startswith("wrong"):
        at = {"wrong first": 1, "wrong third": 3}[tail]
        ids[at] = (ids[at] + 1) % 512
    out, _ = engine.run({}, ids=ids, position=[0], rows=[rows], kept=[0])
    assert out["accepted"] == accepted
    assert out["next_kept"] == out["next_position"] == accepted + 1
    assert out["pending"] == out["next_ids"][accepted]


def test_logits_that_are_not_finite_choose_nothing(tmp_path: Path) -> None:
    config, tensors = trunk_parts(dtype="fp32", extras=False)
    name = next(n for n in tensors if n.endswith("embed_tokens.weight"))
    tensors[name][7] = torch.inf
    trunk = save(tmp_path / "trunk", config, tensors)
    draft = save(tmp_path / "draft", *draft_parts(config, dtype="fp32"))
    made = engines(trunk, draft, options(), ("trunk", "draft_step"))
    out, states = made["trunk"].run({}, ids=[1, 2, 3, 7, 4], position=[0], rows=[5], kept=[0])
    # every row sees the whole KV buffer, and 0 times a value that is not finite is not 0
    assert (out["next_ids"] == -1).all()
    assert out["accepted"] == 0 and out["pending"] == -1
    out, _ = made["trunk"].run(states, ids=[1, 2, 3, 5, 4], position=[0], rows=[5], kept=[0])
    assert (out["next_ids"] >= 0).all(), "written over, nothing of it is left"
    g = np.zeros((1, 64), np.float32)
    out, _ = made["draft_step"].run({}, ids=[7], g=g, position=[0], row=[0])
    assert out["token"] == -1


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("width", [1, 2, 9])
def test_every_profile_dtype_and_width_is_valid_onnx(
    pair_folders: tuple[Path, Path], profile: str, dtype: str, width: int
) -> None:
    pair = open_pair(*pair_folders)
    opts = Options(width, CAPACITY, dtype, profile, DEBUG)
    graphs = build_graphs(pair.trunk_config, pair.draft_config, weight_table(pair), opts)
    for model in graphs.values():
        onnx.checker.check_model(with_bound_weights(model), full_check=True)
        assert [(o.domain, o.version) for o in model.opset_import] == [
            ("", PROFILES[profile].opset)
        ]
        assert {node.domain for node in model.graph.node} == {""}
        dims = [
            d.dim_value
            for value in (*model.graph.input, *model.graph.output)
            for d in value.type.tensor_type.shape.dim
        ]
        assert all(dims), "every dimension is static"


def test_weights_stay_in_the_checkpoint(pair_folders: tuple[Path, Path]) -> None:
    pair = open_pair(*pair_folders)
    graphs = build_graphs(pair.trunk_config, pair.draft_config, weight_table(pair), options())
    stored = sum(t.nbytes for t in pair.trunk.tensors.values())
    for model in graphs.values():
        assert len(model.SerializeToString()) < stored / 2
        outside = [t for t in model.graph.initializer if t.external_data]
        assert all(not t.raw_data for t in outside)
    trunk, step = graphs["trunk"].graph, graphs["draft_step"].graph
    tables = [
        {
            e.key: e.value
            for t in g.initializer
            if t.name == "embed_tokens.weight"
            for e in t.external_data
        }
        for g in (trunk, step)
    ]
    assert tables[0] == tables[1] != {}, "trunk and draft read one embedding"


# --- the comparison above must be able to fail -----------------------------------------------

Patch = tuple[type, str, Callable[..., Any]]


def faults() -> list[Any]:
    """Mistakes a port makes, planted in the graph's source."""
    rms_norm, rotate, fold = Portable.rms_norm, Portable.rotate, Portable.fold
    conv, attention = Portable.conv, Portable.attention
    delta_rule = Portable.delta_rule

    def plain_norm(self: Any, x: Any, weight: str, eps: float, *, centred: bool) -> Any:
        return rms_norm(self, x, weight, eps, centred=False)

    def whole_head(self: Any, x: Any, rotary: Any, head_dim: int) -> Any:
        return rotate(self, x, rotary, head_dim) if head_dim == 0 else x

    def fold_nothing(self: Any, S: Any, log: Any) -> Any:
        return S

    def fold_backwards(self: Any, S: Any, log: Any) -> Any:
        return fold(self, S, tuple(part[::-1] for part in log))

    def later_window(self: Any, window: Any, weight: str, rows: int, kernel: int) -> Any:
        g = self.g
        size = rows + kernel - 1
        order = [min(i + 1, size - 1) for i in range(size)]
        return conv(self, g.Gather(window, g.ints(*order), axis=0), weight, rows, kernel)

    def no_unit(self: Any, x: Any) -> Any:
        return x

    def late(self: Any, query: Any, cache: Any, positions: Any, *rest: Any) -> Any:
        return attention(self, query, cache, self.g.Sub(positions, self.g.int32(1)), *rest)

    def no_beta(self: Any, S: Any, rows: Any) -> Any:
        one = self.g.scalar(1.0)
        ones = [self.g.Add(self.g.Mul(b, self.g.scalar(0.0)), one) for b in rows.beta]
        return delta_rule(self, S, type(rows)(**{**vars(rows), "beta": ones}))

    def log_of_queries(self: Any, *args: Any) -> Any:
        rows, key = TrunkGraph_delta_rows(self, *args)
        return rows, self.g.Mul(key, self.g.scalar(1.001))

    TrunkGraph_delta_rows = TrunkGraph.delta_rows
    table: dict[str, Patch] = {
        "norm without the +1": (Portable, "rms_norm", plain_norm),
        "no rotary": (Portable, "rotate", whole_head),
        "log never folded": (Portable, "fold", fold_nothing),
        "log folded backwards": (Portable, "fold", fold_backwards),
        "conv window off by one": (Portable, "conv", later_window),
        "keys and queries not normalised": (Portable, "unit", no_unit),
        "a row does not see itself": (Portable, "attention", late),
        "beta left out": (Portable, "delta_rule", no_beta),
        "the log's keys off by a thousandth": (TrunkGraph, "delta_rows", log_of_queries),
    }
    return [pytest.param(patch, id=name) for name, patch in table.items()]


@pytest.mark.parametrize("patch", faults())
def test_planted_faults_are_seen(
    pair_folders: tuple[Path, Path], patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*patch)
    engine = engines(*pair_folders, options(), ("trunk",))["trunk"]
    worst = trunk_distances(engine, pair_folders)
    assert not max(worst.values()) < FP32_TOLERANCE


def test_state_pairs_of_a_spec_are_the_graphs_states(pair_folders: tuple[Path, Path]) -> None:
    pair = open_pair(*pair_folders)
    graphs = build_graphs(pair.trunk_config, pair.draft_config, weight_table(pair), options())
    names = {i.name for i in graphs["trunk"].graph.input}
    model = ir.from_proto(graphs["trunk"])
    for cache in (n for n in names if n.endswith((".key", ".value"))):
        value = next(i for i in model.graph.inputs if i.name == cache)
        assert len(value.uses()) == 1, "only the scatter may read a cache that is updated in place"
    assert StatePair("layers.3.key", "layers.3.key.next", "fp32", (1, 2, 53, 32), True, 2) in (
        eager.trunk_spec(pair.trunk_config, pair.draft_config.aux_layers, options()).states
    )
