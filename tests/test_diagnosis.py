"""The likely cause of a low acceptance: from rates as they are, and on the shipped pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_chain.engines.cli import main
from eagle_chain.runtime.answer import Answer
from eagle_chain.runtime.diagnosis import likely_cause
from eagle_chain.runtime.stats import Result, Round, Stats
from tests.toy_pair import write_pair


def measured(*accepted: int, rounds: int = 100) -> Stats:
    """Of so many rounds of 4 drafts, how many accepted draft 1, 2, ... at least."""
    stats = Stats()
    for i in range(rounds):
        run = sum(i < count for count in accepted)
        stats.add(Round((0,) * (run + 1), 4, run))
    return stats


@pytest.mark.parametrize(
    ("stats", "drafter", "draft_kv", "words"),
    [
        (measured(62, 28, 8, 1), "eagle", "kept", None),  # usual
        (measured(85, 73, 64, 58), "eagle", "kept", None),
        (measured(10, 1, 0, 0), "eagle", "kept", "only 10% of the first drafts"),
        (measured(10, 1, 0, 0), "eagle", "kept", "--aux-layers, --rope-theta and --rotary-dim"),
        (measured(0), "eagle", "kept", "none of 400 drafted tokens was accepted"),
        (measured(0, rounds=5), "eagle", "kept", None),  # may be an accident
        (measured(2, rounds=20), "eagle", "kept", None),
        (measured(60, 6, 0, 0), "eagle", "kept", "norm_output"),
        (measured(60, 6, 0, 0), "mtp", "kept", None),  # one layer, re-applied: no fault
        (measured(15, 5, 2, 1), "eagle", "scratch", "--draft-kv scratch makes"),
        (measured(5, 1, 0, 0), "mtp", "kept", "fine-tuned without its MTP head"),
        (measured(0), "ngram", "kept", None),
        (measured(0), "none", "kept", None),
        (Stats(), "eagle", "kept", None),
    ],
)
def test_the_rates_tell(stats: Stats, drafter: str, draft_kv: str, words: str | None) -> None:
    cause = likely_cause(stats, drafter, draft_kv)
    assert cause is None if words is None else cause and words in cause


@pytest.mark.parametrize(
    ("drafter", "words"),
    [("eagle", "aux layers"), ("mtp", "fine-tuned without its MTP head"), ("ngram", "")],
)
def test_generate_warns_about_a_draft_that_was_never_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], drafter: str, words: str
) -> None:
    """On stderr and in the JSON; a text without repetitions is nobody's fault."""
    trunk, draft = write_pair(tmp_path, layers=4, aux=[0, 1, 2], tokenizer=True)
    bundle = tmp_path / "b"
    pair = (str(trunk), str(draft), "-o", str(bundle), "--aux-layers", "0,1,2")
    assert main(["export", *pair, "--capacity", "64", "--prefill", "0"]) == 0
    capsys.readouterr()
    request = ("--prompt", "abc", "--max-new-tokens", "30", "--drafter", drafter, "--json")
    assert main(["generate", str(bundle), *request]) == 0
    output = capsys.readouterr()
    answer = json.loads(output.out)
    assert answer["drafter"] == drafter
    assert bool(answer["warnings"]) == bool(words) == ("warning:" in output.err)
    assert all(words in warning and warning in output.err for warning in answer["warnings"])


def test_draws_are_not_what_is_usual() -> None:
    """A token drawn against the odds is nobody's fault."""
    result = Result([0], "length", measured(10, 1, 0, 0))
    assert (
        Answer("", result, None).warnings() and not Answer("", result, None, drawn=True).warnings()
    )
