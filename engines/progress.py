"""Progress of long work on stderr: a bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield `advance(bytes)`, to be called until `total` bytes are done."""
    show = _bar if sys.stderr.isatty() else _lines
    with show(label, total) as advance:
        yield advance


@contextmanager
def phases(label: str, patience: float = 0.0) -> Iterator[Callable[[str, int, int], None]]:
    """Yield `show(phase, done, total)` for work whose length nobody knows; total 0: only time.

    To be called with any news, and now and then without. Work that ends within `patience` seconds
    passes in silence.
    """
    show = _phase_bar if sys.stderr.isatty() else _phase_lines
    with show(label, patience) as advance:
        yield advance


def counted(number: int, noun: str) -> str:
    """A number of things: "1 token", "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def human_bytes(count: float) -> str:
    """12.3 MB; powers of 1000, as disks and downloads count."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.update(task, advance=count)


@contextmanager
def _lines(label: str, total: int) -> Iterator[Callable[[int], None]]:
    done, start = 0, time.monotonic()
    spoken = start

    def advance(count: int) -> None:
        nonlocal done, spoken
        done += count
        if time.monotonic() - spoken >= SECONDS_BETWEEN_LINES:
            spoken = time.monotonic()
            share = f"{100 * done / max(total, 1):.0f} %"
            print(f"{label}: {share} of {human_bytes(total)}", file=sys.stderr, flush=True)

    yield advance
    seconds = time.monotonic() - start
    if seconds >= 1:
        print(f"{label}: {human_bytes(total)} in {seconds:.1f} s", file=sys.stderr, flush=True)


@contextmanager
def _phase_bar(label: str, patience: float) -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task, start = bar.add_task(label, total=None), time.monotonic()
    with ExitStack() as shown:

        def show(phase: str, done: int, total: int) -> None:
            words = f"{label}: {phase}" if phase else label
            bar.update(task, description=words, completed=done, total=total or None)
            if not bar.live.is_started and time.monotonic() - start >= patience:
                shown.enter_context(bar)

        if not patience:
            shown.enter_context(bar)
        yield show


@contextmanager
def _phase_lines(label: str, patience: float) -> Iterator[Callable[[str, int, int], None]]:
    start = time.monotonic()
    due = start + (patience or SECONDS_BETWEEN_LINES)

    def show(phase: str, done: int, total: int) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + SECONDS_BETWEEN_LINES
            count = f" {done} of {total}," if total else ""
            words = f"{label}: {phase}" if phase else label
            print(f"{words},{count} {now - start:.0f} s", file=sys.stderr, flush=True)

    yield show
