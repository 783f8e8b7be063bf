"""What a KV type costs in acceptance, along one and the same text: every position is drafted from.

    python -m tests.kv_loss py.jsonl doc.jsonl book.jsonl --kv q8_0/q5_1 --kv q8_0/q5_1:fp32

A chain over its own tokens wanders off to another text with the first near-tie that falls to the
other side, and then two acceptances compare two texts. Here the text is what greedy decoding makes
of the prompts with KV in fp32 (`--along`: in another type); the drafts of each KV type are compared
with it at every position. Where a trunk with another KV type would itself choose another token, its
draft is right to guess that one: figures of the positions whose next K tokens are the trunk's own
choice stand beside those of all positions. `TRUNK:DRAFT` gives the two KV types of their own. Files
are named after the register token that their prompts begin with.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_chain.engines.cli import main as command
from eagle_chain.runtime import Engines, Tokenizer, open_engines
from eagle_chain.runtime.buffers import HostMemory
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.exactness import before_repeat
from eagle_chain.runtime.prompts import cut_prompts, read_text

DEMO = Path(__file__).parents[1] / "demo"
K = 4
BASE = "fp32"


@dataclass(frozen=True)
class Text:
    """A prompt and its greedy continuation."""

    tokens: Sequence[int]
    prompt: int  # tokens of the prompt
    fresh: int  # tokens behind it before the text repeats itself

    @property
    def positions(self) -> range:
        """Where a pending token may stand: generated, with K more behind it."""
        return range(self.prompt, len(self.tokens) - K)


@dataclass(frozen=True)
class Reading:
    """What a trunk makes of a text."""

    chosen: list[int]  # its choice behind each token but the last
    g: NDArray[Any]  # [tokens - 1, H] its features, encoded


@dataclass
class Found:
    """For each position of each text: what the draft of one KV type guessed there."""

    accepted: list[list[int]] = field(default_factory=list)  # drafts that are the text's, 0..K
    agreed: list[list[bool]] = field(default_factory=list)  # the trunk chooses the next K as well

    @property
    def tokens_per_pass(self) -> float:
        """The mean over all positions, the trunk's own token counted."""
        return 1 + float(np.mean([*chain(*self.accepted)]))

    @property
    def agreement(self) -> float:
        """Share of the positions whose next K tokens are the trunk's own choice."""
        return float(np.mean([*chain(*self.agreed)]))


@dataclass(frozen=True)
class Loss:
    """Tokens per pass of one KV type against another's at the same positions."""

    positions: int
    base: float
    change: float  # relative to `base`
    error: float  # standard error of `change`, the texts taken as the independent samples


def exported(folder: Path, kv: str, capacity: int) -> Engines:
    """The shipped pair with this KV type."""
    path = folder / kv.replace("/", "_")
    if not path.exists():
        words = [str(DEMO / "trunk"), str(DEMO / "draft"), "-o", str(path), "--kv", kv]
        with redirect_stdout(StringIO()):
            assert command(["export", *words, "--capacity", str(capacity)]) == 0
    return open_engines(path, threads=1)


def greedy_texts(engines: Engines, prompts: Sequence[Sequence[int]], new: int) -> list[Text]:
    """The prompts with their greedy continuations, which the chain gives as plain decoding does."""
    decoded, chain = [], engines.chain()
    for prompt in prompts:
        tokens = chain.generate(prompt, max_new_tokens=new).tokens
        fresh = before_repeat(prompt, tokens)
        decoded.append(Text([*prompt, *tokens], len(prompt), fresh))
    return decoded


def reader(engines: Engines) -> Callable[[Text], Reading]:
    """The trunk over given texts, W rows a call."""
    sessions, memory = engines.sessions, engines.memory
    cache = Cache(sessions["trunk"].spec, memory, engines.manifest.options.capacity)
    trunk = [sessions["trunk"].bind(cache.tensors(parity)) for parity in (0, 1)]
    g = memory.allocate(sessions["encoder"].spec.outputs[0])
    encoders = [
        sessions["encoder"].bind({"features": outputs["features"], "g": g})
        for outputs in cache.outputs
    ]

    def read(text: Text) -> Reading:
        cache.reset()
        chosen, rows, tokens = list[int](), list[NDArray[Any]](), text.tokens[:-1]
        for start in range(0, len(tokens), cache.width):
            ids = tokens[start : start + cache.width]
            cache.feed(ids)
            trunk[cache.parity].run()
            cache.advance(ids)
            cache.commit(len(ids), 0)
            encoders[cache.parity].run()
            chosen += cache.outputs[cache.parity]["next_ids"].read()[: len(ids)].tolist()
            rows.append(g.read()[: len(ids)].copy())
        return Reading(chosen, np.concatenate(rows))

    return read


def guesser(engines: Engines) -> Callable[[Text, Reading], list[int]]:
    """The draft over a text that a trunk has read: how many guesses are right at each position.

    Row by row: the row of a true feature is written, and guessed from where a position counts; the
    rows that the guesses write behind it are overwritten by those of the next true features.
    """
    session, memory = engines.sessions["draft_step"], HostMemory()
    spec = session.spec
    buffers = {t.name: memory.allocate(t) for t in (*spec.inputs, *spec.outputs)}
    states = {}
    for pair in spec.states:
        states |= dict.fromkeys((pair.input, pair.output), memory.allocate(pair.tensors[0]))
    step = session.bind({**buffers, **states})

    def run(token: int, g: NDArray[Any], position: int) -> int:
        buffers["ids"].write(token)
        buffers["g"].write(g)
        buffers["position"].write(position)
        step.run()
        return int(buffers["token"].read()[0])

    def guess(text: Text, reading: Reading) -> list[int]:
        for buffer in states.values():
            buffer.zero()
        accepted, tokens = [], text.tokens
        for pending in range(1, text.positions.stop):  # pairs with the feature before it
            token = run(tokens[pending], reading.g[pending - 1], pending - 1)
            if pending not in text.positions:
                continue
            right = 0
            while token == tokens[pending + 1 + right]:
                right += 1
                if right == K:
                    break
                token = run(token, buffers["g_next"].read(), pending - 1 + right)
            accepted.append(right)
        return accepted

    return guess


def measure(trunk: Engines, draft: Engines, texts: Sequence[Text]) -> Found:
    """Read each text, and draft up to K tokens from each of its generated positions."""
    found, read, guess = Found(), reader(trunk), guesser(draft)
    for text in texts:
        reading = read(text)
        own = [a == b for a, b in zip(reading.chosen, text.tokens[1:], strict=True)]
        found.agreed.append([all(own[at : at + K]) for at in text.positions])
        found.accepted.append(guess(text, reading))
    return found


def loss(texts: Sequence[Text], base: Found, other: Found, *, fresh: bool, own: bool) -> Loss:
    """Compare two KV types along the same texts.

    Args:
        texts: What both were measured on.
        base: The KV type to compare with.
        other: The one whose loss is wanted.
        fresh: Count only the positions before a text repeats itself.
        own: Count only those whose next K tokens both trunks choose themselves.
    """
    sums = np.zeros((len(texts), 3))  # positions, tokens of `base`, of `other`
    for i, text in enumerate(texts):
        for j in range(min(len(text.positions), text.fresh if fresh else len(text.positions))):
            if not own or (base.agreed[i][j] and other.agreed[i][j]):
                sums[i] += 1, 1 + base.accepted[i][j], 1 + other.accepted[i][j]
    positions, before, after = sums.sum(0)
    ratio = after / before
    spread = sums[:, 2] - ratio * sums[:, 1]  # of a ratio of sums, to first order
    error = np.sqrt(len(texts) / (len(texts) - 1) * (spread**2).sum()) / before
    return Loss(int(positions), float(before / positions), float(ratio - 1), float(error))


def losses(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    new: int,
    kinds: Sequence[str],
    along: str = BASE,
) -> tuple[list[Text], Mapping[str, Found]]:
    """The texts that KV in `along` gives, and what is found along them in fp32 and in `kinds`."""
    capacity = max(len(p) for p in prompts) + new
    texts = greedy_texts(exported(folder, along, capacity), prompts, new)
    found = {}
    for kv in (BASE, *kinds):
        trunk, _, draft = kv.partition(":")
        pair = [exported(folder, kind, capacity) for kind in (trunk, draft or trunk)]
        found[kv] = measure(pair[0], pair[1], texts)
    return texts, found


def main() -> None:
    """Print a line for each KV type: over all positions, and over those of the trunk's own text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--kv", action="append", required=True)
    parser.add_argument("--along", default=BASE)
    parser.add_argument("--prompts", type=int, default=40, help="of each file")
    parser.add_argument("--new", type=int, default=64)
    given = parser.parse_args()
    tokenizer, prompts = Tokenizer(DEMO / "trunk"), []
    for path in given.texts:
        prefix = f"<|{path.stem}|>"
        file = read_text(path)
        prompts += cut_prompts(file, tokenizer, count=given.prompts, length=64, prefix=prefix)
    with tempfile.TemporaryDirectory() as folder:
        texts, found = losses(Path(folder), prompts, given.new, given.kv, given.along)
    print("all positions, those of the trunk's own choice; the same before a repetition")
    for kv, counts in found.items():
        cells = []
        for fresh in (False, True):
            for own in (False, True):
                it = loss(texts, found[BASE], counts, fresh=fresh, own=own)
                cells.append(f"{it.change:+.2%} +- {it.error:.2%} ({it.positions}, {it.base:.3f})")
        print(f"{kv:16} agrees {counts.agreement:.2%}  {'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
