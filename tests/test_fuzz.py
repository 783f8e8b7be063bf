"""Damaged input of every kind, for as long as CI has time: success or one sentence, nothing else.

`tests.fuzz` has the targets and their mutators; it runs here for a third of a second each, the same
inputs every time, and by hand for hours (docs/reliability.md). What is not a file comes from
hypothesis.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_chain.engines.cli import main
from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.fields import parse_json
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.strict_json import decode
from eagle_chain.runtime import Tokenizer, open_engines
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.prompts import cut_prompts, read_text
from tests.faults import SMALL, SMALL_DRAFT
from tests.fuzz import PIECES, TARGETS
from tests.toy_pair import draft_config, trunk_config, write_pair

ROOT = Path(__file__).parent.parent
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0.3"))  # of a processor, for each target
EXAMPLES = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "60")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
PEAK = 1000  # MB; an untouched command takes some 250


def test_no_input_ends_in_anything_but_success_or_a_sentence(tmp_path: Path) -> None:
    """Every target, in processes with a limit on memory and one on time."""
    words = [sys.executable, "-m", "tests.fuzz", "--seconds", str(SECONDS)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280)
    report: dict[str, dict[str, Any]] = json.loads(done.stdout)
    assert {name: r["findings"] for name, r in report.items() if r["findings"]} == {}
    assert done.returncode == 0
    assert report.keys() == TARGETS.keys()
    assert all(r["inputs"] > 0 and r["peak_mb"] < PEAK for r in report.values())
    assert sum(r["refused"] for r in report.values()) > 150


# The fuzzer itself ---------------------------------------------------------------------------

FAULTS = {
    "a traceback": ("raise KeyError('x')", "KeyError"),
    "another exit code": ("return 3", "exit code 3"),
    "two sentences": ("print('eagle-chain: a\\neagle-chain: b'); return 2", "not one sentence"),
    "a crash": ("os.kill(os.getpid(), 11)", "SIGSEGV"),
    "all memory": ("bytearray(1 << 40)", "MemoryError"),
    "a hang": ("time.sleep(60)", "nothing for 1 seconds"),
    "half an output": (
        "open(folder / 'out', 'w'); assert False, 'left something'",
        "left something",
    ),
}


def test_the_fuzzer_finds_what_it_is_for(tmp_path: Path) -> None:
    runs = "\n".join(
        f"def run_{i}(folder):\n    {body}\n    return 0"
        for i, (body, _) in enumerate(FAULTS.values())
    )
    code = (
        f"import os, sys, time, json, pathlib\nfrom tests import fuzz\n{runs}\n"
        "fuzz.PATIENCE, found = 1, []\n"
        "base = pathlib.Path(sys.argv[1])\n"
        "(base / 'world/bundle').mkdir(parents=True)\n"
        "for name in ('f', 'bundle/manifest.json'): (base / 'world' / name).write_text('x')\n"
        f"for i in range({len(FAULTS)}):\n"
        "    run = globals()[f'run_{i}']\n"
        "    fuzz.TARGETS = {'x': fuzz.Target('f', lambda rng, content: content, run)}\n"
        "    found.append(fuzz.fuzz('x', base, 7, 1, 5))\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    for report, (_, words) in zip(json.loads(done.stdout), FAULTS.values(), strict=True):
        assert report["inputs"] == 1
        [[seed, finding]] = report["findings"]
        assert seed == 7 and words in finding


# Values that are no file ---------------------------------------------------------------------


@EXAMPLES
@given(JSON)
def test_any_json_is_a_config_or_one_error(data: Any) -> None:
    for good in (trunk_config(8), draft_config(trunk_config(8))):
        for key in [*good, "text_config"]:
            changed = {**good, key: data}
            try:
                trunk = TrunkConfig.from_json(changed, "config.json")
                DraftConfig.from_json(changed, trunk, "config.json")
            except InputError as error:
                assert str(error).startswith("config.json")


@EXAMPLES
@given(JSON)
def test_any_json_is_a_manifest_or_one_error(data: Any) -> None:
    with pytest.raises(InputError):
        decode(Manifest, data)
    with pytest.raises(InputError):
        decode(Manifest, {"format": data, "options": data, "plans": data})


@EXAMPLES
@given(st.text() | st.lists(st.sampled_from([p.decode("latin-1") for p in PIECES])).map("".join))
def test_any_text_is_json_or_a_value_error(text: str) -> None:
    try:
        want = json.loads(text)
    except (ValueError, RecursionError):
        with pytest.raises(ValueError):
            parse_json(text)
    else:
        assert json.dumps(parse_json(text)) == json.dumps(want)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    sizes: dict[str, Any] = {"sizes": SMALL, "draft_sizes": SMALL_DRAFT}
    pair = write_pair(folder, layers=4, aux=[0, 1, 3], tokenizer=True, extras=False, **sizes)
    words = [*map(str, pair), "-o", str(folder / "bundle"), "--aux-layers", "0,1,3"]
    assert main(["export", *words, "--capacity", "32"]) == 0
    return folder / "bundle"


@pytest.fixture(scope="module")
def chain(bundle: Path) -> Chain:
    return open_engines(bundle, threads=1).chain()


ODD = st.none() | st.text(max_size=2) | st.floats() | st.integers(-(2**70), 2**70)
IDS = st.lists(st.integers(0, 299), max_size=40) | st.lists(st.integers(-3, 305) | ODD, max_size=5)


@EXAMPLES
@given(
    ids=IDS | st.binary(max_size=5) | ODD,
    budget=st.none() | st.integers(-1, 6) | ODD,
    k=st.none() | st.integers(-1, 6) | ODD,
    stops=st.none() | st.lists(st.integers(-5, 400), max_size=3) | ODD,
)
def test_any_request_is_answered_or_refused(
    chain: Chain, ids: Any, budget: Any, k: Any, stops: Any
) -> None:
    try:
        result = chain.generate(ids, max_new_tokens=budget, k=k, stop_ids=stops)
    except InputError as error:
        assert str(error)
    else:
        want = chain.generate(list(ids), max_new_tokens=budget, k=0, stop_ids=stops)
        assert result.tokens == want.tokens and result.finish_reason == want.finish_reason


@EXAMPLES
@given(
    content=st.binary(max_size=80)
    | st.text(max_size=80).map(lambda t: t.encode("utf-8", "replace"))
)
def test_any_file_is_a_text_or_one_error(bundle: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    tokenizer = Tokenizer(bundle)
    try:
        text = read_text(path)
        prompts = cut_prompts(text, tokenizer, count=2, length=5)
    except InputError as error:
        assert str(path) in str(error)
        return
    whole = [tokenizer.encode(document) for document in text.documents]
    rows = [ids[i : i + 5] for ids in whole for i in range(len(ids) - 4)]
    assert all(prompt in rows for prompt in prompts)


@EXAMPLES
@given(st.lists(st.integers(0, 2**33), max_size=40))
def test_any_ids_stream_as_they_decode(bundle: Path, ids: list[int]) -> None:
    tokenizer = Tokenizer(bundle)
    try:
        want = tokenizer.decode(ids)
    except InputError:
        return
    stream = tokenizer.stream()
    got = "".join([*map(stream.push, ids), stream.end()])
    assert got == want or "\ufffd" in want
