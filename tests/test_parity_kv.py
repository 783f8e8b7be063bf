"""Parity in half dtypes with KV rows that are coarser: what rounding does passes, faults do not.

bf16 does not run on a CPU: there the reference computes, in that dtype, with a fault in its own
weights. What it is compared with is the reference in fp32, from the checkpoint as it is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from eagle_chain.engines.cli import main
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.recording import read_calls, read_index
from eagle_chain.export import teacher
from eagle_chain.export.reference import Weights
from eagle_chain.runtime.comparison import Comparison
from eagle_chain.runtime.load import Engines
from eagle_chain.runtime.player import Player
from tests.planted import Edit, head_rows, permuted, plant
from tests.torch_engine import torch_engines

DEMO = Path(__file__).resolve().parents[1] / "demo"
Bundles = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """The shipped pair with a KV type: a bundle in a dtype, and the recording of the fp32 one."""
    folder = tmp_path_factory.mktemp("kv")

    def bundle(kv: str, dtype: str = "fp32") -> tuple[Path, Path]:
        base = folder / kv.replace("/", "-")
        target, recording = base / dtype, base / "recording"
        if not target.exists():
            words = ["--capacity", "64", "--prefill", "0", "--debug", "logits", "--kv", kv]
            pair = str(DEMO / "trunk"), str(DEMO / "draft")
            assert main(["export", *pair, "-o", str(target), "--dtype", dtype, *words]) == 0
        if not recording.exists():
            assert main(["parity", str(target), "--save", str(recording)]) == 0
        return target, recording

    return bundle


def compared(engines: Engines, recording: Path) -> Comparison:
    """The calls of a recording on these engines, up to the first round that has a fault."""
    comparison = Comparison(engines.manifest)
    player = Player(engines.sessions, engines.memory)
    round = 0
    for call in read_calls(recording, read_index(recording)):
        if call.round != round and not comparison.passed:
            break
        round = call.round
        comparison.add(call, player.play(call))
    return comparison


@pytest.mark.parametrize(
    ("kv", "dtype"),
    [
        ("q8_0/q5_1", "fp16"),
        ("q8_0/q5_1", "bf16"),
        ("q8_0", "fp16"),
        ("q8_0", "bf16"),
        ("bf16", "fp16"),
    ],
)
def test_limits_hold_what_rounding_does(bundles: Bundles, kv: str, dtype: str) -> None:
    """The reference computing in a half dtype, against itself in fp32 with the same KV type."""
    bundle, recording = bundles(kv)
    comparison = compared(torch_engines(bundle, dtype), recording)
    assert not [(v.engine, v.tensor, v.worst, v.failed) for v in comparison.ordered() if v.failed]


def scaled(weight: Tensor) -> Tensor:
    return weight * 1.1


def without_plus_one(weight: Tensor) -> Tensor:
    return weight - 1


def one_on(offsets: Tensor) -> Tensor:
    return offsets + 1


def reordered(rows: list[int]) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight[rows]


# Of the shipped trunk: 2 key and 4 value heads of 128 dims, 4 query and 2 KV heads of 64, which
# the draft has as well; layers 3 and 7 are attention.
TILED = [0, 2, 1, 3]
FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor], tuple[str, str]]] = {
    "value heads tiled in v": (
        "layers.4.linear_attn.in_proj_qkv.weight",
        reordered(head_rows(TILED, 128, 2 * 2 * 128)),
        ("trunk", "layers.4.log_delta"),
    ),
    "query heads swapped": (
        "layers.3.self_attn.q_proj.weight",
        reordered(head_rows([2, 3, 0, 1], 2 * 64)),
        ("trunk", "features (layer 3)"),
    ),
    "KV heads swapped": (
        "layers.7.self_attn.v_proj.weight",
        reordered(head_rows([1, 0], 64)),
        ("trunk", "layers.7.value"),
    ),
    "w for 1 + w": (
        "layers.4.input_layernorm.weight",
        without_plus_one,
        ("trunk", "layers.4.log_key"),
    ),
    "w for 1 + w, keys": (
        "layers.7.self_attn.k_norm.weight",
        without_plus_one,
        ("trunk", "layers.7.key"),
    ),
    "v_proj 10 % too large": (
        "layers.7.self_attn.v_proj.weight",
        scaled,
        ("trunk", "layers.7.value"),
    ),
    "v_proj of mtp 10 % too large": (
        "mtp.layers.0.self_attn.v_proj.weight",
        scaled,
        ("mtp", "mtp.value"),
    ),
    "v_proj of the draft 10 % too large": (
        "midlayer.self_attn.v_proj.weight",
        scaled,
        ("draft", "draft.value"),
    ),
    "query heads of the draft tiled": (
        "midlayer.self_attn.q_proj.weight",
        reordered(head_rows(TILED, 64)),
        ("draft", "g_next"),
    ),
    "d2t one on": ("d2t", one_on, ("draft_step", "token")),
}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_stays_visible(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    """A fault is named where it is, so what comes before it in the graph is within its limits."""
    weight, change, first = FAULTS[name]
    bundle, recording = bundles("q8_0/q5_1")
    read, changed = teacher.load_weights, []

    def faulty(*arguments: object, **rest: object) -> Weights:
        weights = dict(read(*arguments, **rest))  # type: ignore[arg-type]
        if weight in weights:
            weights[weight] = change(weights[weight])
            changed.append(weight)
        return weights

    monkeypatch.setattr(teacher, "load_weights", faulty)
    monkeypatch.setattr("eagle_chain.export.eager.load_weights", faulty)  # the draft's
    fault = compared(torch_engines(bundle, dtype), recording).first_fault()
    assert changed == [weight]
    assert fault is not None and (fault.engine, fault.tensor) == first


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("shift", [1, -1])
def test_aux_layers_off_by_one(bundles: Bundles, dtype: str, shift: int) -> None:
    bundle, recording = bundles("q8_0/q5_1")
    manifest = Manifest.load(bundle)
    assert manifest.draft is not None
    moved = tuple(layer + shift for layer in manifest.aux_layers)
    wrong = replace(manifest, draft=replace(manifest.draft, aux_layers=moved))
    engines = torch_engines(bundle, dtype, wrong)
    engines = replace(engines, manifest=replace(engines.manifest, draft=manifest.draft))
    failed = {v.tensor for v in compared(engines, recording).ordered() if v.failed}
    assert failed == {f"features (layer {layer})" for layer in manifest.aux_layers}


FULL = "layers.3.self_attn"
GRAPH_FAULTS: dict[str, tuple[Edit | None, str]] = {
    "none": (None, ""),
    "KV heads swapped": (
        permuted(f"{FULL}.v_proj.weight", head_rows([1, 0], 64)),
        "layers.3.value",
    ),
    "query heads swapped": (
        permuted(f"{FULL}.q_proj.weight", head_rows([2, 3, 0, 1], 2 * 64)),
        "features (layer 3)",
    ),
}


@pytest.mark.parametrize("name", GRAPH_FAULTS)
def test_the_command_tells_rounding_from_a_fault(
    bundles: Bundles, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An fp16 bundle on ONNX Runtime, as exported and with a fault in its graph."""
    edit, first = GRAPH_FAULTS[name]
    right, recording = bundles("q8_0/q5_1", "fp16")
    bundle = right.with_name(name.replace(" ", "-"))  # its links are relative
    shutil.copytree(right, bundle, symlinks=True)
    if edit is not None:
        plant(bundle, "trunk.onnx", edit)
    capsys.readouterr()
    code = main(["parity", str(bundle), "--load", str(recording), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (1 if edit else 0) and report["passed"] == (code == 0)
    assert (report["first_fault"] or {"tensor": ""})["tensor"] == first
