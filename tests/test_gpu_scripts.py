"""The scripts that run on a GPU, dry: small sizes, fp32, CUDA and ONNX Runtime's provider acted.

That every step reads its options, prepares its data, writes its results and goes on after a
failure; the times mean nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eagle_chain.engines import worker
from eagle_chain.engines.cli import main as command
from eagle_chain.export import graph, shapes
from tests import qwen_9b
from tests.gpu import ort_series, prefill_series, trt_forms, trt_series
from tests.ort_host import gpu_on_host
from tests.standin import standins
from tests.test_ort_cuda import MaskedTrunk
from tests.toy_pair import exported, write_pair

PAIR = qwen_9b.tiny()


@pytest.fixture
def gpu(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for module in (shapes, prefill_series):
        monkeypatch.setattr(module, "configs", lambda name: PAIR)
    monkeypatch.setattr(qwen_9b, "configs", lambda layers: PAIR)
    monkeypatch.setitem(graph.TRUNKS, "ort-cuda", MaskedTrunk)
    monkeypatch.setattr(subprocess, "run", prefill_series.written_here)
    with gpu_on_host(library) as runtime:
        yield runtime


def run(
    monkeypatch: pytest.MonkeyPatch, script: ModuleType, file: Path, *words: str
) -> tuple[int, dict[str, Any]]:
    """The exit code and the file of one run."""
    monkeypatch.setattr(sys, "argv", [script.__name__, "--out", str(file.parent), *words])
    return script.main(), json.loads(file.read_text())


def test_prefill_series(
    gpu: ModuleType, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers and prompts; replayed graphs leave the bits of plain runs."""
    words = ["--only", "layers,prompts", "--rows", "32,16", "--tokens", "35", "--capacity", "40"]
    words += ["--runs", "1", "--graphs", "--dtype", "fp32", "--library", str(library)]
    words += ["--profiles", "ort-fused,ort-stock,ort-cuda"]
    monkeypatch.setattr(prefill_series, "RUNS", 2)
    code, found = run(monkeypatch, prefill_series, tmp_path / "prefill.json", *words)
    assert code == 0
    for profile in ("ort-fused", "ort-stock", "ort-cuda"):
        for rows in (32, 16):
            layer = found[f"layer, {profile}, P = {rows}"]
            assert layer.keys() == {"layer_ms", "layer_replayed_ms"}
            prompt = found[f"{profile}, P = {rows}, 35 tokens"]
            assert prompt["wide_seconds"] > 0 and prompt["predicted_chain"] > 0
            used = prompt["used_bytes"]
            after = ["replayed"] if profile != "ort-stock" else []
            assert list(used) == ["sessions", "weights", "chain", "step", "wide", "prompts", *after]
            assert list(used.values()) == sorted(used.values())
            new = used["weights"] - used["sessions"]
            assert (new > 0) == (rows == 32), "a profile's engines share them"
            if profile != "ort-stock":
                assert max(prompt["apart"].values()) < 1e-5
                assert prompt["replayed_differ"] == []


def test_a_step_that_fails_ends_no_other(
    gpu: ModuleType, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run that follows keeps what is in the file."""
    file = tmp_path / "prefill.json"
    file.write_text('{"before": 1}')
    program = tmp_path / "bench"
    program.write_text("#!/bin/sh\necho half of it\nexit 3\n")
    program.chmod(0o755)
    words = ["--dtype", "fp32", "--library", str(library), "--bench", str(program)]
    words += ["--profiles", "ort-fused", "--rows", "32", "--capacity", "48", "--tokens", "9"]
    words += ["--graphs"]

    def refused(*_: Any) -> Any:
        return gpu.cudaError_t.cudaErrorStreamCaptureUnsupported, None

    monkeypatch.setattr(gpu, "cudaGraphInstantiate", refused)
    monkeypatch.setattr(prefill_series, "of_shapes", None)
    code, found = run(monkeypatch, prefill_series, file, *words)
    assert code == 1 and found["before"] == 1
    assert "failed with 3: half of it" in found["kernels"]
    layer = found["layer, ort-fused, P = 32"]
    assert "layer_ms" in layer and layer["replayed"].startswith("failed: UserWarning: goes on")
    assert found["ort-fused, P = 32, 9 tokens"].startswith("failed: TypeError")
    code, found = run(monkeypatch, prefill_series, file, *words, "--seconds", "5")
    assert code == 0 and found["layer, ort-fused, P = 32"] == "left out"


def test_ort_series(
    gpu: ModuleType, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of kernels that only a GPU has."""
    words = ["--only", "library,kernels-fused-bf16", "--library", str(library)]
    code, found = run(monkeypatch, ort_series, tmp_path / "results.json", *words)
    assert code == 1 and found["kernels-fused-bf16"].startswith("failed: ")
    assert found["library"]["name"] == library.name


def test_trt_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage on 8.6 over stand-ins for TensorRT and CUDA, and one of them with other pins."""
    pair = write_pair(tmp_path, layers=4, aux=[0, 1, 3], dtype="fp16", draft_sizes={"head_dim": 32})
    options = ("--capacity", "64", "--aux-layers", "0,1,3", "--prefill", "0", "--debug", "logits")
    bundle = exported(pair, tmp_path / "b", *options, "--no-mtp")
    recording = tmp_path / "recording"
    assert command(["record", str(bundle), "-o", str(recording), "--part"]) == 0
    monkeypatch.setattr(qwen_9b, "configs", lambda layers: PAIR)
    monkeypatch.setattr(trt_series, "copy_bandwidth", lambda memory: 1e12)
    monkeypatch.setattr(trt_series, "NEW_TOKENS", 8)
    monkeypatch.setattr(trt_series, "RUNS", 2)
    monkeypatch.setattr(worker, "module_command", worker.module_command)  # the series sets it
    out = tmp_path / "out"

    def series(*words: str) -> dict[str, Any]:
        given = ["--bundle", f"toy={bundle},{recording}", "--layers", "4", *words]
        monkeypatch.setattr(sys, "argv", ["trt_series", str(out), *given])
        with standins(STANDIN_VERSION="8.6.0"):
            assert trt_series.main() == 0
        found: dict[str, Any] = json.loads((out / "results.json").read_text())
        return found

    monkeypatch.setattr(trt_forms, "SIZES", (64, 96))
    forms = [f"mlp-{form}" for form in trt_forms.FORMS]
    bundles = [f"toy-{stage}" for stage in ("build", "parity", "chains", "aliasing")]
    series("--only", ",".join(["device", "delta", "mlp", "nine-4", *forms, *bundles]))
    found = series("--only", "delta,toy-baked", "--pins", "none")
    assert found["device"]["tensorrt"] == "8.6.0"
    assert found["toy-build"]["trunk.plan"]["pieces"][0]["kinds"]
    assert found["toy-parity"]["passed"]
    assert all(found["toy-chains"]["prompt0"].values())
    assert not any(found["toy-aliasing"]["differ"].values())
    assert all(found[form]["error"] < 2e-3 for form in forms)
    for name in ("delta", "mlp", "nine-4", "delta@none"):
        pieces = found[name]["pieces"]["each"]
        assert sum(row["runs"] for row in pieces) > len(pieces) > 5
        pins = {(row["piece"][:4], row["pins"]) for row in pieces}
        half = "none" if name == "delta@none" else "sums"
        assert pins == {("fp16", half), ("fp16", ""), ("fp32", "")}
    for variant in ("build", "none"):
        plan = (out / "delta" / variant / "trunk.plan").read_bytes()
        assert (b'"pinned": [["HALF", "FLOAT"]' in plan) == (variant == "build")


def test_a_distance_that_is_not_finite_is_a_number() -> None:
    assert trt_series.number("infinite") == float("inf")


@pytest.mark.parametrize("script", [prefill_series, ort_series])
def test_names_of_steps_are_checked_first(
    script: ModuleType, gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, script, tmp_path / "none.json", "--only", "prompt")


ACTED = """#!/bin/sh
echo "$*" >> "$LOG"
while [ $# -gt 1 ]; do
  if [ "$1" = -o ]; then mkdir -p "$2"; fi
  shift
done
"""


def test_parity_script(tmp_path: Path) -> None:
    """What it exports, records and compares with what, in which order; Python is acted."""
    python, log, out = tmp_path / "python", tmp_path / "log", tmp_path / "out"
    python.write_text(ACTED)
    python.chmod(0o755)
    script = Path(__file__).parent / "gpu" / "parity.sh"
    named = dict.fromkeys(("PYTHON", "TORCH"), str(python))
    environment = {"PATH": os.environ["PATH"], "LOG": str(log), **named}

    def calls(*words: str) -> list[list[str]]:
        log.write_text("")
        done = subprocess.run(["bash", script, words[0], out, *words[1:]], env=environment)
        assert done.returncode == 0
        return [line.replace(f"{out}/", "").split()[2:] for line in log.read_text().splitlines()]

    prepared = calls("prepare")
    recorded = {words[1]: words[3] for words in prepared if words[0] == "parity"}
    assert recorded == {
        "portable-fp32": "recording",
        "ort-cuda-bf16": "recording-ort-cuda",
        "portable-fp32-q8": "recording-q8",
        "ort-cuda-bf16-q8": "recording-ort-cuda-q8",
    }
    exports = [
        dict(zip(words[3::2], words[4::2], strict=True))
        for words in prepared
        if words[0] == "export"
    ]
    for options in exports:
        profile, dtype, *kv = options["-o"].rsplit("-", 2 if options["-o"].endswith("-q8") else 1)
        assert (options["--profile"], options["--dtype"]) == (profile, dtype)
        assert options.get("--kv") == ("q8_0/q5_1" if kv else None)
    played = [(words[1], words[5].removeprefix("recording")) for words in calls("run")]
    assert [name for name, _ in played] == [options["-o"] for options in exports]
    assert played[:7] == [
        *((f"ort-fused-{dtype}", "") for dtype in ("bf16", "fp16", "fp32")),
        ("ort-fused-bf16-q8", "-q8"),
        *((f"ort-cuda-{dtype}", "-ort-cuda") for dtype in ("bf16", "fp16")),
        ("ort-cuda-bf16-q8", "-ort-cuda-q8"),
    ]
    assert ("portable-bf16-q8", "-q8") in played and ("portable-fp32-q8", "-q8") in played
    built = [words[1] for words in calls("run", "tensorrt-rtx") if words[0] == "build"]
    assert built == [name for name, _ in played if not name.startswith("ort-")]
