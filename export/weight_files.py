"""Where each tensor lies in a folder of safetensors files; headers are checked, weights not read.

ONNX refers to weights by absolute byte offset, so the header is read here by hand, and a file that
was cut, padded or garbled is refused before anything is made from it.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.fields import is_integer, parse_json, raise_all, read_json, show
from eagle_chain.engines.files import open_plain
from eagle_chain.engines.manifest import STORED_BYTES
from eagle_chain.engines.progress import counted

# Every dtype of safetensors: those that a bundle may hold, and those that only pass by.
FILE_BYTES = {**STORED_BYTES, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8}
INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors library
LARGEST_EXTENT = 1 << 40
SHOWN = 10  # names or problems of a kind in an error
AGAIN = "the file is damaged or incomplete: download it again"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
OTHER_FORMATS = (*PICKLES, ".gguf", ".h5", ".msgpack")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: row-major, little-endian, `nbytes` bytes from `offset`."""

    name: str  # as in the file
    file: Path
    offset: int  # from the start of the file
    dtype: str  # as in safetensors: "BF16", "F32", "I64", ...
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return FILE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class WeightFolder:
    """The tensors of a folder by their stored names."""

    tensors: dict[str, StoredTensor]
    notices: tuple[str, ...]  # what was left aside, in sentences


def read_folder(folder: Path) -> WeightFolder:
    """Locate every tensor of a checkpoint folder: one file, or several with or without an index.

    The index, where there is one, decides which tensors belong to the checkpoint.

    Raises:
        InputError: No or incomplete weights, or a damaged file.
    """
    if not folder.is_dir():
        kind = "not a folder" if folder.exists() else "no such folder"
        action = "give a folder with config.json and safetensors (download a hub model first)"
        raise InputError(f"{folder}: {kind}; {action}")
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        return _read_indexed(folder, present)
    if not present:
        _refuse_other_formats(folder)
    _refuse_missing_shards(folder, present)
    raise_all(
        str(folder),
        [
            f"{show(name)} is not a name that a graph can refer to; rename the file"
            for name in present[:SHOWN]
            if not _is_plain(name)
        ],
    )
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for file in _read_files(folder, present):
        for name, tensor in file.items():
            if name in tensors:
                first = tensors[name].file.name
                problems.append(f"{name}: in {first} and in {tensor.file.name}; remove one file")
            tensors[name] = tensor
    raise_all(f"{folder}", problems[:SHOWN])
    return WeightFolder(tensors, ())


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, after checking that the file is whole.

    Raises:
        InputError: The file is not a complete safetensors file; says what it declares and has.
    """
    try:
        with open_plain(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            declared = int.from_bytes(start, "little")
            text = stream.read(min(declared, LARGEST_HEADER))
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from None
    if (start + text[:16]).startswith(b"version https://"):
        action = "run `git lfs pull` or download it again"
        raise InputError(f"{file}: {size} bytes, a Git LFS pointer instead of weights; {action}")
    if size < 8:
        raise InputError(f"{file}: {size} bytes, wanted 8 and a header; {AGAIN}")
    if declared > LARGEST_HEADER:
        limit = f"wanted at most {LARGEST_HEADER}"
        raise InputError(
            f"{file}: {size} bytes, declares a header of {declared} bytes, {limit}; {AGAIN}"
        )
    if 8 + declared > size:
        needed = f"its header alone declares {8 + declared} bytes"
        raise InputError(f"{file}: {size} bytes, but {needed}; {AGAIN}")
    try:
        header = parse_json(text.decode("utf-8"))
        if not isinstance(header, dict):
            raise ValueError(f"got {show(header)}, wanted an object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise ValueError(f"__metadata__ is {show(metadata)}, wanted an object")
        tensors = {
            name: _read_entry(name, entry, file, 8 + declared) for name, entry in header.items()
        }
    except ValueError as error:  # InputError and UnicodeDecodeError are of this kind too
        raise InputError(f"{file}: bad header of {declared} bytes ({error}); {AGAIN}") from None
    _check_layout(file, size, 8 + declared, tensors.values())
    return tensors


def _read_entry(name: str, entry: Any, file: Path, data: int) -> StoredTensor:
    """One entry of a header; `data` is where the bytes of the tensors start."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} is {show(entry)}, wanted dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in FILE_BYTES:
        raise ValueError(f"{name}: dtype {show(dtype)}, wanted one of {', '.join(FILE_BYTES)}")
    for key, value, length in (("shape", shape, range(9)), ("data_offsets", offsets, (2,))):
        if (
            not isinstance(value, list)
            or len(value) not in length
            or not all(is_integer(extent, (0, LARGEST_EXTENT)) for extent in value)
        ):
            raise ValueError(f"{name}: {key} {show(value)}")
    tensor = StoredTensor(name, file, data + offsets[0], dtype, tuple(shape))
    if offsets[1] - offsets[0] != tensor.nbytes:
        length = offsets[1] - offsets[0]
        raise ValueError(f"{name}: {length} bytes, but {dtype} {shape} has {tensor.nbytes}")
    return tensor


def _check_layout(file: Path, size: int, data: int, tensors: Iterable[StoredTensor]) -> None:
    """The tensors must cover the file from `data` to its end, without holes or overlaps."""
    end, last = data, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            what = "overlaps" if tensor.offset < end else "leaves a hole after"
            raise InputError(f"{file}: {size} bytes, {tensor.name} {what} {last}; {AGAIN}")
        end, last = tensor.offset + tensor.nbytes, tensor.name
    if end != size:
        raise InputError(f"{file}: {size} bytes, its header declares {end}; {AGAIN}")


def _read_files(folder: Path, names: Iterable[str]) -> list[dict[str, StoredTensor]]:
    """The headers of several files; all damaged files are named in one error."""
    headers, problems = [], []
    for name in names:
        try:
            headers.append(read_header(folder / name))
        except InputError as error:
            problems.append(str(error))
    if len(problems) == 1:
        raise InputError(problems[0])
    raise_all(f"{folder}", problems)
    return headers


def _read_indexed(folder: Path, present: list[str]) -> WeightFolder:
    """The tensors that the index lists, in the files it names, literally."""
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: weight_map is {show(weight_map)}, wanted names and files")
    problems = []
    for file in sorted({show(f) for f in weight_map.values() if not _is_plain(f)}):
        problems.append(f"weight_map: file {file}, wanted the name of a file in this folder")
    raise_all(str(index), problems[:SHOWN])

    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not os.path.isfile(folder / name)]  # never raises
    if missing:
        names = f"{', '.join(missing[:SHOWN])}{' ...' if len(missing) > SHOWN else ''}"
        count = f"{len(missing)} of the {len(shards)} files in {INDEX} are missing"
        raise InputError(f"{folder}: {count}: {names}; incomplete download?")
    headers = dict(zip(shards, _read_files(folder, shards), strict=True))
    absent = [name for name, file in weight_map.items() if name not in headers[file]]
    raise_all(
        str(index),
        [
            f"{name}: not in {weight_map[name]}; the index belongs to other files"
            for name in absent[:SHOWN]
        ],
    )
    notices = [
        f"{name} is not in {INDEX} and was left aside" for name in present if name not in headers
    ]
    unlisted = sum(
        weight_map.get(name) != file for file, header in headers.items() for name in header
    )
    if unlisted:
        notices.append(f"left aside, not in {INDEX}: {counted(unlisted, 'tensor')} of the shards")
    tensors = {name: headers[file][name] for name, file in weight_map.items()}
    return WeightFolder(tensors, tuple(notices))


def _is_plain(name: Any) -> bool:
    """Whether an index names a file of its own folder, and nothing else."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not any(c in name for c in "/\\:\0")
        and not any(0xD800 <= ord(c) <= 0xDFFF for c in name)  # bytes that are not UTF-8
    )


def _refuse_missing_shards(folder: Path, present: list[str]) -> None:
    """Numbered files without an index must at least be all there."""
    parts: dict[tuple[str, str, int], set[int]] = {}  # stem, total and digits as written -> numbers
    for name in present:
        if part := re.fullmatch(r"(.*)-([0-9]+)-of-([0-9]+)\.safetensors", name):
            parts.setdefault((part[1], part[3], len(part[2])), set()).add(int(part[2]))
    for (stem, written, digits), found in parts.items():
        total = int(written)  # of any size: nothing here may take as long as it says
        count = total - sum(1 <= number <= total for number in found)
        if count:
            absent = (i for i in range(1, total + 1) if i not in found)
            shown = [
                f"{stem}-{i:0{digits}}-of-{written}.safetensors" for i in islice(absent, SHOWN)
            ]
            raise InputError(
                f"{folder}: {count} of {total} files are missing: {', '.join(shown)}"
                f"{' ...' if count > SHOWN else ''}; incomplete download?"
            )


def _refuse_other_formats(folder: Path) -> None:
    """Say what to do with a folder that has no safetensors; pickles are never opened."""
    other = sorted(p.name for p in folder.iterdir() if p.suffix in OTHER_FORMATS)
    pickles = [name for name in other if name.endswith(PICKLES)]
    if pickles:
        raise InputError(
            f"{folder}: the weights are in {', '.join(pickles[:5])}, a pickle, which is never "
            f"loaded here; convert it first: {_conversion(folder, pickles)}"
        )
    if other:
        raise InputError(
            f"{folder}: the weights are in {', '.join(other[:5])}, but only safetensors are read; "
            "get them from whoever published the model"
        )
    raise InputError(f"{folder}: no safetensors file; is this a whole checkpoint folder?")


def _conversion(folder: Path, pickles: list[str]) -> str:
    """The command that makes safetensors of pickles; torch then unpickles nothing but tensors."""
    code = (
        "import torch; from safetensors.torch import save_file; t = {}; "
        f"[t.update(torch.load(f, 'cpu', weights_only=True)) for f in {pickles}]; "
        "save_file({n: x.contiguous().clone() for n, x in t.items()}, 'model.safetensors')"
    )
    return f"cd {shlex.quote(str(folder))} && python -c {shlex.quote(code)}"
