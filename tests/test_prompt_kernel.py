"""The kernels for the rows of a prompt, on fibres, against a float64 loop over the rows.

The loop starts from what the convolution left, which is judged on its own: so it sees the same
rounded rows as the kernels in every dtype.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from eagle_chain.engines.memory import prompt_scratch
from eagle_chain.engines.spec import EngineSpec, TensorSpec
from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.chunked import ChunkRows, Sizes, delta_rule
from tests import qwen_9b
from tests.test_prefill import by_rows, distance

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Tensors = dict[str, tuple[int, tuple[int, ...]]]
WIDTH, TAPS, EPS = 3, 4, 1e-6
EXACT = 1e-5  # largest difference over largest value
WIDE_OPEN, SHUT = 2000.0, -2000.0  # a gate before its activation
KINDS = {
    "fp32": (np.float32, TensorProto.FLOAT, 1e-6),  # and the rounding of y and of the conv
    "fp16": (np.float16, TensorProto.FLOAT16, 1e-3),
    "bf16": (ml_dtypes.bfloat16, TensorProto.BFLOAT16, 8e-3),
}
LINEAR = [f"linear_{part}" for part in ("key_heads", "value_heads", "key_dim", "value_dim")]
OUTPUTS = ("y", "S", "log_key", "log_delta", "log_decay", "window", "qkv")


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer and of a call."""

    rows: int
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 8
    dtype: str = "fp32"

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def states(self) -> dict[str, tuple[int, ...]]:
        """S and log."""
        return {
            "S": (self.value_heads, self.key_dim, self.value_dim),
            "log_key": (WIDTH, self.key_heads, self.key_dim),
            "log_delta": (WIDTH, self.value_heads, self.value_dim),
            "log_decay": (WIDTH, self.value_heads),
        }


class Operator:
    """One operator alone in a graph; a tensor is ONNX's number of a dtype, and a shape."""

    def __init__(
        self, library: Path, op_type: str, inputs: Tensors, outputs: Tensors, **attributes: float
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        names = [f"{name}.next" for name in outputs]
        node = helper.make_node(op_type, list(inputs), names, domain="eagle_chain", **attributes)
        graph = helper.make_graph(
            [node],
            op_type,
            [helper.make_tensor_value_info(n, *tensor) for n, tensor in inputs.items()],
            [
                helper.make_tensor_value_info(n, *tensor)
                for n, tensor in zip(names, outputs.values(), strict=True)
            ],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("eagle_chain", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(library))
        self.session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def run(self, given: Arrays) -> Arrays:
        """Every output by name; they start as what is not a number."""
        binding = self.session.io_binding()
        feeds = {}
        for name, (kind, shape) in self.inputs.items():
            feeds[name] = np.ascontiguousarray(given[name].astype(dtype_of(kind)).reshape(shape))
            address = feeds[name].ctypes.data
            binding.bind_input(name, "cpu", 0, kind, list(shape), address)
        results = {}
        for name, (kind, shape) in self.outputs.items():
            results[name] = np.full(shape, np.nan, dtype_of(kind))
            address = results[name].ctypes.data
            binding.bind_output(f"{name}.next", "cpu", 0, kind, list(shape), address)
        self.session.run_with_iobinding(binding)
        return results


def rule(layer: Layer, library: Path, *, opened: bool = True) -> Operator:
    """The rule of one layer with all that stands around it; `opened` for a look at its scratch."""
    kind, F = KINDS[layer.dtype][1], TensorProto.FLOAT
    values = layer.value_heads * layer.value_dim
    states: Tensors = {name: (F, shape) for name, shape in layer.states().items()}
    window = {"window": (kind, (layer.channels, TAPS - 1 + WIDTH))}
    inputs: Tensors = {
        "u": (kind, (layer.rows, layer.channels)),
        "z": (kind, (layer.rows, values)),
        **{name: (kind, (layer.rows, layer.value_heads)) for name in ("b", "a")},
        **window,
        **states,
        **{name: (TensorProto.INT32, (1,)) for name in ("kept", "rows")},
        "conv": (F, (layer.channels, 1, TAPS)),
        **{name: (F, (layer.value_heads,)) for name in ("A_log", "dt_bias")},
        "norm": (F, (layer.value_dim,)),
    }
    outputs: Tensors = {
        "y": (kind, (layer.rows, values)),
        **states,
        **window,
        "qkv": (F, (layer.rows, layer.channels)),
        "mixed": (F, (layer.rows, values)),
    }
    if not opened:
        del outputs["qkv"], outputs["mixed"]
    return Operator(library, "GatedDeltaPrompt", inputs, outputs, epsilon=EPS)


def dtype_of(kind: int) -> Any:
    if kind == TensorProto.BFLOAT16:
        return ml_dtypes.bfloat16
    return onnx.helper.tensor_dtype_to_np_dtype(kind)


def drawn(layer: Layer, seed: int = 0, valid: int | None = None, kept: int = 0) -> Arrays:
    """A call in the middle of a sequence, rounded to the layer's dtype."""
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return random.normal(size=shape) * scale

    values, element = layer.value_heads * layer.value_dim, KINDS[layer.dtype][0]
    given = {
        "u": normal(layer.rows, layer.channels),
        "z": normal(layer.rows, values),
        "b": normal(layer.rows, layer.value_heads),
        "a": normal(layer.rows, layer.value_heads),
        "window": normal(layer.channels, TAPS - 1 + WIDTH),
    }
    given = {name: x.astype(element) for name, x in given.items()}
    states = {name: normal(*s, scale=0.5) for name, s in layer.states().items()}
    states["log_decay"] = random.uniform(0.5, 1, states["log_decay"].shape)
    given |= {name: x.astype(np.float32) for name, x in states.items()}
    given["kept"], given["rows"] = np.array([kept]), np.array([valid or layer.rows])
    given |= {
        "conv": normal(layer.channels, 1, TAPS, scale=0.5).astype(np.float32),
        "A_log": normal(layer.value_heads, scale=0.5).astype(np.float32),
        "dt_bias": normal(layer.value_heads).astype(np.float32),
        "norm": (1 + normal(layer.value_dim, scale=0.1)).astype(np.float32),
    }
    return given


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


def convolved(layer: Layer, given: Arrays) -> Array:
    """What the convolution and silu leave of u, in float64 with the two roundings of the dtype."""
    element, kept = KINDS[layer.dtype][0], int(given["kept"][0])
    past = given["window"].astype(np.float64)[:, kept : kept + TAPS - 1].T
    line = np.concatenate([past, given["u"].astype(np.float64)])
    taps = given["conv"].astype(np.float64)[:, 0]
    sums = sum(line[j : j + layer.rows] * taps[:, j] for j in range(TAPS))
    sums = np.asarray(sums).astype(element).astype(np.float64)
    return (sums * sigmoid(sums)).astype(element).astype(np.float64)


def rows_of(layer: Layer, given: Arrays, qkv: Array) -> tuple[Array, ...]:
    """What the rule reads of the valid rows, in float64: q, k, v, log of the decay, beta."""
    Hk, Hv, dk, dv = layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim
    valid = int(given["rows"][0])
    parts = np.split(qkv[:valid].astype(np.float64), [Hk * dk, 2 * Hk * dk], axis=1)
    query, key = (x.reshape(valid, Hk, dk) for x in parts[:2])
    query, key = (x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6) for x in (query, key))
    b, a = (given[name][:valid].astype(np.float64) for name in "ba")
    rate = np.logaddexp(0, a + given["dt_bias"].astype(np.float64))
    log_decay = -np.exp(given["A_log"].astype(np.float64)) * rate
    value = parts[2].reshape(valid, Hv, dv)
    return query * dk**-0.5, key, value, log_decay, sigmoid(b)


def committed(layer: Layer, given: Arrays) -> Array:
    """S with the kept rows of the log folded in, in float64."""
    x = {name: given[name].astype(np.float64) for name in layer.states()}
    S = x["S"]
    for r in range(int(given["kept"][0])):
        key = x["log_key"][r].repeat(layer.value_heads // layer.key_heads, 0)
        S = S * x["log_decay"][r, :, None, None] + key[:, :, None] * x["log_delta"][r, :, None]
    return S


def normed(layer: Layer, given: Arrays, mixed: Array) -> Array:
    """The gated norm of [R, Hv, dv] in float64."""
    z = given["z"].astype(np.float64)[: len(mixed)].reshape(mixed.shape)
    scale = 1 / np.sqrt(np.square(mixed).mean(-1, keepdims=True) + EPS)
    return (mixed * scale * given["norm"] * (z * sigmoid(z))).reshape(len(mixed), -1)


def agree(layer: Layer, given: Arrays, got: Arrays, bound: float = EXACT) -> None:
    """All that a call gives is what the loop over its rows gives."""
    valid, rounding = int(given["rows"][0]), KINDS[layer.dtype][2]
    qkv = got["qkv"][:valid]
    assert distance(qkv, convolved(layer, given)[:valid]) < rounding
    mixed, S = by_rows(committed(layer, given), *rows_of(layer, given, got["qkv"]))
    assert distance(got["mixed"][:valid], mixed.reshape(valid, -1)) < bound
    assert distance(got["S"], S) < bound
    want = normed(layer, given, got["mixed"][:valid].astype(np.float64).reshape(mixed.shape))
    assert distance(got["y"][:valid], want) < max(EXACT, rounding)
    assert not got["y"][valid:].any()
    history = TAPS - 1
    line = np.concatenate([given["window"][:, int(given["kept"][0]) :][:, :history].T, given["u"]])
    np.testing.assert_array_equal(got["window"][:, :history], line[valid : valid + history].T)
    assert not got["window"][:, history:].any()
    assert not any(got[name].any() for name in ("log_key", "log_delta", "log_decay"))


LAYERS = (
    Layer(160),
    Layer(96, value_dim=16, dtype="fp16"),
    Layer(64, key_heads=1, value_heads=1, key_dim=32, value_dim=32, dtype="bf16"),
    Layer(128, key_heads=1, value_heads=3, key_dim=64, value_dim=64, dtype="bf16"),
    Layer(160, key_heads=1, value_heads=2, key_dim=128, value_dim=128, dtype="bf16"),
    Layer(96, key_heads=1, value_heads=1, key_dim=128, value_dim=128),
)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_call_gives_what_a_loop_over_its_rows_gives(library: Path, layer: Layer) -> None:
    operator = rule(layer, library)
    for valid, kept in ((layer.rows, 0), (layer.rows - 37, 2), (layer.rows, WIDTH)):
        given = drawn(layer, valid, valid, kept)
        agree(layer, given, operator.run(given))


def test_scratch_is_taken_while_it_computes_and_given_back(
    library: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By what ONNX Runtime logs: one request, as large as the memory report says."""
    layer = Layer(160, key_heads=2, value_heads=4, key_dim=32, value_dim=16, dtype="bf16")
    ort.set_default_logger_severity(0)
    try:
        operator, given = rule(layer, library, opened=False), drawn(layer)
        shut = [operator.run(given) for _ in range(3)]
        told = capfd.readouterr().err
    finally:
        ort.set_default_logger_severity(2)
    sizes = {f: getattr(layer, f.removeprefix("linear_")) for f in LINEAR}
    trunk = replace(qwen_9b.configs()[0], **sizes)
    asked = [int(n) for n in re.findall(r"Extending BFCArena for Cpu.* num_bytes: (\d+)", told)]
    assert asked == [prompt_scratch(trunk, layer.rows)]
    want = rule(layer, library).run(given)
    for got in shut:
        for name, values in got.items():
            np.testing.assert_array_equal(values, want[name])


@pytest.mark.parametrize("kind", ["one key", "no decay", "all decays", "sudden decay", "no beta"])
@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[4]], ids=str)
def test_hard_rows(library: Path, layer: Layer, kind: str) -> None:
    """Rows that all write one key without forgetting, rows that forget all or learn nothing."""
    given = drawn(layer, 1, kept=1)
    beta, decay = given["b"], given["a"]
    if kind in ("one key", "no decay"):
        decay[:] = SHUT
    if kind == "one key":
        beta[:] = WIDE_OPEN
        keys = slice(layer.key_heads * layer.key_dim, 2 * layer.key_heads * layer.key_dim)
        given["u"][:, keys] = given["u"][0, keys]
        given["conv"][keys] = [0, 0, 0, 1]
    if kind == "all decays":
        decay[:] = WIDE_OPEN
    if kind == "sudden decay":
        decay[20::7] = 60
        decay[5] = WIDE_OPEN
    if kind == "no beta":
        beta[:] = SHUT
    agree(layer, given, rule(layer, library).run(given))


def test_every_count_of_valid_rows(library: Path) -> None:
    """What stands behind them changes no bit, though it is not even numbers."""
    layer = Layer(96, key_heads=1, value_heads=2)
    operator = rule(layer, library)
    for valid in range(1, layer.rows + 1):
        given = drawn(layer, 2, valid, kept=1)
        got = operator.run(given)
        agree(layer, given, got)
        for name in ("u", "z", "b", "a"):
            given[name][valid:] = np.nan
        given["log_key"][1:], given["log_delta"][1:], given["log_decay"][1:] = [np.nan] * 3
        poisoned = operator.run(given)
        for name in OUTPUTS[:-1]:
            np.testing.assert_array_equal(poisoned[name], got[name])


@pytest.mark.parametrize("layer", [Layer(160), LAYERS[4]], ids=str)
def test_several_calls_are_one(library: Path, layer: Layer) -> None:
    """Whole chunks lead to the same bits, other cuts to the same values."""
    operator, given = rule(layer, library), drawn(layer, 3, kept=2)
    whole = operator.run(given)
    for cuts, exact in (((64, 128), True), ((1, 2, 5, 70), False)):
        states, at, outputs = given, 0, []
        for end in (*cuts, layer.rows):
            part = {name: np.zeros_like(given[name]) for name in ("u", "z", "b", "a")}
            for name, rows in part.items():
                rows[: end - at] = given[name][at:end]
            states = states | part | {"rows": np.array([end - at])}
            got = operator.run(states)
            outputs.append(got["mixed"][: end - at])
            states = states | got | {"kept": np.array([0])}
            at = end
        np.testing.assert_array_equal(got["window"], whole["window"])
        for mine, theirs in ((np.concatenate(outputs), whole["mixed"]), (got["S"], whole["S"])):
            assert np.array_equal(mine, theirs) if exact else distance(mine, theirs) < EXACT


def test_the_graph_of_the_other_profiles_gives_the_same(library: Path) -> None:
    layer = Layer(128, key_heads=2, value_heads=4, key_dim=32, value_dim=32)
    given = drawn(layer, 4)
    got = rule(layer, library).run(given)
    S, rows = given["S"][None], rows_of(layer, given, got["qkv"])
    names = ("query", "key", "value", "log_decay", "beta")
    tensors = [
        TensorSpec(n, "fp32", x.shape) for n, x in zip(("S", *names), (S, *rows), strict=True)
    ]
    results = (TensorSpec("out", "fp32", rows[2].shape), TensorSpec("after", "fp32", S.shape))
    g = GraphBuilder(EngineSpec("rule", tuple(tensors), results), {}, "fp32", 17)
    sizes = Sizes(layer.rows, 2, 4, layer.key_dim, layer.value_dim)
    for name, value in zip(
        ("out", "after"),
        delta_rule(g, g.input("S"), ChunkRows(*map(g.input, names)), sizes),
        strict=True,
    ):
        g.output(name, value)
    session = ort.InferenceSession(g.model().SerializeToString())
    feeds = {n: x.astype(np.float32) for n, x in zip(names, rows, strict=True)}
    out, after = session.run(None, {"S": S, **feeds})
    assert distance(got["mixed"], out.reshape(got["mixed"].shape)) < EXACT
    assert distance(got["S"], after[0]) < EXACT


@pytest.mark.parametrize("dtype", KINDS)
def test_silu_mul_rounds_once(library: Path, dtype: str) -> None:
    element, kind, rounding = KINDS[dtype]
    tensor = (kind, (37, 72))
    operator = Operator(library, "SiluMul", {"gate": tensor, "up": tensor}, {"y": tensor})
    given = {n: np.random.default_rng(5).normal(size=tensor[1]) * 4 for n in ("gate", "up")}
    given = {name: x.astype(element) for name, x in given.items()}
    gate, up = (x.astype(np.float64) for x in given.values())
    assert distance(operator.run(given)["y"], gate * sigmoid(gate) * up) < rounding / 2 + 1e-6
