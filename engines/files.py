"""Files made by others: opened only if they are plain files, read only up to a bound."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

from eagle_chain.engines.progress import human_bytes

LARGEST_TEXT = 64 << 20  # bytes of JSON or of a template; a tokenizer has some 20 MB


def open_plain(path: Path | str) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: It cannot be opened, or is something that may never end or never begin: a device, a
            pipe, a socket.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return cast(BinaryIO, open(handle, "rb"))


def read_plain(path: Path | str, limit: int = LARGEST_TEXT) -> bytes:
    """The content of a file of at most `limit` bytes.

    Raises:
        OSError: As in `open_plain`, or the file is larger.
    """
    with open_plain(path) as stream:
        return read_bounded(stream, str(path), limit)


def read_bounded(stream: BinaryIO, name: str, limit: int = LARGEST_TEXT) -> bytes:
    """The rest of a stream, which may be a pipe, if it has at most `limit` bytes.

    Raises:
        OSError: It cannot be read, or has more.
    """
    content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {human_bytes(limit)}", name)
    return content
