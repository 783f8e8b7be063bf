"""The command `build`: every graph through TensorRT-RTX's own parser and builder, and its errors.

TensorRT-RTX builds ahead of time without a GPU, so what it accepts here it accepts anywhere; its
plans cannot run here. A stand-in for TensorRT serves for what must go wrong on purpose.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from eagle_chain.engines import flavours, plans
from eagle_chain.engines.build import Recipe, built_plans
from eagle_chain.engines.cli import main
from eagle_chain.engines.compiler import Job, Request
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.flavours import Flavour, load_flavour
from eagle_chain.engines.graphs import bound_graph
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.memory import Estimate, check_room
from eagle_chain.engines.plan_file import unpacked
from eagle_chain.engines.plans import Target, find_plans
from eagle_chain.engines.spec import Options
from eagle_chain.engines.worker import compile_all
from eagle_chain.export.graph import build_graphs
from eagle_chain.runtime import open_engines
from tests import qwen_9b
from tests.planted import plant
from tests.standin import FOLDER, standins
from tests.toy_pair import exported, write_pair

RTX = ["--backend", "tensorrt-rtx", "--compute-capability"]
CAPABILITIES = ("8.6", "8.9", "12.0")
PLANS = "plans/tensorrt-10.9.0.34-Stand-in-GPU"
rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx-cu13"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), layers=4, aux=[0, 1, 3], dtype="bf16")


def export(pair: tuple[Path, Path], bundle: Path, *flags: str) -> Path:
    return exported(pair, bundle, "--capacity", "64", "--aux-layers", "0,1,3", *flags)


@pytest.fixture
def bundle(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    return export(pair, tmp_path / "b")


@pytest.fixture
def gpu() -> Iterator[Any]:
    with standins() as runtime:
        yield runtime


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    code = main([*words, "--json"])
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return {**data, "code": code}


# --- TensorRT-RTX itself ---------------------------------------------------------------------


@rtx
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("profile", ["portable", "standard"])
def test_every_graph_of_a_pair_builds(
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    profile: str,
    dtype: str,
) -> None:
    bundle = export(pair, tmp_path / "b", "--dtype", dtype, "--profile", profile, "--sampling")
    done = report(capsys, "build", str(bundle), *RTX, *CAPABILITIES)
    assert done["code"] == 0 and done["built"]
    manifest = Manifest.load(bundle)
    assert {Path(name).stem for name in manifest.plans} == set(manifest.specs)
    assert {plan.compute_capability for plan in manifest.plans.values()} == {"8.6 8.9 12.0"}
    folder = bundle / "plans" / "tensorrt-rtx-{}-sm86-sm89-sm120".format(done["target"]["version"])
    assert sorted(p.name for p in folder.iterdir()) == [
        "build.log",
        *(f"{name}.plan" for name in sorted(manifest.specs)),
    ]
    again = report(capsys, "build", str(bundle), *RTX, *CAPABILITIES)
    assert again["code"] == 0 and not again["built"] and again["plans"] == done["plans"]


def nine(
    folder: Path,
    layers: int,
    profile: str,
    dtype: str,
    capabilities: tuple[str, ...],
    only: tuple[str, ...] = (),
) -> dict[str, dict[str, Any]]:
    """Build the graphs of the published 9B shapes, with this many layers, all or some of them."""
    trunk, draft = qwen_9b.configs(layers)
    options = Options(5, 4096, dtype, profile, prefill=256)
    specs = engine_specs(trunk, draft, options, mtp=True)
    jobs = []
    weights_table = qwen_9b.weights(trunk, draft)
    models = build_graphs(trunk, draft, weights_table, options, mtp=True, only=only)
    for name, model in models.items():
        bound, weights = bound_graph(model, specs[name], dtype)
        (folder / f"{name}.onnx").write_bytes(bound.SerializeToString())
        inputs = (*specs[name].all_inputs, *weights)
        paths = str(folder / f"{name}.onnx"), str(folder / f"{name}.plan")
        jobs.append(Job(name, *paths, inputs, specs[name].all_outputs))
    return compile_all(Request("tensorrt-rtx", tuple(jobs), capabilities), folder)


@rtx
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("profile", ["portable", "standard"])
def test_four_layers_of_the_9b_build(tmp_path: Path, profile: str, dtype: str) -> None:
    built = nine(tmp_path, 4, profile, dtype, CAPABILITIES)
    assert built["trunk"]["bytes"] < 15e6 and built["draft_step"]["bytes"] < 15e6
    assert built["prefill"]["bytes"] < 15e6 and built["draft_prefill"]["bytes"] < 15e6
    assert all(built[name]["bytes"] < 15e6 for name in ("mtp", "mtp_step", "mtp_prefill"))


@rtx
@pytest.mark.slow
@pytest.mark.parametrize("profile", ["portable", "standard"])
def test_the_whole_9b_builds_small_and_fast(tmp_path: Path, profile: str) -> None:
    """On two cores: under 2 minutes, 2 GB of memory, 15 MB of plan for 18 GB of weights."""
    trunk = nine(tmp_path, 32, profile, "bf16", ("8.9",), ("trunk",))["trunk"]
    assert trunk["bytes"] < 15e6 and trunk["seconds"] < 120 and trunk["peak_bytes"] < 2e9


@rtx
def test_baked_weights_become_part_of_the_plan(
    pair: tuple[Path, Path], bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bound = report(capsys, "build", str(bundle), *RTX, "8.9")
    baked = report(capsys, "build", str(bundle), *RTX, "8.9", "--weights", "baked")
    sizes = [{Path(p["file"]).stem: p["bytes"] for p in d["plans"]} for d in (bound, baked)]
    assert baked["built"] and {p.weights for p in Manifest.load(bundle).plans.values()} == {"baked"}
    assert sizes[1]["encoder"] - sizes[0]["encoder"] > 64 * 192 * 4 * 0.9


@rtx
def test_an_interface_that_is_not_the_specs_is_refused(tmp_path: Path) -> None:
    trunk, draft = qwen_9b.configs(4)
    options = Options(5, 64, "fp16")
    spec = engine_specs(trunk, draft, options)["encoder"]
    model = build_graphs(trunk, draft, qwen_9b.weights(trunk, draft), options)["encoder"]
    bound, _ = bound_graph(model, spec, "fp16")
    (tmp_path / "e.onnx").write_bytes(bound.SerializeToString())
    job = Job("encoder", str(tmp_path / "e.onnx"), str(tmp_path / "p"), spec.inputs, spec.inputs)
    with pytest.raises(InputError) as error:
        compile_all(Request("tensorrt-rtx", (job,), ("8.9",)), tmp_path)
    assert str(error.value) == (
        "encoder: the parsed network has the input draft.fc.weight of its own; "
        "has the output g of its own; lacks the output features"
    )
    assert not (tmp_path / "p").exists()


@rtx
def test_a_graph_that_cannot_be_parsed_is_named(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_node(bundle, "encoder.onnx", op_type="NoSuchOperator", domain="")
    assert main(["build", str(bundle), *RTX, "8.9"]) == 2
    assert "encoder: TensorRT 1." in (words := capsys.readouterr().err)
    assert "cannot read the graph" in words and "NoSuchOperator" in words
    assert not (bundle / "plans").exists()


def add_node(bundle: Path, graph: str, op_type: str, domain: str) -> None:
    """Put a node in front of the first output."""

    def edit(model: onnx.ModelProto) -> None:
        last = model.graph.node[-1]
        last.output[0], output = "before", last.output[0]
        node = onnx.helper.make_node(op_type, ["before"], [output], name="odd one", domain=domain)
        model.graph.node.append(node)

    plant(bundle, graph, edit)


def test_an_operator_of_another_runtime_is_refused_before_anything_is_built(
    bundle: Path, gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    add_node(bundle, "draft.onnx", "FusedMatMul", "com.microsoft")
    assert main(["build", str(bundle)]) == 2
    words = capsys.readouterr().err
    assert "draft.onnx: TensorRT has no operator com.microsoft.FusedMatMul" in words
    assert "'odd one'" in words and "--profile portable" in words


# --- requests --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--backend", "tensorrt-rtx"], "needs --compute-capability, some of 7.5, 8.0, 8.6"),
        ([*RTX, "9.0"], "cannot build for compute capability 9.0, only for 7.5"),
        ([*RTX, "8.9", "--workspace", "2 GiB"], "'2 GiB' is no size; write 500MB or 2GB"),
        ([*RTX, "8.9", "--level", "9"], "invalid choice: 9"),
        (["--backend", "onnxruntime"], "invalid choice: 'onnxruntime'"),
    ],
)
@rtx
def test_bad_requests_are_one_sentence(
    bundle: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert main(["build", str(bundle), *words]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_a_capability_is_not_for_tensorrt(
    bundle: Path, gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(bundle), "--compute-capability", "8.9"]) == 2
    assert "--compute-capability is for --backend tensorrt-rtx" in capsys.readouterr().err


def test_missing_tensorrt_says_what_to_install_for_which_python_and_cuda(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert main(["build", str(bundle)]) == 2
    error = capsys.readouterr().err
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    for words in (
        f"TensorRT is not installed in this {python}",
        "TensorRT 8.6, 10 and 11 are supported, with Python 3.10 to 3.14",
        "pip install 'tensorrt-cu13>=10.13,<12' --extra-index-url https://pypi.nvidia.com",
        "CUDA 12",
        "JetPack",
    ):
        assert words in error
    assert error.count("\n") == 1


def test_tensorrt_that_cannot_be_loaded_gives_the_reason(tmp_path: Path) -> None:
    (tmp_path / "tensorrt.py").write_text("raise OSError('libnvinfer.so.10: cannot open')")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        patch.delitem(sys.modules, "tensorrt", raising=False)
        with pytest.raises(InputError, match=r"cannot be loaded \(libnvinfer\.so\.10.*pip install"):
            load_flavour("tensorrt")


def test_a_folder_of_that_name_is_no_tensorrt(tmp_path: Path) -> None:
    (tmp_path / "tensorrt").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        patch.delitem(sys.modules, "tensorrt", raising=False)
        with pytest.raises(InputError, match="TensorRT is not installed"):
            load_flavour("tensorrt")
        sys.modules.pop("tensorrt", None)


@pytest.mark.parametrize("version", ["7.2.3.4", "8.5.3", "9.1.0", "12.0.1"])
def test_other_versions_are_refused(version: str) -> None:
    with standins(STANDIN_VERSION=version):
        with pytest.raises(InputError, match=rf"TensorRT {version} is not supported.*8\.6, 10 and"):
            load_flavour("tensorrt")


def test_a_dry_run_writes_nothing(
    bundle: Path, gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(bundle.rglob("*"))
    done = report(capsys, "build", str(bundle), "--dry-run")
    assert done["code"] == 0 and not done["built"] and done["memory"]["weights"] > 0
    assert done["target"]["gpu"] == "Stand-in GPU"
    assert sorted(bundle.rglob("*")) == before


def test_a_dry_run_needs_no_library(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are those of a dry run with the library; only the target is not known."""
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    assert main(["build", str(bundle), "--dry-run"]) == 0
    assert "tensorrt, version unknown (not installed here), GPU unknown" in capsys.readouterr().out
    assert main(["build", str(bundle), "--dry-run", *RTX, "8.9"]) == 0
    assert "compute capability 8.9" in capsys.readouterr().out
    without = report(capsys, "build", str(bundle), "--dry-run")
    monkeypatch.undo()
    with standins():
        assert report(capsys, "build", str(bundle), "--dry-run")["memory"] == without["memory"]
    assert main(["build", str(bundle)]) == 2  # a build still says how to install it


def test_plans_are_rebuilt_when_anything_differs(
    bundle: Path, gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(capsys, "build", str(bundle))["built"]
    assert not report(capsys, "build", str(bundle))["built"]
    assert report(capsys, "build", str(bundle), "--force")["built"]
    assert report(capsys, "build", str(bundle), "--level", "4")["built"]
    assert not report(capsys, "build", str(bundle), "--level", "4")["built"]
    assert report(capsys, "build", str(bundle), "--weights", "baked")["built"]
    [name] = [name for name in Manifest.load(bundle).plans if name.endswith("/encoder.plan")]
    plan = bundle / name
    plan.write_bytes(plan.read_bytes()[:-1])
    assert report(capsys, "build", str(bundle), "--weights", "baked")["built"]
    add_node(bundle, "encoder.onnx", "Identity", "")
    assert report(capsys, "build", str(bundle), "--weights", "baked")["built"]


def test_building_elsewhere_gives_the_same(
    bundle: Path, gpu: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle.parent)
    assert report(capsys, "build", "b", "--weights", "baked")["built"]
    first = (bundle / PLANS / "trunk.plan").read_bytes()
    monkeypatch.chdir("/")
    assert report(capsys, "build", str(bundle), "--weights", "baked", "--force")["built"]
    [other] = {str(Path(name).parent) for name in Manifest.load(bundle).plans}
    assert other != PLANS and not (bundle / PLANS).exists()
    assert (bundle / other / "trunk.plan").read_bytes() == first


def test_tf32_is_off_and_the_network_strongly_typed(
    bundle: Path, gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report(capsys, "build", str(bundle), "--level", "1", "--workspace", "1.5GB")
    assert settings((bundle / PLANS / "trunk.plan").read_bytes()) == {
        **{"tf32": False, "flags": 2, "level": 1, "pools": 1},
        **{"fp16": False, "obey": False, "pinned": []},
    }
    inspected = report(capsys, "inspect", str(bundle))["plans"]
    assert [plan["layers"] for plan in inspected] == [{"FP32": 1}] * len(
        Manifest.load(bundle).specs
    )
    assert inspected[0]["target"].startswith("TensorRT 10.9.0.34 on Stand-in GPU")
    assert "a warning of the builder" in (bundle / PLANS / "build.log").read_text()


def test_a_bad_timing_cache_is_a_warning(
    bundle: Path, gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = bundle / f"{PLANS}.timing.cache"
    assert main(["build", str(bundle)]) == 0
    assert cache.read_bytes() == b"timing" and "warning" not in capsys.readouterr().err
    cache.write_bytes(b"of another TensorRT")
    assert main(["build", str(bundle), "--force"]) == 0
    assert f"{cache}: not a timing cache" in capsys.readouterr().err
    assert cache.read_bytes() == b"timing"


# --- what goes wrong on the way --------------------------------------------------------------


def forged(bundle: Path, change: Any) -> None:
    """Let `change` edit the bytes of the encoder's graph, and give the manifest their hash."""
    graph, path = bundle / "encoder.onnx", bundle / "manifest.json"
    graph.write_bytes(change(graph.read_bytes()))
    data = json.loads(path.read_text())
    data["graphs"]["encoder.onnx"] = hashlib.sha256(graph.read_bytes()).hexdigest()
    path.write_text(json.dumps(data))


def of_doubles(content: bytes) -> bytes:
    """The graph with every weight stored in fp64 and every cast to it."""
    model = onnx.load_from_string(content)
    for tensor in model.graph.initializer:
        tensor.data_type = onnx.TensorProto.DOUBLE
    for node in model.graph.node:
        if node.op_type == "Cast":
            node.attribute[0].i = onnx.TensorProto.DOUBLE
    changed: bytes = model.SerializeToString()
    return changed


FORGERIES = {
    "no graph": lambda content: b"not a graph",
    "names that are no text": lambda c: c.replace(b"draft.fc.weight", b"draft.\xc7c.weight"),
    "places that are no text": lambda c: c.replace(b"weights/draft/", b"\xff" * 14),
    "weights in fp64": of_doubles,
    "another weight": lambda c: c.replace(b"draft.fc.weight", b"draft.fx.weight"),
}


@pytest.mark.parametrize("weights", ["bound", "baked"])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_graph_is_one_sentence(
    bundle: Path, gpu: Any, capsys: pytest.CaptureFixture[str], forgery: str, weights: str
) -> None:
    forged(bundle, FORGERIES[forgery])
    if (forgery, weights) == ("another weight", "bound"):  # for who uploads the weights to see
        assert main(["build", str(bundle)]) == 0
        with pytest.raises(InputError, match=r"weight draft\.fx\.weight is not in the bundle"):
            open_engines(bundle, "tensorrt")
        return
    assert main(["build", str(bundle), "--weights", weights]) == 2
    error = capsys.readouterr().err
    assert "encoder" in error and error.count("eagle-chain: ") == 1


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("none", "draft: TensorRT cannot build it: no implementation of node_X obeys"),
        ("abort", "draft: TensorRT ended its process (SIGABRT) while building: WARNING: a warning"),
    ],
)
def test_a_failed_build_leaves_the_plans_as_they_were(
    bundle: Path,
    gpu: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    words: str,
) -> None:
    assert main(["build", str(bundle)]) == 0
    before = contents(bundle)
    monkeypatch.setenv("STANDIN_BUILD", how)
    assert main(["build", str(bundle), "--force"]) == 2
    assert words in capsys.readouterr().err
    assert contents(bundle) == before


def contents(bundle: Path) -> dict[str, bytes]:
    files = [p for p in bundle.rglob("*") if p.is_file() and p.suffix != ".cache"]
    return {str(p.relative_to(bundle)): p.read_bytes() for p in files}


def start(bundle: Path, how: str) -> subprocess.Popen[str]:
    """A build in a process of its own, once it is building."""
    path = os.pathsep.join([str(FOLDER), *sys.path])
    child = subprocess.Popen(
        [sys.executable, "-m", "eagle_chain.engines", "build", str(bundle), "--force"],
        env={**os.environ, "PYTHONPATH": path, "STANDIN_BUILD": how},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd="/",
    )
    deadline = time.monotonic() + 60
    logs = f".{Path(PLANS).name}*.partial/build.log"
    while not any("warning" in log.read_text() for log in (bundle / "plans").glob(logs)):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return child


def compilers() -> list[str]:
    """Command lines of compiler processes that are still alive."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "eagle_chain.engines.compiler" in line:
            found.append(line)
    return found


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc to see processes")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_ctrl_c_stops_at_once_and_leaves_the_plans(
    stop: signal.Signals, bundle: Path, gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(bundle)]) == 0
    before = contents(bundle)
    child = start(bundle, "hang")
    child.send_signal(stop)
    _, error = child.communicate(timeout=10)
    assert child.returncode == 128 + stop and "interrupted" in error
    assert contents(bundle) == before and not list((bundle / "plans").glob(".*.partial"))
    assert not [line for line in compilers() if "hang" in line]
    assert not report(capsys, "build", str(bundle))["built"]


def test_a_killed_build_is_cleaned_up_by_the_next(
    bundle: Path, gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(bundle)]) == 0
    child = start(bundle, "hang")
    child.kill()
    child.communicate(timeout=10)
    assert list((bundle / "plans").glob(".*.partial"))
    assert not report(capsys, "build", str(bundle))["built"], "the old plans are still good"
    assert report(capsys, "build", str(bundle), "--force")["built"]
    assert not list((bundle / "plans").glob(".*.partial"))


def test_a_second_build_into_one_bundle_is_refused(
    bundle: Path, gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    child = start(bundle, "hang")
    try:
        assert main(["build", str(bundle), "--force"]) == 2
        assert "another process is writing this folder" in capsys.readouterr().err
    finally:
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=10)


# --- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needed", "words"),
    [
        (Estimate(0, 0, 1 << 60), r"building needs about \d+\.\d TB of memory, this machine has"),
        (Estimate(1 << 60, 0, 0), r"plans with baked weights take .* TB, the disk has"),
        (Estimate(5 << 30, 1 << 30, 0), r"needs 6\.4 GB on the GPU, Stand-in GPU has 4\.3 GB"),
    ],
)
def test_what_cannot_fit_is_refused_with_numbers(
    gpu: Any, tmp_path: Path, needed: Estimate, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        check_room(tmp_path, needed, "baked", 0)


# --- TensorRT 8.6 ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(dtype="bf16"), "TensorRT 8.6.1 has no bf16: export with --dtype fp16"),
        (Options(dtype="fp16", profile="standard"), "export with --profile portable"),
    ],
)
def test_8_6_refuses_what_it_cannot_read(options: Options, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Flavour("tensorrt", "8.6.1", None).refuse(options)
    Flavour("tensorrt", "10.3.0", None).refuse(options)
    Flavour("tensorrt", "8.6.1", None).refuse(Options(dtype="fp16"))
    with pytest.raises(InputError, match="bf16 weights: build with --weights bound"):
        Flavour("tensorrt", "8.6.1", None).refuse_baked({"BF16", "F32"})


def settings(plan: bytes | memoryview) -> dict[str, Any]:
    """What the stand-in was told when it built a plan."""
    line = bytes(plan).split(b"\n")[0]
    told: dict[str, Any] = json.loads(line.removeprefix(b"stand-in plan "))
    return told


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_8_6_builds_pieces_of_one_type(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    """Single pieces cannot use fp16; products of half pieces read fp16 and add up in fp32."""
    bundle = export(pair, tmp_path / "b", "--dtype", dtype)
    with standins(STANDIN_VERSION="8.6.1"):
        done = report(capsys, "build", str(bundle))
    assert done["built"]
    place = "plans/tensorrt-8.6.1-Stand-in-GPU"
    contents, plans = unpacked(memoryview((bundle / place / "trunk.plan").read_bytes()))
    assert set(contents.types) == {"fp32", dtype}
    products = 0
    for kind, told in zip(contents.types, map(settings, plans), strict=True):
        half = kind == "fp16"
        pins = told.pop("pinned")
        assert all(pin == ["HALF", "FLOAT"] for pin in pins) and (half or not pins)
        products += len(pins)
        assert told == {
            **{"tf32": False, "flags": 1, "level": 2, "pools": 0},
            **{"fp16": half, "obey": half},
        }
    assert bool(products) == (dtype == "fp16")
    counts = done["jobs"]["trunk"]["pieces"], done["jobs"]["trunk"]["plans"]
    assert counts == (len(contents.pieces), len(plans)) and counts[0] > counts[1]
    [shown] = [p for p in report(capsys, "inspect", str(bundle))["plans"] if "trunk" in p["file"]]
    assert shown["pieces"] == list(contents.runs) and shown["layers"] == {"FP32": counts[0]}
    main(["inspect", str(bundle)])
    assert f"{counts[1]} distinct pieces, {counts[0]} runs a call" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "pins", "words"),
    [
        ({"STANDIN_BUILD": "no precision"}, ["", "FLOAT"], "built with pins 'outputs'"),
        (
            {"STANDIN_CONVERTS": "1"},
            [],
            "built with pins 'none'; bytes of scratch: sums 16,777,216",
        ),
    ],
)
def test_8_6_takes_the_strictest_pins_that_leave_weights_alone(
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    pins: list[str],
    words: str,
) -> None:
    bundle = export(pair, tmp_path / "b", "--dtype", "fp16")
    with standins(STANDIN_VERSION="8.6.1", **environment):
        assert report(capsys, "build", str(bundle))["built"]
    place = bundle / "plans/tensorrt-8.6.1-Stand-in-GPU"
    _, plans = unpacked(memoryview((place / "trunk.plan").read_bytes()))
    told = [pin for plan in plans for pin in settings(plan)["pinned"]]
    assert all(pin == pins for pin in told) and bool(told) == bool(pins)
    assert words in (place / "build.log").read_text()


def test_8_6_compiles_what_engines_share_once(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two capacities differ in their attention alone; the builder warns once for each plan."""
    bundle = exported(pair, tmp_path / "b", "--aux-layers", "0,1,3", "--capacity", "48,64")
    with standins(STANDIN_VERSION="8.6.1"):
        assert report(capsys, "build", str(bundle))["built"]
    place = bundle / "plans/tensorrt-8.6.1-Stand-in-GPU"
    files = [unpacked(memoryview(path.read_bytes())) for path in place.glob("*.plan")]
    distinct = {bytes(plan) for _, plans in files for plan in plans}
    warned = (place / "build.log").read_text().count("a warning of the builder")
    assert warned == len(distinct) < sum(len(plans) for _, plans in files)


def test_a_piece_that_8_6_cannot_build_is_named(
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = export(pair, tmp_path / "b", "--dtype", "fp16")
    monkeypatch.setenv("STANDIN_BUILD", "none")
    with standins(STANDIN_VERSION="8.6.1"):
        assert main(["build", str(bundle)]) == 2
    words = capsys.readouterr().err
    assert re.search(r"draft, piece 1 of \d+ \(fp16: .* Cast.*\): TensorRT cannot build it", words)
    assert not (bundle / "plans").exists() or not list((bundle / "plans").glob("tensorrt*"))


def test_a_forged_graph_that_cannot_be_cut_is_one_sentence(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reads what nothing writes: a traceback of the compiler before."""
    bundle = export(pair, tmp_path / "b")
    forged(bundle, lambda content: content.replace(b"features", b"featurez", 1))
    with standins(STANDIN_VERSION="8.6.1"):
        assert main(["build", str(bundle)]) == 2
    error = capsys.readouterr().err
    assert "encoder.onnx: not a graph that export writes" in error
    assert error.count("eagle-chain: ") == 1 and "ended its process" not in error


def test_8_6_rebuilds_what_another_version_cut(
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans from before graphs were cut at all, and those of a cut to come."""
    bundle = export(pair, tmp_path / "b")
    machine = Target("tensorrt", "8.6.1", "Stand-in GPU", ("9.0",))
    with standins(STANDIN_VERSION="8.6.1"):
        assert report(capsys, "build", str(bundle))["built"]
        assert not report(capsys, "build", str(bundle))["built"]
        manifest = Manifest.load(bundle)
        old = {
            name: dataclasses.replace(
                plan, source=hashlib.sha256(manifest.graphs[graph].encode()).hexdigest()
            )
            for name, plan in manifest.plans.items()
            for graph in [f"{Path(name).stem}.onnx"]
        }
        dataclasses.replace(manifest, plans=old).save(bundle)
        assert report(capsys, "build", str(bundle))["built"]
        assert not report(capsys, "build", str(bundle))["built"]
        monkeypatch.setattr(plans, "VERSION", plans.VERSION + 1)
        with pytest.raises(InputError, match="or by a version that cuts it differently; build it"):
            find_plans(bundle, Manifest.load(bundle), machine)
        assert report(capsys, "build", str(bundle))["built"]
    monkeypatch.undo()
    with standins():  # no graph is cut for TensorRT 10
        assert report(capsys, "build", str(bundle))["built"]
        monkeypatch.setattr(plans, "VERSION", plans.VERSION + 1)
        assert not report(capsys, "build", str(bundle))["built"]


# --- the key ---------------------------------------------------------------------------------


def test_a_plan_serves_the_machine_it_was_built_for(bundle: Path, gpu: Any) -> None:
    assert main(["build", str(bundle)]) == 0
    manifest = Manifest.load(bundle)
    plan = manifest.plans[f"{PLANS}/trunk.plan"]
    here = Target("tensorrt", "10.9.0.34", "Stand-in GPU", ("9.0",))
    assert here.runs(plan)
    assert len(built_plans(bundle, manifest, Recipe(here, "bound", ()))) == len(manifest.specs)
    for other in (
        Target("tensorrt", "10.9.0.34", "Stand-in GPU", ("8.6",)),
        Target("tensorrt", "10.9.0.34", "Another GPU", ("9.0",)),
        Target("tensorrt", "10.9.1", "Stand-in GPU", ("9.0",)),
        Target("tensorrt-rtx", "10.9.0.34", "Stand-in GPU", ("9.0",)),
    ):
        assert not other.runs(plan)
    assert set(flavours.FLAVOURS) == {"tensorrt", "tensorrt-rtx"}
