"""An export over a bundle with TensorRT plans: those that still fit stay, of the others it says so.

The oracle is `build`, which answers that there is nothing to do only if every plan is the one that
it would make. The faults that may happen meanwhile are in `tests.faults`.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_chain.engines.cli import main
from eagle_chain.engines.manifest import Manifest
from tests.standin import standins
from tests.toy_pair import write_pair

FLAGS = ("--capacity", "32", "--aux-layers", "0,1,3", "--prefill", "0", "--no-mtp")
PLACE = "plans/tensorrt-10.9.0.34-Stand-in-GPU"


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Any]:
    with standins() as runtime:
        yield runtime


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), layers=4, aux=[0, 1, 3])


@pytest.fixture(scope="module")
def built(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles with plans of both kinds."""
    made = {}
    for kind in ("bound", "baked"):
        made[kind] = tmp_path_factory.mktemp(kind) / "b"
        with standins():
            assert main(["export", *map(str, pair), "-o", str(made[kind]), *FLAGS]) == 0
            assert main(["build", str(made[kind]), "--weights", kind]) == 0
    return made


@pytest.fixture
def bundle(built: dict[str, Path], tmp_path: Path) -> Path:
    return copied(built["bound"], tmp_path)


def copied(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "b", symlinks=True))


def again(
    capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], bundle: Path, *flags: str
) -> tuple[str, list[str]]:
    """What an export over the bundle says of plans, and which it says are deleted."""
    capsys.readouterr()
    assert main(["export", *map(str, pair), "-o", str(bundle), *FLAGS, *flags, "--json"]) == 0
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("plans ")]
    return "\n".join(lines), json.loads(output.out)["deleted_plans"]


def is_built(capsys: pytest.CaptureFixture[str], bundle: Path, kind: str = "bound") -> bool:
    capsys.readouterr()
    assert main(["build", str(bundle), "--weights", kind, "--dry-run"]) == 0
    return "are up to date" in capsys.readouterr().out


def files(bundle: Path) -> dict[str, bytes]:
    found = sorted(path for path in (bundle / "plans").rglob("*") if path.is_file())
    return {str(path.relative_to(bundle)): path.read_bytes() for path in found}


def test_plans_of_the_same_graphs_stay(
    pair: tuple[Path, Path], bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, plans = files(bundle), Manifest.load(bundle).plans
    assert before and any(name.endswith(".timing.cache") for name in before)
    for _ in range(2):
        words, deleted = again(capsys, pair, bundle, "--weights", "copy")
        assert words == f"plans    {PLACE}: kept, the graphs are the same" and deleted == []
        assert files(bundle) == before and Manifest.load(bundle).plans == plans
        assert is_built(capsys, bundle)
    assert main(["build", str(bundle), "--force"]) == 0 and is_built(capsys, bundle)
    words, _ = again(capsys, pair, bundle)
    assert "~: kept" in words and is_built(capsys, bundle)


def test_plans_of_other_graphs_go_with_a_word(
    pair: tuple[Path, Path], bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = Manifest.load(bundle).plans
    words, deleted = again(capsys, pair, bundle, "--width", "3")
    assert words.startswith(f"plans    {PLACE}: deleted, they are of other graphs; build again: ")
    assert words.endswith(f"eagle-chain build {bundle} --backend tensorrt")
    assert deleted == sorted(plans) and not files(bundle) and not Manifest.load(bundle).plans
    assert again(capsys, pair, bundle) == ("", [])


@pytest.mark.parametrize("kind", ["bound", "baked"])
def test_other_weights_matter_where_they_are_baked_in(
    built: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    bundle = copied(built[kind], tmp_path)
    other = write_pair(tmp_path / "other", layers=4, aux=[0, 1, 3], seed=7)
    words, deleted = again(capsys, other, bundle)
    assert (": kept" in words, not deleted) == ((True, True) if kind == "bound" else (False, False))
    assert is_built(capsys, bundle, kind) == (kind == "bound")


def test_what_is_typed_builds_the_same_kind_of_plans(
    pair: tuple[Path, Path],
    built: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle = copied(built["bound"], tmp_path)
    options = ["--weights", "baked", "--level", "3", "--workspace", "2GB"]
    assert main(["build", str(bundle), *options]) == 0
    words, _ = again(capsys, pair, bundle, "--width", "3")
    assert "deleted, they are of other graphs or weights; build again: eagle-chain " in words
    assert main(shlex.split(words.partition("eagle-chain ")[2])) == 0
    capsys.readouterr()
    assert main(["build", str(bundle), *options, "--dry-run"]) == 0
    assert "are up to date" in capsys.readouterr().out


@pytest.mark.parametrize("harm", ["link", "folder", "gone", "elsewhere", "engine"])
def test_what_a_build_did_not_put_there_is_not_kept(
    pair: tuple[Path, Path], bundle: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    trunk, outside = bundle / PLACE / "trunk.plan", bundle.parent / "outside"
    if harm == "link":
        trunk.rename(outside)
        trunk.symlink_to(outside)
    elif harm == "folder":
        (bundle / "plans").rename(outside)
        (bundle / "plans").symlink_to(outside)
    elif harm == "gone":
        trunk.unlink()
    else:
        text = (bundle / "manifest.json").read_text()
        old, new = f'"{PLACE}/trunk.plan"', '"weights/trunk/trunk.plan"'
        new = new if harm == "elsewhere" else f'"{PLACE}/other.plan"'
        assert old in text
        (bundle / "manifest.json").write_text(text.replace(old, new))
    words, deleted = again(capsys, pair, bundle)
    assert "deleted" in words and deleted and not Manifest.load(bundle).plans
    assert not files(bundle) and (harm not in ("link", "folder") or outside.exists())
