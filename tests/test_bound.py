"""Weights as inputs: the same numbers come out, and no cast of a weight is left to the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from eagle_chain.engines.bound import bound_weights, with_bound_weights
from eagle_chain.engines.graphs import bound_graph, load_graph
from eagle_chain.engines.manifest import Manifest
from eagle_chain.runtime import open_engines
from eagle_chain.runtime.ort_bound import BoundSession
from eagle_chain.runtime.request import RequestOptions
from eagle_chain.runtime.weights import blocks
from tests.draft_variants import VARIANTS, write_variant
from tests.toy_pair import exported, write_pair

Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stored as bf16 for fp32; as fp16 for fp16, where ONNX Runtime skips the rounding of bf16."""
    folder = tmp_path_factory.mktemp("bound")
    stored = "bf16" if request.param == "fp32" else "fp16"
    pair = write_pair(folder, layers=4, aux=[0, 1, 3], dtype=stored, tied=True)
    flags = ["--capacity", "32", "--aux-layers", "0,1,3", "--dtype", request.param]
    return exported(pair, folder / "b", *flags, "--weights", "copy")


def run(model: onnx.ModelProto | Path, feeds: Arrays) -> list[np.ndarray[Any, Any]]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return list(ort.InferenceSession(source, options).run(None, feeds))


@pytest.mark.parametrize("engine", ["trunk", "encoder", "draft", "draft_step"])
def test_uploaded_weights_give_the_same_bits(bundle: Path, engine: str) -> None:
    manifest = Manifest.load(bundle)
    spec = manifest.specs[engine]
    model, weights = bound_graph(load_graph(bundle, engine), spec, manifest.options.dtype)
    onnx.checker.check_model(model, full_check=True)
    random = np.random.default_rng(0)
    kinds = {"fp32": np.float32, "fp16": np.float16, "int32": np.int32}
    feeds: Arrays = {}
    for tensor in spec.all_inputs:
        values = random.normal(size=tensor.shape)
        if tensor.dtype == "int32":
            values = {"ids": random.integers(0, 512, tensor.shape), "rows": [3], "kept": [2]}.get(
                tensor.name, np.zeros(tensor.shape)
            )
        feeds[tensor.name] = np.asarray(values).astype(kinds[tensor.dtype])
    uploaded = {
        w.name: np.concatenate([b for _, b in blocks(bundle, manifest.weights[w.name], w)]).reshape(
            w.shape
        )
        for w in weights
    }
    plain = run(bundle / f"{engine}.onnx", feeds)
    for expected, got in zip(plain, run(model, {**feeds, **uploaded}), strict=True):
        assert expected.tobytes() == got.tobytes()


def test_weights_enter_in_the_dtype_they_are_computed_in(bundle: Path) -> None:
    manifest = Manifest.load(bundle)
    dtype = manifest.options.dtype
    islands = ("layernorm.weight", "norm.weight", "norm_embedding.weight", "norm_hidden.weight")
    islands += ("A_log", "dt_bias", "conv1d.weight")
    for engine, spec in manifest.specs.items():
        model, weights = bound_graph(load_graph(bundle, engine), spec, manifest.options.dtype)
        for weight in weights:
            wanted = "fp32" if weight.name.endswith(islands) else dtype
            assert weight.dtype == ("int32" if weight.name == "draft.d2t" else wanted), weight
        inputs = {w.name for w in weights}
        assert not [n for n in model.graph.node if n.op_type == "Cast" and n.input[0] in inputs]


TABLES = {  # variant of a draft -> tables that stay as they are stored, and those that become fp32
    "trunk's embedding as head": ([], ["embed_tokens.weight"]),
    "another width, its embedding as head": (
        ["embed_tokens.weight"],
        ["draft.embed_tokens.weight"],
    ),
    "own embedding": (["draft.embed_tokens.weight", "embed_tokens.weight"], []),
    "tied trunk's head": ([], ["embed_tokens.weight"]),
}


@pytest.mark.parametrize("variant", TABLES)
def test_an_embedding_that_some_head_is_is_converted_once(variant: str, tmp_path: Path) -> None:
    """Not in every step, for all engines that share it; tokens are those of plain sessions."""
    pair = write_variant(tmp_path, VARIANTS[variant], "bf16")
    bundle = exported(pair, tmp_path / "b", "--capacity", "32")
    bound = open_engines(bundle, threads=1, bound=True)
    found: dict[str, set[str]] = {}
    for session in bound.sessions.values():
        assert isinstance(session, BoundSession)
        for tensor in session.weights:
            if tensor.name.endswith("embed_tokens.weight"):
                found.setdefault(tensor.dtype, set()).add(tensor.name)
    stored, converted = TABLES[variant]
    wanted = {"bf16": set(stored), "fp32": set(converted)}
    assert found == {dtype: names for dtype, names in wanted.items() if names}
    request: RequestOptions = {"max_new_tokens": 12, "k": 4}
    mine, theirs = (
        engines.chain().generate([1, 2, 3], **request)
        for engines in (bound, open_engines(bundle, threads=1))
    )
    assert mine.tokens == theirs.tokens and mine.stats.accepted == theirs.stats.accepted


def test_a_weight_with_two_casts_keeps_its_stored_dtype() -> None:
    helper, kinds = onnx.helper, onnx.TensorProto
    weight = kinds(name="w", data_type=kinds.BFLOAT16, dims=[2, 2])
    weight.data_location = kinds.EXTERNAL
    weight.external_data.add(key="location", value="nowhere")
    nodes = [
        helper.make_node("Cast", ["w"], ["a"], to=kinds.FLOAT),
        helper.make_node("Cast", ["w"], ["b"], to=kinds.FLOAT16),
        helper.make_node("Cast", ["b"], ["c"], to=kinds.FLOAT),
        helper.make_node("Add", ["a", "c"], ["y"]),
    ]
    output = helper.make_tensor_value_info("y", kinds.FLOAT, [2, 2])
    model = helper.make_model(helper.make_graph(nodes, "g", [], [output], [weight]))
    assert bound_weights(model) == ["w"]
    bound = with_bound_weights(model, converted="fp16")
    assert [i.type.tensor_type.elem_type for i in bound.graph.input] == [kinds.BFLOAT16]
    assert len(bound.graph.node) == 4 and len(model.graph.initializer) == 1
