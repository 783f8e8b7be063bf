"""Steps of a measurement on a GPU: a line each, a file after each, and an end when time is up."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Stage = tuple[str, Callable[[], Any], float]  # its name, its work, and the seconds it needs
HANGING = 60  # seconds behind the end at which a step that hangs is shown and killed


class Steps:
    """What was found, by the name of the step, in a file that earlier runs may have begun.

    Args:
        path: The file, JSON.
        seconds: How long all of it may take.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.start = path, time.monotonic()
        self.end = self.start + seconds
        self.failed: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        faulthandler.dump_traceback_later(seconds + HANGING, exit=True)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def say(self, text: str) -> None:
        """Print with the time since the start."""
        print(f"[{time.monotonic() - self.start:6.1f}s] {text}", flush=True)

    def stage(self, name: str, work: Callable[[], Any], needs: float = 15.0) -> Any:
        """Run one step if `needs` seconds are left, and keep what it found, or how it failed.

        Returns:
            What it found; None if it was left out or failed.
        """
        if self.left < needs:
            self.say(f"{name}: left out, {self.left:.0f} s remain")
            self.keep(name, "left out")
            return None
        try:
            found = work()
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            # the traceback holds the frames, and they hold memory of the device
            traceback.clear_frames(error.__traceback__)
            found = None
            self.keep(name, f"failed: {type(error).__name__}: {error}")
        else:
            self.keep(name, found)
        self.say(f"{name}: {json.dumps(self.results[name])[:3500]}")
        gc.collect()
        return found

    def keep(self, name: str, found: Any) -> None:
        """Add a result to the file, which is whole at every moment."""
        self.results[name] = found
        written = self.path.with_suffix(".part")
        written.write_text(json.dumps(self.results, indent=1))
        os.replace(written, self.path)

    def close(self) -> int:
        """Tell what failed; the exit code."""
        faulthandler.cancel_dump_traceback_later()
        self.say(f"done; failed: {', '.join(self.failed) or 'nothing'}")
        return 1 if self.failed else 0


def chosen(parser: argparse.ArgumentParser, only: str, stages: list[Stage]) -> list[Stage]:
    """The stages that `--only` names, all without it; no other names are taken."""
    names = set(filter(None, only.split(",")))
    if unknown := names - {name for name, _, _ in stages}:
        known = ", ".join(name for name, _, _ in stages)
        parser.error(f"--only names {', '.join(sorted(unknown))}, expected some of {known}")
    return [stage for stage in stages if not names or stage[0] in names]
