"""The wheel: what is in it, and what it needs before it can be imported."""

from __future__ import annotations

import email
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib

from eagle_chain.engines.version import VERSION

ROOT = Path(__file__).parent.parent
PACKAGES = ("engines", "export", "runtime")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that nothing is left in the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copyfile(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(source / "dist")]
    subprocess.run([*pip, *options, str(source)], check=True, timeout=120)
    [wheel] = (source / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of the wheel, as pip lays it out."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_the_wheel_holds_exactly_the_sources(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*")]
    assert sorted(names) == sorted(
        f"eagle_chain/{file.relative_to(ROOT)}"
        for file in files
        if file.is_file() and not {"__pycache__", ".mypy_cache", ".ruff_cache"} & set(file.parts)
    )
    assert {f"eagle_chain/{package}/py.typed" for package in PACKAGES} <= set(names)


def test_the_metadata_names_pythons_and_extras(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith("METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Requires-Python"] == ">=3.10" and metadata["Version"] == VERSION
    assert {"export", "cpu", "gpu", "parity"} <= set(metadata.get_all("Provides-Extra") or [])
    plain = [r for r in metadata.get_all("Requires-Dist") or [] if "extra ==" not in r]
    names = sorted(re.split(r"[<>=]", requirement)[0] for requirement in plain)
    assert names == ["jinja2", "numpy", "rich", "tokenizers"]


def test_only_the_namespace_is_importable(installed: Path, tmp_path: Path) -> None:
    """`export`, `runtime` and `engines` are no global names, and imports need NumPy alone."""
    code = (
        "import importlib.util, sys\n"
        "sys.path[:0] = [sys.argv[1]]\n"
        "for name in ('torch', 'onnx', 'onnx_ir', 'onnxruntime', 'rich', 'tokenizers'):\n"
        "    sys.modules[name] = None\n"
        "import eagle_chain.engines, eagle_chain.export, eagle_chain.runtime\n"
        "assert eagle_chain.runtime.__file__.startswith(sys.argv[1])\n"
        "for name in ('engines', 'export', 'runtime', 'tests', 'demo'):\n"
        "    assert importlib.util.find_spec(name) is None, name\n"
    )
    subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", code, str(installed)], check=True, cwd=tmp_path
    )


def pins(name: str) -> dict[str, str]:
    """Package -> version of a requirements file, the files it includes with it."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            package, _, version = line.partition("==")
            assert version, f"{name}: {line} is not pinned exactly"
            found[package.lower().replace("_", "-")] = version
    return found


@pytest.mark.parametrize(
    ("file", "extras"),
    [
        ("requirements-demo.txt", ("export", "cpu")),
        ("requirements-dev.txt", ("export", "cpu", "plot", "dev")),
    ],
    ids=["demo", "dev"],
)
def test_the_pins_satisfy_the_project(file: str, extras: tuple[str, ...]) -> None:
    from packaging.requirements import Requirement

    wanted = [*PROJECT["dependencies"]]
    for extra in extras:
        wanted += PROJECT["optional-dependencies"][extra]
    pinned = pins(file)
    for requirement in map(Requirement, wanted):
        if requirement.name not in ("eagle-chain", "torch"):  # the scripts install these two
            assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement


def test_the_demo_needs_neither_torch_nor_transformers() -> None:
    assert not {"torch", "transformers", "safetensors"} & set(pins("requirements-demo.txt"))


@pytest.mark.parametrize("script", ["demo.sh", "test.sh", "build_engines.sh", "venv.sh"])
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / script)], check=True)


FAKE = """#!/usr/bin/env bash
case "$*" in
  *"ruff format"*) exit 1 ;;
  *pytest*) echo "3 passed" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The scripts beside a .venv whose Python only pretends: formatting fails, tests pass."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("pyproject.toml", "requirements-demo.txt", "requirements-dev.txt", "README.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    for name in PACKAGES:
        (tmp_path / name).mkdir()
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE)
    python.chmod(0o755)
    return tmp_path


def test_every_check_runs_and_one_failure_counts(clone: Path) -> None:
    child = subprocess.run(["bash", "scripts/test.sh"], cwd=clone, capture_output=True, text=True)
    assert child.returncode == 1
    assert child.stdout.splitlines() == [
        "lint ok | format FAILED | types ok | tests follow",
        "3 passed",
    ]
    python = clone / ".venv/bin/python"
    python.write_text(FAKE.replace("exit 1", "").replace('"3 passed"', '"1 failed"; exit 5'))
    child = subprocess.run(["bash", "scripts/test.sh"], cwd=clone, capture_output=True, text=True)
    assert child.returncode == 5
    assert child.stdout.startswith("lint ok | format ok | types ok | ")


@pytest.mark.parametrize(
    ("answer", "found"),
    [(None, "does not start"), ("is 3.10", "is 3.10"), ("is 3.14", "is 3.14")],
    ids=["none", "3.10", "3.14"],
)
def test_an_unfit_python_is_named(clone: Path, answer: str | None, found: str) -> None:
    shutil.rmtree(clone / ".venv")
    base = clone / "some-python"
    if answer:
        base.write_text(f"#!/bin/sh\necho {answer}\n")
        base.chmod(0o755)
    child = subprocess.run(
        ["bash", "scripts/demo.sh"],
        cwd=clone,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": str(base)},
    )
    assert child.returncode == 2
    assert child.stderr == (
        f"demo.sh: needs Python 3.11 to 3.13, but {base} {found}; "
        "name another: PYTHON=python3.12 bash scripts/demo.sh\n"
    )


def test_build_engines_explains_itself() -> None:
    script = ROOT / "scripts/build_engines.sh"
    child = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert child.returncode == 2
    assert "TRUNK DRAFT BUNDLE" in child.stderr


def test_build_engines_makes_a_bundle(tmp_path: Path) -> None:
    from eagle_chain.engines.manifest import Manifest
    from tests.toy_pair import write_pair

    pair = write_pair(tmp_path, layers=4, aux=[0, 1, 2])
    words = [*map(str, pair), str(tmp_path / "bundle"), "--aux-layers", "0,1,2"]
    child = subprocess.run(
        ["bash", str(ROOT / "scripts/build_engines.sh"), *words, "--capacity", "64"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "wrote" in child.stdout
    assert "plans    none" in child.stdout
    assert Manifest.load(tmp_path / "bundle").options.capacity == 64


STOPPED = f"""#!{sys.executable}
import signal, sys, time
def stop(number, frame):
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, stop)
try:
    print("begun", sys.argv[2], flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.2)
    print("cleaned up", flush=True)
    sys.exit(7)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_build_engines_passes_signals_on(clone: Path, name: str) -> None:
    """SIGTERM to the script alone, Ctrl-C to all that run in the terminal."""
    python = clone / ".venv/bin/python"
    python.write_text(STOPPED)
    child = subprocess.Popen(
        ["bash", "scripts/build_engines.sh", "trunk", "draft", "bundle"],
        cwd=clone,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # ignored in the background
    )
    assert child.stdout is not None
    begun = child.stdout.readline()
    (os.kill if name == "SIGTERM" else os.killpg)(child.pid, getattr(signal, name))
    rest, _ = child.communicate(timeout=20)
    assert (begun, rest, child.returncode) == ("begun eagle_chain.export\n", "cleaned up\n", 7)
