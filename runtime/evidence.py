"""How much text it takes to tell a mistake in a draft's settings from noise, and what to ask for.

The standard error of a difference falls with the root of the tokens that drafts are judged behind,
whether they come from many short continuations or from few long ones. docs/drafts.md has the
measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from eagle_chain.engines.progress import counted
from eagle_chain.runtime.along import Text

NOISE = 3.0  # standard errors: the best of two dozen settings that are alike looks better by two
# Tokens: the smallest of the planted mistakes is three standard errors off from 600 on.
ENOUGH = 650


def judged_tokens(texts: Sequence[Text], k: int) -> int:
    """Behind how many tokens of some texts k drafts are judged."""
    return sum(text.rounds(k) for text in texts)


def wanted(prompts: int, tokens: int) -> int:
    """How many prompts like these, behind which `tokens` are judged, are enough."""
    return math.ceil(prompts * ENOUGH / tokens)


def too_few(prompts: int, tokens: int, *, at_best: bool) -> str | None:
    """What to say of prompts that judge too few tokens; None if they are enough.

    Args:
        prompts: How many.
        tokens: That drafts are judged behind, in all of them, 1 or more.
        at_best: Nothing has been decoded yet, and there may be fewer.
    """
    if tokens >= ENOUGH:
        return None
    most, least = ("at most ", "at least ") if at_best else ("", "")
    return (
        f"{prompts} prompts let drafts be judged behind {most}{counted(tokens, 'token')}, and a "
        f"mistake may pass for noise below {ENOUGH}: ask for {least}{wanted(prompts, tokens)} "
        "--prompts"
    )


def to_tell(prompts: int, behind: float, error: float) -> int:
    """How many prompts make a difference surely one, if it and its spread stay what they are."""
    return math.ceil(prompts * (NOISE * error / behind) ** 2)
