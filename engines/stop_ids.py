"""Where text ends: the ids that stop a request, and the tokenizer files that name them.

transformers' `generate` stops at `eos_token_id` of generation_config.json, or at that of
config.json where there is no such file; `eos_token` of tokenizer_config.json, which for chat models
is the end of a turn, it does not look at. Here all three count: no text runs on where transformers
would stop. `stop_ids` of a request takes the place of them all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.files import read_plain
from eagle_chain.engines.manifest import MANIFEST

GENERATION = "generation_config.json"
TOKENIZER = "tokenizer_config.json"


def stop_token_ids(folder: str | os.PathLike[str]) -> frozenset[int]:
    """Ids that the files beside a tokenizer name; empty if there are none.

    Args:
        folder: A bundle, or a folder with tokenizer.json.

    Raises:
        InputError: A file cannot be read, or names what is no token id.
    """
    found = stop_sources(folder, ())
    return frozenset(id for ids in found.values() for id in ids)


def stop_sources(folder: str | os.PathLike[str], config: Iterable[int]) -> dict[str, list[int]]:
    """Stop ids by the file that names them, `config` being those of the trunk's config.json."""
    folder = tokenizer_folder(folder)
    return {
        "config.json": list(config),
        GENERATION: _generation_ids(folder / GENERATION),
        TOKENIZER: _end_token_ids(folder),
    }


def stop_line(sources: dict[str, list[int]]) -> str:
    """The stop ids and where they come from, in one line."""
    ids = sorted({id for found in sources.values() for id in found})
    if not ids:
        return f"NONE in {', '.join(sources)}: only the budget or the capacity ends a request"
    named = (f"{name} {', '.join(map(str, ids))}" for name, ids in sources.items() if ids)
    return f"{', '.join(map(str, ids))} ({'; '.join(named)})"


def tokenizer_folder(folder: str | os.PathLike[str]) -> Path:
    """Where the tokenizer files of a bundle or a checkpoint are."""
    inside = Path(folder) / "tokenizer"
    return inside if inside.is_dir() or Path(folder, MANIFEST).exists() else Path(folder)


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json holds; nothing if it is not there."""
    path = folder / TOKENIZER
    return _json(path) if path.is_file() else {}


def text_of(token: Any) -> str | None:
    """A special token is a string, or an object with its text in `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _generation_ids(path: Path) -> list[int]:
    value = _json(path).get("eos_token_id") if path.is_file() else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise InputError(
            f"{path}: eos_token_id is {json.dumps(value)[:60]}, expected a token id or a list of "
            "them; mend the file, or delete it"
        )
    return list(dict.fromkeys(ids))


def _end_token_ids(folder: Path) -> list[int]:
    name = text_of(tokenizer_config(folder).get("eos_token"))
    path = folder / "tokenizer.json"
    if name is None or not path.is_file():
        return []
    added = _json(path).get("added_tokens") or []
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and type(token.get("id")) is int for token in added
    ):
        raise InputError(f"{path}: added_tokens is not a list of tokens with an id")
    return [token["id"] for token in added if token.get("content") == name]


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object")
    return data
