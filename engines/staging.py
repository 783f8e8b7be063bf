"""A folder that appears complete or not at all, whatever kills the process that writes it.

Everything is written into `.NAME.partial` beside the folder NAME; at the end the two change places
in one system call and the old one is deleted. `.NAME.lock` is held (flock) meanwhile, so a partial
folder that is found while holding the lock belongs to a dead process and is removed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eagle_chain.engines.errors import InputError

CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)  # a folder that nothing can be made in
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def staged(target: Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """Yield an empty folder to fill; it takes the place of `target` when the block ends well.

    `check(target)` is called under the lock if there is something at `target`; it raises an
    `InputError` if that may not be replaced. A file system that refuses is an `InputError` too.
    """
    target = Path(os.path.realpath(target))
    partial = target.with_name(f".{target.name}.partial")
    old = target.with_name(f".{target.name}.old")
    try:
        with _folder_for(target), locked(target):
            _recover(target, partial, old)
            if os.path.lexists(target):
                check(target)
            try:
                partial.mkdir()
                yield partial
                _replace(target, partial, old)
            finally:  # after the exchange this is the old folder
                _clear(partial)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = error.filename or str(target)
        if error.errno in CLOSED and Path(where).parent == target.parent:
            where = str(target.parent)  # not the hidden name that was to be made in it
        raise InputError(
            f"{where}: {error.strerror or error}; nothing was written to {target}"
        ) from error


@contextmanager
def _folder_for(target: Path) -> Iterator[None]:
    """The parent folders of `target`, removed again on failure as far as they were made here."""
    made = [folder for folder in target.parents if not folder.exists()]  # innermost first
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of `target`, or say that somebody else does."""
    path = target.with_name(f".{target.name}.lock")
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise InputError(
                f"{target}: another process is writing this folder (it holds {path}); "
                "wait until it is done, or choose another folder"
            ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                break
        os.close(handle)  # the file was removed between open and flock: not a lock any more
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _recover(target: Path, partial: Path, old: Path) -> None:
    """Clear what a dead process left; put back a folder that it had only moved aside."""
    if old.exists() and not os.path.lexists(target):
        os.rename(old, target)
    _remove(old)
    _remove(partial)


def _replace(target: Path, partial: Path, old: Path) -> None:
    """Put `partial` in the place of `target`."""
    if not os.path.lexists(target):
        os.rename(partial, target)
    elif not _exchange(partial, target):
        os.rename(target, old)  # killed from here to the next line: `_recover` puts it back
        os.rename(partial, target)
        _remove(old)


def _exchange(a: Path, b: Path) -> bool:
    """Let two folders change places atomically; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # no glibc 2.28, not Linux
        return False
    paths = os.fsencode(a), os.fsencode(b)
    status: int = renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)
    return status == 0


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _clear(folder: Path) -> None:
    """Remove a folder at the very end; a second Ctrl-C does not stop that half way."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
