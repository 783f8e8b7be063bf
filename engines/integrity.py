"""Whether the files of a bundle are those of its export: their hashes, taken and checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.files import open_plain

if TYPE_CHECKING:
    from eagle_chain.engines.manifest import WeightFile

LARGEST_GRAPH = 1 << 31  # bytes, the limit of protobuf; ours have some MB

_EDGE = 64 * 1024  # bytes of each end of the data that go into `WeightFile.sample`
_BLOCK = 4 * 1024 * 1024


def file_hash(path: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """SHA-256 of a file; `progress` gets the bytes of each block."""
    digest = hashlib.sha256()
    with open_plain(path) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def sample_hash(path: Path) -> str:
    """SHA-256 of a safetensors header and of the first and last 64 KiB of the data after it."""
    with open_plain(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = stream.read(8)
        data = min(8 + int.from_bytes(length, "little"), size)
        digest = hashlib.sha256(length)
        left = max(data - 8, 0) + _EDGE  # a header may declare any length: never held whole
        while left and (block := stream.read(min(left, _BLOCK))):
            digest.update(block)
            left -= len(block)
        stream.seek(max(data, size - _EDGE))
        digest.update(stream.read(_EDGE))
    return digest.hexdigest()


def check_graph(path: Path, digest: str, command: str) -> None:
    """The graph is the one that was exported."""
    try:
        if (size := path.stat().st_size) > LARGEST_GRAPH:
            raise InputError(
                f"{path}: has {size} bytes, no graph has more than {LARGEST_GRAPH}; "
                f"export it again: {command}"
            )
        found = file_hash(path)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); export it again: {command}"
        ) from None
    if found != digest:
        raise InputError(
            f"{path}: was changed since the export (SHA-256 {found[:12]}, "
            f"the manifest has {digest[:12]}); export it again: {command}"
        )


def check_weight_file(folder: Path, name: str, file: WeightFile, command: str) -> None:
    """The weight file is there, of its size, with the header and edges it had at export."""
    path = folder / name
    link = folder.joinpath(*PurePosixPath(name).parts[:2])
    aim = f" (link to {os.readlink(link)})" if os.path.islink(link) else ""
    mend = f"restore the file, or export again: {command}"
    if aim:
        mend = f"point {link} at the checkpoint folder, or export again: {command}"
    if aim and not link.exists():
        raise InputError(
            f"{link}: the checkpoint folder {os.path.realpath(link)} is not there, and the bundle "
            "has no weights of its own (was it copied or moved alone? --weights copy makes it "
            f"stand alone); from where the checkpoint lies now, {mend}"
        )
    try:
        size = path.stat().st_size
        sample = sample_hash(path) if size == file.size else ""
    except OSError as error:
        raise InputError(f"{path}{aim}: cannot be read ({error.strerror}); {mend}") from None
    if size != file.size:
        raise InputError(
            f"{path}{aim}: has {size} bytes, {file.size} at export "
            f"({'incomplete download?' if size < file.size else 'another file?'}); {mend}"
        )
    if sample != file.sample:
        raise InputError(
            f"{path}{aim}: is not the file that was exported (SHA-256 of header and edges "
            f"{sample[:12]}, the manifest has {file.sample[:12]}); {mend}"
        )
