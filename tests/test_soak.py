"""Many requests of every kind on one chain, and two chains in two threads; `tests.soak` has both.

By hand for hours: `python -m tests.soak BUNDLE --requests 5000` (docs/reliability.md).
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from eagle_chain.engines.cli import main
from eagle_chain.runtime import Engines, open_engines
from eagle_chain.runtime.chain import Chain
from tests import soak
from tests.faults import SMALL, SMALL_DRAFT
from tests.standin import standins
from tests.toy_pair import exported, write_pair


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("soak")
    sizes: dict[str, Any] = {"sizes": SMALL, "draft_sizes": SMALL_DRAFT}
    pair = write_pair(folder, layers=4, aux=[0, 1, 3], extras=False, **sizes)
    return exported(pair, folder / "bundle", "--aux-layers", "0,1,3", "--capacity", "96")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_requests_of_every_kind_keep_memory_flat_and_answers_the_same(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "STRETCH", 40)
    report = soak.soak(open_engines(bundle, threads=1), 250, longest=20, budget=12)
    assert {kind for kind in report["kinds"] if " " not in kind} == set(soak.KINDS)
    assert min(report["growths_kb"]) < 64, "a leak grows in every stretch"


def test_a_state_that_leaks_into_the_next_request_is_seen(bundle: Path) -> None:
    """The check itself: a cache whose reset forgets the recurrent states."""
    engines = open_engines(bundle, threads=1)
    run = soak.Soak(engines, longest=20, budget=12)
    cache = run.chain.cache
    wanted = [run.request(i) for i in range(12)]
    for pair, buffers in cache._states:
        if pair.input.endswith(".S"):
            for buffer in buffers:
                buffer.zero = lambda: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        assert [run.request(i) for i in range(12)] == wanted


def in_two_threads(engines: Engines, rounds: int) -> list[list[list[int]]]:
    """What two chains answer that work at the same time, request by request."""
    chains = [engines.chain(), engines.chain()]
    answers: list[list[list[int]]] = [[], []]
    faults: list[BaseException] = []
    together = threading.Barrier(2)

    def work(chain: Chain, which: int) -> None:
        try:
            together.wait(30)
            for i in range(rounds):
                ids = [(7 * i + 31 * which + j) % 300 for j in range(1 + (i + which) % 9)]
                result = chain.generate(ids, max_new_tokens=10, k=(i + which) % 5, stop_ids=())
                answers[which].append(result.tokens)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(chain, i)) for i, chain in enumerate(chains)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert faults == []
    return answers


def one_after_the_other(engines: Engines, rounds: int) -> list[list[list[int]]]:
    """The same by plain decoding, in this thread."""
    chain = engines.chain(drafter="none")
    return [
        [
            chain.generate(
                [(7 * i + 31 * which + j) % 300 for j in range(1 + (i + which) % 9)],
                max_new_tokens=10,
                stop_ids=(),
            ).tokens
            for i in range(rounds)
        ]
        for which in (0, 1)
    ]


def test_two_threads_on_one_set_of_engines_give_plain_s_tokens(bundle: Path) -> None:
    engines = open_engines(bundle, threads=1)
    assert in_two_threads(engines, 40) == one_after_the_other(engines, 40)


@pytest.mark.parametrize("late", [False, True])
def test_two_threads_on_one_stream_give_plain_s_tokens(bundle: Path, late: bool) -> None:
    """Chains of one GPU memory share a stream, scratch memory and the capture of graphs."""
    with standins() as runtime:
        if not (bundle / "plans").exists():
            assert main(["build", str(bundle)]) == 0
        engines = open_engines(bundle, "tensorrt")
        want = one_after_the_other(engines, 12)
        runtime.DEVICE.late = late
        assert in_two_threads(engines, 12) == want
