"""Thousands of requests on one loaded chain: flat memory, and the first answers once more.

`python -m tests.soak BUNDLE [--requests 5000] [--seconds 60]` mixes, from a fixed seed, requests of
any length, K and drafter (the bundle's own, none, a noisy one), turns of conversations, snapshots
with branches and returns, streams that are left early, failures of the trunk in the middle and
requests that are refused. Every token is compared with plain decoding of the same prompt. At the
end the first requests are made again: the same tokens, the same accepted counts, the same bits of
every state.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import hashlib
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from eagle_chain.engines.errors import InputError
from eagle_chain.runtime import Engines, open_engines
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.cuda import CudaMemory
from eagle_chain.runtime.drafters import Drafter, NoDrafter
from tests.toy import Over

STRETCH = 100  # requests between two looks at the memory
AGAIN = 50  # requests that are made again at the end
PROMPTS = 40
KINDS = [*["request"] * 10, *["turn"] * 3, *["cancel"] * 3, *["failure"] * 2]
KINDS += [*["branch"] * 2, "refused", "reset"]


class Noisy(Over):
    """The drafter it is made over, with some guesses spoiled or left out."""

    def __init__(self, drafter: Drafter, vocab: int, rng: random.Random) -> None:
        super().__init__(drafter)
        self.vocab, self.rng = vocab, rng

    def propose(self, token: int, k: int) -> list[int]:
        """The other's guesses, every fourth something else."""
        guesses = self.drafter.propose(token, k)
        noisy = [self.rng.randrange(self.vocab) if self.rng.random() < 0.25 else g for g in guesses]
        return noisy[: self.rng.randrange(k + 1) if self.rng.random() < 0.2 else k]


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """A chain, and what it must answer."""

    def __init__(self, engines: Engines, longest: int = 40, budget: int = 24) -> None:
        self.vocab = engines.manifest.trunk.vocab_size
        self.capacity = engines.manifest.options.capacity
        self.width = engines.manifest.options.width
        self.budget = budget
        plain, rng = engines.chain(drafter="none"), random.Random(0)
        self.prompts = [
            [rng.randrange(self.vocab) for _ in range(rng.randrange(1, longest))]
            for _ in range(PROMPTS)
        ]
        more = 3 * budget + self.width
        self.truths = [
            plain.generate(p, max_new_tokens=more, stop_ids=()).tokens for p in self.prompts
        ]
        self.chain: Chain = engines.chain()
        self.own = self.chain.drafter
        self.counts: Counter[str] = Counter()

    def request(self, i: int) -> Any:
        """Request `i`, which depends on `i` alone; what it gave."""
        rng, chain = random.Random(i), self.chain
        noisy = Noisy(self.own, self.vocab, rng)
        chain.drafter = rng.choice([self.own, self.own, noisy, NoDrafter()])
        self.counts["drafter " + type(chain.drafter).__name__] += 1
        kind, which = rng.choice(KINDS), rng.randrange(PROMPTS)
        self.counts[kind] += 1
        prompt, truth = self.prompts[which], self.truths[which]
        options: dict[str, Any] = {"k": rng.randrange(self.width), "stop_ids": ()}
        budget = rng.randrange(self.budget)
        return getattr(self, f"_{kind}")(rng, prompt, truth, budget, options)

    def _request(self, rng: Any, prompt: Any, truth: Any, budget: int, options: Any) -> Any:
        if truth and rng.random() < 0.2:
            options["stop_ids"] = {rng.choice(truth)}
        result = self.chain.generate(prompt, max_new_tokens=budget, **options)
        want = truth[:budget]
        for at, token in enumerate(want):
            if token in options["stop_ids"]:
                want = want[: at + 1]
                break
        assert result.tokens == want
        return result.tokens, result.finish_reason, result.stats.accepted_at, self.states()

    def _turn(self, rng: Any, prompt: Any, truth: Any, budget: int, options: Any) -> Any:
        options["k"] = options["k"] or 1  # plain decoding would leave a gap in a draft's KV
        first = self.chain.generate(prompt, max_new_tokens=budget + 1, **options).tokens
        more = self.chain.generate(first[-1:], max_new_tokens=budget, append=True, **options).tokens
        assert [*first, *more] == truth[: 2 * budget + 1]
        return first, more, self.states()

    def _cancel(self, rng: Any, prompt: Any, truth: Any, budget: int, options: Any) -> Any:
        stream = self.chain.stream(prompt, **options)
        got = list(itertools.islice(stream, budget))
        if rng.random() < 0.5:
            stream.close()  # type: ignore[attr-defined]
        assert got == truth[:budget]
        return got

    def _failure(self, rng: Any, prompt: Any, truth: Any, budget: int, options: Any) -> Any:
        """The trunk's engine raises, before or after it has run, in the prompt or behind it."""
        calls, late, at = itertools.count(), rng.random() < 0.5, rng.randrange(6)

        def failing(run: Any) -> None:
            fails = next(calls) == at
            if late or not fails:
                run()
            if fails:
                raise OSError("device lost")

        trunk = self.chain._ladder.rung.trunk  # one binding for each parity
        runs = [binding.run for binding in trunk]
        for binding, run in zip(trunk, runs, strict=True):
            binding.run = functools.partial(failing, run)  # type: ignore[method-assign]
        got: list[int] = []
        try:
            with contextlib.suppress(OSError):
                got.extend(self.chain.stream(prompt, max_new_tokens=budget, **options))
        finally:
            for binding, run in zip(trunk, runs, strict=True):
                binding.run = run  # type: ignore[method-assign]
        assert got == truth[: len(got)]
        return got

    def _branch(self, rng: Any, prompt: Any, truth: Any, budget: int, options: Any) -> Any:
        """A snapshot in the middle, another continuation, and back."""
        options["k"] = options["k"] or 1
        first = self.chain.generate(prompt, max_new_tokens=budget + 1, **options).tokens
        before = self.chain.snapshot()
        other = [rng.randrange(self.vocab) for _ in range(rng.randrange(1, 9))]
        aside = self.chain.generate(other, max_new_tokens=5, append=True, **options).tokens
        self.chain.rollback(before)
        more = self.chain.generate(first[-1:], max_new_tokens=budget, append=True, **options).tokens
        assert [*first, *more] == truth[: 2 * budget + 1]
        return first, aside, more, self.states()

    def _refused(self, rng: Any, prompt: Any, truth: Any, budget: int, options: Any) -> Any:
        bad = rng.choice([[], [self.vocab], [-1], [0] * (self.capacity + 1), [None], 5])
        try:
            self.chain.generate(bad, max_new_tokens=budget, **options)
        except InputError as error:
            return str(error)
        raise AssertionError(f"{bad} was not refused")

    def _reset(self, rng: Any, prompt: Any, truth: Any, budget: int, options: Any) -> Any:
        self.chain.reset()
        return None

    def states(self) -> str:
        """A hash over every bit of the sequence's states."""
        cache, digest = self.chain.cache, hashlib.sha256()
        for pair, buffers in cache._states:
            array = buffers[cache.parity].read()
            if pair.rows_axis is not None:  # rows behind the sequence are anybody's
                rows = range(len(cache.tokens) - (len(cache.tokens) > 0))
                if pair.input.startswith("draft."):
                    continue  # as long as its drafter was asked
                array = array.take(rows, pair.rows_axis)
            elif pair.input.endswith(".window"):
                array = array[:, cache.kept : cache.kept + pair.shape[1] - cache.width]
            elif not pair.input.endswith(".S"):
                continue  # the log of the last call, rejected rows among it
            digest.update(array.tobytes())
        return digest.hexdigest()


def free_on_device(engines: Engines) -> int:
    """Bytes; 0 where the memory is the host's."""
    gc.collect()
    return engines.memory.free_bytes() if isinstance(engines.memory, CudaMemory) else 0


def soak(
    engines: Engines, requests: int, seconds: float = float("inf"), **sizes: int
) -> dict[str, Any]:
    """Make the requests, as many as there is time for but fifty at least, and those once more.

    Raises:
        AssertionError: An answer is wrong.
    """
    run = Soak(engines, **sizes)
    allocations, allocate = itertools.count(), engines.memory.allocate

    def counted(spec: Any) -> Any:
        next(allocations)
        return allocate(spec)

    engines.memory.allocate = counted  # type: ignore[method-assign]
    start = time.monotonic()
    again = range(min(AGAIN, requests))
    first = [run.request(i) for i in again]
    memory, free = [resident()], free_on_device(engines)
    for i in range(len(again), requests):
        if time.monotonic() - start > seconds:
            requests = i
            break
        run.request(i)
        if i % STRETCH == 0:
            memory.append(resident())
            if sys.stderr.isatty() or i % 1000 == 0:
                print(f"{i} requests, {memory[-1] / 1e6:.1f} MB", file=sys.stderr, flush=True)
    assert [run.request(i) for i in again] == first, "the first answers are not the same"
    half = memory[len(memory) // 2 :]
    return {
        "requests": requests + len(again),
        "seconds": round(time.monotonic() - start, 1),
        "kinds": dict(sorted(run.counts.items())),
        "first_mb": round(memory[0] / 1e6, 2),
        "highest_mb": round(max(memory) / 1e6, 2),
        "last_mb": round(memory[-1] / 1e6, 2),
        "growth_of_second_half_kb": round((half[-1] - half[0]) / 1e3),
        "device_kb_lost": round((free - free_on_device(engines)) / 1e3),
        "growths_kb": [round((b - a) / 1e3) for a, b in itertools.pairwise(memory)],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--backend", default="auto")
    arguments = parser.parse_args()
    engines = open_engines(arguments.bundle, arguments.backend, threads=1)
    report = soak(engines, arguments.requests, arguments.seconds)
    print(json.dumps(report))
