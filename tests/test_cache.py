"""The cache: counters, places changed and changed back, snapshots, reset."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eagle_chain.engines.errors import InputError
from eagle_chain.runtime.buffers import HostBuffer
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.chain import Chain
from tests.toy import Script, Tensors, Toy, cache_states, live_states


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy(1)


def live(toy: Toy, cache: Cache) -> Tensors:
    states = cache_states(cache, toy.specs["trunk"])
    return live_states(states, cache.kept, len(cache.tokens))


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def poison(cache: Cache) -> None:
    """Fill everything that outlives a call with NaN, or -1 for integers."""
    for parity in (0, 1):
        for buffer in cache.tensors(parity).values():
            buffer.write(-1 if buffer.spec.dtype == "int32" else np.nan)
    for _, buffers in cache._states:
        for buffer in buffers:
            buffer.write(np.nan)


def test_counters_of_a_call_that_is_kept_cut_and_undone(toy: Toy) -> None:
    cache = toy.cache()
    cache.advance([3, 1, 4, 1, 5])
    cache.commit(5, 9)
    assert (cache.tokens, cache.position, cache.kept) == ([3, 1, 4, 1, 5], 0, 5)
    cache.advance([9, 2, 6])
    assert (cache.tokens, cache.position, cache.kept) == ([3, 1, 4, 1, 5], 5, 0)
    cache.commit(3, 7)
    cache.commit(1, 2)  # cut later: the consumer stopped
    assert (cache.tokens[5:], cache.kept, cache.pending) == ([9], 1, 2)
    cache.undo()
    assert (cache.tokens, cache.position, cache.kept) == ([3, 1, 4, 1, 5], 0, 5)
    assert cache.pending == 9
    with pytest.raises(AssertionError, match="no call to undo"):
        cache.undo()
    with pytest.raises(AssertionError, match="no such row"):
        cache.commit(6, 0)


def test_the_two_sets_of_addresses_are_each_others_mirror(toy: Toy) -> None:
    cache, spec = toy.cache(), toy.specs["trunk"]
    even, odd = cache.tensors(0), cache.tensors(1)
    for pair in spec.states:
        assert even[pair.input] is odd[pair.output] and even[pair.output] is odd[pair.input]
        assert (even[pair.input] is even[pair.output]) == pair.in_place
    for tensor in (*spec.inputs, *spec.outputs):
        assert (even[tensor.name] is odd[tensor.name]) == (tensor.name == "rows")


def test_a_call_leaves_its_counters_where_the_next_one_reads_them(toy: Toy) -> None:
    cache = toy.cache()
    for here, after in ((cache.tensors(0), cache.tensors(1)), (cache.tensors(1), cache.tensors(0))):
        assert here["next_kept"] is after["kept"] and here["next_position"] is after["position"]
        after["ids"].write([1, 2, 3, 4, 5])
        here["pending"].write(9)
        assert after["ids"].read().tolist() == [9, 2, 3, 4, 5]


def test_inputs_of_a_call_say_where_it_stands(toy: Toy) -> None:
    cache = toy.cache()
    cache.advance([3, 1])
    cache.commit(2, 4)
    cache.feed([4, 6, 7])
    inputs = cache.inputs[cache.parity]
    fed = {name: buffer.read().tolist() for name, buffer in inputs.items()}
    assert fed == {"ids": [4, 6, 7, -1, -1], "position": [2], "rows": [3], "kept": [2]}
    cache.feed([4], rows=5)
    assert [inputs[n].read().tolist() for n in ("ids", "rows")] == [[4, -1, -1, -1, -1], [5]]
    cache.follow(8)
    left = cache.outputs[cache.parity]
    assert [left[n].read().tolist() for n in ("next_ids", "accepted")] == [[1, 8, -1, -1, -1], [1]]
    assert cache.inputs[1 - cache.parity]["position"].read().tolist() == [0]


def test_undo_brings_back_states_and_features(toy: Toy) -> None:
    """A round launched past a stop leaves no trace: the next one equals plain decoding."""
    prompt = toy.prompt(0, 7)
    truth, steps = toy.decode(prompt, 10)
    chain = toy.chain()
    chain.generate(prompt, max_new_tokens=4)
    cache = chain.cache
    n = len(cache.tokens)
    before, feature = live(toy, cache), cache.outputs[cache.parity]["features"].read()
    assert same(before, steps[n - 1].states)
    assert cache.pending is not None
    chain._decoder._call([cache.pending, 5, 6, 7, 8])
    cache.commit(3, 6)
    cache.undo()
    assert same(live(toy, cache), before)
    assert np.array_equal(cache.outputs[cache.parity]["features"].read(), feature)
    assert list(chain.stream([cache.pending], max_new_tokens=5, append=True)) == truth[n + 1 :][:5]


def test_reset_leaves_no_nan_and_counts_from_zero(toy: Toy) -> None:
    chain = toy.chain()
    chain.generate(toy.prompt(0, 9), max_new_tokens=9)
    poison(chain.cache)
    chain.reset()
    assert (chain.cache.tokens, chain.cache.position, chain.cache.pending) == ([], 0, None)
    for _, buffers in chain.cache._states:
        for buffer in buffers:
            assert not buffer.read().any()


def branch(toy: Toy, chain: Chain, extra: list[int]) -> list[int]:
    return chain.generate(extra, max_new_tokens=9, append=True).tokens


def test_a_snapshot_serves_any_number_of_branches(toy: Toy) -> None:
    """Oracle: each branch decoded from scratch; also after a reset, NaN everywhere, a replay."""
    system = toy.prompt(0, 11)
    chain = toy.chain()
    chain.reset()
    chain.extend(system)
    kept = chain.snapshot()
    at_snapshot = live(toy, chain.cache)
    for seed, disturb in enumerate(["nothing", "other request", "reset", "nan", "again"]):
        extra = toy.prompt(10 + seed % 4, 1 + seed)
        want, _ = toy.decode([*system, *extra], 9)
        chain.rollback(kept)
        assert same(live(toy, chain.cache), at_snapshot)
        assert branch(toy, chain, extra) == want[-9:], disturb
        if disturb == "other request":
            chain.generate(toy.prompt(99, 30), max_new_tokens=20)
        elif disturb == "reset":
            chain.reset()
        elif disturb == "nan":
            poison(chain.cache)


def test_branches_draft_as_a_fresh_chain_does(toy: Toy) -> None:
    """The draft's KV is part of a snapshot: same rounds, same drafts accepted, same draft KV."""
    system, extra = toy.prompt(0, 11), toy.prompt(1, 3)
    chain = toy.chain()
    chain.reset()
    chain.extend(system)
    kept = chain.snapshot()
    chain.generate(toy.prompt(2, 20), max_new_tokens=30, append=True)
    chain.rollback(kept)
    got = [(r.tokens, r.drafted) for r in chain.rounds(extra, max_new_tokens=9, append=True)]
    fresh = toy.chain()
    want = [(r.tokens, r.drafted) for r in fresh.rounds([*system, *extra], max_new_tokens=9)]
    assert got == want
    n = len(fresh.cache.tokens) - fresh.cache.kept
    for mine, other in zip(chain.cache._states[-2:], fresh.cache._states[-2:], strict=True):
        rows = mine[1][0].read()[0, :, :n], other[1][0].read()[0, :, :n]
        assert rows[0].tobytes() == rows[1].tobytes()


def test_a_snapshot_in_the_middle_of_an_accepted_run(toy: Toy) -> None:
    """Stop after each token of a round, copy, go elsewhere, come back: plain decoding goes on."""
    prompt = toy.prompt(3, 6)
    truth, _ = toy.decode(prompt, 20)
    for stop in range(1, 12):
        chain = toy.chain(lambda cache: Script(cache, truth, itertools.repeat(4)))
        got = list(itertools.islice(chain.stream(prompt, max_new_tokens=20), stop))
        kept = chain.snapshot()
        chain.generate(toy.prompt(4, 9), max_new_tokens=5)
        chain.rollback(kept)
        assert chain.cache.pending == got[-1]
        rest = chain.generate([got[-1]], max_new_tokens=20 - stop, append=True).tokens
        assert got + rest == truth[6:]


def test_a_snapshot_copies_live_rows_only(toy: Toy) -> None:
    chain = toy.chain()
    sizes = []
    for length in (10, 20):
        chain.generate(toy.prompt(0, length), max_new_tokens=0)
        sizes.append(chain.snapshot().nbytes)
    row = 2 * 2 * 2 * 3 * 4  # trunk and draft, key and value, heads, dims, fp32
    assert sizes[1] - sizes[0] == 10 * row


def test_an_empty_cache_can_be_copied_and_restored(toy: Toy) -> None:
    chain = toy.chain()
    empty = chain.snapshot()
    prompt = toy.prompt(0, 8)
    first = chain.generate(prompt, max_new_tokens=8).tokens
    chain.rollback(empty)
    assert chain.cache.tokens == [] and chain.cache.pending is None
    assert chain.generate(prompt, max_new_tokens=8, append=True).tokens == first


def test_a_snapshot_of_another_bundle_is_refused(toy: Toy) -> None:
    chain, other = toy.chain(), Toy(1, width=4).chain()
    with pytest.raises(InputError, match="another bundle or drafter"):
        chain.rollback(other.snapshot())
    with pytest.raises(InputError, match="another bundle or drafter"):
        chain.rollback(toy.chain(lambda cache: Script(cache, [], iter(()))).snapshot())


def test_a_snapshot_of_other_weights_of_the_same_size_is_refused(toy: Toy) -> None:
    chain, tuned = toy.chain(), Toy(2).chain()
    prompt = toy.prompt(0, 7)
    want = chain.generate(prompt, max_new_tokens=5).tokens
    tuned.generate(prompt, max_new_tokens=5)
    before = live(toy, chain.cache)
    with pytest.raises(InputError, match="another bundle or drafter"):
        chain.rollback(tuned.snapshot())
    assert same(live(toy, chain.cache), before) and [chain.cache.pending] == want[-1:]


def test_snapshots_of_one_chain_serve_another_over_the_same_sessions(toy: Toy) -> None:
    a, b = toy.chain(), toy.chain()
    a.generate(toy.prompt(5, 8), max_new_tokens=3)
    b.rollback(a.snapshot())
    assert a.cache.pending == b.cache.pending is not None
    got = [c.generate([c.cache.pending or 0], max_new_tokens=6, append=True).tokens for c in (a, b)]
    assert got[0] == got[1]


def test_states_live_where_they_were_allocated(toy: Toy) -> None:
    """Nothing in a request moves a buffer: engines hold the addresses."""
    chain = toy.chain(rollback="replay")
    buffers = [b for _, pair in chain.cache._states for b in pair]
    assert all(isinstance(b, HostBuffer) for b in buffers)
    addresses = [b.address for b in buffers]
    chain.generate(toy.prompt(0, 9), max_new_tokens=12)
    chain.rollback(chain.snapshot())
    assert [b.address for _, pair in chain.cache._states for b in pair] == addresses
