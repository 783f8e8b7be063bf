"""The memory report against what a chain really allocates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_chain.engines import cli
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.memory import chain_needs, check_load
from eagle_chain.runtime import open_engines
from tests.toy_pair import write_pair


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    pair = write_pair(folder / "pair", layers=4, aux=[0, 1, 2])
    words = [*map(str, pair), "-o", str(folder / "bundle"), "--aux-layers", "0,1,2"]
    assert cli.main(["export", *words, "--capacity", "128,512", "--prefill", "64"]) == 0
    return folder / "bundle"


def test_a_chain_takes_what_is_reported_capacity_by_capacity(bundle: Path) -> None:
    engines = open_engines(bundle, "onnxruntime-cpu", threads=1)
    taken, allocate = [0], engines.memory.allocate

    def counted(spec: Any) -> Any:
        taken[-1] += spec.nbytes
        return allocate(spec)

    engines.memory.allocate = counted  # type: ignore[method-assign]
    chain = engines.chain()
    taken.append(0)
    chain.extend(np.random.default_rng(0).integers(0, 512, 200).tolist())
    manifest = Manifest.load(bundle)
    needs = chain_needs(manifest.specs, manifest.options, manifest.trunk)
    for size, found in zip(needs.values(), taken, strict=True):
        expected = size.total - size.scratch
        assert abs(found - expected) < 0.02 * expected
    assert needs[512].kv > 3.5 * needs[128].kv and needs[512].states == needs[128].states


def test_inspect_adds_it_up(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["inspect", str(bundle), "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["chain"].keys() == {"128", "512"} and memory["device"]["bytes"] > 0
    for parts in memory["chain"].values():
        assert parts.pop("total") == sum(parts.values())
    assert cli.main(["inspect", str(bundle)]) == 0
    words = capsys.readouterr().out
    assert "chain    up to 128 tokens: kv " in words and "enough" in words


def test_what_does_not_fit_is_refused_before_it_is_loaded(bundle: Path) -> None:
    manifest = Manifest.load(bundle)
    parts = manifest.specs, manifest.options, manifest.trunk
    needed = chain_needs(*parts)[128].total
    check_load(*parts, 1000, 1000 + needed, "GPU")
    with pytest.raises(InputError, match=r"a chain of 128 tokens .*, GPU has .* free: end other"):
        check_load(*parts, 1001, 1000 + needed, "GPU")
