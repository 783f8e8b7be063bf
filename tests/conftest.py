"""What every test relies on."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that: the tests that
    # interrupt a command would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
