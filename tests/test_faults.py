"""What kills a command half way, at every stage of export and build: nothing is lost or in the way.

`tests.faults` does the work, in a process that may fork; here a share of its faults in CI. The rest
is what it cannot do: a disk that fills up in the middle of a file, and a real compiler process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eagle_chain.engines.cli import main
from eagle_chain.engines.manifest import HALF_WRITTEN, Manifest
from tests.faults import contents
from tests.toy_pair import exported, write_pair

ROOT = Path(__file__).parent.parent
RTX = ["--backend", "tensorrt-rtx", "--compute-capability", "8.9", "--force"]
rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx-cu13"
)


@pytest.mark.parametrize(("command", "step"), [("export", 11), ("build", 13)])
def test_any_fault_at_any_operation_leaves_a_whole_bundle(
    tmp_path: Path, command: str, step: int
) -> None:
    words = [sys.executable, "-m", "tests.faults", command, str(tmp_path), str(step)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    for kind, faults in seen.items():
        assert len(faults) >= 4, kind
        codes = {fault["code"] for fault in faults}
        assert {"kill": -signal.SIGKILL, "interrupt": 130}.get(kind, 2) in codes, kind
    bundles = [fault["bundle"] for faults in seen.values() for fault in faults]
    assert bundles.count("old") > 8 and bundles.count("new") > 3


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with plans of the real TensorRT-RTX for a pair of some size."""
    folder = tmp_path_factory.mktemp("built")
    pair = write_pair(folder, layers=4, aux=[0, 1, 3])
    flags = "--aux-layers", "0,1,3", "--capacity", "64", "--prefill", "0"
    bundle = exported(pair, folder / "bundle", *flags)
    assert main(["build", str(bundle), *RTX]) == 0
    return folder


def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy", symlinks=True)) / "bundle"


def limited(size: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A command for which every file ends at `size` bytes, as on a disk that is full then."""
    code = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
        "from eagle_chain.engines.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@rtx
@pytest.mark.parametrize("size", [0, 3_000, 60_000])
def test_a_disk_that_is_full_during_a_build_is_one_sentence(
    built: Path, tmp_path: Path, size: int
) -> None:
    """In turn: the first file of the build, a log or a graph, a plan in the compiler process."""
    bundle = copy(built, tmp_path)
    before = contents(bundle)
    done = limited(size, "build", str(bundle), *RTX, "--level", "1")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("eagle-chain: ") == 1 and "File too large" in done.stderr
    assert contents(bundle) == before
    assert not list(bundle.rglob("*.partial")) and not list(bundle.parent.glob(".*"))
    assert main(["build", str(bundle), *RTX]) == 0
    manifest = Manifest.load(bundle)
    assert len(manifest.plans) == len(manifest.specs)


@rtx
def test_a_compiler_that_is_killed_is_one_sentence(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = copy(built, tmp_path)
    before = contents(bundle)
    words = [sys.executable, "-m", "eagle_chain.engines", "build", str(bundle), *RTX]
    child = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    os.kill(compiler_of(child), signal.SIGKILL)
    error = child.communicate(timeout=60)[1]
    assert child.returncode == 2 and "Traceback" not in error
    assert "TensorRT ended its process (SIGKILL, as the system does when memory runs out)" in error
    assert contents(bundle) == before


@rtx
def test_a_compiler_does_not_outlive_a_build_that_is_killed(built: Path, tmp_path: Path) -> None:
    """It is gone at once, so that the next build finds the folder quiet."""
    bundle = copy(built, tmp_path)
    before = contents(bundle)
    words = [sys.executable, "-m", "eagle_chain.engines", "build", str(bundle), *RTX]
    child = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    compiler = compiler_of(child)
    child.kill()
    child.wait(10)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{compiler}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert contents(bundle) == before
    assert main(["build", str(bundle), *RTX]) == 0
    assert not list(bundle.rglob("*.partial"))


def compiler_of(build: subprocess.Popen[Any]) -> int:
    """The process that a build has started, once it has."""
    children = Path(f"/proc/{build.pid}/task/{build.pid}/children")
    deadline = time.monotonic() + 60
    while True:
        assert build.poll() is None and time.monotonic() < deadline
        if found := children.read_text().split():
            return int(found[0])
        time.sleep(0.01)


def test_what_a_kill_leaves_of_a_manifest_is_in_nobodys_way(built: Path, tmp_path: Path) -> None:
    bundle = copy(built, tmp_path)
    (bundle / HALF_WRITTEN).write_text('{"format": 1, "opt')
    assert Manifest.load(bundle) == Manifest.load(built / "bundle")
    links = [str(bundle / "weights" / role) for role in ("trunk", "draft")]
    assert main(["export", *links, "-o", str(bundle), "--aux-layers", "0,1,3"]) == 0
    assert not (bundle / HALF_WRITTEN).exists()


def test_two_builds_for_two_targets_keep_each_others_plans(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second had read the manifest before the first wrote its plans into it."""
    bundle = copy(built, tmp_path)
    build = importlib.import_module("eagle_chain.engines.build")
    check_room = build.check_room

    def other_build_first(*arguments: Any) -> None:
        monkeypatch.setattr(build, "check_room", check_room)
        assert main(["build", str(bundle), *RTX[:3], "8.6"]) == 0

    monkeypatch.setattr(build, "check_room", other_build_first)
    assert main(["build", str(bundle), *RTX[:3], "12.0"]) == 0
    built_for = {plan.compute_capability for plan in Manifest.load(bundle).plans.values()}
    assert built_for == {"8.9", "8.6", "12.0"}


def test_plans_are_never_written_through_a_link_out_of_the_bundle(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = copy(built, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(bundle / "plans", elsewhere)
    (bundle / "plans").symlink_to(elsewhere)
    before = contents(bundle)
    assert main(["build", str(bundle), *RTX]) == 2
    assert "out of the bundle" in capsys.readouterr().err
    assert contents(bundle) == before
