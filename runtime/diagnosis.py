"""Why drafts are hardly ever right: the likely cause, told from the rates by position."""

from __future__ import annotations

from eagle_chain.runtime.stats import Stats

ENOUGH = 8  # rounds without a single accepted draft that are no accident
JUDGED = 24  # verdicts on a position that make a rate
LOW = 0.3  # of first drafts; a draft that suits its trunk and the text has 0.45 to 0.85
COLLAPSE = 0.35  # of the share of first drafts; the share of seconds among those is 0.6 or more
TUNE = "`eagle-chain tune BUNDLE --text FILE` finds the right values"


def likely_cause(stats: Stats, drafter: str, draft_kv: str = "kept") -> str | None:
    """Tell, in a sentence, what is probably wrong; None if nothing looks wrong.

    A drafter that reads the wrong features, or turns them by the wrong angles, is already wrong in
    its first draft. One whose recurrence is wrong (before the last norm instead of behind it) makes
    its first draft from the trunk's features and is right there; only what it feeds itself is not.

    Args:
        stats: Of a request.
        drafter: Who guessed.
        draft_kv: With which memory.
    """
    if drafter not in ("eagle", "mtp"):  # a text without repetitions is no fault
        return None
    rates = stats.acceptance_by_position
    first = rates[0] if rates and stats.judged_at[0] >= JUDGED else None
    if stats.drafted and not stats.accepted and stats.rounds >= ENOUGH:
        seen = f"none of {stats.drafted} drafted tokens was accepted (exactly 1 token a pass)"
    elif first is not None and first < LOW:
        seen = f"only {first:.0%} of the first drafts are right, where 45 to 85 % are usual"
    elif first is not None and len(rates) > 1 and stats.judged_at[1] >= JUDGED:
        again = rates[1] / first
        if drafter == "mtp" or again >= COLLAPSE * first:
            return None
        return (
            f"{first:.0%} of the first drafts are right, but of the second ones behind them only "
            f"{again:.0%}: what the draft feeds itself is probably wrong, so norm_output "
            f"(EAGLE-3.1) should have the other value; {TUNE}"
        )
    else:
        return None
    if draft_kv == "scratch":
        return f"{seen}: --draft-kv scratch makes the draft forget the sequence; leave it out"
    if drafter == "mtp":
        return (
            f"{seen}: was the trunk fine-tuned without its MTP head, or is the text unlike what it "
            "was trained on?"
        )
    return (
        f"{seen}: the likely causes are aux layers counted from another end (one too early or too "
        "late) and a rotary base or rotary dims that the draft was not trained with (--aux-layers, "
        f"--rope-theta and --rotary-dim of `export`); {TUNE}. A draft made for another trunk, or a "
        "text unlike its training, looks alike"
    )
