"""The main promise on the shipped pair: whatever drafts, the tokens are those of plain decoding.

Oracles: plain decoding in the same engine, token for token, for every drafter, K, rollback, draft
KV and profile; and transformers' own forward pass over plain's tokens.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_chain.engines.cli import main
from eagle_chain.runtime import Engines, Tokenizer, open_engines
from eagle_chain.runtime.exactness import Plain, decode_plainly
from eagle_chain.runtime.ort import OrtBinding
from tests.toy import Script
from tests.toy_pair import exported

DEMO = Path(__file__).parents[1] / "demo"
VOCAB, NEW = 8192, 36
PROMPTS = [
    '<|py|>"""Small helpers for reading settings."""\n\nimport os\n\n\ndef read_flag(name):\n',
    "<|doc|>.. _caching:\n\nCaching results\n===============\n\nA function that is slow may keep",
    "<|book|>The old harbour master put down his pipe, looked at the two boys for a while, and",
    "<|py|>",
]
OPTIONS: dict[str, dict[str, Any]] = {
    "log": {},
    "replay": {"rollback": "replay"},
    "scratch": {"draft_kv": "scratch"},
    "replay_scratch": {"rollback": "replay", "draft_kv": "scratch"},
}
CASES = [
    *(("portable", k, options) for k in (1, 2, 3, 4) for options in OPTIONS),
    *(("standard", k, options) for k, options in zip((1, 2, 3, 4), OPTIONS, strict=True)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exactness")


def export(bundle: Path, *flags: str) -> Path:
    pair = DEMO / "trunk", DEMO / "draft"
    return exported(pair, bundle, "--debug", "logits", "--capacity", "128", *flags)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> dict[str, Engines]:
    return {
        profile: open_engines(export(folder / profile, "--profile", profile), threads=1)
        for profile in ("portable", "standard")
    }


@pytest.fixture(scope="module")
def plain(loaded: dict[str, Engines]) -> dict[str, list[Plain]]:
    """What each profile's engine decodes without drafts."""
    tokenizer = Tokenizer(DEMO / "trunk")
    chains = {profile: engines.chain(drafter="none") for profile, engines in loaded.items()}
    return {
        profile: [decode_plainly(chain, tokenizer.encode(text), NEW) for text in PROMPTS]
        for profile, chain in chains.items()
    }


@pytest.mark.parametrize(("profile", "k", "options"), CASES)
def test_eagle_gives_plain_s_tokens(
    loaded: dict[str, Engines], plain: dict[str, list[Plain]], profile: str, k: int, options: str
) -> None:
    chain = loaded[profile].chain(drafter="eagle", **OPTIONS[options])
    accepted = 0
    for want in plain[profile]:
        result = chain.generate(want.prompt, max_new_tokens=NEW, k=k)
        assert result.tokens == want.tokens
        accepted += result.stats.accepted
    assert accepted > 0


@pytest.mark.parametrize(
    ("profile", "k", "options"), [case for case in CASES if "scratch" not in case[2]]
)
def test_every_accepted_count_gives_plain_s_tokens(
    loaded: dict[str, Engines], plain: dict[str, list[Plain]], profile: str, k: int, options: str
) -> None:
    chain = loaded[profile].chain(drafter="none", **OPTIONS[options])
    counts = itertools.cycle(itertools.chain(range(k + 1), range(k, -1, -1)))
    seen = set()
    for want in plain[profile]:
        truth = [*want.prompt, *want.tokens]
        script = chain.drafter = Script(chain.cache, truth, counts, vocab=VOCAB)
        rounds = list(chain.rounds(want.prompt, max_new_tokens=NEW, k=k))
        assert [token for round in rounds for token in round.tokens] == want.tokens
        assert [round.accepted for round in rounds[1:]] == script.planned
        seen |= set(script.planned)
    assert seen == set(range(k + 1))


def test_one_bundle_of_width_9_serves_every_k(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = export(folder / "wide", "--width", "9")
    text = folder / "prompt.txt"
    text.write_text("".join(PROMPTS))
    sizes = ("--prompts", "1", "--prompt-tokens", "20", "--max-new-tokens", "40", "--threads", "1")
    capsys.readouterr()
    assert main(["verify", str(bundle), "--text", str(text), *sizes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact"] and found["largest_logit_difference"] == 0
    assert [(run["drafter"], run["k"]) for run in found["runs"]] == [
        *(("scripted", k) for k in range(1, 9)),
        *(("eagle", k) for k in range(1, 9)),
        *(("mtp", k) for k in range(1, 9)),
        *(("ngram", k) for k in range(1, 9)),
    ]


def test_a_round_costs_little_beyond_its_calls(
    loaded: dict[str, Engines], plain: dict[str, list[Plain]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 15 % over the ONNX Runtime calls; -s shows the ratio."""
    spent = 0.0
    run = OrtBinding.run

    def timed(self: OrtBinding) -> None:
        nonlocal spent
        start = time.perf_counter()
        run(self)
        spent += time.perf_counter() - start

    monkeypatch.setattr(OrtBinding, "run", timed)
    chain, ratios = loaded["portable"].chain(drafter="eagle"), []
    for want in plain["portable"]:
        spent = 0.0
        stats = chain.generate(want.prompt, max_new_tokens=NEW, k=4).stats
        ratios.append((stats.prompt_seconds + stats.decode_seconds) / spent - 1)
    print("over the ONNX Runtime calls:", *(f"{ratio:.1%}" for ratio in ratios))
    assert min(ratios) < 0.15


@pytest.mark.parametrize("profile", ["portable", "standard"])
def test_plain_tokens_are_those_of_transformers(
    plain: dict[str, list[Plain]], profile: str
) -> None:
    """Forced along plain's tokens, so that one near-tie does not end the comparison."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "trunk", dtype=torch.float32)
    clear = total = 0
    for found in plain[profile]:
        ids = torch.tensor([[*found.prompt, *found.tokens[:-1]]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(found.prompt) - 1 :].numpy()
        second, first = np.partition(logits, -2)[:, -2:].T
        for row, token, margin in zip(logits, found.tokens, first - second, strict=True):
            total += 1
            clear += margin > 1e-3
            assert margin <= 1e-3 or row.argmax() == token
        # float32 on both sides; only the order of the sums differs
        assert np.abs(logits - np.stack(found.logits)).max() < 2e-3
    assert clear > 0.95 * total >= 0.95 * 100
