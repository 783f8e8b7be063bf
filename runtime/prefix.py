"""A sequence in a file: what a snapshot holds, for the engines that it came from.

The file is NumPy's .npz, uncompressed: one array per state under its name, bf16 as its bits, and
`about`, a JSON text with the tokens, the counters and the fingerprint of the engines.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.files import open_plain
from eagle_chain.engines.progress import counted, human_bytes
from eagle_chain.runtime.buffers import NUMPY_DTYPES, Buffer
from eagle_chain.runtime.cache import Cache, Counters, Snapshot

FORMAT = 1
HEADER = 4096  # bytes that an .npy has in front of its data, at most
ABOUT = "about"
STATES = {"eagle": "draft.", "mtp": "mtp."}  # drafter -> what the names of its states begin with
OTHERS = "none or ngram"  # which have no states
DAMAGE = (  # what reading a file that is broken in any way may raise
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    RuntimeError,
    AttributeError,
    SyntaxError,
    MemoryError,
)


def fingerprint(engines: Hashable) -> str:
    """Of the backend, the graphs and the weights that a sequence was computed with."""
    return hashlib.sha256(repr(engines).encode()).hexdigest()


def save(path: str | os.PathLike[str], snapshot: Snapshot) -> int:
    """Write a whole snapshot, in the place of what is there only once it is complete.

    Returns:
        The size of the file in bytes.

    Raises:
        InputError: It cannot be written, or what is there is no sequence.
    """
    path, counters = Path(path), snapshot.counters
    check_replaceable(path)
    about = {
        "format": FORMAT,
        "engines": fingerprint(snapshot.engines),
        "tokens": counters.tokens,
        "position": counters.position,
        "pending": counters.pending,
        "call": counters.call,
    }
    arrays: dict[str, NDArray[Any]] = {ABOUT: np.array(json.dumps(about))}
    for buffer in (*snapshot.buffers, *snapshot.outputs):
        assert buffer is not None, "a snapshot without its KV is not a sequence"
        arrays[buffer.spec.name] = buffer.read()
    with _beside(path) as temporary:
        with open(temporary, "wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        return path.stat().st_size


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """An empty file in the same folder, removed at the end if it is still there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.touch()
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}); choose another place"
        ) from None


def check_replaceable(path: Path) -> None:
    """Refuse a path at which no sequence can be put: only another one is replaced.

    Raises:
        InputError: Something else is there, or no file can be made in its folder.
    """
    if not path.parent.is_dir():
        raise InputError(
            f"{path}: cannot be written: {path.parent} is no folder; choose another place"
        )
    with _beside(path):  # permissions do not tell: not to root, nor of a name that is too long
        pass
    if not os.path.lexists(path):
        return
    try:
        with open_plain(path) as stream, zipfile.ZipFile(stream) as archive:
            _about(archive, path)
    except (InputError, OSError, *DAMAGE):
        raise InputError(
            f"{path}: is there and is no prefix file, and only a prefix file is replaced; choose "
            "another name, or move the file away"
        ) from None


class Prefix:
    """A file that `save` wrote, open: its head has been read, its states can be.

    One handle from the check to the last array: what is put at the path meanwhile is another file.

    Args:
        path: The file.
        vocab_size: Of the trunk.

    Raises:
        InputError: It is not there, or no prefix file.
    """

    def __init__(self, path: str | os.PathLike[str], vocab_size: int) -> None:
        self.path = Path(path)
        with ExitStack() as opened, _refusing(self.path):
            stream = opened.enter_context(open_plain(self.path))
            self._archive = opened.enter_context(zipfile.ZipFile(stream))
            about = _about(self._archive, self.path)
            self.counters = _counters(about, vocab_size)
            self._engines = about["engines"]
            self._opened = opened.pop_all()

    def __enter__(self) -> Prefix:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def check(self, capacity: int, engines: Hashable, drafter: str) -> None:
        """Whether it is for these engines, from its head; what it holds `load` tells.

        Args:
            capacity: Of the engines.
            engines: What the sequence must have been computed with, as in `Cache.engines`.
            drafter: Of the chain that is to go on with it.

        Raises:
            InputError: It is of other engines or another drafter, or longer than the capacity.
        """
        self._check_engines(engines)
        ours = drafter if drafter in STATES else OTHERS
        _check_drafter(self.path, _drafter(self._archive.namelist()), ours)
        held = len(self.counters.tokens)
        if held > capacity:
            raise InputError(
                f"{self.path}: holds {counted(held, 'token')}, the bundle's capacity is "
                f"{capacity}: export with a larger --capacity"
            )

    def load(self, cache_for: Callable[[int], Cache]) -> Snapshot:
        """Read the states.

        Args:
            cache_for: The cache for a sequence of so many tokens, which gives them their sizes.

        Raises:
            InputError: The file is not whole, or not of this chain's engines and drafter.
        """
        path = self.path
        with _refusing(path):
            cache = cache_for(len(self.counters.tokens))
            self._check_engines(cache.engines)
            snapshot = cache.blank(self.counters)
            buffers = (*snapshot.buffers, *snapshot.outputs)
            wanted = {b.spec.name: b for b in buffers if b is not None}
            held = {name.removesuffix(".npy") for name in self._archive.namelist()} - {ABOUT}
            if held != wanted.keys():
                _check_drafter(path, _drafter(held), _drafter(wanted))
                odd = ", ".join(sorted(held ^ wanted.keys())[:3])
                raise InputError(f"{path}: was saved with other engines (it differs in {odd})")
            for name, buffer in wanted.items():
                buffer.write(_array(self._archive, path, name, buffer))
        return snapshot

    def _check_engines(self, engines: Hashable) -> None:
        if self._engines != fingerprint(engines):
            raise InputError(
                f"{self.path}: was saved with another bundle (one of other capacities is another) "
                "or backend; make it again with this one (generate --save-prefix)"
            )


def _drafter(names: Collection[str]) -> str:
    """Whose states are among the trunk's."""
    owners = [owner for owner, start in STATES.items() if any(n.startswith(start) for n in names)]
    return " and ".join(owners) or OTHERS


def _check_drafter(path: Path, theirs: str, ours: str) -> None:
    if theirs != ours:
        raise InputError(
            f"{path}: was saved with the drafter {theirs} and has the states of no other, and this "
            f"chain has {ours}: take --drafter {theirs}, or make the file again"
        )


def _about(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    """What a file says of itself."""
    about = json.loads(str(_array(archive, path, ABOUT, None)))
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InputError(f"{path}: is not a prefix that this version of eagle-chain reads")
    return about


def _array(archive: zipfile.ZipFile, path: Path, name: str, buffer: Buffer | None) -> NDArray[Any]:
    """One array, whose size is known before it is read."""
    member = archive.getinfo(f"{name}.npy")
    most = 64 * 1024 * 1024 if buffer is None else buffer.spec.nbytes + HEADER
    if member.file_size > most:
        size = human_bytes(member.file_size)
        raise InputError(f"{path}: {name} has {size}, expected {human_bytes(most)}")
    with archive.open(member) as stream:
        array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    if buffer is not None:
        spec = buffer.spec
        if array.dtype != NUMPY_DTYPES[spec.dtype] or array.shape != spec.shape:
            raise InputError(
                f"{path}: {name} is {array.dtype} {list(array.shape)}, expected "
                f"{spec.dtype} {list(spec.shape)}"
            )
    return array


def _counters(about: dict[str, Any], vocab_size: int) -> Counters:
    tokens, call = tuple(about["tokens"]), tuple(about["call"])
    position, pending = about["position"], about["pending"]
    for value in (*tokens, *call, position, *([] if pending is None else [pending])):
        if type(value) is not int or value < 0:
            raise ValueError(f"{value!r} where a count or a token is expected")
    if any(token >= vocab_size for token in (*tokens, *call, pending or 0)):
        raise ValueError("a token outside the vocabulary")
    kept = len(tokens) - position
    fits = 0 <= kept <= len(call) and tokens[position:] == call[:kept]
    if not fits or bool(tokens) == (pending is None):
        raise ValueError("counters that contradict each other")
    return Counters(tokens, position, pending, call)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except DAMAGE as error:
        raise InputError(f"{path}: is not a whole prefix file ({error})") from None
