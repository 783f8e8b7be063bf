"""Faults planted in graphs and bound buffers of an fp32 bundle, each found where it was planted.

The checkpoint stays as it is: the reference reads it, and the engine under test does not see the
change coming. Each test also says which tensor, layer or round must be the first to show it, so
that a check that fails everything would not do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from eagle_chain.engines.cli import main
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.recording import read_calls, read_index
from eagle_chain.export.graph import build_graphs
from eagle_chain.export.lowering import Portable
from eagle_chain.export.tensor_shapes import draft_shapes, trunk_shapes
from eagle_chain.runtime.comparison import Comparison, Verdict
from eagle_chain.runtime.player import Player
from tests.bound_engine import Array, BoundSession, Buffers, read_graph, stored_arrays
from tests.planted import (
    Edit,
    exchanged,
    head_rows,
    kept_off,
    permuted,
    plant,
    rounded,
    scaled,
    tf32,
    with_plus_one,
    without_plus_one,
)
from tests.toy_pair import write_pair

LAYERS, AUX = 8, (1, 3, 6)  # three linear, one full, three linear, one full
SHARED = (("trunk", "prefill"), ("draft", "draft_step", "draft_prefill"))  # have their states
ENGINES = ("trunk", "encoder", "draft", "draft_step", "prefill", "draft_prefill")


class Bench:
    """The toy bundle, its recording, and its engines with weights that a test may change."""

    def __init__(self, folder: Path) -> None:
        self.bundle, self.folder = folder / "bundle", folder / "recording"
        pair = write_pair(folder, layers=LAYERS, aux=list(AUX), tokenizer=True)
        words = [
            "--capacity",
            "90",
            "--prefill",
            "32",
            "--debug",
            "logits",
            "--aux-layers",
            "1,3,6",
        ]
        assert main(["export", *map(str, pair), "-o", str(self.bundle), *words]) == 0
        assert main(["parity", str(self.bundle), "--save", str(self.folder)]) == 0
        self.manifest = Manifest.load(self.bundle)
        self.weights = stored_arrays(self.bundle, self.manifest)
        self.calls = list(read_calls(self.folder, read_index(self.folder)))
        self.sessions = {name: self.session(name) for name in ENGINES}
        self.graphs = {name: read_graph(self.bundle, name) for name in ENGINES}

    def session(self, engine: str, model: onnx.ModelProto | None = None) -> BoundSession:
        """An engine as exported, or from another model."""
        model = model or read_graph(self.bundle, engine)
        return BoundSession(model, self.manifest.specs[engine], self.weights)

    def edited(self, engine: str, *edits: Edit) -> BoundSession:
        """An engine with faults in its graph."""
        model = read_graph(self.bundle, engine)
        for edit in edits:
            edit(model)
        return self.session(engine, model)

    def compare(self, sessions: Mapping[str, BoundSession], *, to_the_end: bool) -> Comparison:
        """Play the calls of these engines, up to the first round that has a fault."""
        sessions = dict(sessions)
        comparison = Comparison(self.manifest)
        player = Player(sessions, next(iter(sessions.values())).memory)
        round = 0
        for call in self.calls:
            if call.round != round and not comparison.passed and not to_the_end:
                break
            round = call.round
            if call.engine in sessions:
                comparison.add(call, player.play(call))
        return comparison

    def around(self, engine: str, session: BoundSession) -> dict[str, BoundSession]:
        """One engine, and those that share its states as exported."""
        group = next((names for names in SHARED if engine in names), ())
        return {**{name: self.sessions[name] for name in group}, engine: session}

    def fault(self, engine: str, session: BoundSession) -> Verdict:
        """The first fault of one engine."""
        comparison = self.compare(self.around(engine, session), to_the_end=False)
        fault = comparison.first_fault()
        assert fault is not None, "nothing was found"
        return fault


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def weights_of(engine: str, manifest: Manifest) -> list[str]:
    """Every weight tensor of a graph, as the checkpoint's own list has it."""
    assert manifest.draft is not None
    draft = [f"draft.{name}" for name in draft_shapes(manifest.draft) if name != "t2d"]
    if engine in ("trunk", "prefill"):
        return list(trunk_shapes(manifest.trunk))
    if engine == "encoder":
        return ["draft.fc.weight"]
    if engine == "draft_prefill":  # keys and values, and what they are made of
        parts = ("fc", "input_layernorm", "hidden_norm", "k_proj", "v_proj")
        return ["embed_tokens.weight", *(n for n in draft if n.split(".")[-2] in parts)]
    return ["embed_tokens.weight", *(name for name in draft if name != "draft.fc.weight")]


BEFORE_THE_STATES = (  # of a layer: what its own states show; the rest shows behind the layer
    *("input_layernorm", "in_proj_qkv", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_bias"),
    *("k_proj", "k_norm", "v_proj"),
)


def place_of(name: str) -> tuple[str, int | None]:
    """Where a fault in a weight of the trunk must show first: a tensor, or a layer's states."""
    if name in ("norm.weight", "lm_head.weight"):
        return {"norm.weight": "hidden", "lm_head.weight": "logits"}[name], None
    if name == "embed_tokens.weight":  # a norm divides it out of layer 0, the residual keeps it
        return "", 1
    _, number, part = name.split(".", 2)
    layer = int(number)
    if any(word in part for word in BEFORE_THE_STATES):
        return "", layer
    if layer in AUX:
        return f"features (layer {layer})", layer
    return ("", layer + 1) if layer + 1 < LAYERS else ("hidden", None)


def test_the_engines_as_exported_are_right(bench: Bench) -> None:
    comparison = bench.compare(bench.sessions, to_the_end=True)
    assert comparison.passed and not comparison.unknown
    assert {verdict.engine for verdict in comparison.ordered()} == set(ENGINES)


def altered(value: Array, factor: float) -> Array:
    """A weight times a factor; of whole numbers, which are offsets, every one moved by one."""
    return value + 1 if value.dtype.kind == "i" else value * np.float32(factor)


def divided_out(engine: str, name: str) -> bool:
    """Whether a norm right behind a weight undoes any scale of it."""
    if engine in ("trunk", "prefill"):
        return name.endswith("k_proj.weight")
    return name == "embed_tokens.weight" or (engine, name) == ("draft_prefill", "draft.fc.weight")


def partly(value: Array, factor: float) -> Array:
    """A weight with a part of what the norm behind it sees as one vector scaled."""
    value = value.copy()
    part = value[:5] if value.shape[0] < value.shape[1] * 2 else value[:, :5]
    part *= np.float32(factor)
    return value


@pytest.mark.parametrize("engine", ENGINES)
def test_one_percent_in_any_weight_is_found_where_it_is(bench: Bench, engine: str) -> None:
    """Scaled up in the buffer that is bound to the graph, one weight tensor at a time."""
    session = bench.sessions[engine]
    names = weights_of(engine, bench.manifest)
    assert sorted(session.weights) == sorted(names)
    for name in names:
        right = session.weights[name]
        session.weights[name] = altered(right, 1.01)
        try:
            if divided_out(engine, name):  # the function is the same, and must pass
                same = bench.compare(bench.around(engine, session), to_the_end=True)
                assert same.passed, "not the same"
                session.weights[name] = partly(right, 1.01)
            fault = bench.fault(engine, session)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
        finally:
            session.weights[name] = right
        assert fault.engine == engine
        if engine in ("trunk", "prefill"):
            tensor, layer = place_of(name)
            assert fault.layer == layer, f"{name}: found in {fault.tensor}"
            assert fault.tensor.startswith(tensor), f"{name}: found in {fault.tensor}"


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("trunk", "layers.1.mlp.down_proj.weight"),
        ("trunk", "layers.4.mlp.down_proj.weight"),
        ("trunk", "lm_head.weight"),
        ("encoder", "draft.fc.weight"),
        ("draft_step", "draft.midlayer.self_attn.v_proj.weight"),
    ],
)
def test_one_percent_in_the_graph_is_found(bench: Bench, engine: str, name: str) -> None:
    fault = bench.fault(engine, bench.edited(engine, scaled(name, 1.01)))
    assert fault.engine == engine
    if engine == "trunk":
        assert (fault.tensor, fault.layer) == {
            "layers.1.mlp.down_proj.weight": ("features (layer 1)", 1),
            "layers.4.mlp.down_proj.weight": ("layers.5.log_key", 5),
            "lm_head.weight": ("logits", None),
        }[name]


# Of the toy trunk: 2 key and 4 value heads of 16 and 24 dims, 4 query and 2 KV heads of 32.
KEYS, DV = 2 * 2 * 16, 24
TILED = [h for group in range(2) for h in (group, group + 2)]  # value head h reads key head h % 2


def queries_then_gates() -> list[int]:
    """Per head query rows then gate rows, read as all queries and then all gates."""
    return [half * 128 + head * 32 + i for head in range(4) for half in (0, 1) for i in range(32)]


LINEAR, FULL = "layers.1.linear_attn", "layers.3.self_attn"
GRAPH_FAULTS: dict[str, tuple[Edit, str]] = {  # -> what must show it first
    "value heads tiled in v": (
        permuted(f"{LINEAR}.in_proj_qkv.weight", head_rows(TILED, DV, KEYS)),
        "layers.1.log_delta",
    ),
    "value heads tiled in z": (
        permuted(f"{LINEAR}.in_proj_z.weight", head_rows(TILED, DV)),
        "features (layer 1)",
    ),
    "value heads tiled in A_log": (permuted(f"{LINEAR}.A_log", TILED), "layers.1.log_de"),
    "key heads swapped": (
        permuted(
            f"{LINEAR}.in_proj_qkv.weight",
            [*range(32), *head_rows([1, 0], 16, 32)[32:], *range(KEYS, KEYS + 96)],
        ),
        "layers.1.log_key",
    ),
    "query heads swapped": (
        permuted(f"{FULL}.q_proj.weight", head_rows([1, 0, 2, 3], 64)),
        "features (layer 3)",
    ),
    "KV heads swapped": (
        permuted(f"{FULL}.v_proj.weight", head_rows([1, 0], 32)),
        "layers.3.value",
    ),
    "all queries, then all gates": (
        permuted(f"{FULL}.q_proj.weight", queries_then_gates()),
        "features (layer 3)",
    ),
    "gates before queries": (
        permuted(f"{FULL}.q_proj.weight", head_rows([1, 0, 3, 2, 5, 4, 7, 6], 32)),
        "features (layer 3)",
    ),
    "conv taps reversed": (
        permuted(f"{LINEAR}.conv1d.weight", [3, 2, 1, 0], axis=2),
        "layers.1.log_key",
    ),
    "a and b exchanged": (
        exchanged(f"{LINEAR}.in_proj_a.weight", f"{LINEAR}.in_proj_b.weight"),
        "layers.1.log_de",
    ),
    "dt_bias left out": (scaled(f"{LINEAR}.dt_bias", 0.0), "layers.1.log_de"),
    "gate and up exchanged": (
        exchanged("layers.1.mlp.gate_proj.weight", "layers.1.mlp.up_proj.weight"),
        "features (layer 1)",
    ),
    "w for 1 + w, first norm": (
        without_plus_one("layers.1.input_layernorm.weight"),
        "layers.1.log_key",
    ),
    "w for 1 + w, second norm": (
        without_plus_one("layers.1.post_attention_layernorm.weight"),
        "features (layer 1)",
    ),
    "w for 1 + w, queries": (without_plus_one(f"{FULL}.q_norm.weight"), "features (layer 3)"),
    "w for 1 + w, keys": (without_plus_one(f"{FULL}.k_norm.weight"), "layers.3.key"),
    "w for 1 + w, last norm": (without_plus_one("norm.weight"), "hidden"),
    "1 + w for w, gated norm": (with_plus_one(f"{LINEAR}.norm.weight"), "features (layer 1)"),
    "w in bf16": (
        rounded("layers.1.input_layernorm.weight", onnx.TensorProto.BFLOAT16),
        "layers.1.log_key",
    ),
    "S in fp16": (rounded("layers.1.S", onnx.TensorProto.FLOAT16), "layers.1.S"),
    "S in bf16": (rounded("layers.1.S", onnx.TensorProto.BFLOAT16), "layers.1.S"),
    "log in fp16": (rounded("layers.1.log_delta", onnx.TensorProto.FLOAT16), "layers.1.S"),
    "KV in fp16": (rounded("layers.3.key", onnx.TensorProto.FLOAT16), "layers.3.key"),
    "TF32": (tf32, "layers.0.log_key"),
    "window of a partial accept one late": (kept_off(1, "Add", 5), "layers.0.log_key"),
    "window of a partial accept one early": (kept_off(-1, "Add", 5), "layers.0.log_key"),
    "one rejected row folded in": (kept_off(1, "Less", 5), "layers.0.S"),
    "one kept row left out": (kept_off(-1, "Less", 5), "layers.0.S"),
    "nothing rolled back": (kept_off(5, "Less", 5), "layers.0.S"),
}


@pytest.mark.parametrize("name", GRAPH_FAULTS)
def test_a_fault_in_the_trunk_graph_is_found_where_it_is(bench: Bench, name: str) -> None:
    edit, first = GRAPH_FAULTS[name]
    fault = bench.fault("trunk", bench.edited("trunk", edit))
    assert fault.tensor.startswith(first), f"found in {fault.tensor}"
    resumes = ("window", "rejected", "kept", "rolled")
    if any(word in name for word in resumes):  # the first call resumes from nothing
        assert min(fault.failed) > 0
    partial = ("one rejected", "nothing rolled", "window of a partial accept one late")
    if name.startswith(partial):  # whole prompt chunks keep every row
        assert min(fault.failed) > 2


def test_a_state_kept_in_fp16_is_found_in_the_bound_buffers(bench: Bench) -> None:
    """The graph is right; whoever owns the buffers stores S of one layer in half the bytes."""
    session = bench.session("trunk")

    def narrow(buffers: Buffers) -> None:
        held = buffers["layers.5.S.next"].array
        held[...] = held.astype(np.float16)

    session.after = narrow
    fault = bench.fault("trunk", session)
    assert fault.tensor == "layers.5.S" and min(fault.failed) == 3  # S of round 0 is zero


def test_a_rejected_row_that_stays_is_found_in_the_bound_buffers(bench: Bench) -> None:
    """Both sides of a state in one buffer: the log of the call before is gone when it is read."""
    session = bench.session("trunk")

    def lose(buffers: Buffers) -> None:
        buffers["layers.2.log_key.next"].array[...] = 0

    session.after = lose
    fault = bench.fault("trunk", session)
    assert fault.tensor == "layers.2.log_key" and fault.layer == 2


@pytest.mark.parametrize(
    ("shift", "tensor", "layer"),
    [(1, "features (layer 1)", 1), (-1, "features (layer 1)", 1)],
)
def test_aux_layers_off_by_one(bench: Bench, shift: int, tensor: str, layer: int) -> None:
    """The graph takes its features one layer late or early; states and logits stay right."""
    manifest = bench.manifest
    assert manifest.draft is not None
    aux = tuple(layer + shift for layer in manifest.aux_layers)
    models = build_graphs(
        manifest.trunk, replace(manifest.draft, aux_layers=aux), manifest.weights, manifest.options
    )
    wrong = bench.around("trunk", bench.session("trunk", models["trunk"]))
    comparison = bench.compare(wrong, to_the_end=True)
    failed = {v.tensor for v in comparison.ordered() if v.failed}
    assert failed == {f"features (layer {layer})" for layer in manifest.aux_layers}
    fault = comparison.first_fault()
    assert fault is not None and (fault.tensor, fault.layer) == (tensor, layer)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"rope_theta": 1e6}, "layers.3.key"),
        ({"rotary_dim": 32}, "layers.3.key"),
        ({"norm_eps": 1e-3}, "layers.0.log_key"),
    ],
    ids=str,
)
def test_a_config_misread(bench: Bench, change: dict[str, Any], first: str) -> None:
    manifest = bench.manifest
    assert manifest.draft is not None
    wrong = replace(manifest.trunk, **change)
    models = build_graphs(wrong, manifest.draft, manifest.weights, manifest.options)
    fault = bench.fault("trunk", bench.session("trunk", models["trunk"]))
    assert fault.tensor == first


@pytest.mark.parametrize("engine", ["trunk", "draft"])
def test_rotary_one_position_late(
    bench: Bench, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Portable.rotary_rows

    def late(self: Portable, positions: Any, *rest: Any) -> Any:
        return right(self, self.g.Add(positions, self.g.int32(1)), *rest)

    monkeypatch.setattr(Portable, "rotary_rows", late)
    manifest = bench.manifest
    assert manifest.draft is not None
    models = build_graphs(manifest.trunk, manifest.draft, manifest.weights, manifest.options)
    fault = bench.fault(engine, bench.session(engine, models[engine]))
    assert fault.tensor == {"trunk": "layers.3.key", "draft": "draft.key"}[engine]


D, H = "draft.midlayer", 64
DRAFT_FAULTS: dict[str, tuple[str, Edit, str]] = {  # -> engine, and what must show it first
    "features in another order": (
        "encoder",
        permuted("draft.fc.weight", [*range(H, 3 * H), *range(H)], axis=1),
        "g",
    ),
    "norms exchanged": (
        "draft",
        exchanged(f"{D}.input_layernorm.weight", f"{D}.hidden_norm.weight"),
        "draft.key",
    ),
    "[hidden; embedding]": (
        "draft_step",
        permuted(f"{D}.self_attn.q_proj.weight", [*range(H, 2 * H), *range(H)], axis=1),
        "g_next",
    ),
    "query heads tiled": (
        "draft",
        permuted(f"{D}.self_attn.q_proj.weight", head_rows([0, 4, 1, 5, 2, 6, 3, 7], 16)),
        "g_next",
    ),
    "1 + w": ("draft", with_plus_one(f"{D}.hidden_norm.weight"), "draft.key"),
    "1 + w, last norm": ("draft", with_plus_one("draft.norm.weight"), "logits"),
    "TF32": ("draft", tf32, "draft.key"),
    "KV in fp16": ("draft", rounded("draft.value", onnx.TensorProto.FLOAT16), "draft.value"),
}


@pytest.mark.parametrize("name", DRAFT_FAULTS)
def test_a_fault_in_a_draft_graph_is_found_where_it_is(bench: Bench, name: str) -> None:
    engine, edit, first = DRAFT_FAULTS[name]
    fault = bench.fault(engine, bench.edited(engine, edit))
    assert (fault.engine, fault.tensor) == (engine, first)


@pytest.mark.parametrize("name", ["S in fp16", "w for 1 + w, keys", "TF32"])
def test_the_command_finds_a_fault(
    bench: Bench, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way: a faulty trunk.onnx in a bundle on disk, exit code 1, and its name."""
    edit, first = GRAPH_FAULTS[name]
    bundle = bench.bundle.with_name(tmp_path.name)  # its links are relative
    shutil.copytree(bench.bundle, bundle, symlinks=True)
    plant(bundle, "trunk.onnx", edit)
    capsys.readouterr()
    assert main(["parity", str(bundle), "--load", str(bench.folder), "--json"]) == 1
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert not report["passed"] and report["first_fault"]["tensor"].startswith(first)
    assert f"first in the order of the graph {first}" in printed.err
    engines = {t["engine"] for t in report["tensors"] if not t["passed"]}
    assert "trunk" in engines and engines <= {"trunk", "prefill"}  # the draft is fed what is right
