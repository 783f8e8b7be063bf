"""Graphs cut into pieces of one float type, against the whole graph on ONNX Runtime.

The pieces run one after the other, as `runtime/trt.py` runs their plans, without optimisations on
either side: the same operators in another order must leave the same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from eagle_chain.engines import pieces
from eagle_chain.engines.bound import tensor_spec
from eagle_chain.engines.compiler import TACTICS_8, WEAK_LEVEL, Compiler, Job, Request
from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.flavours import load_flavour
from eagle_chain.engines.graphs import bound_graph
from eagle_chain.engines.memory import chain_needs
from eagle_chain.engines.pieces import HALF, SINGLE, VERSION, Cut, Piece, cut
from eagle_chain.engines.plan_file import (
    MAGIC,
    Contents,
    DamagedError,
    interface,
    layout,
    packed,
    unpacked,
)
from eagle_chain.engines.precision import ALIKE, CONVERTED, PINS
from eagle_chain.engines.spec import Options, TensorSpec
from eagle_chain.export import prefill
from eagle_chain.export.graph import build_graphs
from tests import qwen_9b

NUMPY = {1: np.float32, 6: np.int32, 10: np.float16}
DTYPES = {"fp32": np.float32, "int32": np.int32, "fp16": np.float16}
Arrays = dict[str, "np.ndarray[Any, Any]"]


class Plain:
    """ONNX's own evaluator: every tensor is rounded to its type, fp16 as well.

    ONNX Runtime has no fp16 on a CPU, computes in fp32, and skips the rounding between operators.
    """

    def __init__(self, model: bytes) -> None:
        self.evaluator = ReferenceEvaluator(onnx.load_from_string(model))

    def run(self, names: list[str], feeds: Arrays) -> list[Any]:
        """As an `InferenceSession`."""
        found: list[Any] = self.evaluator.run(names, feeds)
        return found


def session(model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def whole(run: Any, model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """Every output of the graph."""
    names = [value.name for value in model.graph.output]
    return dict(zip(names, run(model.SerializeToString()).run(names, feeds), strict=True))


def in_pieces(run: Any, parts: Cut, feeds: Arrays, outputs: list[str]) -> Arrays:
    """The same, piece by piece, in the memory that the runtime gives them.

    Between pieces that is one block, of ones, which are no numbers, wherever nothing is that some
    piece has still to read. Keys and values that leave are written over those that entered.
    """
    sessions = [run(form.model) for form in parts.forms]
    offsets, size = layout(parts.pieces, parts.crossing)
    block = np.full(size, 0xFF, np.uint8)
    between = {
        t.name: block[offsets[t.name] :][: t.nbytes].view(DTYPES[t.dtype]).reshape(t.shape)
        for t in parts.crossing
    }
    last = {name: piece for piece in parts.pieces for name in (*piece.inputs, *piece.outputs)}
    values = {name: array.copy() for name, array in feeds.items()} | between
    for name in outputs:
        in_place = name.endswith((".key.next", ".value.next"))
        values[name] = values[name.removesuffix(".next")] if in_place else np.empty(0)
    for piece in parts.pieces:
        read = {f"i{k}": values[name].copy() for k, name in enumerate(piece.inputs)}
        found = sessions[piece.form].run([f"o{k}" for k in range(len(piece.outputs))], read)
        for name, array in zip(piece.outputs, found, strict=True):
            if values[name].size:
                values[name][...] = array
            else:
                values[name] = array
        for name in between.keys() & {*piece.inputs, *piece.outputs}:
            if last[name] is piece:
                between[name].view(np.uint8)[...] = 0xFF
    assert (block == 0xFF).all()
    return {name: values[name] for name in outputs}


def random_feeds(model: onnx.ModelProto, width: int) -> Arrays:
    """A call in the middle of a sequence, two rows of the last one kept."""
    random = np.random.default_rng(0)
    numbers = {"position": 20, "rows": width, "kept": 2, "row": 0}
    feeds: Arrays = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [axis.dim_value for axis in kind.shape.dim]
        dtype = NUMPY[kind.elem_type]
        if value.name in numbers:
            feeds[value.name] = np.full(shape, numbers[value.name], dtype)
        elif dtype is np.int32:
            feeds[value.name] = random.integers(0, 90, shape, dtype)
        elif value.name.endswith("log_decay"):
            feeds[value.name] = random.uniform(0.3, 1.0, shape).astype(dtype)
        else:
            feeds[value.name] = (random.standard_normal(shape) * 0.1).astype(dtype)
    return feeds


@cache
def tiny(dtype: str) -> dict[str, onnx.ModelProto]:
    """All graphs of a small pair, their weights bound."""
    options = Options(5, 128, dtype, prefill=64, debug=("logits", "S_rows"))
    return bound(*qwen_9b.tiny(), options)


def bound(
    trunk: TrunkConfig, draft: DraftConfig, options: Options, only: tuple[str, ...] = ()
) -> dict[str, onnx.ModelProto]:
    specs = engine_specs(trunk, draft, options, mtp=True)
    weights = qwen_9b.weights(trunk, draft)
    models = build_graphs(trunk, draft, weights, options, mtp=True, only=only)
    return {n: bound_graph(m, specs[n], options.dtype)[0] for n, m in models.items()}


@cache
def nine(layers: int, dtype: str, engine: str = "trunk", prompt: int = 256) -> onnx.ModelProto:
    """A graph of the 9B's widths."""
    options = Options(5, 4096, dtype, prefill=prompt)
    return bound(*qwen_9b.configs(layers), options, (engine,))[engine]


ENGINES = (
    *("trunk", "encoder", "draft", "draft_step", "mtp", "mtp_step"),
    *("prefill", "draft_prefill", "mtp_prefill"),
)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("engine", ENGINES)
def test_pieces_leave_the_bits_of_the_whole(engine: str, dtype: str) -> None:
    model = tiny(dtype)[engine]
    feeds = random_feeds(model, 64 if "prefill" in engine else 5)
    run = session if dtype == "fp32" else Plain
    wanted = whole(run, model, feeds)
    found = in_pieces(run, cut(model), feeds, list(wanted))
    assert [n for n in wanted if wanted[n].tobytes() != found[n].tobytes()] == []
    assert any(np.abs(v.astype(np.float64)).max() > 0 for v in wanted.values())


LINEAR, FULL = "linear_attention", "full_attention"
ODD: dict[str, tuple[tuple[str, ...], tuple[int, ...], dict[str, Any]]] = {
    "two rows": ((LINEAR, LINEAR, LINEAR, FULL), (1, 2), {"width": 2}),
    "drawn from 16 rows": ((LINEAR, FULL), (0,), {"width": 16, "sampling": True}),
    "KV of the other type": ((FULL, LINEAR), (0, 1), {"kv": "other", "prefill": 96}),
    "no attention, features of every layer": ((LINEAR,) * 4, (0, 1, 2, 3), {}),
    "attention alone": ((FULL,) * 3, (2,), {"smaller": (48, 64)}),
    "one layer": ((FULL,), (0,), {"debug": ()}),
    "one linear layer": ((LINEAR,), (0,), {}),
    "forty layers": ((LINEAR, LINEAR, LINEAR, FULL) * 10, (1, 20, 39), {"prefill": 0, "debug": ()}),
}


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("case", ODD)
def test_so_they_do_in_odd_models(case: str, dtype: str) -> None:
    """And no piece reads a state after another has written the next one."""
    layers, aux, given = ODD[case]
    options: dict[str, Any] = {"prefill": 32, "debug": ("logits", "S_rows"), **given}
    if "kv" in options:
        options["kv"] = {"fp16": "fp32", "fp32": "fp16"}[dtype]
    trunk, draft = qwen_9b.tiny()
    trunk = dataclasses.replace(trunk, layer_types=layers, tied_head=len(layers) % 2 == 0)
    draft = dataclasses.replace(draft, aux_layers=aux)
    made = Options(capacity=128, dtype=dtype, **options)
    for engine, model in bound(trunk, draft, made).items():
        feeds = random_feeds(model, made.prefill if "prefill" in engine else made.width)
        run = session if dtype == "fp32" else Plain
        wanted, parts = whole(run, model, feeds), cut(model)
        found = in_pieces(run, parts, feeds, list(wanted))
        assert [n for n in wanted if wanted[n].tobytes() != found[n].tobytes()] == [], engine
        written: set[str] = set()
        for piece in parts.pieces:
            assert not written & {f"{name}.next" for name in piece.inputs}, engine
            written |= set(piece.outputs)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_piece_has_one_float_type(engine: str) -> None:
    """By the types in the piece alone: half pieces touch fp32 only where they cast from or to it.

    And nothing but what an engine may have crosses a border.
    """
    parts = cut(tiny("fp16")[engine])
    for form in parts.forms:
        model = onnx.load_from_string(form.model)
        onnx.checker.check_model(model, full_check=True)
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
        types = {
            **{v.name: v.type.tensor_type.elem_type for v in (*inferred.value_info,)},
            **{v.name: v.type.tensor_type.elem_type for v in (*inferred.input, *inferred.output)},
            **{t.name: t.data_type for t in inferred.initializer},
        }
        for node in inferred.node:
            touched = {types[name] for name in (*node.input, *node.output) if name} & {1, 10}
            wrong = 1 if form.type == HALF else 10
            assert wrong not in touched or (form.type, node.op_type) == (HALF, "Cast")
    assert {tensor.dtype for tensor in parts.crossing} <= {"fp16", "fp32", "int32"}


def test_equal_layers_are_equal_pieces() -> None:
    """A deeper trunk has no more to compile, and no more pieces a layer than changes of type."""
    few, many = cut(nine(8, "fp16")), cut(nine(32, "fp16"))
    assert len(few.forms) == len(many.forms) == 17
    assert [form.title for form in few.forms] == [form.title for form in many.forms]
    assert len(many.pieces) - len(few.pieces) == 24 * 8
    assert Counter(piece.form for piece in many.pieces).most_common(1)[0][1] == 65  # the norms
    single = cut(nine(32, "fp32"))
    assert {form.type for form in single.forms} == {SINGLE}
    assert len(single.forms) <= 4 and len(single.pieces) == 33


def test_scores_of_a_long_prompt_lie_in_memory_one_chunk_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The 9B's attention makes 268 MB of fp32 scores for 1,024 rows, in 4 chunks."""
    parts = cut(nine(4, "fp16", "prefill", 1024))
    _, size = layout(parts.pieces, parts.crossing)
    assert size < 200_000_000
    monkeypatch.setattr(pieces, "LARGE", 1 << 60)
    parts = cut(nine(4, "fp16", "prefill", 1024))
    _, size = layout(parts.pieces, parts.crossing)
    assert size > 500_000_000, "or chunks are not what makes the difference"


@pytest.mark.parametrize(
    ("engine", "width", "capacity", "prompt"),
    [("prefill", 5, 4096, 1024), ("trunk", 64, 131_072, 0), ("trunk", 5, 4096, 0)],
)
def test_what_lies_between_pieces_is_within_the_estimate(
    engine: str, width: int, capacity: int, prompt: int
) -> None:
    pair, options = qwen_9b.configs(4), Options(width, capacity, "fp16", prefill=prompt)
    parts = cut(bound(*pair, options, (engine,))[engine])
    needs = chain_needs(engine_specs(*pair, options), options, pair[0])[capacity]
    assert layout(parts.pieces, parts.crossing)[1] < needs.scratch


def test_pieces_of_chunks_leave_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows in 4 chunks, scaled down."""
    monkeypatch.setattr(prefill, "ATTENTION_SCORES", 16 * 133 * 2)
    model = tiny.__wrapped__("fp16")["prefill"]
    plain = cut(model)
    monkeypatch.setattr(pieces, "LARGE", 16 * 133)
    parts = cut(model)
    assert len(parts.pieces) == len(plain.pieces) + 6
    feeds = random_feeds(model, 64)
    wanted = whole(Plain, model, feeds)
    found = in_pieces(Plain, parts, feeds, list(wanted))
    assert [n for n in wanted if wanted[n].tobytes() != found[n].tobytes()] == []


def test_what_no_layer_shares_is_shared_by_nothing() -> None:
    """A constant, an attribute, a shape or a type that differs makes another piece."""
    model = tiny("fp16")["trunk"]
    forms = len(cut(model).forms)
    other = onnx.ModelProto()
    other.CopyFrom(model)
    scale = next(n for n in other.graph.node if n.op_type == "ReduceMean")
    scale.attribute.append(onnx.helper.make_attribute("noop_with_empty_axes", 0))
    assert len(cut(other).forms) == forms + 1


def test_a_product_that_leaves_a_half_piece_may_be_summed_in_fp32() -> None:
    """The encoder is one: its output is fp16, the product before it need not be."""
    [form] = cut(tiny("fp16")["encoder"]).forms
    kinds = [node.op_type for node in onnx.load_from_string(form.model).graph.node]
    assert form.type == HALF and kinds == ["Gemm", "Identity"]


def test_a_tensor_of_another_dtype_between_pieces_is_refused() -> None:
    """Here a truth value of fp32 numbers that chooses among fp16 ones."""
    make = onnx.helper
    nodes = [
        make.make_node("Less", ["x", "y"], ["less"]),
        make.make_node("Where", ["less", "a", "b"], ["z"]),
    ]
    inputs = [make.make_tensor_value_info(n, 1, [3]) for n in "xy"]
    inputs += [make.make_tensor_value_info(n, 10, [3]) for n in "ab"]
    graph = make.make_graph(nodes, "g", inputs, [make.make_tensor_value_info("z", 10, [3])])
    with pytest.raises(InputError, match=r"less is ONNX's dtype 9 \[3\] where the graph is cut"):
        cut(make.make_model(graph, opset_imports=[make.make_opsetid("", 17)]))


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx")
@pytest.mark.parametrize("engine", ["trunk", "draft", "encoder", "prefill"])
def test_every_piece_goes_through_a_real_parser_and_builder(engine: str, tmp_path: Path) -> None:
    """TensorRT-RTX's; it finds in each piece the interface that the cut says."""
    flavour = load_flavour("tensorrt-rtx")
    compiler = Compiler(Request("tensorrt-rtx", (), ("8.9",)), flavour, lambda message: None)
    graph, plan = tmp_path / "piece.onnx", tmp_path / "piece.plan"
    for model in (nine(4, "fp16", engine), tiny("fp16")[engine]):
        for form in cut(model).forms:
            graph.write_bytes(form.model)
            job = Job(form.title, str(graph), str(plan), form.inputs, form.outputs)
            assert compiler.compile(job)["bytes"] > 0


def two_layers() -> onnx.ModelProto:
    """Norms in fp32 around fp16 products, a mask from the position, a state; written by hand."""
    make, lines = onnx.helper, []
    text = """
      h = Gather(table, ids)
      places = Add(position, range)
      seen = LessOrEqual(range, places)
    """
    for i in range(2):
        text += f"""
      a{i} = Cast<to=1>({"h" if i == 0 else "f0"})
      b{i} = Mul(a{i}, layers.{i}.norm.weight)
      c{i} = Cast<to=10>(b{i})
      d{i} = MatMul(c{i}, layers.{i}.w)
      e{i} = Where(seen, d{i}, zero)
      f{i} = Add(e{i}, layers.{i}.S)
      layers.{i}.S.next = Identity(f{i})
    """
    text += "\n features = Identity(f1)"
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, call = line.partition(" = ")
        kind, _, read = call.rstrip(")").partition("(")
        kind, _, to = kind.rstrip(">").partition("<to=")
        extra = {"to": int(to)} if to else {}
        lines.append(make.make_node(kind, read.split(", "), [name], **extra))
    halves = {"table": [9, 4]} | {f"layers.{i}.{n}": [4, 4] for i in range(2) for n in "wS"}
    inputs = [make.make_tensor_value_info(n, 10, shape) for n, shape in halves.items()]
    inputs += [make.make_tensor_value_info(f"layers.{i}.norm.weight", 1, [4]) for i in range(2)]
    inputs += [make.make_tensor_value_info(n, 6, [k]) for n, k in (("ids", 4), ("position", 1))]
    outputs = ("layers.0.S.next", "layers.1.S.next", "features")
    constants = [make.make_tensor("zero", 10, [], [0]), make.make_tensor("range", 6, [4], range(4))]
    left = [make.make_tensor_value_info(n, 10, [4, 4]) for n in outputs]
    graph = make.make_graph(lines, "g", inputs, left, constants)
    return make.make_model(graph, opset_imports=[make.make_opsetid("", 17)])


def test_another_cut_is_another_version() -> None:
    """Plans made by either must not be taken for those of the other: their key has the version.

    If this fails because the cut, the pins or the file have changed, raise `pieces.VERSION` and put
    the new digest here.
    """
    parts = cut(two_layers())
    forms = [
        (f.title, [list(n.input) for n in onnx.load_from_string(f.model).graph.node])
        for f in parts.forms
    ]
    said = Contents(
        tuple(f.type for f in parts.forms), (1,) * len(forms), parts.pieces, parts.crossing
    )
    told = (forms, list(PINS), CONVERTED, ALIKE, TACTICS_8, WEAK_LEVEL, pieces.LARGE)
    file = packed(said, [b"x"] * len(forms))
    digest = hashlib.sha256(f"{told}".encode() + file).hexdigest()[:16]
    assert {VERSION: digest} == {2: "424555898513321e"}


# --- the file ----------------------------------------------------------------------------------


def contents() -> tuple[Contents, list[bytes]]:
    """A file of a real cut, with short plans."""
    parts = cut(tiny("fp16")["trunk"])
    plans = [b"plan %d" % i for i in range(len(parts.forms))]
    types = tuple(form.type for form in parts.forms)
    sizes = tuple(map(len, plans))
    return Contents(types, sizes, parts.pieces, parts.crossing), plans


def test_a_file_comes_back_as_it_was_written() -> None:
    said, plans = contents()
    found, spans = unpacked(memoryview(packed(said, plans)))
    assert found == said and [bytes(span) for span in spans] == plans


def test_a_truncated_file_is_refused_at_every_byte() -> None:
    data = packed(*contents())
    for end in (*range(0, 200), *range(200, len(data), 97), len(data) - 1):
        with pytest.raises(DamagedError):
            unpacked(memoryview(data[:end]))
    with pytest.raises(DamagedError, match="its plans end at"):
        unpacked(memoryview(data + b"x"))


def test_an_altered_file_is_refused_or_says_something_whole() -> None:
    """Any byte of the header: nothing but `DamagedError` leaves, and what is taken is in order."""
    said, plans = contents()
    data = packed(said, plans)
    end = len(data) - sum(map(len, plans))
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(600):
        at, bit = int(random.integers(0, end)), int(random.integers(0, 8))
        damaged = bytearray(data)
        damaged[at] ^= 1 << bit
        try:
            found, spans = unpacked(memoryview(damaged))
        except DamagedError:
            refused += 1
            continue
        assert len(spans) == len(found.types) and max(p.form for p in found.pieces) < len(spans)
    assert refused > 100


DISORDER = {
    "a piece of plan 99": lambda c: {"pieces": (Piece(99, (), ()), *c.pieces)},
    "a piece of plan -1": lambda c: {"pieces": (Piece(-1, (), ()), *c.pieces)},
    "plans that nothing runs": lambda c: {"pieces": c.pieces[:1]},
    "tensors are in disorder": lambda c: {"pieces": c.pieces[::-1]},
    "two tensors of one name": lambda c: {"crossing": (*c.crossing, c.crossing[0])},
    "that no piece writes": lambda c: {"crossing": (*c.crossing, TensorSpec("x", "fp32", (1,)))},
    r'\["x", "bool", \[1\]\], which no engine can have': lambda c: {
        "crossing": (*c.crossing, TensorSpec("x", "bool", (1,)))
    },
    "its plans end at": lambda c: {"sizes": (*c.sizes[:-1], c.sizes[-1] + 1)},
    "or of no type": lambda c: {"types": c.types[:-1]},
}


@pytest.mark.parametrize("words", DISORDER)
def test_what_cannot_run_is_refused(words: str) -> None:
    said, plans = contents()
    wrong = dataclasses.replace(said, **DISORDER[words](said))
    with pytest.raises(DamagedError, match=words):
        unpacked(memoryview(packed(wrong, plans)))


def test_a_forged_header_of_any_size_is_one_short_sentence_in_time() -> None:
    """Each made what follows take minutes, gigabytes or screens."""
    begin = time.monotonic()
    many = range(12_000)
    tensors = tuple(TensorSpec(f"t{i}", "fp32", (1,)) for i in many)
    steps = tuple(Piece(i, (f"t{i - 1}",) if i else (), (f"t{i}",)) for i in many)
    said = Contents(("fp32",) * len(many), (1,) * len(many), steps, tensors)
    found, _ = unpacked(memoryview(packed(said, [b"x"] * len(many))))
    assert set(found.runs) == {1} and layout(found.pieces, found.crossing)[1] == 512
    for content in (b"[" + b"[]," * 2_000_000 + b"[]]", b"[" * 100_000, b'{"a":' * 100_000):
        data = MAGIC + len(content).to_bytes(8, "little") + content
        with pytest.raises(DamagedError) as error:
            unpacked(memoryview(data))
        assert len(str(error.value)) < 300
    unwritten = dataclasses.replace(said, crossing=(*tensors, TensorSpec("x" * 99_999, "fp32", ())))
    backwards = dataclasses.replace(said, pieces=steps[::-1])
    for wrong in (unwritten, backwards):
        with pytest.raises(DamagedError) as error:
            unpacked(memoryview(packed(wrong, [b"x"] * len(many))))
        assert len(str(error.value)) < 300
    assert time.monotonic() - begin < 15


def test_the_interface_is_that_of_the_graph() -> None:
    model = tiny("fp16")["trunk"]
    parts = cut(model)
    ios = [
        ({t.name: t for t in form.inputs}, {t.name: t for t in form.outputs})
        for form in parts.forms
    ]
    said, _ = contents()
    found = interface(said, ios)
    for side, values in zip(found, (model.graph.input, model.graph.output), strict=True):
        assert side == {value.name: tensor_spec(value) for value in values}
    inputs, outputs = ios[-1]
    name, spec = next(iter(inputs.items()))
    for wrong in ({}, {**inputs, name: dataclasses.replace(spec, shape=(7,))}):
        with pytest.raises(DamagedError):
            interface(said, [*ios[:-1], (wrong, outputs)])


@pytest.mark.parametrize("engine", ["trunk", "prefill"])
def test_no_two_tensors_that_are_wanted_at_once_share_their_place(engine: str) -> None:
    """By painting: each piece finds in its inputs what was written there for it."""
    parts = cut(nine(8, "fp16", engine))
    offsets, size = layout(parts.pieces, parts.crossing)
    specs = {tensor.name: tensor for tensor in parts.crossing}
    owner = np.full(size // 256, -1)
    names = list(specs)

    def span(name: str) -> slice:
        begin, end = offsets[name], offsets[name] + specs[name].nbytes
        assert begin % 256 == 0 and end <= size
        return slice(begin // 256, -(-end // 256))

    for piece in parts.pieces:
        inside = [name for name in piece.outputs if name in specs]
        for name in inside:
            owner[span(name)] = names.index(name)
        for name in (*inside, *(name for name in piece.inputs if name in specs)):
            assert (owner[span(name)] == names.index(name)).all()
    total = sum(tensor.nbytes for tensor in parts.crossing)
    assert size < total / 3, "what is over makes room for what follows"
