"""Look-up in the sequence: matches against brute force, guesses against the text."""

from __future__ import annotations

import random
import time

import pytest

from eagle_chain.runtime.ngram import CANDIDATES, LONGEST, NgramDrafter, NgramIndex
from tests.toy import Toy


def longest_match(row: list[int]) -> tuple[int, int]:
    """All earlier places, compared token by token; those a pair long go before single tokens."""
    last = len(row) - 1

    def common(place: int) -> int:
        length = 0
        while length < LONGEST and place >= length and row[place - length] == row[last - length]:
            length += 1
        return length

    lengths = [(common(place), place) for place in range(last)]
    latest = sorted((entry for entry in lengths if entry[0] > 1), key=lambda e: -e[1])[:CANDIDATES]
    length, place = max(latest or lengths, default=(0, 0))
    return (place + 1, length) if length else (0, 0)


@pytest.mark.parametrize("vocab", [1, 2, 3, 8, 40])
def test_matches_are_those_of_brute_force(vocab: int) -> None:
    rng = random.Random(vocab)
    for length in (1, 2, 3, 30, 160):
        row = [rng.randrange(vocab) for _ in range(length)]
        row += row[: length // 2]  # a long repetition, at a distance
        index = NgramIndex()
        for size, token in enumerate(row, 1):
            index.add(token)
            assert index.match() == longest_match(row[:size])


@pytest.mark.parametrize(
    ("row", "k", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], 4, [4, 9, 1, 2]),
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 2, [7, 6]),  # the longer match, not the later
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, [8]),  # of equal ones the later
        ([1, 2, 1, 2], 4, [1, 2, 1, 2]),  # goes on as a cycle
        ([3, 3, 3], 4, [3, 3, 3, 3]),
        ([4, 5, 6, 4], 2, [5, 6]),  # one token will do
        ([1, 2, 3], 4, []),
        ([1], 4, []),
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_drafts_are_what_followed(row: list[int], k: int, drafts: list[int]) -> None:
    toy = Toy()
    cache = toy.cache()
    cache.tokens = row[:-1]
    assert NgramDrafter(cache).propose(row[-1], k) == drafts


def test_the_index_follows_a_sequence_that_is_cut_or_replaced() -> None:
    cache = Toy().cache()
    drafter, rng = NgramDrafter(cache), random.Random(0)
    for _ in range(300):
        action = rng.random()
        if action < 0.7:
            cache.tokens = cache.tokens + [rng.randrange(6) for _ in range(rng.randrange(1, 6))]
        elif action < 0.8:  # cut behind the token that was guessed for, or before
            cache.tokens = cache.tokens[: rng.randrange(len(cache.tokens) + 1)]
        elif action < 0.9:
            drafter.propose(rng.randrange(6), 4)  # a token that does not come
        else:
            cache.tokens = [rng.randrange(6) for _ in range(len(cache.tokens))]
            drafter.reset()
        fresh, token = NgramDrafter(cache), rng.randrange(6)
        assert drafter.propose(token, 4) == fresh.propose(token, 4)


@pytest.mark.parametrize("rollback", ["log", "replay"])
def test_the_chain_is_exact_and_repeats_are_found(rollback: str) -> None:
    toy = Toy(4)
    toy.places[:] = 0
    for layer in toy.layers:  # so that a token follows from the one before it alone
        layer["out"][:] = 0
    prompt = toy.prompt(3, 9)
    truth, _ = toy.decode(prompt, 50)
    chain = toy.chain(NgramDrafter, rollback=rollback)
    for _ in range(2):
        result = chain.generate(prompt, max_new_tokens=50)
        assert result.tokens == truth[9:]
        assert result.stats.acceptance_length and result.stats.acceptance_length > 2
    held = chain.snapshot()
    other = chain.generate(toy.prompt(5, 4), max_new_tokens=8).tokens
    chain.rollback(held)
    assert chain.cache.pending is not None
    assert chain.generate([chain.cache.pending], max_new_tokens=1, append=True).tokens
    assert chain.generate(toy.prompt(5, 4), max_new_tokens=8).tokens == other


def test_a_round_costs_microseconds() -> None:
    """Far below a trunk pass, at any length and on any text."""
    rng = random.Random(0)
    for vocab in (1, 2, 50, 8000):
        cache = Toy().cache()
        cache.tokens = [rng.randrange(vocab) for _ in range(20_000)]
        drafter = NgramDrafter(cache)
        token = 0
        drafter.propose(token, 4)
        start = time.perf_counter()
        for _ in range(200):
            cache.tokens += [token, rng.randrange(vocab)]
            token = rng.randrange(vocab)
            drafter.propose(token, 4)
        assert (time.perf_counter() - start) / 200 < 1e-3
