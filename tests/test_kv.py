"""KV types: the bits of ggml's quantised rows, and every promise of the chain with each of them.

Oracles: the `gguf` package for codes and scales, the PyTorch reference for a whole call, plain
decoding with the same KV type for the chain, and the unquantised engine's own rows.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from eagle_chain.engines.cli import main
from eagle_chain.engines.contract import draft_spec, kv_pairs, trunk_spec
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.flavours import Flavour
from eagle_chain.engines.kv import KV_TYPES, key_and_value, names
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.spec import (
    EngineSpec,
    Options,
    TensorSpec,
    check_options,
    kv_row_bytes,
)
from eagle_chain.export import eager, kv_reference
from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.graph import STANDARD_PROFILES as PROFILES
from eagle_chain.export.lowering import Heads
from eagle_chain.runtime import Engines, Tokenizer, open_engines
from eagle_chain.runtime.exactness import Plain, decode_plainly
from tests import qwen_9b
from tests.ggml import by_gguf, ggml_bytes
from tests.kv_loss import losses
from tests.onnx_engine import Arrays, engines, open_pair
from tests.test_graph import CALLS, distance, reference_run, teacher_forced
from tests.toy import Script
from tests.toy_pair import write_pair

QUANTISED = ("q8_0", "q5_1")
WIDTH, CAPACITY = 5, 48
# Sums run in another order than PyTorch's, so now and then a value falls to the other side of the
# edge between two codes: a step of q5_1 is 3 % of a block's range, and moves what comes after it.
FLIPPED = 1e-2
DEMO = Path(__file__).parents[1] / "demo"
VOCAB, NEW = 8192, 24
PROMPTS = [
    '<|py|>"""Small helpers for reading settings."""\n\nimport os\n\n\ndef read_flag(name):\n',
    "<|book|>The old harbour master put down his pipe, looked at the two boys for a while, and",
]
rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx-cu13"
)


# --- codes and scales ------------------------------------------------------------------------


def samples(heads: int, rows: int, dim: int) -> np.ndarray[Any, Any]:
    """Rows of many sizes, and blocks of the kinds that rounding goes wrong on."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, heads, dim)).astype(np.float32)
    x *= np.float32(10.0) ** random.integers(-6, 4, (rows, heads, 1)).astype(np.float32)
    block = x.reshape(-1, 32)
    block[0] = 0
    block[1] = 3.25  # q5_1: no spread
    block[2] = np.arange(32) - 15.5  # ties of q8_0 are in the next ones
    block[3] = np.append((np.arange(31) + 0.5) * (-1.0) ** np.arange(31), 127)
    block[4] = np.append(np.full(31, 0.49999997), 127)  # just below a tie
    block[5] = np.linspace(0, 31, 32) + np.where(np.arange(32) % 31, 0.5, 0)
    block[6] = -np.abs(block[6])
    block[7] = 1e-9  # a scale that fp16 flushes to zero
    return x


def one_layer(profile: str, dtype: str, kv: str, heads: Heads, rows: int) -> ort.InferenceSession:
    """A graph that writes keys and values at `position` and gives back all slots."""
    options = Options(2, 18, dtype, profile, (), kv)
    sides = ("key", "value")
    shape = (1, heads.kv, options.kv_rows, heads.dim)
    spec = EngineSpec(
        "kv",
        (
            *(TensorSpec(f"new_{side}", dtype, (rows, heads.kv, heads.dim)) for side in sides),
            TensorSpec("position", "int32", (1,)),
        ),
        tuple(TensorSpec(f"all_{side}", dtype, shape) for side in sides),
        kv_pairs("layer", heads.kv, heads.dim, options),
    )
    g = GraphBuilder(spec, {}, dtype, PROFILES[profile].opset)
    low = PROFILES[profile](g)
    position = g.input("position")
    key, value = (
        low.write_rows(f"layer.{side}", g.input(f"new_{side}"), position, rows, heads)
        for side in sides
    )
    for side, held in zip(sides, low.read_rows((key, value), heads, options.kv_rows), strict=True):
        g.output(f"all_{side}", held)
    model = g.model()
    onnx.checker.check_model(model, full_check=True)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("kv", ["q8_0/q5_1", "q8_0", "q5_1"])
def test_planes_have_the_bits_of_ggml(kv: str, profile: str, dtype: str) -> None:
    heads, rows, at = Heads(4, 2, 96), 9, 7
    session = one_layer(profile, dtype, kv, heads, rows)
    x = samples(heads.kv, rows, heads.dim).astype(np.float16 if dtype == "fp16" else np.float32)
    feeds: Arrays = {
        i.name: np.zeros(i.shape, np.int8 if "int8" in i.type else np.float16)
        for i in session.get_inputs()
    }
    feeds |= {"new_key": x, "new_value": x[::-1], "position": np.array([at], np.int32)}
    outputs = [o.name for o in session.get_outputs()]
    got = dict(zip(outputs, session.run(None, feeds), strict=True))
    for side, kind in zip(("key", "value"), key_and_value(kv), strict=True):
        want = by_gguf(kind, feeds[f"new_{side}"].transpose(1, 0, 2))
        planes = {n: got[f"layer.{side}{n}.next"][0] for n in (f".{p}" for p in suffixes(kind))}
        bytes_ = ggml_bytes(kind, planes)
        np.testing.assert_array_equal(bytes_[:, at : at + rows], want)
        assert not bytes_[:, :at].any() and not bytes_[:, at + rows :].any()
        values = gguf.dequantize(bytes_, gguf.GGMLQuantizationType[kind.upper()])
        np.testing.assert_array_equal(got[f"all_{side}"][0], values.astype(x.dtype))


def suffixes(kind: str) -> list[str]:
    return [name.removeprefix("x.") for name in names(kind, "x")]


@pytest.mark.parametrize("kind", QUANTISED)
def test_the_reference_has_the_bits_of_ggml(kind: str) -> None:
    x = samples(2, 9, 96)
    like = {f".{name}": torch.zeros(0) for name in suffixes(kind)}
    planes = kv_reference.encoded(torch.from_numpy(x), like)
    want = by_gguf(kind, x)
    np.testing.assert_array_equal(ggml_bytes(kind, {n: t.numpy() for n, t in planes.items()}), want)
    values = gguf.dequantize(want, gguf.GGMLQuantizationType[kind.upper()])
    np.testing.assert_array_equal(kv_reference.decoded(planes, torch.float32).numpy(), values)


def test_a_token_of_the_9b_takes_what_ggml_takes() -> None:
    trunk, draft = qwen_9b.configs()
    sizes = {}
    for kv in KV_TYPES:
        options = Options(dtype="bf16", kv=kv)
        specs = trunk_spec(trunk, draft.aux_layers, options), draft_spec(draft, 1, options)
        sizes[kv] = [kv_row_bytes([spec]) for spec in specs]
    assert sizes == {
        "fp32": [65536, 8192],
        "fp16": [32768, 4096],
        "bf16": [32768, 4096],
        "q8_0/q5_1": [14848, 1856],
        "q8_0": [17408, 2176],
    }


# --- whole graphs ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), draft_sizes={"head_dim": 32})


def options(kv: str | None, profile: str = "portable", dtype: str = "fp32") -> Options:
    return Options(WIDTH, CAPACITY, dtype, profile, ("logits", "S_rows"), kv)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("kv", ["fp16", "q8_0/q5_1", "q8_0"])  # NumPy has no bf16
def test_trunk_agrees_with_the_reference(pair: tuple[Path, Path], kv: str, profile: str) -> None:
    opened = open_pair(*pair)
    engine = engines(*pair, options(kv, profile), ("trunk",))["trunk"]
    weights = eager.load_weights(opened.trunk, "fp32")
    config, aux = opened.trunk_config, opened.draft_config.aux_layers
    reference = reference_run(eager.trunk_session(weights, config, aux, options(kv)))
    for want, got in zip(teacher_forced(reference), teacher_forced(engine.run), strict=True):
        assert want.keys() == got.keys()
        for name in ("logits", "features", "hidden"):
            assert distance(got[name], want[name]) < FLIPPED, name
        for name, array in want.items():
            if array.dtype == np.int8:
                assert (array != got[name]).mean() < FLIPPED, name
        for name in ("next_ids", "accepted", "pending", "next_kept", "next_position"):
            np.testing.assert_array_equal(got[name], want[name])


def rows_of(out: Arrays, cache: str, kind: str) -> np.ndarray[Any, Any]:
    """The cache [Hkv, T, ...] that a call gives: ggml's bytes."""
    return ggml_bytes(kind, {f".{p}": out[f"{cache}.{p}.next"][0] for p in suffixes(kind)})


@pytest.mark.parametrize("profile", PROFILES)
def test_a_quantised_cache_holds_the_plain_rows_quantised(
    pair: tuple[Path, Path], profile: str
) -> None:
    """Nothing before the first attention depends on the KV type: the same rows, bit for bit."""
    plain = engines(*pair, options(None, profile), ("trunk",))["trunk"]
    ours = engines(*pair, options("q8_0/q5_1", profile), ("trunk",))["trunk"]
    last = 0
    for want, got in zip(teacher_forced(plain.run), teacher_forced(ours.run), strict=True):
        last = int(got["next_position"][0])
        for side, kind in (("key", "q8_0"), ("value", "q5_1")):
            rows = by_gguf(kind, want[f"layers.3.{side}.next"][0])
            live = np.s_[:, : last + 1]
            np.testing.assert_array_equal(rows_of(got, f"layers.3.{side}", kind)[live], rows[live])
    assert last > sum(kept for _, kept in CALLS) - WIDTH


@pytest.mark.parametrize("kv", ["fp16", "q8_0/q5_1", "q8_0"])
def test_draft_agrees_with_the_reference(pair: tuple[Path, Path], kv: str) -> None:
    """Extends that overwrite rejected rows, and single steps between them."""
    opened, opts = open_pair(*pair), options(kv)
    ours = engines(*pair, opts, ("draft", "draft_step"))
    weights = eager.load_weights(opened.draft, "fp32")
    table, config = opened.trunk.torch("embed_tokens.weight").float(), opened.draft_config
    theirs = {
        name: reference_run(eager.draft_session(weights, table, config, rows, opts))
        for name, rows in (("draft", WIDTH), ("draft_step", 1))
    }
    random = np.random.default_rng(1)
    states, held, position = Arrays(), Arrays(), 0
    for row in (4, 1, 0, 4, 2):
        g = random.normal(size=(WIDTH, config.hidden_size)).astype(np.float32)
        ids = random.integers(0, config.vocab_size, WIDTH)
        inputs: dict[str, Any] = {"ids": ids, "g": g, "position": [position], "row": [row]}
        for name in ("draft", "draft_step", "draft_step"):
            want, held = theirs[name](held, **inputs)
            got, states = ours[name].run(states, **inputs)
            assert got["token"] == want["token"]
            for output in ("g_next", "logits"):
                assert distance(got[output], want[output]) < FLIPPED, output
            at = want["next_position"]
            inputs = {"ids": want["token"], "g": want["g_next"], "position": at, "row": [0]}
        position += row + 1


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("kv", ["fp16", "q8_0/q5_1", "q8_0"])
def test_a_row_has_the_same_bits_wherever_it_stands(
    pair: tuple[Path, Path], kv: str, profile: str
) -> None:
    engine = engines(*pair, options(kv, profile), ("trunk",))["trunk"]
    tokens = np.random.default_rng(2).integers(0, 512, 24)
    plain, states = list[Arrays](), Arrays()
    for at in range(15):
        ids = [tokens[at], -1, -1, -1, -1]
        out, states = engine.run(states, ids=ids, position=[at], rows=[1], kept=[min(at, 1)])
        plain.append(out)
    states, position, kept = {}, 0, 0
    for keep in (3, 1, 5, 1, 4):
        ids = tokens[position : position + WIDTH]
        out, states = engine.run(states, ids=ids, position=[position], rows=[5], kept=[kept])
        for row in range(keep):
            for name in ("features", "hidden", "logits"):
                np.testing.assert_array_equal(out[name][row], plain[position + row][name][0])
        position, kept = position + keep, keep


# --- the chain on the shipped pair -----------------------------------------------------------

CASES = [(kv, "portable") for kv in KV_TYPES[1:]]
CASES += [(kv, "standard") for kv in ("q8_0/q5_1", "q8_0")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case).replace("/", "_"))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    kv, profile = request.param
    bundle = tmp_path_factory.mktemp("kv") / "bundle"
    words = [str(DEMO / "trunk"), str(DEMO / "draft"), "-o", str(bundle), "--capacity", "96"]
    assert main(["export", *words, "--kv", kv, "--profile", profile]) == 0
    return open_engines(bundle, threads=1)


@pytest.fixture(scope="module")
def plain(loaded: Engines) -> list[Plain]:
    tokenizer = Tokenizer(DEMO / "trunk")
    chain = loaded.chain(drafter="none")
    return [decode_plainly(chain, tokenizer.encode(text), NEW) for text in PROMPTS]


@pytest.mark.parametrize("rollback", ["log", "replay"])
def test_every_accepted_count_gives_plain_s_tokens(
    loaded: Engines, plain: list[Plain], rollback: Any
) -> None:
    k = WIDTH - 1
    chain = loaded.chain(drafter="none", rollback=rollback)
    counts: Iterator[int] = itertools.cycle([*range(k + 1), *range(k, -1, -1)])
    seen = set[int]()
    for want in plain:
        truth = [*want.prompt, *want.tokens]
        script = chain.drafter = Script(chain.cache, truth, counts, vocab=VOCAB)
        rounds = list(chain.rounds(want.prompt, max_new_tokens=NEW, k=k))
        assert [token for round in rounds for token in round.tokens] == want.tokens
        assert [round.accepted for round in rounds[1:]] == script.planned
        seen |= set(script.planned)
    assert seen == set(range(k + 1))


@pytest.mark.parametrize("draft_kv", ["kept", "scratch"])
def test_eagle_gives_plain_s_tokens(loaded: Engines, plain: list[Plain], draft_kv: Any) -> None:
    chain = loaded.chain(drafter="eagle", draft_kv=draft_kv)
    accepted = 0
    for want in plain:
        result = chain.generate(want.prompt, max_new_tokens=NEW, k=4)
        assert result.tokens == want.tokens
        accepted += result.stats.accepted
    assert accepted > 0


def test_a_branch_comes_back_from_its_snapshot(loaded: Engines, plain: list[Plain]) -> None:
    """Live rows of every plane: another text over the same slots, then the first one again."""
    chain = loaded.chain(drafter="eagle")
    first, second = plain
    half = NEW // 2
    head = chain.generate(first.prompt, max_new_tokens=half, k=4).tokens
    snapshot = chain.snapshot()
    specs = loaded.manifest.specs
    planes = [*specs["trunk"].states, *specs["draft"].states]
    live = {pair.input: pair for pair in planes if pair.rows_axis is not None}
    held = sum(len(chain.cache.tokens) * p.tensors[0].nbytes // p.shape[2] for p in live.values())
    others = {p.input: p.tensors[0].nbytes for p in planes if p.rows_axis is None}
    outputs = sum(b.spec.nbytes for b in snapshot.outputs)
    assert snapshot.nbytes == held + sum(others.values()) + outputs
    for _ in range(2):
        chain.generate(second.prompt, max_new_tokens=NEW, k=4)
        chain.rollback(snapshot)
        rest = [chain.cache.pending]
        tokens = [*chain.stream(rest, max_new_tokens=NEW - half, append=True)]
        assert [*head, *tokens] == first.tokens


# --- building and refusing -------------------------------------------------------------------


@rtx
@pytest.mark.parametrize(
    ("profile", "dtype", "kv"),
    [
        ("portable", "fp16", "q8_0/q5_1"),
        ("portable", "bf16", "fp16"),
        ("standard", "fp16", "q8_0"),
        ("standard", "bf16", "q8_0/q5_1"),
    ],
)
def test_every_graph_builds(tmp_path: Path, kv: str, profile: str, dtype: str) -> None:
    pair = write_pair(tmp_path, layers=4, aux=[0, 1, 3], draft_sizes={"head_dim": 32})
    bundle = tmp_path / "b"
    words = ["--capacity", "64", "--aux-layers", "0,1,3", "--kv", kv, "--profile", profile]
    if (profile, kv) != ("portable", "q8_0/q5_1"):  # prefill engines once: they take longest
        words += ["--prefill", "0"]
    assert main(["export", *map(str, pair), "-o", str(bundle), *words, "--dtype", dtype]) == 0
    capabilities = ["--compute-capability", "8.6", "8.9", "12.0"]
    assert main(["build", str(bundle), "--backend", "tensorrt-rtx", *capabilities]) == 0
    manifest = Manifest.load(bundle)
    assert {Path(name).stem for name in manifest.plans} == set(manifest.specs)


def test_a_head_must_be_whole_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = write_pair(tmp_path)  # the draft's heads have 16 dims
    bundle = tmp_path / "b"
    words = ["export", *map(str, pair), "-o", str(bundle)]
    assert main([*words, "--kv", "q8_0"]) == 2
    assert (
        "draft: head_dim is 16, and KV in q8_0 takes multiples of 32: export with --kv fp32, fp16 "
        "or bf16" in capsys.readouterr().err
    )
    assert not bundle.exists()
    assert main([*words, "--kv", "fp16"]) == 0


def test_inspect_shows_the_kv_type(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", *map(str, pair), "-o", str(tmp_path / "b"), "--kv", "q8_0/q5_1"]
    assert main(words) == 0
    assert "--kv q8_0/q5_1" in Manifest.load(tmp_path / "b").export_command(tmp_path / "b")
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "b")]) == 0
    # 34 + 24 bytes for each KV head: two in both attention layers of the trunk and in its mtp
    # head, four in the draft
    parts = f"(trunk {58 * 4} + eagle {58 * 4}; mtp in its place: {58 * 2})"
    assert f"KV       q8_0/q5_1, {58 * 8} bytes a token {parts}" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "b"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kv"] == "q8_0/q5_1" and report["memory"]["kv_per_token"] == 58 * 8


@pytest.mark.parametrize(
    ("kv", "words"),
    [("q8_0", "takes int8 only for a quantisation of its own"), ("bf16", "has no bf16")],
)
def test_tensorrt_8_6_refuses(kv: str, words: str) -> None:
    bundle = Options(dtype="fp16", kv=kv)
    with pytest.raises(InputError, match=f"{words}.*--kv fp16"):
        Flavour("tensorrt", "8.6.1", None).refuse(bundle)
    Flavour("tensorrt", "10.3.0", None).refuse(bundle)
    Flavour("tensorrt-rtx", "1.7.1", None).refuse(bundle)


def test_an_unknown_kv_type_is_refused() -> None:
    with pytest.raises(InputError, match="kv is 'q4_0', expected one of fp32, fp16, bf16, q8_0"):
        check_options(Options(kv="q4_0"))


def test_quantised_rows_cost_little_acceptance(tmp_path: Path) -> None:
    """Along one text, so that few tokens tell; a draft that read wrong rows would only guess."""
    tokenizer = Tokenizer(DEMO / "trunk")
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    texts, found = losses(tmp_path, prompts, 40, ["fp16", "q8_0/q5_1"])
    plain = found["fp32"]
    assert plain.agreement == 1 and plain.tokens_per_pass > 2
    for kv in ("fp16", "q8_0/q5_1"):
        assert found[kv].tokens_per_pass > 0.95 * plain.tokens_per_pass
        assert found[kv].agreement > 0.9
    # the rounds of a chain are a walk over these positions
    chain = open_engines(tmp_path / "fp32", threads=1).chain()
    for text, accepted in zip(texts, plain.accepted, strict=True):
        prompt, at, walk = text.tokens[: text.prompt], 0, list[int]()
        while at < len(accepted):
            walk.append(accepted[at])
            at += accepted[at] + 1
        rounds = chain.rounds(prompt, max_new_tokens=40, k=4)
        assert walk == [round.accepted for round in rounds if round.drafted == 4]
