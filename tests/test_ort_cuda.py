"""The profiles for ONNX Runtime's CUDA provider, run on the CPU against the portable graphs.

`ort-fused` runs the very kernels of `engines/kernels`, compiled for the host: each GPU thread a
fibre. `ort-cuda` runs on the CPU kernels of the same com.microsoft operators. What only a GPU can
show (speed, its own rounding) is in tests/gpu.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from eagle_chain.engines.bound import bound_weights, with_bound_weights
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.derived import Derived
from eagle_chain.engines.kernel_library import SOURCES
from eagle_chain.engines.kv import is_quantised, key_and_value, names
from eagle_chain.engines.overrides import DraftOverrides
from eagle_chain.engines.spec import Options, TensorSpec
from eagle_chain.export import graph as export_graph
from eagle_chain.export.bundle import Pair, weight_table, write_bundle
from eagle_chain.export.checkpoint import open_draft, open_mtp, open_trunk
from eagle_chain.export.fused import stretches
from eagle_chain.export.graph import build_graphs
from eagle_chain.export.ort_cuda import OrtCudaTrunk
from eagle_chain.runtime import ort_cuda
from eagle_chain.runtime.cuda import CudaMemory
from tests.ggml import by_gguf, ggml_bytes
from tests.ort_host import gpu_on_host
from tests.standin import standins
from tests.test_prefill import feed, in_steps
from tests.toy_pair import write_pair

WIDTH, CAPACITY = 5, 48
AUX = DraftOverrides(aux_layers=(0, 1, 2))
TOLERANCE = 1e-4  # of the largest value, fp32: sums run in another order
# Rounding to 16 bits, root mean square over that of the values: the toy trunk amplifies it.
ROUNDING = {"fp16": 0.1, "bf16": 0.4}
CALLS = ((5, 5), (2, 2), (5, 1), (5, 5), (5, 3))  # rows of the call, rows kept of it
ELEMENT = {
    **{"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16},
    **{"int32": np.int32, "int8": np.int8},
}
NUMBER = {"fp32": 1, "fp16": 10, "bf16": 16, "int32": 6, "int8": 3}  # as ONNX counts them
DTYPES = {1: "fp32", 10: "fp16", 16: "bf16", 6: "int32", 7: "int32", 3: "int8"}
STORED = [(p, kv) for p in ("ort-cuda", "ort-fused") for kv in ("q8_0/q5_1", "q8_0", "fp16")]
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    # head_dim 64: this attention operator rotates multiples of 16 dims only
    folders = write_pair(
        tmp_path_factory.mktemp("pair"),
        layers=4,
        dtype="bf16",
        sizes={"head_dim": 64},
        draft_sizes={"head_dim": 32},
    )
    trunk_config, trunk = open_trunk(folders[0])
    draft_config, draft = open_draft(folders[1], trunk_config, trunk, overrides=AUX)
    return Pair(trunk_config, draft_config, trunk, draft, mtp=open_mtp(trunk, trunk_config))


def test_the_kernels_for_big_sizes_agree_with_simpler_sums(tmp_path: Path) -> None:
    """Dims, matrices and caches that the toy pair does not reach."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the kernels with")
    source, program = Path(__file__).parent / "kernel_check.cc", tmp_path / "kernel_check"
    flags = ["-std=c++17", "-O2", "-fno-strict-aliasing", "-I", str(SOURCES)]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
    found = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


class MaskedTrunk(OrtCudaTrunk):
    """Replays all rows with the rejected ones masked.

    The CPU kernel refuses `cu_seqlens` that end before the last row, which the CUDA kernel takes.
    A masked row multiplies S by 1 and adds 0 to it.
    """

    def replayed(self, prefix: str, held: tuple[ir.Value, ...], S: ir.Value) -> ir.Value:
        """As in the base class."""
        g = self.g
        qkv, *gates = held
        kept, off = g.Unsqueeze(self.was_kept, g.ints(1)), g.scalar(-1e30)
        rows = (qkv, *(g.Where(kept, gate, off) for gate in gates))
        return self.delta(prefix, rows, S, self.all_rows)[1]


class Engine:
    """One graph with its weights as inputs; states and inputs in, everything out, by name."""

    def __init__(
        self, model: onnx.ModelProto, pair: Pair, dtype: str, library: Path | None
    ) -> None:
        bound = with_bound_weights(model, converted=dtype)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if library is not None:
            options.register_custom_ops_library(str(library))
        self.session = ort.InferenceSession(
            bound.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        stored = set(bound_weights(model))
        self.feeds: Arrays = {}
        for value in bound.graph.input:
            kind = ELEMENT[DTYPES[value.type.tensor_type.elem_type]]
            shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
            form = Derived.parse(value.name)
            if form or value.name in stored:
                names = form.sources if form else (value.name,)
                whole = np.concatenate([held(pair, name).astype(np.float32) for name in names])
                self.feeds[value.name] = (whole + (form.offset if form else 0)).astype(kind)
            else:
                self.feeds[value.name] = np.zeros(shape, kind)
        self.width = len(self.feeds["ids"]) if "ids" in self.feeds else 0
        self.outputs = {
            o.name: (DTYPES[o.type.tensor_type.elem_type], [d.dim_value for d in dims(o)])
            for o in bound.graph.output
        }

    def run(self, states: Arrays, **inputs: Any) -> tuple[Arrays, Arrays]:
        """One call from `states` -> all outputs, the next states."""
        binding = self.session.io_binding()
        given = {n: np.asarray(v).astype(self.feeds[n].dtype) for n, v in inputs.items()}
        feeds = {n: np.ascontiguousarray(a) for n, a in (self.feeds | states | given).items()}
        results = {n: np.empty(s, ELEMENT[kind]) for n, (kind, s) in self.outputs.items()}
        numbers = {np.dtype(ELEMENT[kind]): number for kind, number in NUMBER.items()}
        for name, array in feeds.items():
            binding.bind_input(
                name, "cpu", 0, numbers[array.dtype], list(array.shape), array.ctypes.data
            )
        for name, array in results.items():
            binding.bind_output(
                name, "cpu", 0, numbers[array.dtype], list(array.shape), array.ctypes.data
            )
        self.session.run_with_iobinding(binding)
        after = {n.removesuffix(".next"): a for n, a in results.items() if n.endswith(".next")}
        return results, after


def dims(value: onnx.ValueInfoProto) -> Any:
    return value.type.tensor_type.shape.dim


def held(pair: Pair, name: str) -> np.ndarray[Any, Any]:
    checkpoint = pair.draft if name.startswith("draft.") else pair.trunk
    checkpoint = pair.mtp if name.startswith("mtp.") else checkpoint
    assert checkpoint is not None
    found = checkpoint.tensors
    return checkpoint.array(name if name in found else name.removeprefix("draft."))


def engine(
    pair: Pair,
    profile: str,
    library: Path | None = None,
    dtype: str = "fp32",
    name: str = "trunk",
    kv: str | None = None,
    sampling: bool = False,
) -> Engine:
    debug = ("logits", "S_rows")
    options = Options(WIDTH, CAPACITY, dtype, profile, debug, kv, sampling=sampling)
    table = weight_table(pair)
    graphs = build_graphs(pair.trunk_config, pair.draft_config, table, options, mtp=True)
    return Engine(graphs[name], pair, dtype, library if profile == "ort-fused" else None)


@pytest.fixture(scope="module")
def masked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(export_graph.TRUNKS, "ort-cuda", MaskedTrunk)
        yield


@pytest.fixture(scope="module", params=["ort-fused", "ort-cuda"])
def trunk(request: pytest.FixtureRequest, pair: Pair, library: Path, masked: None) -> Engine:
    return engine(pair, request.param, library)


@pytest.fixture(
    scope="module",
    params=[
        ("ort-fused", "fp32", None),
        ("ort-fused", "bf16", None),
        ("ort-cuda", "fp32", None),
        ("ort-cuda", "fp32", "q8_0/q5_1"),
        ("ort-fused", "bf16", "q8_0/q5_1"),
        ("ort-fused", "fp32", "q8_0"),
    ],
)
def exact(request: pytest.FixtureRequest, pair: Pair, library: Path, masked: None) -> Engine:
    """A trunk whose bits are compared; 16-bit types have kernels of their own."""
    profile, dtype, kv = request.param
    return engine(pair, profile, library, dtype, kv=kv)


def forced(trunk: Engine) -> Iterator[Arrays]:
    """Random tokens, states carried on over partial accepts."""
    random = np.random.default_rng(0)
    states: Arrays = {}
    position = kept = 0
    for rows, keep in CALLS:
        ids = random.integers(0, 512, WIDTH)
        ids[rows:] = -1
        out, states = trunk.run(states, ids=ids, position=[position], rows=[rows], kept=[kept])
        yield out
        position, kept = position + keep, keep


def distance(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-6))


def rms(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.sqrt(np.square(got - want).mean() / np.square(want).mean()))


def test_trunk_agrees_with_the_portable_graph(trunk: Engine, pair: Pair) -> None:
    for want, got in zip(forced(engine(pair, "portable")), forced(trunk), strict=True):
        names = ["features", "hidden", "logits", "layers.3.key.next", "layers.3.value.next"]
        if "layers.0.log_key.next" in got:  # the same layout of the recurrent states
            names += [n for n in want if n.startswith(("layers.0.", "layers.2."))]
        for name in names:
            assert distance(got[name], want[name]) < TOLERANCE, name
        for name in ("next_ids", "accepted", "pending", "next_kept", "next_position"):
            np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize(("profile", "kv"), STORED)
def test_trunk_agrees_with_the_portable_graph_on_stored_rows(
    pair: Pair, library: Path, masked: None, profile: str, kv: str
) -> None:
    """A value on the edge between two codes may fall to either side."""
    ours = engine(pair, profile, library, kv=kv)
    for want, got in zip(forced(engine(pair, "portable", kv=kv)), forced(ours), strict=True):
        for name in ("features", "hidden", "logits"):
            assert distance(got[name], want[name]) < 1e-2, name
        planes = [n for n in want if n.startswith(("layers.3.key", "layers.3.value"))]
        assert len(planes) == {"q8_0/q5_1": 6, "q8_0": 4, "fp16": 2}[kv]
        for name in planes:
            if want[name].dtype == np.int8:
                assert (got[name] != want[name]).mean() < 1e-2, name
            else:
                assert distance(got[name], want[name]) < 1e-2, name
        np.testing.assert_array_equal(got["next_ids"], want["next_ids"])


@pytest.mark.parametrize(
    ("profile", "dtype", "kv"),
    [
        ("ort-cuda", "fp32", "q8_0/q5_1"),
        ("ort-fused", "fp32", "q8_0/q5_1"),
        ("ort-fused", "fp16", "q8_0"),
        ("ort-fused", "bf16", "q8_0/q5_1"),
        ("ort-fused", "bf16", "fp16"),
        ("ort-fused", "fp16", "fp32"),
    ],
)
def test_stored_rows_are_the_plain_rows_stored(
    pair: Pair, library: Path, masked: None, profile: str, dtype: str, kv: str
) -> None:
    """Bit for bit: nothing before the first attention depends on the KV type."""
    runs = (forced(engine(pair, profile, library, dtype, kv=k)) for k in (None, kv))
    compared = 0
    for want, got in zip(*runs, strict=True):
        for side, kind in zip(("key", "value"), key_and_value(kv), strict=True):
            cache = f"layers.3.{side}"
            rows = want[f"{cache}.next"][0].astype(np.float32)
            live = np.s_[:, : int(got["next_position"][0])]
            compared += rows[live].size
            if is_quantised(kind):
                planes = {n.removeprefix(cache): got[f"{n}.next"][0] for n in names(kind, cache)}
                stored, rows = ggml_bytes(kind, planes), by_gguf(kind, rows)
            else:
                stored, rows = got[f"{cache}.next"][0], rows.astype(ELEMENT[kind])
            np.testing.assert_array_equal(stored[live], rows[live])
    assert compared


@pytest.mark.parametrize("profile", ["ort-fused", "ort-cuda"])
def test_tokens_are_drawn_as_by_the_portable_graph(
    pair: Pair, library: Path, masked: None, profile: str
) -> None:
    drawing = [engine(pair, p, library, sampling=True) for p in ("portable", profile)]
    share = np.random.default_rng(0).random(drawing[0].feeds["uniform"].shape)
    ids, rest = [5, 6, 7, 8, 9], {"position": [0], "rows": [5], "kept": [0], "uniform": share}
    for temperature in (0.0, 1.0, 3.0):
        want, got = (e.run({}, ids=ids, temperature=[temperature], **rest)[0] for e in drawing)
        np.testing.assert_array_equal(got["next_ids"], want["next_ids"])
        greedy = want["logits"].argmax(-1).tolist()
        assert (want["next_ids"].tolist() == greedy) == (temperature == 0)


@pytest.mark.parametrize("kept", [0, 1, 4, 5])
def test_the_next_state_is_the_one_after_the_kept_rows(exact: Engine, kept: int) -> None:
    """Bit for bit; 0 is a full rollback."""
    trunk = exact
    ids = np.random.default_rng(3).integers(0, 512, (3, WIDTH))
    _, states = trunk.run({}, ids=ids[0], position=[0], rows=[5], kept=[0])
    second, states = trunk.run(states, ids=ids[1], position=[3], rows=[5], kept=[3])
    third, _ = trunk.run(states, ids=ids[2], position=[3 + kept], rows=[5], kept=[kept])
    for name in (n for n in third if n.endswith(".S.next")):
        rows = second[name.replace(".S.next", ".S_rows")]
        np.testing.assert_array_equal(third[name], rows[kept - 1] if kept else second[name])


def test_a_row_has_the_same_bits_wherever_it_stands(exact: Engine) -> None:
    trunk = exact
    tokens = np.random.default_rng(2).integers(0, 512, 16)
    plain: list[Arrays] = []
    states: Arrays = {}
    for at in range(10):
        ids = [tokens[at], -1, -1, -1, -1]
        out, states = trunk.run(states, ids=ids, position=[at], rows=[1], kept=[min(at, 1)])
        plain.append(out)
    states, position, kept = {}, 0, 0
    for keep in (3, 1, 5, 1):
        ids = tokens[position : position + WIDTH]
        out, states = trunk.run(states, ids=ids, position=[position], rows=[5], kept=[kept])
        for row in range(keep):
            for name in ("features", "hidden", "logits"):
                np.testing.assert_array_equal(out[name][row], plain[position + row][name][0])
        position, kept = position + keep, keep


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_tensor_core_products_round_like_16_bits(pair: Pair, library: Path, dtype: str) -> None:
    exact, ours = engine(pair, "portable"), engine(pair, "ort-fused", library, dtype)
    for want, got in zip(forced(exact), forced(ours), strict=True):
        assert rms(got["layers.0.window.next"], want["layers.0.window.next"]) < 4e-3
        assert rms(got["logits"], want["logits"]) < ROUNDING[dtype]


@pytest.mark.parametrize("profile", ["ort-fused", "ort-cuda"])
@pytest.mark.parametrize("kv", [None, "q8_0/q5_1"])
def test_encoder_and_draft_agree_with_the_portable_graph(
    pair: Pair, library: Path, profile: str, kv: str | None
) -> None:
    tolerance = 1e-2 if kv else TOLERANCE  # a value may fall to either side of a code's edge
    random = np.random.default_rng(1)
    features = random.normal(size=(WIDTH, pair.draft_config.feature_size))
    pairs = {
        name: (
            engine(pair, "portable", name=name, kv=kv),
            engine(pair, profile, library, name=name, kv=kv),
        )
        for name in ("encoder", "draft", "draft_step")
    }
    want, got = (e.run({}, features=features)[0]["g"] for e in pairs["encoder"])
    assert distance(got, want) < TOLERANCE
    ids = random.integers(0, 512, WIDTH)
    inputs = {"ids": ids, "g": want, "position": [0], "row": [3]}
    (first, kv), (ours, our_kv) = (e.run({}, **inputs) for e in pairs["draft"])
    for _ in range(3):
        assert ours["token"] == first["token"] and ours["next_position"] == first["next_position"]
        planes = [n for n in first if n.startswith("draft.") and first[n].dtype != np.int8]
        for name in ("g_next", "logits", *planes):
            assert distance(ours[name], first[name]) < tolerance, name
        at = {"position": first["next_position"], "row": [0]}
        inputs = {"ids": first["token"], "g": first["g_next"], **at}
        step, our_step = pairs["draft_step"]
        (first, kv), (ours, our_kv) = step.run(kv, **inputs), our_step.run(our_kv, **inputs)


@pytest.mark.parametrize("profile", ["ort-fused", "ort-cuda"])
def test_the_mtp_head_agrees_with_the_portable_graph(
    pair: Pair, library: Path, profile: str
) -> None:
    """Two extends, so that rows of the first are read, and single steps between them."""
    random = np.random.default_rng(1)
    (extend, our_extend), (step, our_step) = (
        (engine(pair, "portable", name=name), engine(pair, profile, library, name=name))
        for name in ("mtp", "mtp_step")
    )
    kv: Arrays = {}
    our_kv: Arrays = {}
    for position, row in ((0, 3), (4, 4)):
        hidden = random.normal(size=(WIDTH, pair.trunk_config.hidden_size))
        ids = random.integers(0, 512, WIDTH)
        inputs = {"ids": ids, "g": hidden, "position": [position], "row": [row]}
        (want, kv), (got, our_kv) = extend.run(kv, **inputs), our_extend.run(our_kv, **inputs)
        for _ in range(3):
            assert got["token"] == want["token"]
            assert got["next_position"] == want["next_position"]
            for name in ("g_next", "logits", "mtp.key.next", "mtp.value.next"):
                assert distance(got[name], want[name]) < TOLERANCE, name
            at = {"position": want["next_position"], "row": [0]}
            inputs = {"ids": want["token"], "g": want["g_next"], **at}
            (want, kv), (got, our_kv) = step.run(kv, **inputs), our_step.run(our_kv, **inputs)


def test_a_row_that_is_not_finite_chooses_nothing(pair: Pair, library: Path) -> None:
    """Greedy choices of single rows: ties go to the lowest id, a NaN anywhere makes -1."""
    fused = engine(pair, "ort-fused", library)
    states = {n: a.copy() for n, a in fused.feeds.items() if n.endswith(".value")}
    for value in states.values():
        value[0, :, 0] = np.nan  # a KV row that every row of the call sees
    ids = [1, 2, 3, 4, 5]
    out, _ = fused.run(states, ids=ids, position=[1], rows=[5], kept=[0])
    assert (out["next_ids"] == -1).all() and out["accepted"] == 0 and out["pending"] == -1


@pytest.mark.parametrize("profile", ["ort-fused", "ort-cuda"])
@pytest.mark.parametrize("width", [1, 2, 9])
def test_every_width_is_valid_onnx(pair: Pair, profile: str, width: int) -> None:
    options = Options(width, CAPACITY, "bf16", profile)
    specs = engine_specs(pair.trunk_config, pair.draft_config, options)
    table = weight_table(pair)
    graphs = build_graphs(pair.trunk_config, pair.draft_config, table, options)
    for name, model in graphs.items():
        onnx.checker.check_model(with_bound_weights(model))
        assert [o.name for o in model.graph.output] == [t.name for t in specs[name].all_outputs]


@pytest.mark.parametrize("profile", ["ort-fused", "ort-cuda"])
def test_the_cuda_profiles_lead_to_the_same_place(
    pair: Pair,
    library: Path,
    masked: None,
    profile: str,
) -> None:
    """On the CPU kernels of the same operators; the state layouts are each profile's own."""
    options = Options(WIDTH, 96, "fp32", profile, ("logits",), prefill=32)
    table = weight_table(pair)
    graphs = build_graphs(pair.trunk_config, pair.draft_config, table, options)
    emulated = library if profile == "ort-fused" else None
    made = {
        name: Engine(graphs[name], pair, "fp32", emulated)
        for name in ("trunk", "prefill", "draft", "encoder", "draft_prefill")
    }
    ids = np.random.default_rng(5).integers(0, 500, 50)
    chunks = [("trunk", 3), ("prefill", 32), ("trunk", 4), ("prefill", 9), ("trunk", 1)]
    want_features, want, want_states = feed(made, ids, [*in_steps(48), ("trunk", 1)])
    features, got, states = feed(made, ids, chunks)
    _, _, padded = feed(made, ids, chunks, pad=11)
    assert distance(features, want_features) < TOLERANCE
    assert distance(got["logits"][0], want["logits"][0]) < TOLERANCE
    assert got["next_ids"][0] == want["next_ids"][0]
    for name in states:
        kept = slice(0, 49) if name.endswith((".key", ".value")) else slice(None)
        if ".log_" in name or name.endswith(".window"):
            continue
        mine, theirs, other = (s[name][..., kept, :] for s in (states, want_states, padded))
        assert distance(mine, theirs) < TOLERANCE, name
        np.testing.assert_array_equal(mine, other)
    g = made["encoder"].run({}, features=features[:WIDTH])[0]["g"]
    inputs = {"ids": ids[1:6], "position": [7]}
    _, want_states = made["draft"].run({}, g=g, row=[4], **inputs)
    inputs["ids"] = [*ids[1:6], *[11] * (32 - WIDTH)]
    given = np.concatenate([features[:WIDTH], np.full((32 - WIDTH, 192), np.nan)])
    _, states = made["draft_prefill"].run({}, features=given, rows=[WIDTH], **inputs)
    for name in ("draft.key", "draft.value"):
        assert distance(states[name], want_states[name]) < TOLERANCE, name


@pytest.mark.parametrize("profile", ["ort-fused", "ort-cuda"])
def test_wide_calls_take_no_weight_in_a_form_of_their_own(pair: Pair, profile: str) -> None:
    """It would be uploaded twice."""
    options = Options(WIDTH, 96, "bf16", profile, prefill=32)
    specs = engine_specs(pair.trunk_config, pair.draft_config, options)
    table = weight_table(pair)
    forms = {}
    for name, model in build_graphs(pair.trunk_config, pair.draft_config, table, options).items():
        known = {tensor.name for tensor in specs[name].all_inputs}
        inputs = with_bound_weights(model, converted=options.dtype).graph.input
        forms[name] = {
            (i.name, i.type.tensor_type.elem_type) for i in inputs if i.name not in known
        }
    assert forms["prefill"] and forms["prefill"] <= forms["trunk"]
    assert forms["draft_prefill"] <= forms["encoder"] | forms["draft"]


def test_engines_for_prompts_take_memory_for_what_is_alive_and_once(
    pair: Pair, library: Path
) -> None:
    options = Options(WIDTH, 96, "fp32", "ort-cuda", prefill=32)
    given = pair.trunk_config, pair.draft_config
    specs, names = engine_specs(*given, options), ("encoder", "draft_prefill")
    graphs = build_graphs(*given, weight_table(pair), options, only=names)
    with gpu_on_host(library):
        memory = CudaMemory()
        for name in names:
            model = with_bound_weights(graphs[name], converted="fp32").SerializeToString()
            acted = ort_cuda.OrtCudaSession(model, specs[name], memory)._session
            for_prompts = name == "draft_prefill"
            assert acted.options.enable_mem_pattern != for_prompts
            assert ("arena_extend_strategy" in acted.told) == for_prompts


@pytest.mark.parametrize(
    ("profile", "kv", "replayed"),
    [
        ("ort-fused", None, {"trunk", "draft", "prefill", "draft_prefill"}),
        ("ort-fused", "q8_0/q5_1", {"trunk", "draft"}),
        ("ort-cuda", None, {"trunk", "draft"}),
    ],
)
def test_prompts_are_replayed_where_that_leaves_the_same_bits(
    pair: Pair, profile: str, kv: str | None, replayed: set[str]
) -> None:
    options = Options(WIDTH, 96, "bf16", profile, kv=kv, prefill=32)
    specs = engine_specs(pair.trunk_config, pair.draft_config, options)
    found = {name for name in specs if ort_cuda.replayed(options, specs[name])}
    assert found - {"encoder", "draft_step"} == replayed


@pytest.mark.parametrize(("slots", "pieces"), [(48, 2), (1024, 32), (4101, 81), (32773, 209)])
def test_a_long_cache_is_cut_into_longer_pieces(slots: int, pieces: int) -> None:
    assert stretches(slots) == pieces


def test_a_derived_weight_says_how_it_is_made() -> None:
    form = Derived(("a.weight", "b.weight"), "bf16", 1.0)
    assert Derived.parse(form.name) == form
    assert Derived.parse("a.weight") is None


def test_derived_weights_are_put_together_on_the_device(pair: Pair, tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle", pair, Options(WIDTH, CAPACITY), False, ())
    names = ("layers.0.linear_attn.in_proj_z.weight", "layers.0.linear_attn.in_proj_b.weight")
    norm = "layers.0.input_layernorm.weight"
    with standins():
        memory = CudaMemory()
        for form in (Derived(names, "fp16"), Derived((norm,), "bf16", 1.0)):
            shapes = [held(pair, name).shape for name in form.sources]
            spec = TensorSpec(form.name, form.dtype, (sum(s[0] for s in shapes), *shapes[0][1:]))
            made = ort_cuda.derived(tmp_path / "bundle", weight_table(pair), form, spec, memory)
            values = np.concatenate([held(pair, n).astype(np.float32) for n in form.sources])
            want = (values + np.float32(form.offset)).astype(ELEMENT[form.dtype])
            assert made.read().tobytes() == want.tobytes()
