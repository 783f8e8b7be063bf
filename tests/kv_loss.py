"""What a KV type costs in acceptance, along one and the same text: every position is drafted from.

    python -m tests.kv_loss --kv q8_0/q5_1 --prefix '<|py|>' --prompts 36 py.jsonl

A chain over its own tokens wanders off to another text with the first near-tie that falls to the
other side, and then two acceptances compare two texts. Here the text is what plain decoding makes
of the prompts with KV in fp32; the drafts of each KV type are compared with it at every position.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from eagle_chain.engines.cli import main as command
from eagle_chain.engines.spec import TensorSpec
from eagle_chain.runtime import Engines, Tokenizer, open_engines
from eagle_chain.runtime.buffers import Buffer
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.exactness import decode_plainly
from eagle_chain.runtime.prompts import cut_prompts, read_text

DEMO = Path(__file__).parents[1] / "demo"
K = 4

Text = tuple[int, list[int]]  # tokens of the prompt, all tokens


@dataclass
class Found:
    """Counts over all positions of some texts."""

    agreed: int = 0  # the trunk chooses the text's token
    accepted: list[int] = field(default_factory=list)  # drafts that are the text's, by position

    @property
    def tokens_per_pass(self) -> float:
        """The mean over the positions, the trunk's own token counted."""
        return 1 + sum(self.accepted) / len(self.accepted)


def exported(folder: Path, kv: str, capacity: int) -> Engines:
    """The shipped pair with this KV type."""
    words = [str(DEMO / "trunk"), str(DEMO / "draft"), "-o", str(folder / kv.replace("/", "_"))]
    with redirect_stdout(StringIO()):
        assert command(["export", *words, "--kv", kv, "--capacity", str(capacity)]) == 0
    return open_engines(folder / kv.replace("/", "_"), threads=1)


def plain_texts(engines: Engines, prompts: Sequence[Sequence[int]], new: int) -> list[Text]:
    """The prompts with their greedy continuations."""
    chain = engines.chain(drafter="none")
    return [(len(p), [*p, *decode_plainly(chain, p, new).tokens]) for p in prompts]


def measure(engines: Engines, texts: Sequence[Text]) -> Found:
    """Read each text, and draft K tokens from each of its generated positions."""
    found, sessions, memory = Found(), engines.sessions, engines.memory
    capacity = engines.manifest.options.capacity
    cache = Cache(sessions["trunk"].spec, memory, capacity)
    trunk = [sessions["trunk"].bind(cache.tensors(parity)) for parity in (0, 1)]
    states = cache.claim(sessions["draft"].spec.states)
    g = memory.allocate(sessions["encoder"].spec.outputs[0])
    encoders = [
        sessions["encoder"].bind({"features": outputs["features"], "g": g})
        for outputs in cache.outputs
    ]

    def buffers(name: str, **known: Buffer) -> dict[str, Buffer]:
        spec = sessions[name].spec
        tensors: Sequence[TensorSpec] = (*spec.inputs, *spec.outputs)
        made = {t.name: known.get(t.name) or memory.allocate(t) for t in tensors}
        return {**made, **states}

    wide, single = buffers("draft", g=g), buffers("draft_step")
    extend, step = sessions["draft"].bind(wide), sessions["draft_step"].bind(single)

    def drafts(position: int, row: int) -> list[int]:
        wide["position"].write(position)
        wide["row"].write(row)
        extend.run()
        tokens, last = [int(wide["token"].read()[0])], wide
        single["row"].write(0)
        for j in range(1, K):
            single["ids"].write(last["token"].read())
            single["g"].write(last["g_next"].read())
            single["position"].write(position + row + j)
            step.run()
            last = single
            tokens.append(int(single["token"].read()[0]))
        return tokens

    for prompt, tokens in texts:
        cache.reset()
        for start in range(0, len(tokens) - 1, cache.width):
            ids = tokens[start : start + cache.width]
            cache.feed(ids)
            trunk[cache.parity].run()
            cache.advance(ids)
            cache.commit(len(ids), 0)
            chosen = cache.outputs[cache.parity]["next_ids"].read()
            encoders[cache.parity].run()
            follows = tokens[start + 1 : start + 1 + cache.width]
            wide["ids"].write([*follows, *[-1] * (cache.width - len(follows))])
            for row in range(len(ids)):
                pending = start + row + 1  # the token whose successors are drafted
                if pending < prompt or pending + K >= len(tokens):
                    continue
                found.agreed += int(chosen[row] == tokens[pending])
                want = tokens[pending + 1 : pending + 1 + K]
                right = [a == b for a, b in zip(drafts(start, row), want, strict=True)]
                found.accepted.append((*right, False).index(False))
    return found


def losses(
    folder: Path, prompts: Sequence[Sequence[int]], new: int, kinds: Sequence[str]
) -> Mapping[str, Found]:
    """What is found for KV in fp32 and in each of `kinds`, on the same texts."""
    capacity = max(len(p) for p in prompts) + new
    texts = plain_texts(exported(folder, "fp32", capacity), prompts, new)
    return {kv: measure(exported(folder, kv, capacity), texts) for kv in ("fp32", *kinds)}


def main() -> None:
    """Print a line for each KV type."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("text", type=Path)
    parser.add_argument("--kv", action="append", required=True)
    parser.add_argument("--prefix", default="")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new", type=int, default=128)
    given = parser.parse_args()
    tokenizer = Tokenizer(DEMO / "trunk")
    prompts = cut_prompts(
        read_text(given.text), tokenizer, count=given.prompts, length=64, prefix=given.prefix
    )
    with tempfile.TemporaryDirectory() as folder:
        found = losses(Path(folder), prompts, given.new, given.kv)
    base = found["fp32"].tokens_per_pass
    for kv, counts in found.items():
        share = counts.agreed / len(counts.accepted)
        print(
            f"{kv:10} {len(counts.accepted)} positions, trunk agrees {share:.2%}, tokens per pass "
            f"{counts.tokens_per_pass:.3f} ({counts.tokens_per_pass / base - 1:+.2%})"
        )


if __name__ == "__main__":
    main()
