"""What a command hands back to the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """The report is the object that `--json` prints; `passed` is False when a check failed.

    `interrupted`: by Ctrl-C, and the report tells how far it came. `problem`: what failed when the
    report was done, a sentence.
    """

    report: dict[str, Any]
    passed: bool = True
    interrupted: bool = False
    problem: str | None = None
