"""The memory report against what a chain really allocates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from eagle_chain.engines import cli, inspection
from eagle_chain.engines.bound import with_bound_weights
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.memory import LIBRARIES, chain_needs, check_load, prompt_scratch
from eagle_chain.engines.progress import human_bytes
from eagle_chain.engines.savings import Held, savings
from eagle_chain.engines.spec import PROFILES, EngineSpec, Options
from eagle_chain.export.graph import build_graphs
from eagle_chain.runtime import open_engines
from tests import qwen_9b
from tests.toy_pair import write_pair


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    pair = write_pair(folder / "pair", layers=4, aux=[0, 1, 2])
    words = [*map(str, pair), "-o", str(folder / "bundle"), "--aux-layers", "0,1,2"]
    assert cli.main(["export", *words, "--capacity", "128,512", "--prefill", "64"]) == 0
    return folder / "bundle"


def test_a_chain_takes_what_is_reported_capacity_by_capacity(bundle: Path) -> None:
    engines = open_engines(bundle, "onnxruntime-cpu", threads=1)
    taken, allocate = [0], engines.memory.allocate

    def counted(spec: Any) -> Any:
        taken[-1] += spec.nbytes
        return allocate(spec)

    engines.memory.allocate = counted  # type: ignore[method-assign]
    chain = engines.chain()
    taken.append(0)
    chain.extend(np.random.default_rng(0).integers(0, 512, 200).tolist())
    manifest = Manifest.load(bundle)
    needs = chain_needs(manifest.specs, manifest.options, manifest.trunk)
    for size, found in zip(needs.values(), taken, strict=True):
        expected = size.total - size.scratch
        assert abs(found - expected) < 0.02 * expected
    assert needs[512].kv > 3.5 * needs[128].kv and needs[512].states == needs[128].states


@pytest.mark.parametrize("rows", [256, 512, 1024, 2048])
def test_scratch_of_a_prompt_is_what_its_graph_holds_at_once(rows: int) -> None:
    """The graph of the 9B node by node; a value goes when its last reader is done."""
    pair, options = qwen_9b.configs(8), Options(5, 4608, "bf16", "ort-fused", prefill=rows)
    model = build_graphs(*pair, qwen_9b.weights(*pair), options)["prefill"]
    model = with_bound_weights(model, converted="bf16")
    largest, at = held_at_once(model, {"GatedDeltaPrompt": prompt_scratch(pair[0], rows)})
    assert at == "GatedDeltaPrompt"
    needs = chain_needs(engine_specs(*pair, options), options, pair[0])[4608]
    assert abs(needs.scratch / largest - 1) < 0.02


def held_at_once(model: onnx.ModelProto, scratch: Mapping[str, int]) -> tuple[int, str]:
    """The most bytes that values between nodes and an operator's scratch take, and at which."""
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    sizes, outside = {}, {x.name for x in (*graph.input, *graph.output, *graph.initializer)}
    for value in graph.value_info:
        kind = value.type.tensor_type
        item = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
        sizes[value.name] = int(np.prod([d.dim_value for d in kind.shape.dim])) * item
    names: dict[str, str] = {}  # of the value that a reshaped one shares its memory with
    for node in graph.node:
        if node.op_type in ("Reshape", "Squeeze", "Unsqueeze", "Identity"):
            names[node.output[0]] = names.get(node.input[0], node.input[0])
    readers = {names.get(x, x): i for i, node in enumerate(graph.node) for x in node.input}
    held: dict[str, int] = {}
    largest, at = 0, ""
    for i, node in enumerate(graph.node):
        made = (x for x in node.output if x not in outside and x not in names)
        held |= {x: sizes.get(x, 0) for x in made}  # an attention's: smaller than a linear layer's
        taken = sum(held.values()) + scratch.get(node.op_type, 0)
        if taken > largest:
            largest, at = taken, node.op_type
        held = {x: size for x, size in held.items() if readers.get(x, i) > i}
    return largest, at


# ONNX Runtime holds what no node reads to the end of a run, that of all layers at once.
UNREAD = {
    "Attend": "pieces of W rows; 17 MB a layer of the 9B for 32k tokens",
    "AttendQ8": "the same",
    "AttendQ8Q5": "the same",
    "Greedy": "a few numbers a row, once",
    "Verify": "the same",
    "AddNorm": "the residual behind the last layer",
    "CausalConvWithState": "three rows",
    "GatedDeltaNet": "of W rows: the state alone is wanted there",
    "SkipSimplifiedLayerNormalization": "statistics, which are not allocated",
}


@pytest.mark.parametrize("kv", [None, "q8_0/q5_1"])
@pytest.mark.parametrize("profile", PROFILES)
def test_what_no_node_reads_is_small(profile: str, kv: str | None) -> None:
    pair, options = qwen_9b.configs(4), Options(5, 4608, "bf16", profile, (), kv, prefill=256)
    graphs = build_graphs(*pair, qwen_9b.weights(*pair), options, mtp=True)
    assert {"trunk", "prefill", "draft_prefill", "mtp_prefill"} <= graphs.keys()
    for name, model in graphs.items():
        graph = model.graph
        read = {x for node in graph.node for x in node.input} | {x.name for x in graph.output}
        unread = [
            node.op_type
            for node in graph.node
            for alive in [{x in read for x in node.output if x}]
            if alive == {True, False}  # one that nothing is read of does not run at all
        ]
        assert set(unread) <= UNREAD.keys(), name
        assert unread.count("AddNorm") <= 1
        if name.endswith("prefill"):
            assert not any(op.startswith("Attend") for op in unread)


def test_inspect_adds_it_up(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["inspect", str(bundle), "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["chain"].keys() == {"128", "512"} and memory["device"]["bytes"] > 0
    for capacity, parts in memory["chain"].items():
        assert parts.pop("total") == sum(parts.values())
        assert parts["kv"] == memory["kv_per_token"] * (int(capacity) + 5)
    assert memory["states"] == sum(parts[part] for part in ("kv", "states", "logs"))
    assert cli.main(["inspect", str(bundle)]) == 0
    words = capsys.readouterr().out
    assert "chain    up to 128 tokens: kv " in words and "enough" in words
    assert "engines  width 5, capacities 128, 512, fp32" in words
    assert "draft_step" in words and "draft_step-128" not in words
    assert cli.main(["inspect", str(bundle), "--tensors"]) == 0
    words = capsys.readouterr().out
    assert "at capacity 512" in words and words.count("trunk.onnx") == 1


def test_what_does_not_fit_is_refused_before_it_is_loaded(bundle: Path) -> None:
    manifest = Manifest.load(bundle)
    needed = chain_needs(manifest.specs, manifest.options, manifest.trunk)[128].total
    check_load(manifest, 1000, 1000 + needed, "GPU")
    with pytest.raises(
        InputError, match=r"a chain of 128 tokens .* KV; GPU has .* free: end other"
    ):
        check_load(manifest, 1001, 1000 + needed, "GPU")
    with pytest.raises(InputError, match=r"or export with another --dtype$"):
        check_load(manifest, 10**9, 10**9, "GPU")  # KV is not what is large


# --- what would save enough --------------------------------------------------------------------
# A token of the 9B takes 32,768 bytes in bf16 and 14,848 in q8_0/q5_1, an eighth of that in its
# draft; a cache has W = 5 rows more than its capacity.
BF16, SAVED = 32_768 + 4_096, 32_768 + 4_096 - 14_848 - 1_856


def nine(*capacities: int, head_dim: int = 256, **options: Any) -> Manifest:
    """A manifest of the 9B's sizes, as far as memory needs it."""
    *smaller, largest = capacities
    chosen = Options(5, largest, "bf16", "ort-fused", smaller=tuple(smaller), **options)
    trunk, draft = (replace(config, head_dim=head_dim) for config in qwen_9b.configs())
    specs = engine_specs(trunk, draft, chosen)
    return Manifest(
        trunk=trunk,
        draft=draft,
        options=chosen,
        specs=specs,
        graphs={},
        files={},
        weights={},
        ignored={},
        made_with={},
        arguments=(),
    )


def test_libraries_count_where_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, size = nine(4096), 500_000_000
    monkeypatch.delitem(LIBRARIES, "onnxruntime-cuda")
    before = inspection.memory_lines(inspection.memory_report(manifest))
    monkeypatch.setitem(LIBRARIES, "onnxruntime-cuda", size)
    monkeypatch.setitem(LIBRARIES, "tensorrt", 2 * size)
    monkeypatch.setattr(inspection, "_device", lambda: {"name": "GPU", "bytes": size})
    report = inspection.memory_report(manifest)
    first, *_, needs = inspection.memory_lines(report)
    assert first == "GPU      libraries of onnxruntime-cuda 500.0 MB"
    assert (report["libraries"], needs.split(" with ")[0]) == (
        {"onnxruntime-cuda": size},
        f"needs    {human_bytes(size + report['chain']['4096']['total'])}",
    )
    assert not any("libraries" in line for line in before)
    needed = report["chain"]["4096"]["total"]
    check_load(manifest, 1000, 1000 + size + needed, "GPU", "onnxruntime-cuda")
    with pytest.raises(InputError, match=r"take 1\.0 kB, GPU libraries 500\.0 MB and a chain"):
        check_load(manifest, 1001, 1000 + size + needed, "GPU", "onnxruntime-cuda")


def kv_bytes(manifest: Manifest) -> Held:
    def held(specs: Mapping[str, EngineSpec], options: Options) -> int:
        return sum(part.kv for part in chain_needs(specs, options, manifest.trunk).values())

    return held


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        (2 * 10**9, "--kv q8_0/q5_1 (saves 5.3 GB) or --capacity 207872 (saves 2.0 GB)"),
        (262_149 * SAVED, "--kv q8_0/q5_1 (saves 5.3 GB) or --capacity 118720 (saves 5.3 GB)"),
        (262_149 * SAVED + 1, "--capacity 118720 (saves 5.3 GB)"),
        (9_600_000_000, "--capacity 1664 (saves 9.6 GB)"),
        (9_663_000_000, ""),
    ],
)
def test_it_names_what_saves_enough(lacking: int, words: str) -> None:
    manifest = nine(262_144)
    assert kv_bytes(manifest)(manifest.specs, manifest.options) == 262_149 * BF16
    assert savings(manifest, kv_bytes(manifest), lacking) == words


@pytest.mark.parametrize(
    ("manifest", "options", "words"),
    [
        # all of KV saves 393,226 rows times SAVED, the rest are 64,256 rows less
        (nine(131_072, 262_144), {}, "--kv q8_0/q5_1 --capacity 131072,197888 (saves 9.0 GB)"),
        (nine(131_072, 524_288), {"shorten": 0}, "--kv q8_0/q5_1 (saves 13.2 GB)"),
        (nine(524_288, kv="q8_0/q5_1"), {}, ""),
        (nine(524_288), {"quantised": False}, "--capacity 280128 (saves 9.0 GB)"),
        (
            nine(1_048_576, kv="fp32", head_dim=80),  # 23,040 bytes a token
            {},
            "--kv bf16 (saves 12.1 GB) or --capacity 657920 (saves 9.0 GB)",
        ),
    ],
    ids=["both", "smallest", "no smaller type", "no int8", "heads of 80"],
)
def test_it_names_what_there_is(manifest: Manifest, options: Any, words: str) -> None:
    assert savings(manifest, kv_bytes(manifest), 9 * 10**9, **options) == words


def test_a_long_context_that_does_not_fit_is_told_what_would() -> None:
    manifest = nine(262_144)
    with pytest.raises(InputError, match=r"9\.7 GB of it KV; GPU has 24\.0 GB .* export with --kv"):
        check_load(manifest, 18 * 10**9, 24 * 10**9, "GPU")
    check_load(nine(262_144, kv="q8_0/q5_1"), 18 * 10**9, 24 * 10**9, "GPU")


def test_inspect_tells_what_would_be_enough(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another KV type would be read into more scratch memory here than it saves."""
    manifest = Manifest.load(bundle)
    parts = chain_needs(manifest.specs, manifest.options, manifest.trunk).values()
    monkeypatch.setattr(inspection, "_computed_bytes", lambda manifest: 1000)
    free = 1000 + sum(part.total for part in parts) - 100_000
    monkeypatch.setattr(inspection, "_device", lambda: {"name": "GPU", "bytes": free})
    capsys.readouterr()
    assert cli.main(["inspect", str(bundle)]) == 0
    words = capsys.readouterr().out
    assert "TOO LITTLE\n         enough with --capacity 128,448 (saves " in words
