"""Every variant of a draft: reference against the float64 oracle, graphs against the reference.

The graphs of the profiles for CUDA run on the CPU as in test_ort_cuda; the TensorRT-RTX builder
takes those of the two others.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from eagle_chain.engines.bound import with_bound_weights
from eagle_chain.engines.build import Job, Request, compile_all
from eagle_chain.engines.config import DraftConfig
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.graphs import bound_graph
from eagle_chain.engines.spec import Options
from eagle_chain.export import eager, reference
from eagle_chain.export.bundle import Pair, check_graph, read_pair, weight_table
from eagle_chain.export.fused import Fused
from eagle_chain.export.graph import build_graphs
from tests.draft_variants import VARIANTS, write_variant
from tests.onnx_engine import OnnxEngine
from tests.test_graph import distance, follow_draft, reference_run
from tests.test_ort_cuda import Engine
from tests.test_reference_draft import SOURCE, Draft, check_rounds, opened

WIDTH, CAPACITY, PREFILL = 5, 48, 8
DRAFTS = ("encoder", "draft", "draft_step", "draft_prefill")
rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx-cu13"
)


@pytest.fixture(scope="module", params=VARIANTS)
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    return write_variant(tmp_path_factory.mktemp("variant"), VARIANTS[request.param])


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path]) -> Pair:
    return read_pair(*folders)


def test_reference_like_the_oracle(folders: tuple[Path, Path]) -> None:
    check_rounds(reference, opened(*folders))


def graphs(pair: Pair, profile: str, dtype: str = "fp32") -> dict[str, onnx.ModelProto]:
    options = Options(WIDTH, CAPACITY, dtype, profile, ("logits",), prefill=PREFILL)
    table = weight_table(pair)
    made = build_graphs(pair.trunk_config, pair.draft_config, table, options, only=DRAFTS)
    specs = engine_specs(pair.trunk_config, pair.draft_config, options)
    for name in DRAFTS:
        if profile in ("portable", "standard"):
            check_graph(made[name], specs[name], profile)
        else:
            onnx.checker.check_model(with_bound_weights(made[name]))
    return made


def agree(pair: Pair, ours: Any) -> None:
    """Encoder, extends and single steps of one engine against the reference."""
    config, options = pair.draft_config, Options(WIDTH, CAPACITY, debug=("logits",))
    weights, table = eager.load_draft(config, pair.draft, pair.trunk, "fp32")
    encode = reference_run(eager.encoder_session(weights, config, options))
    extend = reference_run(eager.draft_session(weights, table, config, WIDTH, options))
    step = reference_run(eager.draft_session(weights, table, config, 1, options))
    random = np.random.default_rng(1)
    features = random.normal(size=(PREFILL, config.feature_size)).astype(np.float32)
    g = reference.encode(weights, config, torch.from_numpy(features)).numpy()
    ids, rows = random.integers(0, config.vocab_size, PREFILL), PREFILL - 2
    many = reference_run(eager.draft_session(weights, table, config, PREFILL, options))
    _, theirs = many({}, ids=ids, g=g, position=[3], row=[0])
    prompt = {"ids": ids, "features": features, "position": [3], "rows": [rows]}
    _, states = ours["draft_prefill"].run({}, **prompt)
    for name, kv in theirs.items():
        assert distance(states[name][:, :, 3 : 3 + rows], kv[:, :, 3 : 3 + rows]) < 1e-4, name
    reference_engines = {"encoder": encode, "draft": extend, "draft_step": step}
    follow_draft(ours, reference_engines, config, (4, 0, 2), 2, random)


@pytest.mark.parametrize("profile", ["portable", "standard"])
def test_graphs_like_the_reference(pair: Pair, folders: tuple[Path, Path], profile: str) -> None:
    places = {"trunk": folders[0], "draft": folders[1]}
    agree(pair, {n: OnnxEngine(model, places) for n, model in graphs(pair, profile).items()})


@pytest.mark.parametrize("profile", ["ort-fused", "ort-cuda"])
def test_graphs_for_cuda_like_the_reference(pair: Pair, library: Path, profile: str) -> None:
    kernels = library if profile == "ort-fused" else None
    made = graphs(pair, profile)
    agree(pair, {n: Engine(model, pair, "fp32", kernels) for n, model in made.items()})


def test_a_norm_too_wide_for_its_kernel(library: Path, tmp_path: Path) -> None:
    """Over the features of all aux layers; on the 9B that is 12,288 values."""
    pair = read_pair(*write_variant(tmp_path, VARIANTS["norm before fc"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fused, "norm_width", 128)
        made = graphs(pair, "ort-fused")
    kinds = [node.op_type for node in made["encoder"].graph.node]
    assert "Norm" not in kinds and "Linear" in kinds
    agree(pair, {n: Engine(model, pair, "fp32", library) for n, model in made.items()})


# A flag that the reference does not look at, and the variant whose oracle notices.
MISTAKES = {
    "norm before residual": ("if config.norm_before_residual else g", "if False else g"),
    "norm before fc": ("if config.norm_before_fc:", "if False:"),
    "EAGLE 3.1": ("if config.fc_norm:", "if False:"),
    "norm output alone": ("normed if config.norm_output else g_next", "g_next"),
    "qwen3": ("if config.qk_norm:", "if False:"),
    "attention bias": ('weights.get(f"{name}.bias")', "None"),
    "bias of fc": ('weights.get(f"{name}.bias")', "None"),
    "mlp bias": ('weights.get(f"{name}.bias")', "None"),
    "absolute d2t": ("target if config.absolute_d2t else token + target", "token + target"),
    "no fc": ("if config.fc else features", "if config.fc else features * 2"),
    "logit scale": (" * config.logit_scale", ""),
    "everything": ('f"fc_norm.{i}.weight"', '"fc_norm.0.weight"'),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_flag_that_is_not_looked_at_is_noticed(name: str, tmp_path: Path) -> None:
    old, new = MISTAKES[name]
    assert SOURCE.count(old) == 1
    module = ModuleType("planted_variant")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(SOURCE.replace(old, new), "planted_variant", "exec"), module.__dict__)
    draft: Draft = opened(*write_variant(tmp_path, VARIANTS[name]))
    with pytest.raises(AssertionError):
        check_rounds(module, draft)


def test_what_the_files_say(pair: Pair, request: pytest.FixtureRequest) -> None:
    """The config that comes of each variant's files, named by hand."""
    name = request.node.callspec.params["folders"]
    config, plain = pair.draft_config, DraftConfig.__dataclass_fields__
    said = {
        field: getattr(config, field)
        for field, about in plain.items()
        if about.default is not None
        and field in SETTLED
        and getattr(config, field) != about.default
    }
    assert said == EXPECTED[name]


OWN = {"embedding": "draft.embed_tokens.weight"}
ALL = ("fc", *(f"midlayer.self_attn.{p}_proj" for p in "qkvo"))
INNER = tuple(f"midlayer.mlp.{part}_proj" for part in ("gate", "up", "down"))
SETTLED = (
    *("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output", "qk_norm", "fc"),
    *("biases", "embedding", "head", "absolute_d2t", "logit_scale"),
)
EXPECTED: dict[str, dict[str, Any]] = {
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True},
    "norm output alone": {"norm_output": True},
    "qwen3": {"qk_norm": True},
    "attention bias": {"biases": ALL[1:]},
    "bias of fc": {"biases": ("fc",)},
    "mlp bias": {"biases": INNER},
    "another width": OWN,
    "another width, its embedding as head": OWN | {"head": "draft.embed_tokens.weight"},
    "own embedding": OWN,
    "trunk's head": {"head": "lm_head.weight"},
    "tied trunk's head": {"head": "embed_tokens.weight"},
    "trunk's embedding as head": {"head": "embed_tokens.weight"},
    "absolute d2t": {"absolute_d2t": True},
    "four aux layers": {"fc_norm": True, "norm_output": True},
    "one aux layer": {},
    "no fc": {"norm_before_fc": True, "fc": False},
    "logit scale": {"logit_scale": 0.25},
    "everything": OWN
    | {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "qk_norm": True}
    | {"biases": (*ALL, *INNER), "absolute_d2t": True, "logit_scale": 2.0},
}


@rtx
@pytest.mark.parametrize("profile", ["portable", "standard"])
@pytest.mark.parametrize("name", ["everything", "norm before fc", "tied trunk's head", "no fc"])
def test_tensorrt_rtx_builds_the_graphs(name: str, profile: str, tmp_path: Path) -> None:
    """Between them these four have every part that a variant adds to a graph."""
    pair = read_pair(*write_variant(tmp_path, VARIANTS[name]))
    options = Options(WIDTH, CAPACITY, "bf16", profile, ("logits",), prefill=PREFILL)
    specs = engine_specs(pair.trunk_config, pair.draft_config, options)
    jobs = []
    for engine, model in graphs(pair, profile, "bf16").items():
        bound, weights = bound_graph(model, specs[engine], "bf16")
        path = tmp_path / f"{engine}.onnx"
        path.write_bytes(bound.SerializeToString())
        inputs = (*specs[engine].all_inputs, *weights)
        plan = str(path.with_suffix(".plan"))
        jobs.append(Job(engine, str(path), plan, inputs, specs[engine].all_outputs))
    built = compile_all(Request("tensorrt-rtx", tuple(jobs), ("8.9",)), tmp_path)
    assert set(built) == set(DRAFTS) and all(done["bytes"] for done in built.values())
