"""TensorRT sessions over stand-ins: buffers, weights, graphs and refusals, against ONNX Runtime.

The stand-in runs a plan's graph on ONNX Runtime at the addresses that were set, so the chain must
give exactly what it gives on ONNX Runtime. What only a GPU can show is in tests/gpu.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import mmap
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_chain.engines.cli import main
from eagle_chain.engines.compiler import engine_io
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import Manifest, Weight
from eagle_chain.engines.pieces import Piece
from eagle_chain.engines.plan_file import Contents, packed
from eagle_chain.engines.spec import TensorSpec
from eagle_chain.runtime import Engines, open_engines, trt
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.cuda import CudaMemory
from eagle_chain.runtime.trt import TrtBinding, TrtEngine, TrtSession, open_sessions
from eagle_chain.runtime.weights import blocks, converted
from tests.standin import standins
from tests.toy_pair import exported, write_pair

CAPACITY = 64
PROMPT = [3, 141, 59, 26, 53, 58, 97]
BUILD = ["--backend", "tensorrt"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair stored as bf16, exported as fp32, with plans of the stand-in."""
    folder = tmp_path_factory.mktemp("trt")
    pair = write_pair(folder, layers=4, aux=[0, 1, 3], dtype="bf16", tied=True)
    bundle = exported(pair, folder / "b", "--capacity", str(CAPACITY), "--aux-layers", "0,1,3")
    with standins():
        assert main(["build", str(bundle), *BUILD]) == 0
    return bundle


@pytest.fixture(scope="module")
def in_pieces(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with plans in pieces."""
    copy = edit(bundle, tmp_path_factory.mktemp("pieces"))
    with standins(STANDIN_VERSION="8.6.1"):
        assert main(["build", str(copy), *BUILD]) == 0
    return copy


@pytest.fixture
def cuda() -> Iterator[Any]:
    with standins() as runtime:
        yield runtime


@pytest.fixture
def engines(cuda: Any, bundle: Path) -> Engines:
    return open_engines(bundle, "tensorrt")


def tokens(chain: Chain, prompt: list[int] = PROMPT, count: int = 30, **options: Any) -> list[int]:
    return list(chain.generate(prompt, max_new_tokens=count, stop_ids=(), **options).tokens)


@pytest.fixture(scope="module")
def reference(bundle: Path) -> dict[int, list[int]]:
    """What ONNX Runtime gives: plainly, and with 4 drafts (the same, or a test there fails)."""
    chain = open_engines(bundle, "onnxruntime-cpu", threads=1).chain()
    return {k: tokens(chain, k=k) for k in (0, 4)}


@pytest.mark.parametrize("k", [0, 4])
def test_the_chain_gives_what_onnx_runtime_gives(
    engines: Engines, reference: dict[int, list[int]], k: int
) -> None:
    chain = engines.chain()
    assert tokens(chain, k=k) == reference[k]
    assert tokens(chain, k=k) == reference[k], "and again, now from captured graphs"


@pytest.mark.parametrize("weights", ["bound", "baked"])
def test_8_6_runs_pieces_and_gives_the_same_tokens(
    tmp_path: Path, bundle: Path, reference: dict[int, list[int]], weights: str
) -> None:
    """Whole rounds on the device and the chain of the host; again from captured graphs."""
    copy = edit(bundle, tmp_path)
    if weights == "baked":  # 8.6 cannot bake bf16
        folder = tmp_path / "stored"
        pair = write_pair(folder, layers=4, aux=[0, 1, 3], dtype="fp32", tied=True)
        options = ("--capacity", str(CAPACITY), "--aux-layers", "0,1,3")
        copy = exported(pair, tmp_path / "stored" / "b", *options)
        chain = open_engines(copy, "onnxruntime-cpu", threads=1).chain()
        reference = {k: tokens(chain, k=k) for k in (0, 4)}
    with standins(STANDIN_VERSION="8.6.1") as cuda:
        assert main(["build", str(copy), *BUILD, "--weights", weights]) == 0
        engines = open_engines(copy, "tensorrt")
        trunk = engines.sessions["trunk"]
        assert isinstance(trunk, TrtSession)
        plans, steps = len(trunk.engine.plans), len(trunk.engine.steps)
        assert steps > 1 and (plans < steps) == (weights == "bound"), "baked layers are not equal"
        device, host = engines.chain(), engines.chain(ahead=False)
        for k in (0, 4):
            for chain in (device, host):
                assert tokens(chain, k=k) == reference[k]
                assert tokens(chain, k=k) == reference[k]
        gc.collect()
        before = (len(cuda.allocated), _contexts(engines))
        tokens(device, [5, 6], count=12, k=4)
        gc.collect()
        assert (len(cuda.allocated), _contexts(engines)) == before


def test_pieces_of_fp16_agree_with_themselves(tmp_path: Path) -> None:
    """Drafted, plain, with graphs and without: one sequence, whatever the rounding."""
    pair = write_pair(tmp_path, layers=4, aux=[0, 1, 3], dtype="fp16")
    options = ("--capacity", str(CAPACITY), "--aux-layers", "0,1,3", "--dtype", "fp16")
    copy = exported(pair, tmp_path / "b", *options)
    with standins(STANDIN_VERSION="8.6.1"):
        assert main(["build", str(copy), *BUILD]) == 0
        engines = open_engines(copy, "tensorrt")
        trunk = engines.sessions["trunk"]
        assert isinstance(trunk, TrtSession)
        assert trunk.engine.between and len(trunk.engine.plans) < len(trunk.engine.steps)
        plain = tokens(engines.chain(), k=0)
        assert tokens(engines.chain(), k=4) == plain
        memory, sessions = open_sessions(copy, Manifest.load(copy), "tensorrt", graphs=False)
        ungraphed = dataclasses.replace(engines, memory=memory, sessions=sessions)
        assert tokens(ungraphed.chain(ahead=False), k=4) == plain


class Poisoned(TrtBinding):
    """A binding in whose scratch memory is nothing but what some step has still to read."""

    def _enqueue(self) -> None:
        self._poison(self._scratch.address, self._scratch.spec.nbytes)
        super()._enqueue()
        self._poison(self._scratch.address, self._scratch.spec.nbytes)

    def _run_step(self, number: int) -> None:
        super()._run_step(number)
        engine, start = self._engine, self._scratch.address
        self._poison(start, engine.between_at)
        later = {name for step in engine.steps[number + 1 :] for name in step.names.values()}
        step = engine.steps[number]
        for own, name in step.names.items():
            if name in engine.between and name not in later:
                spec = engine_io(engine.flavour.trt, engine.plans[step.plan])
                size = (spec[0] | spec[1])[own].nbytes
                self._poison(start + engine.between_at + engine.between[name], size)

    def _poison(self, address: int, size: int) -> None:
        self._memory.cuda("cudaMemsetAsync", address, 0xFF, size, self._memory.stream)


def test_8_6_reads_nothing_in_scratch_memory_but_what_was_just_written(
    in_pieces: Path, reference: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chains on one stream and one on another, in turn, everything as late as it may be."""
    with standins(STANDIN_VERSION="8.6.1") as cuda:
        monkeypatch.setattr(trt, "TrtBinding", Poisoned)
        cuda.DEVICE.late = True
        engines, memory = open_engines(in_pieces, "tensorrt"), CudaMemory()
        sessions = {
            n: s.on(memory) for n, s in engines.sessions.items() if isinstance(s, TrtSession)
        }
        beside = dataclasses.replace(engines, memory=memory, sessions=sessions)
        chains = [engines.chain(), engines.chain(ahead=False), beside.chain()]
        for _ in range(2):
            requests = [c.stream(PROMPT, max_new_tokens=30, k=4, stop_ids=()) for c in chains]
            assert [*zip(*requests, strict=True)] == [(token,) * 3 for token in reference[4]]
        before = chains[0].snapshot()
        more = tokens(chains[0], [before.counters.pending or 0, 9], count=8, append=True)
        tokens(chains[0], [9, 9, 9], count=8)
        chains[0].rollback(before)
        again = [before.counters.pending or 0, 9]
        assert tokens(chains[0], again, count=8, append=True) == more


def test_8_6_lets_nothing_of_another_thread_between_its_steps(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two bindings without a chain, whose lock is another: after each step of one the other runs.

    It may wait for the first; what it must not do is to write where that one still reads.
    """
    copy = edit(bundle, tmp_path)
    with standins(STANDIN_VERSION="8.6.1"):
        assert main(["build", str(copy), *BUILD]) == 0
        memory, sessions = open_sessions(copy, Manifest.load(copy), "tensorrt", graphs=False)
        session = sessions["trunk"]
        made = [
            {
                t.name: memory.allocate(t)
                for t in (*session.spec.all_inputs, *session.spec.all_outputs)
            }
            for _ in range(2)
        ]
        for tensors, first in zip(made, (3, 200), strict=True):
            tensors["ids"].write([first + i for i in range(5)])
            tensors["rows"].write(5)
        one, other = (session.bind(tensors) for tensors in made)
        one.run()
        wanted = made[0]["hidden"].read()
        threads: list[threading.Thread] = []
        step = TrtBinding._run_step

        def crowded(binding: TrtBinding, number: int) -> None:
            step(binding, number)
            if binding is one:
                threads.append(threading.Thread(target=other.run))
                threads[-1].start()
                threads[-1].join(0.05)

        monkeypatch.setattr(TrtBinding, "_run_step", crowded)
        one.run()
        for thread in threads:
            thread.join()
        assert threads and made[0]["hidden"].read().tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:100], r"has a header of \d+ bytes in a file of 100"),
        (lambda data: data[: len(data) // 2], "its plans end at"),
        (lambda data: b"ftrt" + data, "does not begin as a file of pieces does"),
        (lambda data: data.replace(b'"fp32"', b'"fp3X"', 1), "plans .* of no type"),
        (lambda data: data.replace(b'"outputs"', b'"iutputs"', 1), "the unknown key iutputs"),
        (lambda data: data.replace(b"val_", b"vax_", 1), "tensors are in disorder: .*val_"),
    ],
)
def test_a_damaged_file_of_pieces_is_one_sentence(
    tmp_path: Path, in_pieces: Path, damage: Any, words: str
) -> None:
    """Even one whose hash is right."""
    copy = edit(in_pieces, tmp_path)
    with standins(STANDIN_VERSION="8.6.1"):
        path = next(copy.rglob("tensorrt-8.6.1*/trunk.plan"))
        data = json.loads((copy / "manifest.json").read_text())
        path.write_bytes(damage(path.read_bytes()))
        name = str(path.relative_to(copy))
        data["plans"][name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        (copy / "manifest.json").write_text(json.dumps(data))
        with pytest.raises(InputError, match=words) as error:
            open_sessions(copy, Manifest.load(copy), "tensorrt")
    assert f"{path}: " in str(error.value) and "eagle-chain build" in str(error.value)


@pytest.mark.parametrize("k", [0, 1, 4])
def test_whole_rounds_as_graphs_give_what_the_chain_gives(
    engines: Engines, reference: dict[int, list[int]], k: int
) -> None:
    """Drafted tokens are written to the ids of the next call, where TensorRT takes no address."""
    device, host = engines.chain(), engines.chain(ahead=False)
    assert tokens(device, k=k) == tokens(host, k=k) == reference[0]
    assert {key[1:] for key in device.device.graphs} == {(k, 0), (k, 1)}
    assert not host.device.graphs


def test_two_chains_share_one_engine(engines: Engines, reference: dict[int, list[int]]) -> None:
    """Rounds of two requests in turn: nothing of one shows in the other."""
    first, second = engines.chain(), engines.chain()
    other = tokens(engines.chain(), [7, 7, 200], k=4)
    rounds = [
        c.rounds(p, max_new_tokens=30, k=4, stop_ids=())
        for c, p in ((first, PROMPT), (second, [7, 7, 200]))
    ]
    out: list[list[int]] = [[], []]
    alive = [0, 1]
    while alive:
        for i in list(alive):
            step = next(rounds[i], None)
            out[i] += step.tokens if step else ()
            if step is None:
                alive.remove(i)
    assert out == [reference[4], other]


def test_a_chain_on_another_stream_shares_engine_and_weights(engines: Engines) -> None:
    session = engines.sessions["encoder"]
    assert isinstance(session, TrtSession)
    beside = session.on(CudaMemory())
    assert beside.engine is session.engine and beside.memory.stream != session.memory.stream


def test_each_weight_is_on_the_device_once(cuda: Any, engines: Engines) -> None:
    """Tied head and embedding: one buffer for trunk, draft and draft_step."""
    sessions = [s for s in engines.sessions.values() if isinstance(s, TrtSession)]
    shared = {s.engine.bound["embed_tokens.weight"].address for s in sessions if s.spec.states}
    assert len(shared) == 1
    by_name = {name: b.address for s in sessions for name, b in s.engine.bound.items()}
    assert len(set(by_name.values())) == len(by_name)


def test_nothing_is_allocated_after_the_first_round(cuda: Any, engines: Engines) -> None:
    chain = engines.chain()
    tokens(chain, count=10)
    tokens(chain, count=10)
    gc.collect()
    before = (len(cuda.allocated), _contexts(engines))
    for i in range(20):
        tokens(chain, [i + 1, 5], count=12)
    gc.collect()
    assert (len(cuda.allocated), _contexts(engines)) == before


def _contexts(engines: Engines) -> int:
    sessions = [s for s in engines.sessions.values() if isinstance(s, TrtSession)]
    return sum(plan.contexts for session in sessions for plan in session.engine.plans)


def test_opening_and_closing_leaves_nothing_behind(cuda: Any, bundle: Path) -> None:
    def use() -> None:
        tokens(open_engines(bundle, "tensorrt").chain(), count=4)

    use()
    gc.collect()
    before = len(cuda.allocated)
    for _ in range(5):
        use()
        gc.collect()
    assert len(cuda.allocated) == before


def test_snapshot_and_rollback_on_the_device(engines: Engines) -> None:
    chain = engines.chain()
    first = tokens(chain, count=5)
    snapshot = chain.snapshot()
    one = tokens(chain, [first[-1]], count=8, append=True)
    tokens(chain, [9, 9, 9], count=8)
    chain.rollback(snapshot)
    assert tokens(chain, [first[-1]], count=8, append=True) == one


def test_replay_gives_the_same_tokens(engines: Engines, reference: dict[int, list[int]]) -> None:
    assert tokens(engines.chain(rollback="replay"), k=4) == reference[4]


def test_a_buffer_of_the_wrong_kind_is_refused(engines: Engines) -> None:
    encoder = engines.sessions["encoder"]
    wrong = encoder.memory.allocate(TensorSpec("g", "int32", (1,)))
    with pytest.raises(InputError, match=r"encoder: g is int32 \[1\].*no buffer for features"):
        encoder.bind({"g": wrong})


def test_auto_takes_the_plan_if_there_is_one(cuda: Any, bundle: Path) -> None:
    assert open_engines(bundle).backend == "tensorrt"
    cuda.DEVICE.count = 0
    assert open_engines(bundle).backend == "onnxruntime-cpu"
    with pytest.raises(InputError, match="no CUDA device"):
        open_engines(bundle, "tensorrt")


# --- what must not be loaded -----------------------------------------------------------------


def edit(bundle: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy of the bundle whose plan entries are changed; None removes them."""
    import shutil

    copy = tmp_path / "b"
    shutil.copytree(bundle, copy, symlinks=True)
    (copy / "weights" / "trunk").unlink()
    (copy / "weights" / "draft").unlink()
    for role in ("trunk", "draft"):
        (copy / "weights" / role).symlink_to((bundle / "weights" / role).resolve())
    data = json.loads((copy / "manifest.json").read_text())
    if changes.pop("remove", False):
        data["plans"] = {}
    for plan in data["plans"].values():
        plan.update(changes)
    (copy / "manifest.json").write_text(json.dumps(data))
    return copy


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"version": "8.6.1"},
            r"built with TensorRT 8\.6\.1 on Stand-in GPU \(compute capability 9\.0\), this "
            r"process has TensorRT 10\.9\.0\.34 on Stand-in GPU \(compute capability 9\.0\)",
        ),
        ({"compute_capability": "8.6"}, r"compute capability 8\.6\), this process has"),
        ({"gpu": "NVIDIA L4"}, r"on NVIDIA L4 \("),
        ({"flavour": "tensorrt-rtx"}, "has not been built, this process has"),
        ({"remove": True}, "the draft plan has not been built"),
        ({"source": "0" * 64}, r"was built from another graph than draft\.onnx"),
        (
            {"weights": "baked", "options": ["--level 3"], "source": "0" * 64},
            "build it again: .* --weights baked --level 3$",
        ),
    ],
)
def test_a_plan_of_another_kind_is_refused_with_the_command(
    cuda: Any, bundle: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    copy = edit(bundle, tmp_path, **changes)
    before = {p: p.read_bytes() for p in copy.rglob("*.plan")}
    with pytest.raises(InputError, match=words) as error:
        open_sessions(copy, Manifest.load(copy), "tensorrt")
    assert f"eagle-chain build {copy} --backend tensorrt" in str(error.value)
    assert {p: p.read_bytes() for p in copy.rglob("*.plan")} == before


@pytest.mark.parametrize("damage", ["empty", "half", "one byte", "an onnx file", "missing"])
def test_a_damaged_plan_is_refused_before_tensorrt_sees_it(
    cuda: Any, bundle: Path, tmp_path: Path, damage: str
) -> None:
    copy = edit(bundle, tmp_path)
    path = next(copy.rglob("trunk.plan"))
    content = path.read_bytes()
    flipped = content[:99] + bytes([content[99] ^ 1]) + content[100:]
    contents = {"empty": b"", "half": content[: len(content) // 2], "one byte": flipped}
    contents["an onnx file"] = (copy / "trunk.onnx").read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(contents[damage])
    words = "cannot be read" if damage == "missing" else "is not the plan that was built"
    with pytest.raises(InputError, match=rf"trunk\.plan: {words}.*eagle-chain build"):
        open_sessions(copy, Manifest.load(copy), "tensorrt")


def test_a_plan_that_does_not_load_gives_tensorrts_words(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_LOAD", "none")
    words = r"cannot load it: magic tag does not match; build it again: eagle-chain build"
    with standins(), pytest.raises(InputError, match=words):
        open_sessions(bundle, Manifest.load(bundle), "tensorrt")


def test_pieces_that_do_not_load_give_tensorrts_words(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = edit(bundle, tmp_path)
    with standins(STANDIN_VERSION="8.6.1"):
        assert main(["build", str(copy), *BUILD]) == 0
        monkeypatch.setenv("STANDIN_LOAD", "none")
        with pytest.raises(InputError, match="cannot load it: magic tag does not match; build it"):
            open_sessions(copy, Manifest.load(copy), "tensorrt")


def test_pieces_are_in_host_memory_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With baked weights their file is as large as these."""
    made = [TensorSpec(f"t{i}", "fp32", (1,)) for i in range(20)]
    steps = tuple(Piece(i, (), (tensor.name,)) for i, tensor in enumerate(made))
    said = Contents(("fp32",) * 20, (1 << 20,) * 20, steps, ())
    path = tmp_path / "trunk.plan"
    path.write_bytes(packed(said, [bytes(1 << 20)] * 20))
    monkeypatch.setattr(TrtEngine, "_load", lambda *_: ({}, {"o0": TensorSpec("o0", "fp32", (1,))}))
    engine = TrtEngine.__new__(TrtEngine)
    engine.steps = []
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        tracemalloc.start()
        assert len(engine._load_pieces(path, data, "eagle-chain build")[1]) == 20
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20


def test_no_context_is_a_message_about_memory(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_CONTEXT", "none")
    with pytest.raises(InputError, match="cannot make an execution context, which needs memory"):
        engines.chain()


def test_weights_that_do_not_fit_are_refused_before_anything_is_uploaded(
    cuda: Any, bundle: Path
) -> None:
    cuda.DEVICE.properties.totalGlobalMem = 100_000
    with pytest.raises(InputError, match=r"the weights take 1\.7 MB and a chain .* has 100\.0 kB"):
        open_sessions(bundle, Manifest.load(bundle), "tensorrt")


def test_a_binding_keeps_what_it_has_addresses_of(cuda: Any, engines: Engines) -> None:
    encoder = engines.sessions["encoder"]
    binding = encoder.bind(
        {t.name: encoder.memory.allocate(t) for t in (*encoder.spec.inputs, *encoder.spec.outputs)}
    )
    assert isinstance(binding, TrtBinding)
    gc.collect()
    [context] = binding._contexts.values()
    for address in context.addresses.values():
        assert address in cuda.allocated
    binding.run()


# --- weights ---------------------------------------------------------------------------------


def stored(values: list[float], dtype: str) -> np.ndarray[Any, Any]:
    import ml_dtypes

    kinds = {"F32": np.float32, "F16": np.float16, "I64": np.int64, "BF16": ml_dtypes.bfloat16}
    return np.array(values).astype(kinds[dtype])


@pytest.mark.parametrize("wanted", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_conversion_rounds_as_ml_dtypes_does(dtype: str, wanted: str) -> None:
    import ml_dtypes

    random = np.random.default_rng(0)
    values = [0.0, -0.0, 1.0, 3.14159, 6e-8, 1.00390625, 1.01171875, *random.normal(size=4000)]
    given = stored(values, dtype)
    view = given.view(np.uint16) if dtype == "BF16" else given
    out = converted(view, dtype, TensorSpec("w", wanted, given.shape))
    kinds = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
    assert out.tobytes() == given.astype(np.float32).astype(kinds[wanted]).tobytes()


def test_nan_and_infinity_stay_what_they_are() -> None:
    given = np.array([np.nan, np.inf, -np.inf], np.float32)
    given.view(np.uint32)[0] = 0x7FFFFFFF  # a NaN whose upper half would round up to zero
    bits = converted(given, "F32", TensorSpec("w", "bf16", (3,)))
    back = (bits.astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(back[0]) and back[1] == np.inf and back[2] == -np.inf
    assert np.isnan(converted(given, "F32", TensorSpec("w", "fp16", (3,)))[0])


@pytest.mark.parametrize(
    ("values", "dtype", "wanted", "words"),
    [
        ([1.0, 1e5], "F32", "fp16", r"up to 1e\+05, fp16 ends at 65504"),
        ([1, 1 << 40], "I64", "int32", "do not fit int32"),
        ([1, 2], "I64", "fp16", "is I64, the engine wants fp16"),
        ([1.0], "F32", "int32", "is F32, the engine wants int32"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    values: list[float], dtype: str, wanted: str, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        converted(stored(values, dtype), dtype, TensorSpec("w", wanted, (len(values),)))


def test_blocks_cover_a_weight_at_any_offset(tmp_path: Path, monkeypatch: Any) -> None:
    import eagle_chain.runtime.weights as module

    monkeypatch.setattr(module, "BLOCK", 7)
    values = np.arange(30, dtype=np.float32)
    (tmp_path / "w").write_bytes(b"header 1234567" + values.tobytes())
    spec = TensorSpec("w", "fp16", (30,))
    found = np.zeros(30, np.float16)
    for start, block in blocks(tmp_path, Weight("w", 14, "F32", (30,)), spec):
        found[start // 2 : start // 2 + len(block)] = block
    assert found.tolist() == values.tolist()
