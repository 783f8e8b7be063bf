"""A sequence that outgrows one capacity after the other, on the NumPy pair and on ONNX Runtime.

The toy computes every row on its own, so the tokens, states and guesses must be those of one large
cache to the last bit, wherever the sequence was moved.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from eagle_chain.engines import cli
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import Manifest, check_options, engine_specs
from eagle_chain.engines.spec import Options
from eagle_chain.runtime import Chain, Engines, Tokenizer, open_engines
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.load import DrafterName
from tests import qwen_9b
from tests.test_drafters import check_last_guesses
from tests.toy import Script, Scripted, Toy, cache_states, live_states
from tests.toy_pair import write_pair

DEMO = Path(__file__).resolve().parents[1] / "demo"
SIZES, LARGEST = (20, 37), 90
WIDE = 12


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy(8, capacity=LARGEST, smaller=SIZES)


@pytest.fixture(scope="module")
def wide() -> Toy:
    return Toy(9, capacity=LARGEST, smaller=SIZES, prefill=WIDE)


def where(toy: Toy, name: str = "trunk") -> dict[int, set[int]]:
    """Capacity -> where the calls made there since this was last asked began."""
    return {size: {at[0] for at in calls} for size, calls in rows(toy, name).items()}


def rows(toy: Toy, name: str = "trunk") -> dict[int, list[range]]:
    """Capacity -> positions of the valid rows of each call."""
    found = {}
    for size in (*SIZES, LARGEST):
        calls = toy.session(name, size).calls
        starts = [call["position"][0] for call in calls]
        found[size] = [
            range(at, at + call["rows"][0]) for at, call in zip(starts, calls, strict=True)
        ]
        calls.clear()
    return found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("k", [0, 1, 3, 4])
def test_a_token_is_computed_at_the_smallest_capacity_that_holds_w_rows(
    toy: Toy, k: int, ahead: bool
) -> None:
    """Drafted or not; an accepted run ends where the next capacity begins."""
    prompt = toy.prompt(0, 6)
    truth, steps = toy.decode(prompt, LARGEST - 6)
    for counts in ([k], [0], list(range(k + 1))):

        def made(cache: Cache) -> Scripted:
            return Scripted(toy.eagle(cache), Script(cache, truth, itertools.cycle(counts)))  # noqa: B023

        where(toy)
        chain = toy.chain(made, ahead=ahead)
        tokens: list[int] = []
        for round in chain.rounds(prompt, k=k):
            tokens += round.tokens
            cache, n = chain.cache, len(chain.cache.tokens)
            # 20 holds rows up to 15 + 5, 37 up to 32 + 5
            last = cache.position + cache.kept - 1
            size = 20 if last <= 15 else 37 if last <= 32 else LARGEST
            assert cache.capacity == size
            live = live_states(cache_states(cache, toy.specs["trunk"]), cache.kept, n)
            assert all(live[x].tobytes() == a.tobytes() for x, a in steps[n - 1].states.items())
            drafter = chain.drafter
            assert isinstance(drafter, Scripted)
            if drafter.guesses:
                check_last_guesses(toy, chain, drafter, truth, steps)
        assert tokens == truth[6:] and round.finish_reason == "capacity"
        calls = where(toy)
        assert max(calls[20]) <= 15 < min(calls[37]) <= max(calls[37]) <= 32 < min(calls[LARGEST])


def test_eagle_alone_makes_the_same_guesses_as_in_one_cache(toy: Toy) -> None:
    """Guesses decide the accepted counts, so equal statistics are equal drafts."""
    one = Toy(8, capacity=LARGEST)
    for seed, ahead in itertools.product(range(4), (False, True)):
        prompt = toy.prompt(seed, 3 + 9 * seed)
        want = one.chain(ahead=False).generate(prompt)
        got = toy.chain(ahead=ahead).generate(prompt)
        assert got.tokens == want.tokens
        assert got.stats.accepted <= want.stats.accepted  # runs are cut where a capacity ends
        assert got.stats.accepted >= want.stats.accepted - 4 * len(SIZES)


def test_engines_for_prompts_are_known_at_every_capacity() -> None:
    options = Options(5, 8192, prefill=256, smaller=(2048,))
    specs = engine_specs(*qwen_9b.configs(4), options, mtp=True)
    assert {name for name, spec in specs.items() if spec.reads_prompts} == {
        f"{name}{size}"
        for name in ("prefill", "draft_prefill", "mtp_prefill")
        for size in ("", "-2048")
    }


def test_larger_caches_are_made_when_they_are_needed(toy: Toy) -> None:
    chain = toy.chain()
    before = toy.memory.count
    chain.generate(toy.prompt(0, 6), max_new_tokens=8)
    assert toy.memory.count == before and chain.cache.capacity == 20
    chain.generate(toy.prompt(0, 6), max_new_tokens=20)
    made = toy.memory.count - before
    assert made > 0 and chain.cache.capacity == 37
    chain.generate(toy.prompt(0, 6), max_new_tokens=20)
    assert toy.memory.count - before == made


def test_a_sequence_moves_with_what_is_live_and_nothing_else(toy: Toy) -> None:
    """Whatever an earlier request left in the larger cache, not even numbers."""
    chain = toy.chain()
    truth, _ = toy.decode(toy.prompt(1, 10), 70)
    assert chain.generate(toy.prompt(1, 10), max_new_tokens=70).tokens == truth[10:]
    for rung in chain._ladder._rungs[1:]:
        assert rung is not None
        for _, buffers in rung.cache.states:
            for buffer in set(buffers):
                buffer.write(np.nan)
    chain.reset()
    assert chain.cache.capacity == 20
    assert chain.generate(toy.prompt(1, 10), max_new_tokens=70).tokens == truth[10:]


def test_snapshots_lead_back_to_their_capacity(toy: Toy) -> None:
    chain = toy.chain()
    prompt = toy.prompt(2, 12)
    truth, _ = toy.decode(prompt, 70)
    chain.extend(prompt)
    short = chain.snapshot()
    stream = chain.stream([truth[12]], max_new_tokens=30, append=True)
    assert list(stream) == truth[13:43]
    assert chain.cache.capacity == LARGEST
    long = chain.snapshot()
    chain.rollback(short)
    assert chain.cache.capacity == 20 and chain.cache.tokens == prompt
    other = [*prompt, *toy.prompt(3, 9)]
    want, _ = toy.decode(other, 30)
    assert chain.generate(other[12:], max_new_tokens=30, append=True).tokens == want[21:]
    chain.rollback(long)
    assert chain.cache.tokens == truth[:42]
    assert chain.generate([truth[42]], max_new_tokens=20, append=True).tokens == truth[43:63]


def test_a_snapshot_of_another_chain_is_refused_and_nothing_lost(toy: Toy) -> None:
    chain = toy.chain()
    chain.extend(toy.prompt(0, 30))
    with pytest.raises(InputError, match="another bundle"):
        chain.rollback(Toy(4, capacity=LARGEST, smaller=SIZES).chain().snapshot())
    assert chain.cache.tokens == toy.prompt(0, 30) and chain.cache.capacity == 37


@pytest.mark.parametrize("rollback", ["log", "replay"])
def test_prompts_in_pieces_and_streams_cut_short(toy: Toy, rollback: str) -> None:
    random = np.random.default_rng(0)
    for _ in range(3):
        chain = toy.chain(rollback=rollback)
        history: list[int] = []
        while len(history) < 50:
            ids = toy.prompt(int(random.integers(99)), int(random.integers(1, 14)))
            room = int(random.integers(1, 12))
            want, _ = toy.decode([*history, *ids], room)
            stop = int(random.integers(1, room + 1))
            stream = chain.stream(ids, max_new_tokens=room, append=bool(history))
            got = list(itertools.islice(stream, stop))
            history += ids
            assert got == want[len(history) :][:stop]
            history += got[:-1]
            assert chain.cache.tokens == history


def test_wide_calls_run_where_all_their_rows_fit(wide: Toy) -> None:
    where(wide, "prefill"), where(wide)
    prompt = wide.prompt(0, 50)
    truth, _ = wide.decode(prompt, 30)
    chain = wide.chain()
    assert chain.generate(prompt, max_new_tokens=30).tokens == truth[50:]
    # 12 rows from 12 on are 24 of 25 slots; from 24 on 36 of 42; from 36 on only the largest
    assert where(wide, "prefill") == {20: {0, 12}, 37: {24}, LARGEST: {36, 48} - {48}}
    assert where(wide, "draft_prefill") == {20: {0, 12}, 37: {24}, LARGEST: {36}}
    assert min(where(wide)[LARGEST]) == 48


def test_back_to_a_smaller_capacity_behind_a_wide_call(wide: Toy) -> None:
    """A prompt piece that needed a larger one; single tokens do not, whoever asks for them."""
    first, second = wide.prompt(1, 3), wide.prompt(2, 9)
    chain = wide.chain()
    chain.extend(first)
    where(wide, "prefill"), where(wide)
    chain.extend(wide.prompt(3, 8))  # up to 10
    chain.extend(second)  # 8 rows from 11 on: 23 of 25 slots
    assert where(wide, "prefill")[20] == {3, 11}
    assert where(wide)[37] == {19}
    whole = [*first, *wide.prompt(3, 8), *second]
    want, _ = wide.decode(whole, 9)
    assert chain.generate([want[20]], max_new_tokens=8, append=True).tokens == want[21:29]


def test_the_last_slot_of_the_largest(toy: Toy) -> None:
    chain = toy.chain()
    ids = toy.prompt(0, LARGEST)
    with pytest.raises(InputError, match=f"capacity is {LARGEST}"):
        chain.generate([*ids, 1])
    rows(toy)
    result = chain.generate(ids[:-3])
    assert [calls[-1][-1] for calls in rows(toy).values()][:2] == [15, 32]
    truth, _ = toy.decode(ids[:-3], 3)
    assert result.tokens == truth[LARGEST - 3 :] and result.finish_reason == "capacity"
    held = list(chain.cache.tokens)
    with pytest.raises(InputError, match="behind"):
        chain.generate(ids, append=True)
    assert chain.cache.tokens == held


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engines]:
    """The shipped pair, whose drafters are right now and then, with one capacity and with three."""
    folder, made = tmp_path_factory.mktemp("shipped"), {}
    for name, sizes in (("one", "96"), ("three", "44,60,96")):
        words = [*(str(DEMO / part) for part in ("trunk", "draft")), "-o", str(folder / name)]
        assert cli.main(["export", *words, "--capacity", sizes]) == 0
        made[name] = open_engines(folder / name, "onnxruntime-cpu", threads=1)
    return made


@pytest.mark.parametrize("drafter", ["eagle", "mtp", "ngram"])
def test_drafters_guess_on_behind_a_move(shipped: dict[str, Engines], drafter: DrafterName) -> None:
    """A round that begins at the same token in both caches accepts as many of its four drafts."""
    prompt = Tokenizer(DEMO / "trunk").encode(
        "<|py|>def read(path):\n    with open(path) as file:\n"
    )
    tokens, runs = {}, {}
    for name, engines in shipped.items():
        chain, found = engines.chain(drafter=drafter), dict[int, int]()
        tokens[name] = list(prompt)
        for round in chain.rounds(prompt, stop_ids=()):
            if round.drafted == 4:
                found[len(tokens[name])] = round.accepted
            tokens[name] += round.tokens
        runs[name] = found
    assert tokens["one"] == tokens["three"] and len(tokens["one"]) == 96
    common = runs["one"].keys() & runs["three"].keys()
    assert all(runs["one"][at] == runs["three"][at] for at in common)
    assert sum(runs["one"][at] for at in common if at >= 40) > 6, "right behind the moves as well"


@pytest.mark.parametrize("sizes", [(64, 32), (32, 32, 64), (3, 64)])
def test_capacities_ascend_and_hold_a_call(sizes: tuple[int, ...]) -> None:
    *smaller, largest = sizes
    with pytest.raises(InputError, match="ascending"):
        check_options(Options(capacity=largest, smaller=tuple(smaller)))


def test_a_bundle_of_three_capacities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Engines of each over the same weights; the tokens of one capacity, and of plain decoding."""
    folders = write_pair(tmp_path / "pair", layers=4, aux=[0, 1, 2])
    chains = list[Chain]()
    for name, sizes in (("one", "160"), ("three", "72,160,40")):
        words = [*map(str, folders), "-o", str(tmp_path / name), "--aux-layers", "0,1,2"]
        words += ["--capacity", sizes, "--prefill", "32", "--json"]
        assert cli.main(["export", *words]) == 0
        report = json.loads(capsys.readouterr().out)
        engines = open_engines(tmp_path / name, "onnxruntime-cpu", threads=1)
        chains += [engines.chain(), engines.chain(drafter="none")]
    assert report["capacity"] == 160 and report["capacities"] == [40, 72, 160]
    assert {"trunk-40", "draft_step-72", "prefill-40", "encoder"} <= report["engines"].keys()
    assert "encoder-40" not in report["engines"]
    prompt = np.random.default_rng(0).integers(0, 512, 30).tolist()
    results = [chain.generate(prompt, max_new_tokens=120) for chain in chains]
    assert all(result.tokens == results[0].tokens for result in results)
    assert chains[2].cache.capacity == 160
    command = Manifest.load(tmp_path / "three").export_command(tmp_path / "three")
    assert "--capacity 72,160,40" in command
    words[words.index("--capacity") + 1] = "many"
    assert cli.main(["export", *words]) == 2
    assert "2048,8192,32768" in capsys.readouterr().err
