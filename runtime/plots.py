"""Drawing with matplotlib, which is loaded only when a plot is asked for."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.extras import install

PLOT_HELP = "draw the results into a picture, PNG or what its ending says; needs the extra plot"


def pyplot() -> Any:
    """The module `matplotlib.pyplot`, for files only.

    Raises:
        InputError: matplotlib is missing.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise InputError(f"--plot needs matplotlib ({error}): {install('plot')}") from None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def check_plot(path: Path | None) -> None:
    """Refuse, before long work, a file that `save` could not write, if one is asked for.

    Raises:
        InputError: matplotlib is missing, there is no such folder, it may not be
            written, or the ending is no picture's.
    """
    if path is None:
        return
    pyplot()
    if not path.parent.is_dir():
        raise InputError(f"{path}: the plot cannot be written: there is no folder {path.parent}")
    canvas = importlib.import_module("matplotlib.backend_bases").FigureCanvasBase
    endings = sorted(canvas.get_supported_filetypes())
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        why = "is a folder" if path.is_dir() else "may not be written"
        raise InputError(f"{path}: the plot cannot be written: {place} {why}")
    if path.suffix.lower().lstrip(".") not in endings:
        raise InputError(
            f"{path}: the plot cannot be written: its name ends in {path.suffix!r}, expected one "
            f"of {', '.join(endings)}"
        )


def drawn(plot: Callable[[Any, Path], None], report: Any, path: Path | None) -> str | None:
    """Draw a report, if into a file; what went wrong, as that costs no more than the picture."""
    if path is None:
        return None
    try:
        plot(report, path)
    except InputError as error:
        return str(error)
    print(f"wrote {path}")
    return None


def save(figure: Any, path: Path) -> None:
    """Write a figure to a file and close it.

    Raises:
        InputError: The file cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no picture's
        raise InputError(f"{path}: the plot cannot be written: {error}") from None
    finally:
        pyplot().close(figure)
