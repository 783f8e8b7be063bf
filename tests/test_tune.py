"""`tune`: every wrong reading of the shipped draft is found, alone or in pairs, the right one kept.

Oracles: the pair as it was trained, chains that decode the same texts, tables worked out by hand.
"""

from __future__ import annotations

import errno
import json
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_chain.engines.cli import main, parser_for
from eagle_chain.engines.config import DraftConfig
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import Manifest, Plan
from eagle_chain.engines.overrides import NONE, DraftOverrides
from eagle_chain.runtime import Tokenizer, evidence, open_engines, ort_bound, payoff, tune
from eagle_chain.runtime import trial as trial_module
from eagle_chain.runtime.along import Found, Text, gain
from eagle_chain.runtime.evidence import ENOUGH, to_tell, too_few
from eagle_chain.runtime.exactness import Plain
from eagle_chain.runtime.payoff import confirm, fastest, speeds
from eagle_chain.runtime.prompts import cut_prompts, read_text
from eagle_chain.runtime.search import changes, every_setting, overrides_for, search, surely_better
from eagle_chain.runtime.session import Session
from eagle_chain.runtime.trial import Setting, Trial
from eagle_chain.runtime.tune_report import advice, verdict
from tests.test_demo_pair import DEMO
from tests.toy_pair import exported, write_pair

PROMPTS, LENGTH, NEW, MOST = 6, 20, 36, 4
SIZES = ("--prompts", "6", "--prompt-tokens", "20", "--max-new-tokens", "36", "--threads", "1")
PROSE = """Call me Ishmael. Some years ago - never mind how long precisely - having little or no
money in my purse, and nothing particular to interest me on shore, I thought I would sail about a
little and see the watery part of the world. It is a way I have of driving off the spleen and
regulating the circulation. Whenever I find myself growing grim about the mouth; whenever it is a
damp, drizzly November in my soul; whenever I find myself involuntarily pausing before coffin
warehouses, and bringing up the rear of every funeral I meet, I account it high time to get to sea
as soon as I can. This is my substitute for pistol and ball.
"""
RIGHT = {
    "aux_layers": (1, 3, 6),
    "rotary_dim": 16,
    "rope_theta": 1e7,
    "norm_output": False,
    "norm_before_residual": False,
}
LOW, HIGH = {"aux_layers": (0, 2, 5)}, {"aux_layers": (2, 4, 7)}
WHOLE, THETA = {"rotary_dim": 64}, {"rope_theta": 1e4}
OUTPUT, RESIDUAL = {"norm_output": True}, {"norm_before_residual": True}
MISTAKES: dict[str, dict[str, Any]] = {
    "aux layers one too low": LOW,
    "aux layers one too high": HIGH,
    "whole heads rotate": WHOLE,
    "theta": THETA,
    "norm_output": OUTPUT,
    "norm_before_residual": RESIDUAL,
    "aux layers and rotation": LOW | WHOLE,
    "aux layers, rotation and theta": HIGH | WHOLE | THETA,
    "norm_output and theta": OUTPUT | THETA,
    "norm_output and rotation": OUTPUT | WHOLE,
    "norm_output and aux layers": OUTPUT | HIGH,
    "norm_before_residual and rotation": RESIDUAL | WHOLE,
    "norm_before_residual and aux layers": RESIDUAL | LOW,
    "both norms": OUTPUT | RESIDUAL,
    "everything": LOW | WHOLE | THETA | OUTPUT | RESIDUAL,
}


def export(folder: Path, overrides: DraftOverrides = NONE, draft: bool = True) -> Path:
    pair = [str(DEMO / "trunk"), *([str(DEMO / "draft")] if draft else [])]
    words = ("--capacity", "64", "--prefill", "32", *overrides.words())
    assert main(["export", *pair, "-o", str(folder), *words]) == 0
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair as a bundle, and a text."""
    folder = tmp_path_factory.mktemp("tune")
    export(folder / "bundle")
    (folder / "text.txt").write_text(PROSE)
    return folder


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Manifest:
    return Manifest.load(folder / "bundle")


@pytest.fixture(scope="module")
def right(manifest: Manifest) -> DraftConfig:
    assert manifest.draft is not None
    assert {name: getattr(manifest.draft, name) for name in RIGHT} == RIGHT, "as it was trained"
    return manifest.draft


@pytest.fixture(scope="module")
def trial(folder: Path, manifest: Manifest, right: DraftConfig) -> Trial:
    """All settings over one trunk; each is judged once for all tests."""
    prompts = cut_prompts(
        read_text(folder / "text.txt"),
        Tokenizer(folder / "bundle"),
        count=PROMPTS,
        length=LENGTH,
        prefix="<|book|>",
    )
    drafts = every_setting(right, changes(right, right, 8))
    place = folder / "bundle", manifest, drafts, LENGTH + NEW, folder / "trial"
    trial = Trial(*place, "onnxruntime-cpu", 1)
    trial.read(prompts, NEW, lambda done: None)
    return trial


@pytest.fixture
def recorded(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command does not decode again: it judges on the trial's texts."""

    class Recorded:
        def __init__(self, *_: Any) -> None:
            self.texts, self.judged = trial.texts, dict[Setting, Found]()

        def read(self, *_: Any) -> None: ...

        def found(self, setting: Setting) -> Found:
            return self.judged.setdefault(setting, trial.found(setting))

    monkeypatch.setattr(tune, "Trial", Recorded)
    yield


def run(bundle: Path, *words: str) -> int:
    text = [] if "--text" in words else ["--text", str(bundle.parent / "text.txt")]
    return main(["tune", str(bundle), *text, *SIZES, "--prefix", "<|book|>", *words])


# what is found ----------------------------------------------------------------------------------


def tuned(trial: Trial, start: DraftConfig, filed: DraftConfig) -> DraftConfig:
    groups = changes(start, filed, 8)
    return search(start, filed, groups, lambda draft: trial.found(Setting(draft)), MOST)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_found(mistake: str, trial: Trial, right: DraftConfig) -> None:
    wrong = replace(right, **MISTAKES[mistake])
    found = tuned(trial, wrong, right)
    assert found == right
    flags = overrides_for(found, wrong, DraftOverrides(**MISTAKES[mistake]))
    assert flags == DraftOverrides(**{name: RIGHT[name] for name in MISTAKES[mistake]})


def test_the_right_setting_is_left_alone(trial: Trial, right: DraftConfig) -> None:
    assert tuned(trial, right, right) == right


def test_what_is_within_noise_is_left_alone(trial: Trial, right: DraftConfig) -> None:
    """A base of 1e6 is as good as one of 1e7 on a short text: the one that is used stays."""
    close = replace(right, rope_theta=1e6)
    assert not surely_better(trial.found(Setting(right)), trial.found(Setting(close)), MOST)
    assert tuned(trial, close, close) == close
    assert tuned(trial, close, right) == close, "even if its file has another value"
    # from elsewhere, the file's own value is taken of those that are alike
    assert tuned(trial, replace(right, **THETA), close) == close
    assert tuned(trial, replace(right, **THETA), right) == right


def test_groups_are_tried_again_from_a_better_setting(right: DraftConfig) -> None:
    """Where a wrong norm hides which rotation is right, the right norm shows it."""
    start = replace(right, **THETA, **OUTPUT)

    def judge(draft: DraftConfig) -> Found:
        wrong = sum(getattr(draft, name) != RIGHT[name] for name in ("aux_layers", "rotary_dim"))
        hidden = draft.norm_output and draft.rope_theta == 1e7  # looks worse than other bases
        plain = not draft.norm_output and draft.rope_theta != 1e7
        drafts = 4 - 2 * draft.norm_output - wrong - hidden - plain - draft.norm_before_residual
        return Found([text(40)] * 3, [[max(0, drafts)] * 39] * 3)

    asked = list[DraftConfig]()

    def counted(draft: DraftConfig) -> Found:
        asked.append(draft)
        return judge(draft)

    assert search(start, start, changes(start, right, 8), counted, MOST) == right
    assert len(set(asked)) < 72, "not every combination"


def test_what_is_taken_back_does_not_add_up(right: DraftConfig) -> None:
    """Each of two changes alone could be noise, both together are not: they are not both undone."""
    start = replace(right, **LOW, **THETA)
    accepted = {
        right: [4, 4, 4, 4],
        replace(right, **LOW): [2, 4, 4, 4],  # one standard error less than the best
        start: [3, 3, 2, 3],  # five less than the best, one less than without its layers
    }

    def judge(draft: DraftConfig) -> Found:
        ends = [text(6, fresh=1)] * 4
        return Found(ends, [[a, 0, 0, 0, 0] for a in accepted.get(draft, [0] * 4)])

    found = search(start, start, changes(start, start, 8), judge, MOST)
    assert found == replace(right, **LOW)


def test_layers_that_the_trunk_does_not_have_are_not_tried(right: DraftConfig) -> None:
    deep = replace(right, aux_layers=(0, 3, 7))
    tried = {tuple(change["aux_layers"]) for change in changes(deep, deep, 8)[0]}
    assert tried == {(0, 3, 7)}
    odd = replace(right, rotary_dim=32, rope_theta=5e5)
    filed = replace(right, rotary_dim=48, rope_theta=1e5)
    tried = {(c["rotary_dim"], c["rope_theta"]) for c in changes(odd, filed, 8)[0]}
    dims, thetas = (set(values) for values in zip(*tried, strict=True))
    assert (dims, thetas) == ({32, 48, 16, 64}, {5e5, 1e5, 1e7, 1e6, 1e4})


def test_flags_replace_what_was_given_before(right: DraftConfig) -> None:
    given = DraftOverrides((1, 3, 6), "boundaries", rope_theta=1e4)
    start = replace(right, aux_layers=(0, 2, 5), rope_theta=1e4)
    assert overrides_for(start, start, given) == given
    assert overrides_for(right, start, given) == DraftOverrides((1, 3, 6), rope_theta=1e7)


# how much text it takes -------------------------------------------------------------------------


def test_prompts_that_are_too_few_are_counted() -> None:
    assert too_few(20, ENOUGH, at_best=False) is None
    said = too_few(6, 130, at_best=False)
    assert (
        said is not None and f"130 tokens, and a mistake may pass for noise below {ENOUGH}" in said
    )
    assert "ask for 30 --prompts" in said, "650 over 130 / 6, rounded up"
    assert "at most 130 tokens" in str(too_few(6, 130, at_best=True))


def test_the_error_falls_with_the_root_of_the_prompts() -> None:
    """As many prompts as are asked for make a difference sure, and clearly fewer do not."""
    ends, worse = [text(6, fresh=1)] * 8, [[0, 0, 0, 0, 0]] * 8
    more = Found(ends, [[a, 0, 0, 0, 0] for a in (4, 0, 0, 0, 4, 0, 0, 0)])
    better, error = gain(more, Found(ends, worse), MOST)
    assert (better, error) == pytest.approx((1, (3 / 7) ** 0.5))  # variance 24 / 7, over 8
    assert to_tell(8, -better, error) == 31  # 8 x 9 x 3 / 7 is 30.9
    for times, sure in ((3, False), (4, True)):
        often = (Found(f.texts * times, f.right * times) for f in (more, Found(ends, worse)))
        assert surely_better(*often, MOST) == sure


# what is judged ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "scratch"), [(4, False), (2, False), (4, True)])
def test_rounds_are_those_of_a_chain(k: int, scratch: bool, trial: Trial, folder: Path) -> None:
    """Drafting along a finished text gives, round for round, what decoding it gives."""
    found = trial.found(Setting(trial_draft(folder), scratch))
    chain = open_engines(folder / "bundle", threads=1).chain(
        draft_kv="scratch" if scratch else "kept"
    )
    for text, walk in zip(found.texts[:2], found.accepted(k), strict=False):
        tokens, accepted = list[int](), list[int]()
        for round in chain.rounds(text.prompt, max_new_tokens=NEW, k=k):
            if not round.prompt_tokens and len(tokens) <= text.rounds(k):
                accepted.append(round.accepted)
            tokens += round.tokens
        assert tokens == text.chosen
        assert accepted == walk and len(walk) > 2


def trial_draft(folder: Path) -> DraftConfig:
    draft = Manifest.load(folder / "bundle").draft
    assert draft is not None
    return draft


def text(chosen: int, fresh: int | None = None) -> Text:
    """A text of so many chosen tokens, none of which matter."""
    return Text([0], [0] * chosen, chosen if fresh is None else fresh, np.zeros((chosen, 1)))


def test_rounds_follow_each_other() -> None:
    found = Found([text(10), text(10, fresh=4)], [[2, 0, 0, 1, 0, 4, 0, 0, 0], [0, 3, 9, 9]])
    assert found.accepted(2) == [[2, 1, 2], [0, 2]]  # starts 0 3 5, the end at 7; 0 1, the end at 4
    assert found.accepted(1) == [[1, 0, 1, 1, 0], [0, 1, 1]]  # starts 0 2 3 5 7, the end at 8
    assert found.accepted(0) == [[0] * 9, [0] * 4]
    assert found.tokens_per_pass(2) == 1 + 7 / 5
    assert found.by_position(2) == [4 / 5, 3 / 5]


def test_gain_and_its_error() -> None:
    """Three texts of one round each: the error is that of a mean of differences, 3, 1 and 2."""
    texts = [text(6)] * 3
    more, less = ([[a, 0, 0, 0, 0] for a in counts] for counts in ((4, 3, 4), (1, 2, 2)))
    ends = [replace(t, fresh=1) for t in texts]
    result = gain(Found(ends, more), Found(ends, less), 4)
    assert result == pytest.approx((2.0, (1 / 3) ** 0.5))  # variance 1 over 3
    assert surely_better(Found(ends, more), Found(ends, less), 4)  # 2 is above 3 x 0.577
    assert not surely_better(Found(ends, less), Found(ends, less), 4)


def test_plans_are_built_again_as_they_were(folder: Path, right: DraftConfig) -> None:
    """The command for each kind of plans that the export would delete, whole."""
    kinds = {
        "a/trunk.plan": Plan("0", "tensorrt-rtx", "1.7", "", "8.6 8.9", "0", "baked", ()),
        "a/draft.plan": Plan("1", "tensorrt-rtx", "1.7", "", "8.6 8.9", "0", "baked", ()),
        "b/trunk.plan": Plan("2", "tensorrt", "10", "GPU", "9.0", "0", "bound", ("--level 3",)),
    }
    manifest = replace(Manifest.load(folder / "bundle"), plans=kinds)
    now, best = Setting(replace(right, rotary_dim=64)), Setting(right)
    _, *commands, _ = advice(Path("b"), manifest, now, best, 4)["commands"]
    assert commands == [
        "eagle-chain build b --backend tensorrt --level 3",
        "eagle-chain build b --backend tensorrt-rtx --compute-capability 8.6 8.9 --weights baked",
    ]


def test_the_help_offers_what_is_taken() -> None:
    assert "tensorrt" not in parser_for("tune").format_help()


def test_a_draft_is_called_another_trunk_s_only_if_no_setting_helps() -> None:
    """Not where the best one is not surely better than one whose drafts are right."""

    def row(first: float, **marks: bool) -> dict[str, Any]:
        share = {"by_position": [first, first], "tokens_per_pass": 1.0, "behind": 0.0, "error": 0.5}
        return {"now": False, "best": False, "changed": ["--rotary-dim", "8"], **share, **marks}

    bad, good = row(0.1, now=True, best=True), row(0.6)
    assert any(
        "at most 10% of the first drafts" in s for s in verdict([bad, row(0.0)], 2, [], 1, 1)
    )
    assert not any("another trunk" in s for s in verdict([good, bad], 2, [], 1, 1))


def test_drafts_are_counted_by_what_they_cost() -> None:
    found = Found([text(40)], [[2, 1, 0] * 13])  # 3 tokens a pass from k = 2 on
    parts = {"verify": 10.0, "encoder": 0.5, "draft": 1.5, "draft_step": 1.0}
    kept = speeds(found, parts, 4, scratch=False)
    assert [row["round_ms"] for row in kept] == [10, 12, 13, 14, 15]
    assert kept[2]["tokens_per_second"] == pytest.approx(3 / 0.013)
    assert fastest(kept, 4) == 2
    scratch = speeds(found, parts, 4, scratch=True)
    assert [row["round_ms"] for row in scratch] == [10, 11.5, 12.5, 13.5, 14.5]
    dear = {name: 10.0 for name in parts}
    assert fastest(speeds(Found([text(40)], [[0] * 39]), dear, 4, scratch=False), 4) == 0
    cheap = parts | {"draft_step": 0.05}
    assert fastest(speeds(found, cheap, 4, scratch=False), 4) == 4, "no gain, no change"


def test_engines_are_timed_at_the_capacity_that_the_prompts_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two capacities the smaller one, unless the prompts are too long for it."""
    pair = write_pair(tmp_path, layers=4, aux=[0, 1, 2], tokenizer=True)
    bundle = exported(pair, tmp_path / "bundle", "--capacity", "40,96", "--aux-layers", "0,1,2")
    (tmp_path / "text.txt").write_text(PROSE)
    timed = list[tuple[int, int]]()

    class Seen(payoff.Stand):
        def __init__(self, sessions: Mapping[str, Session], capacity: int, *rest: Any) -> None:
            super().__init__(sessions, capacity, *rest)
            kv = next(t for t in sessions["trunk"].spec.all_inputs if t.name == "layers.3.key")
            timed.append((capacity, kv.shape[2]))

    monkeypatch.setattr(payoff, "Stand", Seen)
    monkeypatch.setattr(tune, "search", lambda start, *_: start)
    for new, capacity in (("20", 40), ("21", 96)):
        capsys.readouterr()
        words = ["--prompts", "2", "--prompt-tokens", "20", "--max-new-tokens", new, "--json"]
        assert main(["tune", str(bundle), "--text", str(tmp_path / "text.txt"), *words]) == 0
        output = capsys.readouterr()
        assert json.loads(output.out)["capacity"] == capacity
        assert f"the engines of capacity {capacity} take here" in output.err
    assert timed == [(40, 45), (96, 101)], "rows of KV: the capacity and the width"


# the command ------------------------------------------------------------------------------------


def test_two_mistakes_from_export_to_export(
    tmp_path: Path,
    folder: Path,
    trial: Trial,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted by options of export; the flags that are printed give what was promised."""
    converted = list[str]()
    monkeypatch.setattr(ort_bound, "_array", counting(ort_bound._array, converted))
    bundle = export(tmp_path / "bundle", DraftOverrides((0, 2, 5), rotary_dim=64))
    shutil.copy(folder / "text.txt", tmp_path)
    capsys.readouterr()
    assert run(bundle, "--json") == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert len(set(converted)) == len(converted) > 100, "each weight is read once for all settings"

    best, confirmed = report["best"], report["confirmed"]
    assert (
        best["changed"] == best["export_flags"] == ["--aux-layers", "1,3,6", "--rotary-dim", "16"]
    )
    assert confirmed["exact"]
    rows = {" ".join(row["changed"]): row for row in report["settings"]}
    assert rows[""]["now"] and rows[" ".join(best["changed"])]["best"]
    assert rows[""]["tokens_per_pass"] < 1.3 < 2 < report["settings"][0]["tokens_per_pass"]
    assert "--draft-kv scratch" in " ".join(rows)
    assert rows[""]["behind"] > 3 * rows[""]["error"] > 0
    assert "change it" in report["verdict"][0]
    assert [row["k"] for row in report["speeds"]] == [0, 1, 2, 3, 4]
    tokens = sum(min(text.fresh, NEW - 5) for text in trial.texts)
    assert (report["prompts"], report["judged_tokens"]) == (6, tokens)
    assert report["prompts_wanted"] == math.ceil(6 * ENOUGH / tokens)
    assert f"ask for {report['prompts_wanted']} --prompts" in report["warnings"][0]
    error = output.err
    assert f"warning: 6 prompts let drafts be judged behind at most {6 * (NEW - 5)} tokens" in error
    assert error.count("warning: ") == 1, "once is enough"

    export_command, generate = map(shlex.split, best["commands"])
    assert export_command[-4:] == best["export_flags"]
    assert export_command.count("--aux-layers") == 1
    assert generate == ["eagle-chain", "generate", str(bundle), *best["generate_flags"]]
    assert main(export_command[1:]) == 0
    engines = open_engines(bundle, threads=1)
    assert engines.manifest.draft is not None
    assert {name: getattr(engines.manifest.draft, name) for name in RIGHT} == RIGHT
    again = confirm(engines, trial.texts, best["k"], NEW, scratch=best["draft_kv"] == "scratch")
    for name in ("exact", "rounds", "tokens_per_pass"):
        assert again[name] == confirmed[name]
    assert confirmed["tokens_per_pass"] == confirmed["judged_tokens_per_pass"]


def counting(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    def counted(*given: Any) -> Any:
        names.append(given[-1].name)
        return function(*given)

    return counted


@pytest.mark.usefixtures("recorded")
def test_the_right_pair_is_told_to_stay(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "acceptance.png"
    assert run(folder / "bundle", "--plot", str(picture)) == 0
    output = capsys.readouterr().out
    alike = [line for line in output.splitlines() if line.endswith("<- within noise")]
    assert any("  --rope-theta 1000000  <-" in line for line in alike)
    assert not any("--rotary-dim 64" in line for line in alike)
    assert "keep the draft as it is" in output and "change it" not in output
    assert "nothing  <- now, best" in output
    assert "every token is that of plain decoding" in output
    assert f"eagle-chain generate {folder / 'bundle'} -k" in output
    assert "eagle-chain export" not in output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("enough", "said"), [(150, []), (170, ["behind 157 tokens"])], ids=str)
def test_text_that_repeats_itself_is_told_once_it_is_decoded(
    enough: int,
    said: list[str],
    folder: Path,
    trial: Trial,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts that could be enough, at best, turn out not to be."""
    assert [text.rounds(MOST) for text in trial.texts] == [17, 16, 31, 31, 31, 31]  # 157 of 186
    monkeypatch.setattr(evidence, "ENOUGH", enough)
    monkeypatch.setattr(tune, "search", lambda start, *_: start)
    monkeypatch.setattr(tune, "_report", told)
    assert run(folder / "bundle") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "eagle-chain: judged"
    for line, words in zip(lines[:-1], said, strict=True):
        assert line.startswith("warning: 6 prompts") and words in line


def told(*_: Any) -> None:
    raise InputError("judged")


@pytest.mark.usefixtures("recorded")
def test_tokens_that_differ_fail(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = {"tokens_per_pass": 2.0, "tokens_per_second": 9.0}
    monkeypatch.setattr(tune, "confirm", lambda *_, **__: {"exact": False, **speed})
    assert run(folder / "bundle") == 1
    assert "NOT EXACT" in capsys.readouterr().out


@pytest.mark.usefixtures("recorded")
def test_a_plot_that_fails_costs_no_numbers(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = tmp_path / "full.png"
    full.symlink_to("/dev/full")
    monkeypatch.setattr(tune, "search", lambda start, *_: start)
    capsys.readouterr()
    assert run(folder / "bundle", "--plot", str(full), "--json") == 2
    output = capsys.readouterr()
    assert json.loads(output.out)["confirmed"]["exact"]
    last = output.err.splitlines()[-1]
    assert last.startswith(f"eagle-chain: {full}: the plot cannot be written: ") and "space" in last


@pytest.mark.usefixtures("recorded")
def test_scratch_kv_is_found(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"verify": 10.0, "encoder": 0.1, "draft": 0.1, "draft_step": 0.1}
    monkeypatch.setattr(tune, "part_times", lambda *_: parts)
    assert run(folder / "bundle", "--draft-kv", "scratch", "-k", "3", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert any("take -k 4: " in sentence and "with 3" in sentence for sentence in report["verdict"])
    assert report["best"]["changed"] == ["--draft-kv", "kept"]
    assert report["best"]["draft_kv"] == "kept"
    assert "--draft-kv" not in report["best"]["generate_flags"], "kept is the default"
    assert report["best"]["export_flags"] == []
    now = next(row for row in report["settings"] if row["now"])
    assert now["changed"] == [] and now["behind"] > 3 * now["error"]


@pytest.mark.usefixtures("recorded")
def test_scratch_kv_is_recommended_where_it_is_better(
    folder: Path,
    trial: Trial,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the draft had been trained with it; what a chain gives is told beside it."""

    def swapped(self: Any, setting: Setting) -> Found:
        other = replace(setting, scratch=not setting.scratch)
        return self.judged.setdefault(setting, trial.found(other))

    monkeypatch.setattr(tune.Trial, "found", swapped)
    monkeypatch.setattr(tune, "search", lambda start, *_: start)
    assert run(folder / "bundle", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["best"]["changed"] == ["--draft-kv", "scratch"]
    assert report["best"]["generate_flags"][2:] == ["--draft-kv", "scratch"]
    confirmed = report["confirmed"]
    assert confirmed["exact"]
    assert confirmed["tokens_per_pass"] < confirmed["judged_tokens_per_pass"] - 0.5


def test_a_chain_is_compared_with_plain_decoding(
    trial: Trial, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it does not give the recorded text, engines made otherwise may still differ there."""
    engines = open_engines(folder / "bundle", threads=1)
    texts = [replace(t, chosen=[t.chosen[0] + 1, *t.chosen[1:]]) for t in trial.texts[:1]]
    assert confirm(engines, texts, 4, NEW, scratch=False)["exact"]
    monkeypatch.setattr(payoff, "decode_plainly", lambda *_: Plain([], [1, 2], [], 0))
    assert not confirm(engines, texts, 4, NEW, scratch=False)["exact"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "absent.txt"], "absent.txt: cannot be read"),
        (["--prompts", "1"], "--prompts is 1, expected 2 or more"),
        (["--prompts", "900"], "different prompts"),
        (["--max-new-tokens", "60"], "take more than the bundle's capacity of 64"),
        (["--max-new-tokens", "3"], "--max-new-tokens is 3, expected 5 or more"),
        (["-k", "5"], "-k is 5, expected 1 to 4"),
        (["--threads", "0"], "threads is 0, expected 1 to 1024"),
        (["--backend", "tensorrt-rtx"], "acceptance hardly depends on the backend"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_requests(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder / "bundle", *words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_bundles_that_cannot_be_tuned(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--text", str(folder / "text.txt"))
    assert run(export(tmp_path / "alone", draft=False), *words) == 2
    assert "has no EAGLE draft" in capsys.readouterr().err
    moved = tmp_path / "moved"
    shutil.copytree(folder / "bundle", moved, symlinks=True)
    (moved / "weights/draft").unlink()
    (moved / "weights/draft").symlink_to(tmp_path / "gone")
    assert run(moved, *words) == 2
    assert "the checkpoint folder" in capsys.readouterr().err


def test_without_matplotlib_nothing_is_begun(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(tune, "Trial", None)
    assert run(folder / "bundle", "--plot", "x.png") == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent/x.png", "there is no folder"),
        ("x.txt", "ends in '.txt'"),
        ("x", "ends in ''"),
        ("folder.png", "is a folder"),
    ],
)
def test_a_plot_that_cannot_be_written_is_refused_first(
    name: str,
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tune, "Trial", None)
    (folder / "folder.png").mkdir(exist_ok=True)
    assert run(folder / "bundle", "--plot", str(folder / name)) == 2
    assert message in capsys.readouterr().err


def test_prompts_that_are_alike_say_nothing_of_noise(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "same.txt").write_text("\0" * 200)
    assert run(folder / "bundle", "--text", str(tmp_path / "same.txt")) == 2
    assert "all prompts that were cut from it are the same one" in capsys.readouterr().err


def test_no_room_for_graphs(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(words: list[str]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(trial_module, "dispatch", full)
    assert run(folder / "bundle") == 2
    error = capsys.readouterr().err
    assert str(tmp_path) in error and "No space left on device" in error and "TMPDIR" in error
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        assert list(tmp_path.glob("eagle-chain-*/trial/draft_step.*.onnx"))
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Trial, "read", interrupted)
    assert run(folder / "bundle") == 130
    assert list(tmp_path.iterdir()) == []
