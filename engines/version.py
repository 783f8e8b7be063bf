"""The version of this project, kept in one place, and those of the libraries it works with."""

from __future__ import annotations

from importlib import metadata

VERSION = "0.1.0"  # pyproject.toml reads it from here
UNKNOWN = "unknown"  # of a library that is there but not installed: a source folder on the path


def library_version(name: str) -> str:
    """Version of a distribution by its name on PyPI, or `UNKNOWN`."""
    if name == "eagle-chain":
        return VERSION
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return UNKNOWN
