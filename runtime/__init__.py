"""Sessions, buffers and the greedy chain.

from eagle_chain.runtime import load

chain = load("bundle")
for token in chain.stream(ids, max_new_tokens=200):
    ...
"""

from eagle_chain.runtime.cache import Cache, Snapshot
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.drafters import Drafter, EagleDrafter, NoDrafter
from eagle_chain.runtime.load import BACKENDS, DRAFTERS, Engines, load, open_engines
from eagle_chain.runtime.stats import Result, Round, Stats
from eagle_chain.runtime.tokenizer import TextStream, Tokenizer

__all__ = [
    "BACKENDS",
    "DRAFTERS",
    "Cache",
    "Chain",
    "Drafter",
    "EagleDrafter",
    "Engines",
    "NoDrafter",
    "Result",
    "Round",
    "Snapshot",
    "Stats",
    "TextStream",
    "Tokenizer",
    "load",
    "open_engines",
]
