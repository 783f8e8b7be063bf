"""Rounds that the device decides, one launched ahead, against the chain that decides on the host.

The toy pair runs in host memory, and over the stand-in for CUDA as captured graphs whose work is
done as late as it may be. What only a GPU can show is in tests/gpu.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_chain.engines.spec import Options
from eagle_chain.export.bundle import Pair, write_bundle
from eagle_chain.export.checkpoint import open_pair
from eagle_chain.runtime.buffers import NUMPY_DTYPES, Buffer
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.cuda import CudaMemory
from eagle_chain.runtime.demo import PROMPTS
from eagle_chain.runtime.drafters import EagleDrafter
from eagle_chain.runtime.load import open_engines
from eagle_chain.runtime.ort import OrtSession
from eagle_chain.runtime.rounds import Reader, Verdict
from eagle_chain.runtime.session import Binding, check_tensors
from eagle_chain.runtime.stats import Round
from eagle_chain.runtime.tokenizer import Tokenizer
from tests.standin import standins
from tests.told import Plan, table_spec, told_graphs, told_specs
from tests.toy import Script, Tensors, Toy, ToyBinding, ToySession, cache_states, live_states

DEMO = Path(__file__).parent.parent / "demo"
PLACES = ["host", "late"]
Memories = Callable[[], CudaMemory | None]


class DeviceSession(ToySession):
    """A toy session over "device" addresses, on the stream of their memory."""

    def bind(self, tensors: Mapping[str, Buffer]) -> DeviceBinding:
        """As the session's; addresses of the stand-in are this process's own."""
        check_tensors(self.spec, self.memory, tensors)
        arrays = {}
        for name, buffer in tensors.items():
            block = (ctypes.c_uint8 * buffer.spec.nbytes).from_address(buffer.address)
            values = np.frombuffer(block, NUMPY_DTYPES[buffer.spec.dtype])
            arrays[name] = values.reshape(buffer.spec.shape)
        binding = DeviceBinding(self, arrays)
        binding.held = tuple(tensors.values())
        return binding


class DeviceBinding(ToyBinding):
    """Queues its session's function."""

    held: tuple[Buffer, ...]

    def run(self) -> None:
        """Run, now or when the graph that records this is launched."""
        memory: Any = self.session.memory
        if self.session.fails:
            raise self.session.fails.pop()
        memory.cuda.lib.queue(memory.stream, lambda: self.session.function(self.arrays))


class Told(Toy):
    """A toy whose draft guesses from a table: the truth, spoiled at some places.

    `spoil` places the errors so that rounds of k drafts accept the counts it is given, in turn. The
    draft computes as before; only its token is another.
    """

    table = np.zeros(0, np.int32)

    def place(self, memory: CudaMemory | None) -> Told:
        """Run everything in another memory from now on."""
        if memory is not None:
            self.memory = memory  # type: ignore[assignment]
            for name, session in self.sessions.items():
                device = DeviceSession(session.spec, self.memory, session.function)
                self.sessions[name] = device
        return self

    def spoil(self, truth: Sequence[int], prompt: int, counts: Iterator[int], k: int) -> None:
        """Guess `truth`, but let the rounds behind a prompt of this length accept `counts`."""
        self.table = np.array([*truth, *[0] * 2 * self.width], np.int32)
        pending = prompt
        while pending < len(truth):
            right = next(counts)
            if right < k:
                self.table[pending + right + 1 :][:1] += 1
                self.table %= len(self.head)
            pending += right + 1

    def run_draft(self, t: Tensors) -> None:
        """Row by row as before; the guess follows the token that `next_position` counts up to."""
        super().run_draft(t)
        if len(self.table) and t["token"][0] != -1:
            t["token"][:] = self.table[min(int(t["next_position"][0]) + 1, len(self.table) - 1)]


@pytest.fixture(params=PLACES)
def memories(request: pytest.FixtureRequest) -> Iterator[Memories]:
    """Makes the memory of a place: None for the host's."""
    if request.param == "host":
        yield lambda: None
        return
    with standins() as runtime:
        runtime.DEVICE.late = True
        try:
            yield CudaMemory
        finally:
            runtime.DEVICE.late = False


def told(memories: Memories, seed: int = 3, **options: Any) -> Told:
    return Told(seed, **options).place(memories())


def live(toy: Toy, chain: Chain) -> Tensors:
    """What of the trunk's and the draft's states belongs to the sequence."""
    cache = chain.cache
    chain.drafter.settle()
    states = cache_states(cache, toy.specs["trunk"])
    found = live_states(states, cache.kept, len(cache.tokens))
    for pair, buffers in cache.states[-2:]:  # rows of the draft: those of calls before the last
        found[pair.input] = buffers[0].read()[0, :, : cache.position].copy()
    return found


def same(ours: Tensors, theirs: Tensors) -> bool:
    return all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


def settled(rounds: Sequence[Round]) -> list[tuple[tuple[int, ...], int, int, int, str | None]]:
    """All of a round but its times."""
    return [(r.tokens, r.drafted, r.accepted, r.trunk_calls, r.finish_reason) for r in rounds]


# --- the same rounds, the same states ---


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_every_accepted_count_leaves_plain_s_bits(memories: Memories, k: int) -> None:
    """All counts equally often; after each round the live state is that of plain decoding."""
    made: list[int] = []
    for seed in range(2):
        toy = told(memories)
        prompt = toy.prompt(seed, 3 + 5 * seed)
        truth, steps = Toy(3).decode(prompt, 45)
        plan = np.random.default_rng(seed).permutation(k + 1).tolist()
        toy.spoil(truth, len(prompt), itertools.cycle(plan), k)
        chain, planned = toy.chain(ahead=True), itertools.cycle(plan)
        for round in itertools.islice(chain.rounds(prompt, max_new_tokens=45, k=k), 99):
            n = len(chain.cache.tokens)
            assert chain.cache.tokens == truth[:n] and chain.cache.pending == truth[n]
            assert same(live(toy, chain), steps[n - 1].states)
            if not round.prompt_tokens and round.drafted == k:
                made.append(round.accepted)
                if len(truth) - n > k:
                    assert round.accepted == next(planned)
    assert set(made) == set(range(k + 1))


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("told_truth", [True, False], ids=["told", "own guesses"])
def test_rounds_equal_those_of_the_host(memories: Memories, k: int, told_truth: bool) -> None:
    """Prompts of 1 to 11 tokens, twice each on one chain: tokens, counts, reasons and states."""
    toy, host = told(memories), Told(3)
    device, chain = toy.chain(ahead=True), host.chain(ahead=False)
    for length in (1, 5, 7, 11):
        prompt = toy.prompt(length, length)
        if told_truth:
            truth, _ = Toy(3).decode(prompt, 40)
            for pair in (toy, host):
                pair.spoil(truth, length, itertools.cycle([2, 0, 4, 1, 3, 1]), k)
        for _ in range(2):
            got = list(device.rounds(prompt, max_new_tokens=30, k=k))
            want = list(chain.rounds(prompt, max_new_tokens=30, k=k))
            assert settled(got) == settled(want)
            assert same(live(toy, device), live(host, chain))


def test_the_device_decides_while_there_is_room_and_one_round_runs_ahead(
    memories: Memories,
) -> None:
    toy = told(memories)
    prompt = toy.prompt(0, 7)
    truth, _ = Toy(3).decode(prompt, 30)
    toy.spoil(truth, 7, itertools.cycle([0, 4, 2]), 4)
    chain = toy.chain(ahead=True)
    ran: list[int] = []
    launch = chain.device.launch
    chain.device.launch = (  # type: ignore[method-assign]
        lambda *a: (ran.append(len(chain.cache.tokens)), launch(*a))[1]
    )
    rounds = list(chain.rounds(prompt, max_new_tokens=20))
    # 1 from the prompt, rounds of 1, 5, 3, 1, 5 leave 4: too few for four drafts and one more
    assert [len(r.tokens) for r in rounds[:6]] == [1, 1, 5, 3, 1, 5]
    # the first two before the first is read; none behind the fifth, which had room for 9
    assert ran == [7, 7, 8, 13, 16, 17]
    assert [r.drafted for r in rounds[1:6]] == [4] * 5 and rounds[6].drafted == 3


# --- stops at every place ---


def stops_at(toy: Told, chain: Chain, prompt: list[int], new: int, how: str) -> list[int]:
    """End a request after `new` tokens; a run of five may be under way."""
    if how == "budget":
        return chain.generate(prompt, max_new_tokens=new).tokens
    if how == "consumer":
        return list(itertools.islice(chain.stream(prompt, max_new_tokens=40), new))
    # a stop id that did not occur before: the request is decoded up to it without drafts
    truth, _ = Toy(3).decode(prompt, 40)
    stop = truth[len(prompt) + new - 1]
    return chain.generate(prompt, max_new_tokens=40, stop_ids={stop}).tokens


GOING_ON = ["append", "other", "snapshot", "extend"]


@pytest.mark.parametrize("how", ["budget", "consumer", "stop id"])
@pytest.mark.parametrize("on", GOING_ON)
def test_a_stop_anywhere_leaves_what_the_host_would(memories: Memories, how: str, on: str) -> None:
    """Then the sequence goes on: with the pending token or another, from a copy, by more text."""
    toy, host = told(memories), Told(3)
    prompt = toy.prompt(3, 6)
    truth, _ = Toy(3).decode(prompt, 40)
    chains = [(toy, toy.chain(ahead=True)), (host, host.chain(ahead=False))]
    for new in range(1, 14):
        ends: list[Any] = []
        for pair, chain in chains:
            pair.spoil(truth, 6, itertools.cycle([4, 2, 4, 0]), 4)
            got = stops_at(pair, chain, prompt, new, how)
            assert got == truth[6 : 6 + len(got)]
            assert [*chain.cache.tokens, chain.cache.pending] == truth[: 6 + len(got)]
            states = [live(pair, chain)]
            first = got[-1] if on != "other" else (got[-1] + 3) % 31
            if on == "snapshot":
                kept = chain.snapshot()
                chain.generate(pair.prompt(9, 9), max_new_tokens=7)
                chain.rollback(kept)
            if on == "extend":
                chain.extend([got[-1], *pair.prompt(7, 6)])
                first = chain.cache.pending or 0
            rest = list(chain.rounds([first], max_new_tokens=14, append=True))
            ends.append((got, settled(rest), chain.cache.tokens))
            states.append(live(pair, chain))
            ends.append(states)
        (ours, our_states), (theirs, their_states) = ends[:2], ends[2:]
        assert ours == theirs
        assert all(map(same, our_states, their_states))


def test_a_copy_in_the_middle_of_a_request_disturbs_nothing(memories: Memories) -> None:
    toy = told(memories)
    prompt = toy.prompt(3, 6)
    truth, _ = Toy(3).decode(prompt, 40)
    toy.spoil(truth, 6, itertools.cycle([4, 2, 4, 0]), 4)
    chain = toy.chain(ahead=True)
    copies, tokens = [], list[int]()
    for token in chain.stream(prompt, max_new_tokens=20):
        tokens.append(token)
        copies.append((chain.snapshot(), list(tokens)))
    assert tokens == truth[6:26]
    for copy, before in copies:
        chain.rollback(copy)
        rest = chain.generate([before[-1]], max_new_tokens=20 - len(before), append=True).tokens
        assert before + rest == tokens


@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_last_slots_before_the_capacity_are_the_host_s(memories: Memories, k: int) -> None:
    """Sessions assert that no row is past the end, the round that runs ahead included."""
    for slots in range(3 * k + 5):
        toy, host = told(memories, 7, capacity=30), Told(7, capacity=30)
        prompt = toy.prompt(slots, 30 - slots)
        truth, _ = Toy(7, capacity=30).decode(prompt, slots + 1)
        for counts in ([4], [0], [0, 4, 2]):
            for pair in (toy, host):
                pair.spoil([*truth, *[0] * 9], len(prompt), itertools.cycle(counts), max(1, k))
            got = list(toy.chain(ahead=True).rounds(prompt, max_new_tokens=100, k=k))
            want = list(host.chain(ahead=False).rounds(prompt, max_new_tokens=100, k=k))
            assert settled(got) == settled(want) and got[-1].finish_reason == "capacity"


# --- what is not a number, what fails ---


def test_logits_that_are_not_numbers_end_a_request_as_on_the_host(memories: Memories) -> None:
    """Whatever the round that ran ahead made of them; then the sequence goes on."""
    toy, host = told(memories, 10), Told(10)
    chains = [(toy, toy.chain(ahead=True)), (host, host.chain(ahead=False))]
    prompt = toy.prompt(0, 7)
    truth, _ = Toy(10).decode(prompt, 40)
    for position, count, k in itertools.product(range(7, 15), (4, 0, 2), (4, 2)):
        ends: list[Any] = []
        for pair, chain in chains:
            pair.spoil(truth, 7, itertools.repeat(count), k)
            pair.nan_at = {position}
            cache, rounds = chain.cache, list[Round]()
            with pytest.raises(FloatingPointError, match=f"at position {position} are not"):
                for round in chain.rounds(prompt, max_new_tokens=30, k=k):
                    rounds.append(round)
            pair.nan_at = set()
            assert [*cache.tokens, cache.pending] == truth[: position + 1]
            states = cache_states(cache, toy.specs["trunk"])
            ends.append(live_states(states, cache.kept, len(cache.tokens)))
            rest = list(chain.rounds([truth[position]], max_new_tokens=12, append=True))
            assert [t for r in rest for t in r.tokens] == truth[position + 1 :][:12]
            ends.append(live(pair, chain))
            ends.append(settled([*rounds, *rest]))
        assert all(map(same, ends[:2], ends[3:5])) and ends[2] == ends[5]


def test_a_round_ahead_that_met_no_numbers_leaves_none(memories: Memories) -> None:
    """It is behind a stop, so nobody reads it; its rows in the caches must not spread either."""
    toy, host = told(memories, 10), Told(10)
    chains = [(toy, toy.chain(ahead=True)), (host, host.chain(ahead=False))]
    prompt = toy.prompt(0, 7)
    truth, _ = Toy(10).decode(prompt, 40)
    for pair, chain in chains:
        pair.spoil(truth, 7, itertools.repeat(4), 4)
        pair.nan_at = {13}  # the run of five is 8 to 12
        got = list(itertools.islice(chain.stream(prompt, max_new_tokens=30), 2))
        pair.nan_at = set()
        rest = chain.generate([got[-1]], max_new_tokens=12, append=True).tokens
        assert [*got, *rest] == truth[7:21]
    assert same(live(*chains[0]), live(*chains[1]))


def test_an_error_ends_a_request_where_it_stood(memories: Memories) -> None:
    """Of the round itself, and of the one ahead, whose error waits until it is asked for."""
    toy = told(memories)
    prompt = toy.prompt(0, 7)
    truth, steps = Toy(3).decode(prompt, 40)
    toy.spoil(truth, 7, itertools.repeat(2), 4)
    for rounds_before, session in itertools.product((1, 2, 3), ("draft", "trunk")):
        chain = toy.chain(ahead=True)
        rounds = chain.rounds(prompt, max_new_tokens=30)
        got = [token for r in itertools.islice(rounds, rounds_before) for token in r.tokens]
        toy.sessions[session].fails.append(OSError("device lost"))
        with pytest.raises(OSError, match="device lost"):
            for round in rounds:
                got += round.tokens
        assert len(got) == 1 + 3 * (rounds_before - (rounds_before == 1))
        n = len(chain.cache.tokens)
        assert [*chain.cache.tokens, chain.cache.pending] == truth[: 7 + len(got)]
        assert same(live(toy, chain), steps[n - 1].states)
        rest = chain.generate([got[-1]], max_new_tokens=9, append=True).tokens
        assert [*got, *rest] == truth[7 : 7 + len(got) + 9]


def test_ctrl_c_while_waiting_for_a_round_keeps_the_sequence(
    memories: Memories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round ahead has begun to write over the states before this one: none of it is kept."""
    toy = told(memories)
    prompt = toy.prompt(0, 7)
    truth, steps = Toy(3).decode(prompt, 40)
    toy.spoil(truth, 7, itertools.repeat(2), 4)
    for rounds_before in (1, 2, 3):
        chain = toy.chain(ahead=True)
        rounds = chain.rounds(prompt, max_new_tokens=30)
        got = [token for r in itertools.islice(rounds, rounds_before) for token in r.tokens]
        with monkeypatch.context() as patch:
            patch.setattr(Reader, "verdict", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(rounds)
        n = len(chain.cache.tokens)
        assert [*chain.cache.tokens, chain.cache.pending] == truth[: 7 + len(got)]
        states = cache_states(chain.cache, toy.specs["trunk"])
        assert same(live_states(states, chain.cache.kept, n), steps[n - 1].states)
        rest = chain.generate([got[-1]], max_new_tokens=9, append=True).tokens
        assert [*got, *rest] == truth[7 : 7 + len(got) + 9]


def interrupted(reader: Reader, k: int) -> Verdict:
    raise KeyboardInterrupt


# --- sharing, memory ---


def test_two_chains_in_turn_share_one_engine(memories: Memories) -> None:
    toy = told(memories)
    prompts = [toy.prompt(30, 6), toy.prompt(31, 11)]
    streams = [toy.chain(ahead=True).stream(p, max_new_tokens=25) for p in prompts]
    got: list[list[int]] = [[], []]
    for pair in zip(*streams, strict=True):
        for tokens, token in zip(got, pair, strict=True):
            tokens.append(token)
    for tokens, prompt in zip(got, prompts, strict=True):
        assert tokens == Toy(3).decode(prompt, 25)[0][len(prompt) :]


def test_graphs_outlive_a_request_and_nothing_is_allocated_after_the_first() -> None:
    with standins() as runtime:
        toy = Told(3).place(CudaMemory())
        chain = toy.chain()
        for k in (4, 0, 2):
            chain.generate(toy.prompt(0, 7), max_new_tokens=30, k=k)
        captured, made = set(chain.device.graphs), (len(runtime.allocated), len(runtime._pinned))
        assert {key[1:] for key in captured} == {
            (k, parity) for k in (4, 0, 2) for parity in (0, 1)
        }
        for i in range(60):
            stream = chain.stream(
                toy.prompt(i, 1 + i % 9), max_new_tokens=i % 13, k=(4, 0, 2)[i % 3]
            )
            list(itertools.islice(stream, 3 if i % 4 == 1 else 99))
        assert set(chain.device.graphs) == captured
        assert (len(runtime.allocated), len(runtime._pinned)) == made


def test_who_needs_the_host_gets_it() -> None:
    """Scratch KV, replay, and drafters that are no engines; and all of it in host memory."""
    with standins():
        toy = Told(3).place(CudaMemory())
        prompt = toy.prompt(0, 7)
        want = Toy(3).decode(prompt, 30)[0][7:]
        scratch = toy.chain(lambda cache: toy.eagle(cache, draft_kv="scratch"))
        script = toy.chain(lambda cache: Script(cache, [*prompt, *want], itertools.repeat(3)))
        for chain in (scratch, script, toy.chain(rollback="replay"), toy.chain(ahead=False)):
            assert chain.generate(prompt, max_new_tokens=30, k=4).tokens == want
            assert not chain.device.graphs
    toy = Told(3)
    calls = toy.sessions["trunk"].calls
    toy.chain().generate(prompt, max_new_tokens=30, k=0)
    assert len(calls) == 2 + 29, "no round ran ahead"


# --- real engines ---


@pytest.mark.skipif(not (DEMO / "draft").is_dir(), reason="the demo pair is not in this tree")
@pytest.mark.parametrize("k", [2, 4])
def test_with_a_trained_draft_every_accepted_count_occurs(tmp_path: Path, k: int) -> None:
    """The toy draft is never right; this one often is."""
    (trunk, trunk_weights), (draft, draft_weights) = open_pair(DEMO / "trunk", DEMO / "draft")
    pair = Pair(trunk, draft, trunk_weights, draft_weights)
    write_bundle(tmp_path / "bundle", pair, Options(5, 256), False, ())
    engines = open_engines(tmp_path / "bundle", "onnxruntime-cpu", threads=1)
    prompt = Tokenizer(tmp_path / "bundle").encode(PROMPTS["book"])
    rounds = [
        list(engines.chain(ahead=ahead).rounds(prompt, max_new_tokens=60, k=k, stop_ids=()))
        for ahead in (True, False)
    ]
    assert settled(rounds[0]) == settled(rounds[1])
    assert {r.accepted for r in rounds[0][1:]} == set(range(k + 1))


@pytest.mark.skipif(not (DEMO / "draft").is_dir(), reason="the demo pair is not in this tree")
def test_a_draft_told_by_a_table_makes_every_count_equally_often(tmp_path: Path) -> None:
    """The graphs that the GPU series uses; the trunk is the shipped one, plain its oracle."""
    (trunk, trunk_weights), (draft, draft_weights) = open_pair(DEMO / "trunk", DEMO / "draft")
    options = Options(5, 128)
    pair = Pair(trunk, draft, trunk_weights, draft_weights)
    write_bundle(tmp_path / "bundle", pair, options, False, ())
    engines = open_engines(tmp_path / "bundle", "onnxruntime-cpu", threads=1)
    specs = engines.manifest.specs
    table = engines.memory.allocate(table_spec(options.capacity, options.width))
    sessions = {}
    for name, graph in told_graphs(specs, options.capacity, options.width).items():
        (tmp_path / f"{name}.onnx").write_bytes(graph)
        spec = told_specs(specs)[name]
        bound = spec.inputs if name == "encoder" else (*spec.inputs, table.spec)
        spec = dataclasses.replace(spec, inputs=bound)
        sessions[name] = OrtSession(tmp_path / f"{name}.onnx", spec, engines.memory, (), threads=1)
    prompt = Tokenizer(tmp_path / "bundle").encode(PROMPTS["book"])
    want = engines.chain(drafter="none").generate(prompt, max_new_tokens=90, stop_ids=()).tokens
    for k in (4, 2):
        guesses, counts = Plan(k, trunk.vocab_size).table(
            len(prompt), [*prompt, *want], table.spec.shape[0]
        )
        table.write(guesses)
        cache = Cache(specs["trunk"], engines.memory, options.capacity)
        bind = {name: Given(session, table) for name, session in sessions.items()}
        drafter = EagleDrafter(cache, bind["encoder"], bind["draft"], bind["draft_step"])
        trunk_session = engines.sessions["trunk"]
        chain = Chain(trunk_session, cache, drafter, vocab_size=trunk.vocab_size, ahead=True)
        rounds = list(chain.rounds(prompt, max_new_tokens=90, k=k))
        assert [t for r in rounds for t in r.tokens] == want
        assert [r.accepted for r in rounds[1 : len(counts) + 1]] == counts
        made = [counts.count(c) for c in range(k + 1)]
        assert max(made) - min(made) <= 1


class Given:
    """A session that binds the table itself, as the GPU's sessions bind their weights."""

    def __init__(self, session: OrtSession, table: Buffer) -> None:
        self.session, self.memory, self.table = session, session.memory, table
        inputs = tuple(t for t in session.spec.inputs if t.name != "table")
        self.spec = dataclasses.replace(session.spec, inputs=inputs)

    def bind(self, tensors: Mapping[str, Buffer]) -> Binding:
        """Bind the table with the rest."""
        given = {"table": self.table} if self.spec != self.session.spec else {}
        return self.session.bind({**tensors, **given})
