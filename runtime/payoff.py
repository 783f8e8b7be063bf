"""What a setting of a draft pays: tokens a second by drafts per round, and a chain to show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle_chain.engines.spec import Options
from eagle_chain.runtime.along import Found, Text
from eagle_chain.runtime.drafters import engine_calls
from eagle_chain.runtime.exactness import decode_plainly
from eagle_chain.runtime.load import Engines
from eagle_chain.runtime.stand import Stand
from eagle_chain.runtime.stats import Stats

CLOCKED = 20  # timed runs of each engine
FASTER = 1.02  # what another number of drafts must promise to gain before it is recommended


def capacity_for(options: Options, tokens: int) -> int:
    """The smallest capacity that holds so many tokens: what calls cost in attention goes with it.

    A chain runs a text there but for its last calls, whose W rows may end beyond.
    """
    return next(size for size in options.capacities if tokens <= size)


def part_times(engines: Engines, position: int, capacity: int) -> dict[str, float]:
    """Milliseconds of each engine of a round on this machine, medians, by its name in `bench`.

    Args:
        engines: Of the bundle.
        position: How many tokens the cache holds.
        capacity: Of the engines to measure, one of the bundle's.
    """
    options = engines.manifest.options
    stand = Stand(engines.of_capacity(capacity), capacity, options.width - 1, position)
    return {name: stand.part(name, CLOCKED).median for name in stand.parts}


def speeds(
    found: Found, parts: Mapping[str, float], most: int, *, scratch: bool
) -> list[dict[str, Any]]:
    """For rounds of 0 to `most` drafts: what one gives, what it takes, tokens a second."""
    rows = []
    for k in range(most + 1):
        # the trunk runs W rows in any case
        times = engine_calls(k, "eagle") if k else {"verify": 1}
        if scratch and k:  # its first row stands alone
            times = {**times, "draft": 0, "draft_step": k}
        taken = sum(count * parts[name] for name, count in times.items() if count)
        tokens = found.tokens_per_pass(k)
        per_second = tokens / taken * 1e3
        row = {
            "k": k,
            "tokens_per_pass": tokens,
            "round_ms": taken,
            "tokens_per_second": per_second,
        }
        rows.append(row)
    return rows


def fastest(rows: Sequence[Mapping[str, Any]], now: int) -> int:
    """The number of drafts with most tokens a second; that of now unless it is clearly slower."""
    best = max(rows, key=lambda row: row["tokens_per_second"])
    gained = best["tokens_per_second"] / rows[now]["tokens_per_second"]
    return int(best["k"]) if gained > FASTER else now


def confirm(
    engines: Engines, texts: Sequence[Text], k: int, new: int, *, scratch: bool
) -> dict[str, Any]:
    """Decode the texts again by a chain, and count the rounds that `Found` counts.

    A text that comes out as it was recorded is plain decoding's; another one is decoded plainly
    here as well, as engines that were made in another way may differ in a near-tie.
    """
    chain = engines.chain(drafter="eagle", draft_kv="scratch" if scratch else "kept")
    stats, exact = Stats(), True
    for text in texts:
        tokens = list[int]()
        for round in chain.rounds(text.prompt, max_new_tokens=new, k=k):
            if not round.prompt_tokens and len(tokens) <= text.rounds(k):
                stats.add(round)
            tokens += round.tokens
        if exact and tokens != text.chosen:
            plain = decode_plainly(engines.chain(drafter="none"), text.prompt, new)
            exact = tokens == plain.tokens
    return {
        "exact": exact,
        "rounds": stats.rounds,
        "tokens_per_pass": stats.acceptance_length or 1.0,
        "tokens_per_second": stats.tokens_per_second or 0.0,
    }
