"""Rounds that run from device buffers alone, against the chain, which decides on the host."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from eagle_chain.engines.spec import Options
from eagle_chain.export.bundle import Pair, write_bundle
from eagle_chain.export.checkpoint import open_pair
from eagle_chain.runtime.demo import PROMPTS
from eagle_chain.runtime.load import Engines, open_engines
from eagle_chain.runtime.rounds import Rounds
from eagle_chain.runtime.tokenizer import Tokenizer
from tests.toy_pair import write_pair

WIDTH, CAPACITY = 5, 64
DEMO = Path(__file__).parent.parent / "demo"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("rounds")
    trunk, draft = write_pair(folder, tokenizer=True)
    write_bundle(folder / "bundle", opened(trunk, draft), Options(WIDTH, CAPACITY), False, ())
    return open_engines(folder / "bundle", "onnxruntime-cpu", threads=1)


def opened(trunk: Path, draft: Path) -> Pair:
    (trunk_config, trunk_weights), (draft_config, draft_weights) = open_pair(trunk, draft)
    return Pair(trunk_config, draft_config, trunk_weights, draft_weights)


@pytest.mark.parametrize("length", [1, 5, 7])
@pytest.mark.parametrize("k", [0, 1, 3, 4])
def test_rounds_settle_what_the_chain_settles(engines: Engines, length: int, k: int) -> None:
    prompt = [int(i) for i in np.random.default_rng(length).integers(0, 512, length)]
    chain = engines.chain(drafter="eagle")
    wanted = list(itertools.islice(chain.rounds(prompt, max_new_tokens=40, k=k), 9))
    rounds = Rounds(engines.sessions, k)
    for _ in range(2):  # a second request starts from nothing
        assert (rounds.start(prompt),) == wanted[0].tokens
        for want in wanted[1:]:
            got = rounds.queue()()
            assert (got.tokens, got.accepted) == (want.tokens, want.accepted)


@pytest.mark.skipif(not (DEMO / "draft").is_dir(), reason="the demo pair is not in this tree")
@pytest.mark.parametrize("k", [2, 4])
def test_with_a_trained_draft_every_accepted_count_occurs(tmp_path: Path, k: int) -> None:
    """The toy draft is never right; this one often is."""
    pair = opened(DEMO / "trunk", DEMO / "draft")
    write_bundle(tmp_path / "bundle", pair, Options(WIDTH, 256), False, ())
    engines = open_engines(tmp_path / "bundle", "onnxruntime-cpu", threads=1)
    prompt = Tokenizer(tmp_path / "bundle").encode(PROMPTS["book"])
    chain = engines.chain().rounds(prompt, max_new_tokens=200, k=k, stop_ids=())
    wanted = list(itertools.islice(chain, 31))
    rounds = Rounds(engines.sessions, k)
    assert (rounds.start(prompt),) == wanted[0].tokens
    verdicts = rounds.verdicts() if k == 4 else None
    for want in wanted[1:]:
        got = next(verdicts) if verdicts else rounds.queue()()
        assert (got.tokens, got.accepted) == (want.tokens, want.accepted)
    assert {w.accepted for w in wanted[1:]} >= {0, 1, 2}
