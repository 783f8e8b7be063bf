"""Strict reads of someone else's JSON: each problem is noted, and one error names them all."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.files import read_plain

Place = tuple[str, Mapping[str, Any]]  # an object in the file and the prefix that names it


def read_json(path: Path | str) -> dict[str, Any]:
    """Parse one JSON object from a file, strictly: UTF-8, no key twice.

    Raises:
        InputError: The file is missing, unreadable, not JSON or not an object.
    """
    path = Path(path)
    again = "restore or download the file again"
    try:
        content = read_plain(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; is the folder a whole checkpoint?") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {again}") from None
    size = len(content)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text, {size} bytes; {again}") from None
    try:
        data = parse_json(text)
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}), {size} bytes; {again}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: got {show(data)}, wanted a JSON object; {again}")
    return data


def parse_json(text: str) -> Any:
    """JSON data; a `ValueError` for bad syntax, a key given twice or endless nesting."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            names = sorted(name for name, _ in pairs)
            twice = next(a for a, b in itertools.pairwise(names) if a == b)
            raise ValueError(f"key given twice: {twice}")
        return data

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None


class Reader:
    """Typed reads that note a problem and go on.

    `places` are the objects where a key may stand; `values` holds what was read without a problem,
    by field name. A null counts as not set.
    """

    def __init__(self, where: str, data: Mapping[str, Any]) -> None:
        self.where = where
        self.places: list[Place] = [("", data)]
        self.problems: list[str] = []
        self.values: dict[str, Any] = {}

    def note(self, key: str, got: Any, wanted: str, action: str = "correct it") -> None:
        """Add one problem."""
        self.problems.append(f"{key}: got {show(got)}, wanted {wanted}; {action}")

    def finish(self) -> None:
        """Raise what was noted, if anything."""
        raise_all(self.where, self.problems)

    def present(self, *keys: str, places: Iterable[Place] | None = None) -> bool:
        """Whether any of the keys is set anywhere."""
        places = self.places if places is None else places
        return any(place.get(key) is not None for _, place in places for key in keys)

    def find(self, *keys: str, places: Iterable[Place] | None = None) -> tuple[str, Any] | None:
        """Name and value of the first of `keys` that is set anywhere.

        Places that disagree are a problem, and then there is no value.
        """
        found = [
            (prefix + key, place[key])
            for prefix, place in (self.places if places is None else places)
            for key in keys
            if place.get(key) is not None
        ]
        for name, value in found[1:]:
            if value != found[0][1]:
                wanted = f"the same as {found[0][0]}, which is {show(found[0][1])}"
                self.note(name, value, wanted, "make them agree")
                return None
        return found[0] if found else None

    def require(
        self, *keys: str, wanted: str, places: list[Place] | None = None
    ) -> tuple[str, Any] | None:
        """`find` for a key that must be there."""
        if not self.present(*keys, places=places):
            self.note(keys[0], None, wanted, "add the value that the model was trained with")
            return None
        return self.find(*keys, places=places)

    def integer(
        self, field: str, key: str, limits: tuple[int, int], default: int | None = None
    ) -> None:
        """Read an integer; without a default it must be there."""
        wanted = f"an integer from {limits[0]} to {limits[1]}"
        if default is not None and not self.present(key):
            self.values[field] = default
        elif (found := self.require(key, wanted=wanted)) is not None:
            if is_integer(found[1], limits):
                self.values[field] = found[1]
            else:
                self.note(*found, wanted)

    def number(
        self, field: str, *keys: str, limits: tuple[float, float], places: list[Place] | None = None
    ) -> None:
        """Read a finite number that must be there."""
        wanted = f"a number from {limits[0]:g} to {limits[1]:g}"
        found = self.require(*keys, wanted=wanted, places=places)
        if found is not None:
            if is_number(found[1], limits):
                self.values[field] = float(found[1])
            else:
                self.note(*found, wanted)

    def flag(self, field: str, key: str, default: bool) -> None:
        """Read true or false."""
        found = self.find(key)
        if found is not None and not isinstance(found[1], bool):
            self.note(*found, "true or false")
        elif found is not None:
            self.values[field] = found[1]
        elif not self.present(key):
            self.values[field] = default

    def pin(
        self, key: str, *allowed: Any, because: str, places: Iterable[Place] | None = None
    ) -> None:
        """Refuse a value other than those allowed; leaving the key out is fine."""
        found = self.find(key, places=places)
        if found is not None and not any(
            type(found[1]) is type(value) and found[1] == value for value in allowed
        ):
            wanted = " or ".join(map(show, allowed)) or "no such key"
            self.note(*found, wanted, because)


def raise_all(where: str, problems: list[str]) -> None:
    """Raise the problems of one file as one error, if there are any."""
    if len(problems) == 1:
        raise InputError(f"{where}: {problems[0]}")
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise InputError(f"{where}: {len(problems)} problems{lines}")


def show(value: Any) -> str:
    """A value as it stands in JSON, shortened; "nothing" when it is not there."""
    if value is None:
        return "nothing"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 70 else f"{text[:66]} ..."


def is_integer(value: Any, limits: tuple[int, int]) -> bool:
    """Whether the value is an integer (not a bool) within the limits."""
    return type(value) is int and limits[0] <= value <= limits[1]


def is_number(value: Any, limits: tuple[float, float]) -> bool:
    """Whether the value is a finite number (not a bool) within the limits."""
    if type(value) not in (int, float):
        return False
    return bool(math.isfinite(value)) and limits[0] <= value <= limits[1]


def is_ascending(ids: Iterable[Any], limits: tuple[int, int]) -> bool:
    """Whether these are integers within the limits, at least one, each above the one before."""
    ids = list(ids)
    return (
        len(ids) > 0
        and all(is_integer(i, limits) for i in ids)
        and all(a < b for a, b in itertools.pairwise(ids))
    )
