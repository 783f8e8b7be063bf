"""What `inspect` tells about a checkpoint folder: its config and its tensors, not their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_chain.engines.config import TrunkConfig
from eagle_chain.engines.description import (
    draft_lines,
    ignored_line,
    source_lines,
    trunk_line,
)
from eagle_chain.engines.draft_keys import is_draft
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.fields import read_json
from eagle_chain.engines.progress import human_bytes
from eagle_chain.engines.stop_ids import stop_line, stop_sources
from eagle_chain.engines.strict_json import encode
from eagle_chain.export.checkpoint import Checkpoint, open_draft, open_mtp, open_trunk


def describe(folder: Path, trunk: Path | None) -> dict[str, Any]:
    """Print and return what a trunk, or a draft for `trunk`, holds."""
    draft = is_draft(read_json(folder / "config.json"))
    if draft and trunk is None:
        raise InputError(f"{folder}: is a draft; name the trunk it was made for: --trunk FOLDER")
    if not draft and trunk is not None:
        raise InputError(f"{folder}: is no draft; leave --trunk out")
    config, checkpoint = open_trunk(folder if trunk is None else trunk)
    if trunk is None:
        stops = stop_sources(folder, config.eos_ids)
        print(f"trunk    {trunk_line(config)}\nstops    {stop_line(stops)}")
        checkpoint.ignored.pop("mtp", None)  # `export` takes them
        more = {"mtp": _mtp(config, checkpoint), "stop_sources": stops}
        return {**_report("trunk", encode(config), checkpoint), **more}
    draft_config, checkpoint = open_draft(folder, config, checkpoint)
    for line in (*draft_lines(draft_config), *source_lines(draft_config)):
        print(line)
    return _report("draft", encode(draft_config), checkpoint)


def _mtp(config: TrunkConfig, checkpoint: Checkpoint) -> bool:
    """Whether `export` would take the trunk's own draft head, which is also printed."""
    try:
        head = open_mtp(checkpoint, config)
    except InputError as error:
        print(f"mtp      export refuses the trunk's own draft head: {error}")
        return False
    if head is None:
        print("mtp      none: the trunk has no draft head of its own")
        return False
    size = sum(tensor.nbytes for tensor in head.tensors.values())
    print(
        f"mtp      {len(head.tensors)} tensors, {human_bytes(size)}: the trunk's own draft head, "
        "which export takes along (--no-mtp leaves it out)"
    )
    return True


def _report(kind: str, config: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    files = sorted({tensor.file.name for tensor in checkpoint.tensors.values()})
    print(f"weights  {len(checkpoint.tensors)} tensors, {human_bytes(size)}")
    for name in files:
        print(f"         {name}")
    print(f"ignored  {ignored_line(checkpoint.ignored)}")
    for notice in checkpoint.notices:
        print(f"notice   {notice}")
    return {
        "checkpoint": str(checkpoint.folder),
        "kind": kind,
        "config": config,
        "tensors": len(checkpoint.tensors),
        "bytes": size,
        "files": files,
        "ignored": checkpoint.ignored,
        "notices": list(checkpoint.notices),
    }
