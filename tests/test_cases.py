"""What others hit (docs/reliability.md lists the reports), where no other file has the test."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomllib
from packaging.requirements import Requirement

from eagle_chain.engines.cli import main
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import MANIFEST, Manifest
from eagle_chain.runtime import load, open_engines
from eagle_chain.runtime.buffers import HostMemory
from eagle_chain.runtime.ort import OrtSession
from tests.faults import SMALL, SMALL_DRAFT
from tests.standin import standins
from tests.toy_pair import draft_parts, exported, save, trunk_parts, write_pair, write_tokenizer

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = sorted(p for name in ("engines", "export", "runtime") for p in (ROOT / name).glob("*.py"))
ALIASES = {  # of NumPy: gone in 2.0, or new in it
    *("bool8", "object0", "int0", "uint0", "float_", "complex_", "string_", "unicode_", "product"),
    *("cumproduct", "in1d", "row_stack", "trapz", "alltrue", "sometrue", "Inf", "NaN", "infty"),
    *("bool", "long", "ulong", "astype", "concat", "isdtype", "permute_dims", "unstack", "matvec"),
    *("unique_values", "vecdot", "cumulative_sum", "bitwise_count", "matrix_transpose", "pow"),
}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    sizes: dict[str, Any] = {"sizes": SMALL, "draft_sizes": SMALL_DRAFT}
    return write_pair(tmp_path, layers=4, aux=[0, 1, 3], tokenizer=True, **sizes)


def export(pair: tuple[Path, Path], bundle: Path, *flags: str) -> Path:
    return exported(pair, bundle, "--capacity", "32", "--aux-layers", "0,1,3", *flags)


# Packaging -------------------------------------------------------------------------------------


def test_every_library_has_a_lower_and_an_upper_bound() -> None:
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *itertools.chain.from_iterable(extras)]
    wanted = [Requirement(line) for line in lines]
    ours = [r for r in wanted if r.name != "eagle-chain"]
    assert len(ours) > 15
    for requirement in ours:
        kinds = {part.operator for part in requirement.specifier}
        assert ">=" in kinds and "<" in kinds, requirement


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_no_name_that_one_numpy_of_two_lacks(source: Path) -> None:
    found = {
        node.attr
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("np", "numpy")
    }
    assert not found & ALIASES


# Weights beside graphs -------------------------------------------------------------------------


def test_a_bundle_builds_wherever_it_was_moved(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are looked up beside the graph, not in the current folder."""
    here = export(pair, tmp_path / "here", "--weights", "copy")
    there = tmp_path / "a" / "b" / "there"
    there.parent.mkdir(parents=True)
    plans = []
    with standins():
        assert main(["build", str(here), "--weights", "baked"]) == 0
        plans.append({p.name: p.read_bytes() for p in here.glob("plans/*/*.plan")})
        shutil.rmtree(here / "plans")
        data = json.loads((here / MANIFEST).read_text())
        (here / MANIFEST).write_text(json.dumps({**data, "plans": {}}))
        here.rename(there)
        for folder in pair:
            shutil.rmtree(folder)
        monkeypatch.chdir("/")
        assert main(["build", str(there), "--weights", "baked"]) == 0
        plans.append({p.name: p.read_bytes() for p in there.glob("plans/*/*.plan")})
    assert plans[0] == plans[1] and "trunk.plan" in plans[0]


def test_a_graph_moved_alone_names_the_weights_that_are_missing(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    bundle = export(pair, tmp_path / "bundle", "--weights", "copy")
    manifest = Manifest.load(bundle)
    alone = tmp_path / "alone" / "trunk.onnx"
    alone.parent.mkdir()
    shutil.copyfile(bundle / "trunk.onnx", alone)
    with pytest.raises(InputError) as caught:
        OrtSession(alone, manifest.specs["trunk"], HostMemory(), manifest.files)
    assert "weights/trunk/model.safetensors" in str(caught.value)
    assert str(alone.parent) in str(caught.value)


# Plans -----------------------------------------------------------------------------------------


def test_plans_of_another_bundle_are_refused_as_a_pair(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The draft's plans of a bundle with another width and capacity, hashes and all."""
    one = export(pair, tmp_path / "one")
    two = export(pair, tmp_path / "two", "--capacity", "48", "--width", "3")
    with standins():
        for bundle in (one, two):
            assert main(["build", str(bundle)]) == 0
        theirs = json.loads((tmp_path / "two" / MANIFEST).read_text())["plans"]
        data = json.loads((one / MANIFEST).read_text())
        for name in data["plans"]:
            if "/draft" in name:
                data["plans"][name] = theirs[name]
                shutil.copyfile(tmp_path / "two" / name, one / name)
        (one / MANIFEST).write_text(json.dumps(data))
        with pytest.raises(InputError, match=r"was built from another graph than draft\.onnx"):
            open_engines(one, "tensorrt")
        (one / MANIFEST).unlink()
        with pytest.raises(InputError, match=r"has no manifest\.json, so it is not a bundle"):
            open_engines(one, "tensorrt")


# Numbers that do not fit -----------------------------------------------------------------------


def loud(folder: Path, factor: float) -> tuple[Path, Path]:
    """A pair whose first MLP is this much louder in both of its products."""
    config, tensors = trunk_parts(layers=4, **SMALL)
    for name in tensors:
        if name.endswith(("layers.0.mlp.down_proj.weight", "layers.0.mlp.up_proj.weight")):
            tensors[name] = tensors[name] * factor
    trunk = save(folder / "trunk", config, tensors)
    return trunk, save(folder / "draft", *draft_parts(config, aux=[0, 1, 3], **SMALL_DRAFT))


def test_an_activation_beyond_fp16_changes_no_token(tmp_path: Path) -> None:
    """Some 1e7 behind the first layer: the tokens of fp32, or an error with the position."""
    pair = loud(tmp_path, 3e3)
    answers = []
    for dtype in ("fp32", "fp16"):
        chain = load(export(pair, tmp_path / dtype, "--dtype", dtype), threads=1)
        try:
            answers.append(chain.generate([1, 2, 3], max_new_tokens=4, stop_ids=()).tokens)
        except FloatingPointError as error:
            assert "logits at position 0 are not finite" in str(error)
            assert dtype == "fp16" and chain.cache.tokens == []
            return
    assert answers[0] == answers[1] and len(answers[0]) == 4


def test_an_activation_beyond_fp32_ends_with_its_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = loud(tmp_path, 1e25)
    write_tokenizer(pair[0])
    bundle = export(pair, tmp_path / "bundle")
    assert main(["generate", str(bundle), "--prompt", "abc", "--threads", "1"]) == 2
    error = capsys.readouterr().err
    assert "the trunk's logits at position 0 are not finite" in error and "Traceback" not in error


# The map ---------------------------------------------------------------------------------------


def test_every_case_of_the_map_has_tests_that_exist() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    assert len(rows) == len({number for number, _, _ in rows}) == 27
    for number, _, cell in rows:
        named = re.findall(r"`((?:gpu/)?\w+)::(\w+)`", cell)
        assert named, f"case {number} has no test"
        for file, test in named:
            tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text())
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert test in names, f"case {number}: {file}::{test}"
