"""Drafts copied from the sequence itself: what followed the last time the text read like this."""

from __future__ import annotations

from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.drafters import NoDrafter

LONGEST = 32  # tokens of a match that are compared
CANDIDATES = 32  # earlier places that are looked at, the latest first


class NgramIndex:
    """A sequence that grows at its end, and where each of its pairs of tokens has occurred.

    The places of a pair form a chain from the latest to the first, as in LZ77, so that a token is
    added in constant time and a look-up walks over at most `CANDIDATES` places.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._before: list[int] = []  # for each place, the last one with the same pair, or -1
        self._pairs: dict[tuple[int, int], int] = {}  # latest place of a pair: of its second token
        self._singles: dict[int, int] = {}

    def add(self, token: int) -> None:
        """Put a token behind the others."""
        place, tokens = len(self.tokens), self.tokens
        tokens.append(token)
        before = -1
        if place:
            # entered one token late, so that a look-up does not find the end itself
            self._enter(place - 1)
            before = self._pairs.get((tokens[-2], token), -1)
        self._before.append(before)

    def match(self) -> tuple[int, int]:
        """The place after the longest earlier match of the end, and its length; (0, 0) if none.

        Of equally long ones the latest; lengths beyond `LONGEST` are not told apart. A single
        token matches only where no pair does.
        """
        tokens = self.tokens
        if not tokens:
            return 0, 0
        place, length = self._before[-1], 0
        after = 0
        for _ in range(CANDIDATES):
            if place < 0 or length == LONGEST:
                break
            found = self._common(place)
            if found > length:
                after, length = place + 1, found
            place = self._before[place]
        if not length and tokens[-1] in self._singles:
            return self._singles[tokens[-1]] + 1, 1
        return after, length

    def _enter(self, place: int) -> None:
        """Make a place known to later look-ups."""
        tokens = self.tokens
        self._singles[tokens[place]] = place
        if place:
            self._pairs[tokens[place - 1], tokens[place]] = place

    def _common(self, place: int) -> int:
        """How many tokens up to `place` are those at the end, two of which are known to be."""
        tokens, last = self.tokens, len(self.tokens) - 1
        most = min(LONGEST, place + 1)
        length = 2
        while length < most and tokens[place - length] == tokens[last - length]:
            length += 1
        return length


class NgramDrafter(NoDrafter):
    """Guesses that the text goes on as it did after the longest earlier match of its end.

    No weights and no device work: a round costs microseconds on the host.

    Args:
        cache: The sequence to draft for.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._index = NgramIndex()

    def propose(self, token: int, k: int) -> list[int]:
        """Return what followed the match; a match that reaches the end goes on as a cycle."""
        index = self._follow(token)
        after, length = index.match()
        if not length:
            return []
        drafts: list[int] = []
        row, size = index.tokens, len(index.tokens)
        for place in range(after, after + k):
            drafts.append(row[place] if place < size else drafts[place - size])
        return drafts

    def reset(self) -> None:
        """Forget the sequence."""
        self._index = NgramIndex()

    def _follow(self, token: int) -> NgramIndex:
        """The index of the cached tokens and `token` behind them."""
        held, index = self.cache.tokens, self._index
        size = len(index.tokens)
        if size > len(held) or (size and index.tokens[-1] != held[size - 1]):
            index, size = NgramIndex(), 0  # the last guess was for a token that did not come
            self._index = index
        for place in range(size, len(held)):
            index.add(held[place])
        index.add(token)
        return index
