"""The exactness certificate: what it says of a sound engine, of planted faults and of bad input.

Faults are planted behind the trunk's session, where a faulty backend would make them. Oracles: the
chain's own rounds counted by hand, NumPy's quantile, examples worked out on paper.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_chain.engines.cli import main
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import Manifest
from eagle_chain.runtime import Tokenizer, load
from eagle_chain.runtime.buffers import Buffer, HostBuffer
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.exactness import Differences, Script, before_repeat, decode_plainly
from eagle_chain.runtime.ort import OrtSession
from eagle_chain.runtime.prompts import cut_prompts, read_text
from eagle_chain.runtime.session import Binding
from tests.toy_pair import exported, write_pair

PROMPTS, LENGTH, NEW, WIDTH, CAPACITY = 3, 8, 30, 5, 48
SIZES = ("--prompts", "3", "--prompt-tokens", "8", "--max-new-tokens", "30", "--threads", "1")
TEXT = "The quick brown fox jumps over the lazy dog, and then some more of it comes."

Arrays = dict[str, np.ndarray[Any, Any]]
Fault = Callable[[Arrays], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bundles of one pair, `bundle` with logits and `bare` without, and a text."""
    folder = tmp_path_factory.mktemp("verify")
    pair = write_pair(folder, layers=4, aux=[0, 1, 3], tokenizer=True)
    flags = "--capacity", str(CAPACITY), "--aux-layers", "0,1,3"
    exported(pair, folder / "bundle", *flags, "--debug", "logits")
    exported(pair, folder / "bare", *flags)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Let a function loose on the arrays of every trunk call that has run."""

    def install(fault: Fault) -> None:
        def bind(self: OrtSession, tensors: Mapping[str, Buffer]) -> Binding:
            binding = original(self, tensors)
            return Faulty(binding, tensors, fault) if self.spec.name == "trunk" else binding

        monkeypatch.setattr(OrtSession, "bind", bind)

    original = OrtSession.bind
    return install


class Faulty:
    """A binding whose results are tampered with."""

    def __init__(self, binding: Binding, tensors: Mapping[str, Buffer], fault: Fault) -> None:
        self.binding, self.fault, self.arrays = binding, fault, Arrays()
        for name, buffer in tensors.items():
            assert isinstance(buffer, HostBuffer)
            self.arrays[name] = buffer.array

    def run(self) -> None:
        """Run, then tamper."""
        self.binding.run()
        if self.arrays["rows"][0] > 1:  # a single row is plain decoding
            self.fault(self.arrays)


def verify(folder: Path, *words: str, bundle: str = "bundle") -> int:
    text = [] if "--text" in words else ["--text", str(folder / "text.txt")]
    return main(["verify", str(folder / bundle), *text, *SIZES, *words])


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def prompts(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer(folder / "bundle")
    return cut_prompts(read_text(folder / "text.txt"), tokenizer, count=PROMPTS, length=LENGTH)


# a sound engine -------------------------------------------------------------------------------


def test_a_sound_engine_is_certified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--rollback", "log,replay", "--draft-kv", "kept,scratch", "--json")
    capsys.readouterr()
    assert verify(folder, *words) == 0
    found = report(capsys)
    assert (found["passed"], found["exact"], found["verdict"]) == (True, True, "exact")
    assert found["largest_logit_difference"] == 0
    ways = {(r["drafter"], r["k"], r["rollback"], r["draft_kv"]) for r in found["runs"]}
    assert (
        len(ways) == len(found["runs"]) == 4 * (2 + 2 * 2 + 2 * 2 + 2)
    )  # scripted, eagle, mtp, ngram
    assert {way[1] for way in ways} == {1, 2, 3, 4}
    for run in found["runs"]:
        assert run["tokens"] == found["plain"]["tokens"] == PROMPTS * NEW
        assert run["mismatches"] == [] and run["bound"] == 0
        if run["drafter"] == "scripted":
            counts = run["accepted_counts"]
            assert run["unplanned_counts"] == 0
            assert len(counts) == run["k"] + 1 and max(counts) - min(counts) <= 1
    assert found["tokens"] == len(ways) * PROMPTS * NEW


def test_the_certificate_names_what_it_is_about(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(folder, "-k", "1", "--drafters", "scripted", "--json") == 0
    found = report(capsys)
    bundle = folder / "bundle"
    for name, digest in {
        "manifest.json": found["bundle"]["manifest_sha256"],
        **found["bundle"]["graphs_sha256"],
        **found["bundle"]["weights_sha256"],
    }.items():
        assert digest == hashlib.sha256((bundle / name).read_bytes()).hexdigest()
    settings = found["settings"]
    assert settings["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert (settings["backend"], settings["threads"]) == ("onnxruntime-cpu", 1)
    assert {"python", "eagle-chain", "numpy", "onnxruntime"} <= set(found["versions"])
    assert found["bundle"]["options"]["width"] == WIDTH
    assert "lazy dog" not in json.dumps(found)  # the text itself stays at home


def test_acceptance_is_that_of_the_chain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder, "-k", "3", "--drafters", "eagle", "--json") == 0
    run = report(capsys)["runs"][0]
    chain = load(folder / "bundle", threads=1)
    rounds = []
    for prompt in prompts(folder):
        emitted = 0
        for round in chain.rounds(prompt, max_new_tokens=NEW, k=3):
            if emitted and NEW - emitted > 3:  # the budget has room for all guesses
                rounds.append(round)
            emitted += len(round.tokens)
    want = run["acceptance"]
    assert want["rounds"] == len(rounds)
    assert want["tokens_per_pass"] == sum(len(r.tokens) for r in rounds) / len(rounds)
    shares = [sum(r.accepted > j for r in rounds) / len(rounds) for j in range(3)]
    assert want["by_position"] == shares
    assert 0 < run["before_repeat"]["rounds"] <= len(rounds)


def test_people_get_a_table_and_a_verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert verify(folder, "-k", "1,4") == 0
    output = capsys.readouterr().out
    assert f"{folder / 'text.txt'}: plain text\n" in output
    assert output.count("scripted  ") == output.count("eagle     ") == 2
    assert f"exact: all {8 * PROMPTS * NEW} tokens are those of plain greedy decoding" in output


# planted faults -------------------------------------------------------------------------------


def another_choice(arrays: Arrays) -> None:
    arrays["next_ids"][0] = (arrays["next_ids"][0] + 1) % 512


def wrong_state(arrays: Arrays) -> None:
    arrays["layers.0.S.next"][:] *= 1.5


def no_numbers(arrays: Arrays) -> None:
    if arrays["position"][0] > LENGTH:
        for name in arrays:
            if name.endswith(".S.next"):
                arrays[name][:] = np.nan


@pytest.mark.parametrize("fault", [another_choice, wrong_state, no_numbers])
@pytest.mark.parametrize("bundle", ["bundle", "bare"])
def test_a_fault_of_the_engine_fails(
    folder: Path,
    plant: Callable[[Fault], None],
    capsys: pytest.CaptureFixture[str],
    fault: Fault,
    bundle: str,
) -> None:
    plant(fault)
    capsys.readouterr()
    assert verify(folder, "-k", "2", "--drafters", "scripted", "--json", bundle=bundle) == 1
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert (found["passed"], found["exact"], found["verdict"]) == (False, False, "failed")
    run = found["runs"][0]
    assert not run["passed"] and run["broken_off"] and len(run["mismatches"]) == 2
    first = run["mismatches"][0]
    assert not first["within_bound"] and first["plain"] != first["chain"]
    assert f"prompt 0, position {first['position']}: plain {first['plain']} " in output.err
    assert ("--debug logits" in output.err) == (bundle == "bare")
    assert "FAILED: 2 of" in output.err


@pytest.mark.parametrize("rollback", ["log", "replay"])
def test_a_rollback_that_keeps_one_row_too_few_fails(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rollback: str,
) -> None:
    def feed(self: Cache, ids: list[int]) -> None:
        original(self, ids)
        self.inputs[self.parity]["kept"].write(max(min(1, self.kept), self.kept - 1))

    original = Cache.feed
    monkeypatch.setattr(Cache, "feed", feed)
    words = ("-k", "4", "--drafters", "scripted", "--rollback", rollback, "--json")
    assert verify(folder, *words) == 1
    assert report(capsys)["mismatches"] > 0


def test_an_accepted_count_that_is_too_low_fails_though_the_tokens_are_right(
    folder: Path, plant: Callable[[Fault], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def timid(arrays: Arrays) -> None:
        arrays["accepted"][0] = max(0, arrays["accepted"][0] - 1)

    plant(timid)
    capsys.readouterr()
    assert verify(folder, "-k", "3", "--drafters", "scripted", "--json") == 1
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert found["exact"] and not found["passed"] and found["verdict"] == "failed"
    assert found["runs"][0]["unplanned_counts"] > 0
    assert "not as many drafts were accepted as the script had right" in output.err


@pytest.mark.parametrize("promised", [True, False])
def test_a_state_off_by_a_millionth_fails_where_the_same_bits_are_promised(
    folder: Path,
    plant: Callable[[Fault], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    promised: bool,
) -> None:
    def nudge(arrays: Arrays) -> None:
        arrays["layers.0.S.next"][:] *= 1 + 1e-6

    if not promised:
        monkeypatch.setattr("eagle_chain.runtime.verify.BIT_EXACT", frozenset[str]())
    plant(nudge)
    capsys.readouterr()
    assert verify(folder, "-k", "4", "--drafters", "scripted", "--json") == promised
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert found["exact"] and 0 < found["largest_logit_difference"] < 1e-3
    assert found["verdict"] == ("failed" if promised else "exact")
    assert ("a row depends on its neighbours" in output.err) == promised


def margins(folder: Path) -> list[float]:
    """Plain's top-2 margins at tokens that a verify call decides, ascending."""
    chain = load(folder / "bundle", drafter="none", threads=1)
    rows = [row for p in prompts(folder) for row in decode_plainly(chain, p, NEW).logits[1:-1]]
    return sorted(float(np.diff(np.partition(row, -2)[-2:])[0]) for row in rows)


def near_ties(upto: float, noise: float) -> Fault:
    """Noise on the logits, and the second choice wherever it trails by `upto` at most."""
    random = np.random.default_rng(0)

    def fault(arrays: Arrays) -> None:
        rows, logits = int(arrays["rows"][0]), arrays["logits"]
        for row in logits[:rows]:
            second, first = row.argsort()[-2:]
            if row[first] - row[second] <= upto * 1.001:
                row[first], row[second] = row[second], row[first]
        logits += noise * random.standard_normal(logits.shape, np.float32)
        arrays["next_ids"][:rows] = logits[:rows].argmax(1)
        right = [a == b for a, b in zip(arrays["ids"][1:rows], arrays["next_ids"], strict=False)]
        arrays["accepted"][0] = (*right, False).index(False)

    return fault


@pytest.mark.parametrize(
    ("ties", "noisy", "code", "verdict", "where"),
    [
        (1, True, 0, "within the bound", "within the bound"),
        (1, False, 1, "failed", "beyond the bound"),
        (4, True, 1, "failed", "more than one token in 1000 differs"),
    ],
    ids=["as_close_as_the_noise", "closer_than_no_noise_explains", "too_many"],
)
def test_a_near_tie_needs_noise_that_explains_it(
    folder: Path,
    plant: Callable[[Fault], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ties: int,
    noisy: bool,
    code: int,
    verdict: str,
    where: str,
) -> None:
    monkeypatch.setattr("eagle_chain.runtime.verify.BIT_EXACT", frozenset[str]())
    margin = margins(folder)[ties - 1]
    plant(near_ties(margin, margin / 10 if noisy else 0))
    capsys.readouterr()
    assert verify(folder, "-k", "4", "--drafters", "scripted", "--json") == code
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert (found["verdict"], found["exact"]) == (verdict, False)
    run = found["runs"][0]
    assert len(run["mismatches"]) == min(ties, 2)
    assert where in output.err
    if ties == 1:
        assert run["tokens"] == PROMPTS * NEW  # a mismatch does not end the comparison
        mismatch = run["mismatches"][0]
        assert mismatch["margin"] == mismatch["gap"] == pytest.approx(margin)
        assert mismatch["within_bound"] == noisy == (run["bound"] > margin)


# parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4, 8])
def test_a_script_is_right_then_wrong_once_then_right(folder: Path, k: int) -> None:
    script = Script(load(folder / "bundle", drafter="none"))
    script.truth = range(20)
    counts = Counter[int]()
    for _ in range(3 * (k + 1)):
        drafts = script.propose(0, k)
        wrong = [i for i, draft in enumerate(drafts) if draft != 1 + i]
        assert len(drafts) == k and wrong == [script.planned][: k - script.planned]
        counts[script.planned] += 1
    assert counts == dict.fromkeys(range(k + 1), 3)
    script.truth = range(2)
    assert len(script.propose(0, k)) == 1  # plain has ended: there is no more to know


def test_the_bound_is_four_times_the_percentile() -> None:
    random = np.random.default_rng(0)
    ours, theirs = random.standard_normal((2, 40, 500)).astype(np.float32)
    differences = Differences()
    for a, b in zip(ours, theirs, strict=True):
        differences.add(a, b)
    want = 4 * np.quantile(np.abs(ours - theirs), 0.999)
    assert differences.bound == pytest.approx(want, rel=0.01)
    assert differences.bound <= want * 1.001
    assert differences.largest == np.abs(ours - theirs).max()
    same = Differences()
    same.add(ours[0], ours[0])
    assert same.bound == same.largest == 0


@pytest.mark.parametrize(
    ("prompt", "tokens", "want"),
    [
        (range(5), range(5, 40), 35),
        (range(12), [*range(50, 60), *range(12), 99], 10),
        (range(3), [7] * 30, 1),
        (range(3), [*range(20, 32), *range(20, 32)], 12),
        ([7] * 30, range(10), 10),
        (range(3), [], 0),
    ],
    ids=["never", "repeats_the_prompt", "one_token", "a_phrase", "only_the_prompt", "nothing"],
)
def test_where_a_text_starts_to_repeat(prompt: Any, tokens: Any, want: int) -> None:
    assert before_repeat(list(prompt), list(tokens)) == want


def test_prompts_are_evenly_spaced_and_stay_inside_their_document(
    folder: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(folder / "bundle")
    path = tmp_path / "lines"
    documents = ["abcdefgh", "xy", "ABCDEF"]
    lines = [{"text": documents[0]}, {"t": documents[1]}, {"t": documents[2], "c": 1}]
    path.write_text("\ufeff" + "\n\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    file = read_text(path)
    assert (file.kind, file.documents) == ("JSON lines", documents)
    cut = cut_prompts(file, tokenizer, count=4, length=4)
    assert [tokenizer.decode(ids) for ids in cut] == ["abcd", "cdef", "efgh", "BCDE"]
    cut = cut_prompts(file, tokenizer, count=8, length=4)  # every place there is
    assert len({tuple(ids) for ids in cut}) == 8
    cut = cut_prompts(file, tokenizer, count=3, length=4, prefix="<|im_start|>")
    assert {ids[0] for ids in cut} == set(tokenizer.encode("<|im_start|>"))
    assert {len(ids) for ids in cut} == {4}


def test_plain_text_may_look_like_json(tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    for text in ('{\n  "text": "a"\n}', "[1, 2]", '{"title": "b"}', "[" * 100_000):
        path.write_text(text)
        assert (read_text(path).kind, read_text(path).documents) == ("plain text", [text])
    path.write_text('{"text": "a\\ud800"}')
    assert read_text(path).documents == ["a?"]


# bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--text", "/nonexistent"], "/nonexistent: cannot be read (No such file"),
        (["--text", "EMPTY"], "has no text in it"),
        (["--text", "LATIN1"], "is not UTF-8 text (byte 1)"),
        (["--text", "BROKEN"], 'line 2 is not a JSON object with its text in "text" or "t"'),
        (["--text", "SHORT"], "room for 0 different prompts of 8 tokens (it has 5 tokens)"),
        (["--text", "LINES"], "(the longest of 2 documents has 7)"),
        (["--prompts", "90"], "room for 69 different prompts"),
        (["--prefix", "12345678"], "the prefix has 8 tokens"),
        (["--prompts", "0"], "--prompts is 0, expected 1 or more"),
        (["--prompt-tokens", "-1"], "--prompt-tokens is -1"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--prompt-tokens", "49"], "more than the bundle's capacity of 48"),
        (["--max-new-tokens", "41"], "prompts of 8 tokens and 41 new ones take more"),
        (["-k", "1,5"], "-k has '5', expected some of 1, 2, 3, 4"),
        (["-k", "two"], "-k has 'two'"),
        (["--drafters", "scripted,magic"], "--drafters has 'magic', expected some of scripted,"),
        (["--drafters", ""], "--drafters has ''"),
        (["--rollback", "undo"], "--rollback has 'undo', expected some of log, replay"),
        (["--draft-kv", "kept,ring"], "--draft-kv has 'ring'"),
        (["--threads", "0"], "threads is 0"),
        (["--backend", "abacus"], "invalid choice"),
    ],
    ids=lambda value: "_".join(value)[:30] if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str,
) -> None:
    files = {
        "EMPTY": b" \n\n",
        "LATIN1": b"h\xe4llo",
        "BROKEN": b'{"t": "some text"}\n{"t": 3}\n',
        "SHORT": b"hello",
        "LINES": b'{"t": "abc"}\n{"t": "abcdefg"}\n',
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    words = [str(tmp_path / word) if word in files else word for word in words]
    capsys.readouterr()
    assert verify(folder, *words) == 2
    output = capsys.readouterr()
    assert expected in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_a_folder_that_is_no_bundle(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder, bundle="nowhere") == 2
    assert "no such folder, expected a bundle" in capsys.readouterr().err
    assert verify(folder, bundle="trunk") == 2
    assert "is not a bundle" in capsys.readouterr().err


def test_a_bundle_without_a_draft_has_fewer_drafters(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = dataclasses.replace(Manifest.load(folder / "bundle"), draft=None)
    monkeypatch.setattr(Manifest, "load", staticmethod(lambda folder: alone))
    assert verify(folder, "--drafters", "scripted,eagle") == 2
    assert "has no eagle, so that only --drafters scripted,mtp,ngram" in capsys.readouterr().err
    assert verify(folder, "-k", "2", "--json") == 0
    assert [run["drafter"] for run in report(capsys)["runs"]] == [
        "scripted",
        "mtp",
        "ngram",
    ]


def test_a_trunk_that_gives_no_numbers_is_bad_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(self: Any, prompt: Any, **options: Any) -> Any:
        raise FloatingPointError("the trunk's logits at position 3 are not finite")

    monkeypatch.setattr("eagle_chain.runtime.chain.Chain.rounds", nothing)
    assert verify(folder) == 2
    assert "prompt 0: the trunk's logits at position 3 are not finite" in capsys.readouterr().err


def test_a_text_is_read_before_engines_are_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("engines are loaded last: that can take minutes")

    monkeypatch.setattr("eagle_chain.runtime.verify.open_engines", never)
    assert verify(folder, "--text", "/nonexistent") == 2
    assert verify(folder, "--prompts", "1000") == 2
    with pytest.raises(InputError):
        read_text(folder)
