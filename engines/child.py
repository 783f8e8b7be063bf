"""A module of ours as a process of its own: the command that starts it, and its environment."""

from __future__ import annotations

import os
import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `python -m module`."""
    return [sys.executable, "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """This environment, with a path on which the child finds what this process finds.

    Relative entries are left out: nothing in the folder where it runs can pass for a module.
    """
    path = os.pathsep.join(entry for entry in sys.path if os.path.isabs(entry))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
