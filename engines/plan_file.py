"""The file of an engine in pieces: its plans, and in which order they run over which tensors."""

from __future__ import annotations

import itertools
import json
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.pieces import HALF, SINGLE, Piece
from eagle_chain.engines.spec import ALIGNMENT, ITEM_BYTES, TensorSpec
from eagle_chain.engines.strict_json import decode, encode, shown

MAGIC = b"eagle-chain pieces\n"
LARGEST_HEADER = 1 << 22  # bytes; a trunk of 32 layers has a hundred thousand
IO = tuple[dict[str, TensorSpec], dict[str, TensorSpec]]  # inputs and outputs by name
_LENGTH = struct.Struct("<Q")


class DamagedError(InputError):
    """A file of pieces is not as `packed` makes them; the text goes on from the file's name."""


@dataclass(frozen=True)
class Contents:
    """What a file of pieces says of them; the plans follow it, one behind the other."""

    types: tuple[str, ...]  # of each plan
    sizes: tuple[int, ...]  # of each plan, in bytes
    pieces: tuple[Piece, ...]  # in the order in which they run
    crossing: tuple[TensorSpec, ...]  # written by one piece for others

    @property
    def runs(self) -> tuple[int, ...]:
        """How often each plan runs."""
        counts = Counter(piece.form for piece in self.pieces)
        return tuple(counts[i] for i in range(len(self.types)))


def packed(contents: Contents, plans: Sequence[bytes | memoryview]) -> bytes:
    """The content of a file."""
    header = json.dumps(encode(contents)).encode()
    assert len(header) <= LARGEST_HEADER, "what is written can be read"
    return b"".join([MAGIC, _LENGTH.pack(len(header)), header, *plans])


def unpacked(data: memoryview) -> tuple[Contents, list[memoryview]]:
    """What a file says, and its plans; a `DamagedError` if not as `packed` makes it."""
    begin = len(MAGIC) + _LENGTH.size
    if len(data) < begin or bytes(data[: len(MAGIC)]) != MAGIC:
        raise DamagedError("does not begin as a file of pieces does")
    (length,) = _LENGTH.unpack(data[len(MAGIC) : begin])
    if length > min(LARGEST_HEADER, len(data) - begin):
        raise DamagedError(f"has a header of {length} bytes in a file of {len(data)}")
    try:
        contents = decode(Contents, json.loads(bytes(data[begin : begin + length])))
    except InputError as error:
        raise DamagedError(f"has a header in which {error}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"has a header that is no JSON ({error})") from None
    ends = [begin + length]
    for size in contents.sizes:
        ends.append(ends[-1] + size)
    if any(size <= 0 for size in contents.sizes) or ends[-1] != len(data):
        raise DamagedError(f"has {len(data)} bytes, its plans end at {ends[-1]}")
    _check(contents)
    return contents, [data[a:b] for a, b in itertools.pairwise(ends)]


def _check(contents: Contents) -> None:
    """Every piece has a plan, every crossing tensor a writer before its readers."""
    kinds = set(contents.types) <= {HALF, SINGLE} and len(contents.types) == len(contents.sizes)
    if not kinds or 0 in contents.runs or not contents.pieces:
        raise DamagedError("has plans that nothing runs, or of no type")
    crossing = {tensor.name: tensor for tensor in contents.crossing}
    if len(crossing) != len(contents.crossing):
        raise DamagedError("has two tensors of one name")
    for tensor in contents.crossing:
        if tensor.dtype not in ITEM_BYTES or min(tensor.shape, default=1) <= 0:
            raise DamagedError(
                f"has a tensor that is {shown(encode(tensor))}, which no engine can have"
            )
    read: set[str] = set()
    written: set[str] = set()
    for piece in contents.pieces:
        if not 0 <= piece.form < len(contents.types):
            raise DamagedError(f"has a piece of plan {piece.form}, and {len(contents.types)} plans")
        early = {name for name in piece.inputs if name in crossing and name not in written}
        again = {name for name in piece.outputs if name in written or name in read}
        if early or again or len(set(piece.outputs)) != len(piece.outputs):
            raise DamagedError(
                f"has a piece whose tensors are in disorder: {shown(sorted(early | again))}"
            )
        read |= set(piece.inputs)
        written |= set(piece.outputs)
    if lacking := crossing.keys() - written:
        raise DamagedError(f"has tensors that no piece writes: {shown(sorted(lacking))}")


def interface(contents: Contents, plans: Sequence[IO]) -> IO:
    """Inputs and outputs of the whole, from those of its plans.

    Raises:
        DamagedError: A plan has other tensors than its pieces, or two see one differently.
    """
    known = {tensor.name: tensor for tensor in contents.crossing}
    inside = set(known)
    found: IO = ({}, {})
    for piece in contents.pieces:
        sides = zip(("i", "o"), (piece.inputs, piece.outputs), plans[piece.form], strict=True)
        for side, (letter, names, own) in enumerate(sides):
            if own.keys() != {f"{letter}{k}" for k in range(len(names))}:
                raise DamagedError(f"has a piece of {len(names)} tensors whose plan has {len(own)}")
            for k, name in enumerate(names):
                plain = own[f"{letter}{k}"]
                spec = TensorSpec(name, plain.dtype, plain.shape)
                if known.setdefault(name, spec) != spec:
                    raise DamagedError(
                        f"has two plans for which {shown(name)} is of another dtype or shape"
                    )
                if name not in inside and (side or name not in found[1]):
                    found[side][name] = spec
    return found


def layout(pieces: Iterable[Piece], crossing: Iterable[TensorSpec]) -> tuple[dict[str, int], int]:
    """Where each crossing tensor lies in one block, and the size of the block.

    Tensors that are never wanted at the same time share their place.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        for name in (*piece.inputs, *piece.outputs):
            first.setdefault(name, number)
            last[name] = number
    placed: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by piece: what is taken then
    offsets: dict[str, int] = {}
    for tensor in sorted(crossing, key=lambda t: -t.nbytes):
        alive = range(first[tensor.name], last[tensor.name] + 1)
        beside = sorted({span for number in alive for span in placed[number]})
        offset = 0
        for a, b in beside:
            if offset + tensor.nbytes <= a:
                break
            offset = max(offset, b)
        end = -(-(offset + tensor.nbytes) // ALIGNMENT) * ALIGNMENT
        offsets[tensor.name] = offset
        for number in alive:
            placed[number].append((offset, end))
    return offsets, max((end for spans in placed.values() for _, end in spans), default=0)
