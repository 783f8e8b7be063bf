"""Where the command line enters: Ctrl-C and SIGTERM, even during imports, end it in one word."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

INTERRUPTED, TERMINATED = 130, 143  # exit codes: 128 and the number of the signal


def main(argv: Sequence[str] | None = None) -> int:
    """Run `cli.main`; an interrupt while that is still being imported ends as one later does.

    So does SIGTERM, with which docker and systemd stop a process: what was begun is cleaned up, the
    word is said, and only the exit code tells them apart. A process that was started with the
    signal ignored goes on ignoring it.
    """
    terminated = False

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt

    ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    try:
        if ours:
            signal.signal(signal.SIGTERM, stop)
        from eagle_chain.engines import cli

        code = cli.main(argv)
    except KeyboardInterrupt:
        print("eagle-chain: interrupted", file=sys.stderr)
        if "--json" in (sys.argv if argv is None else argv):
            print('{"error": "interrupted"}')
        code = INTERRUPTED
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if code == INTERRUPTED:
        # After `python -m` CPython ends by the signal if the last text that `exec` ran, as
        # dataclasses do, was interrupted, whoever caught that. This is now the last one.
        exec("pass")
    return TERMINATED if terminated and code == INTERRUPTED else code
