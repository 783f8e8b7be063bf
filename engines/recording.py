"""The calls of a parity check in a folder: what each engine was fed and what the reference gave.

    recording.json            of which bundle and how it was made
    trunk/inputs/0000000000.json, trunk/outputs/0000000000.json, ...     one file per call

The files of an engine are Polygraphy's own, so `polygraphy run` reads the folders; a reader needs
no PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.fields import parse_json
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.staging import staged
from eagle_chain.engines.strict_json import decode, dumps, encode, shown

FORMAT = 1
INDEX = "recording.json"
RUNNER = "pytorch-reference"  # the name of the runner in Polygraphy's files


@dataclass(frozen=True)
class Call:
    """One call of one engine; arrays are NumPy's, floats fp32 unless a graph takes fp16."""

    engine: str
    round: int  # the trunk call it belongs to, counted from 0
    inputs: Mapping[str, Any]  # the plain ones by name; of whole recordings the states as well
    outputs: Mapping[str, Any]  # by name; states that grow with the sequence may end at its rows


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a recording was made of; the order of the fields is the order in the file."""

    format: int = FORMAT
    weights: dict[str, str]  # file of the bundle -> SHA-256
    layers: int  # of the trunk
    width: int
    capacity: int
    dtype: str  # of the bundle it was made for: what the inputs were rounded to
    whole: bool  # the states are inputs, too, and KV buffers have all their rows
    accepted: tuple[int, ...]  # by round; -1 where a round feeds a prompt
    calls: tuple[tuple[str, int], ...]  # engine and round, as they ran

    def check(self, manifest: Manifest, folder: Path) -> None:
        """Refuse a bundle of other weights or sizes."""
        options = manifest.options
        ours = {name: file.sha256 for name, file in manifest.files.items()}
        for what, got, wanted in (
            ("layers", self.layers, len(manifest.trunk.layer_types)),
            ("width", self.width, options.width),
            ("capacity", self.capacity, options.capacity),
            ("engines", sorted({name for name, _ in self.calls}), sorted(manifest.specs)),
            ("weights", sorted(self.weights.values()), sorted(ours.values())),
        ):
            if got != wanted:
                pair = f"{what} {shown(got)}, the bundle has {shown(wanted)}"
                words = "other weights" if what == "weights" else pair
                raise InputError(
                    f"{folder}: was recorded with {words}; record it again: "
                    "eagle-chain parity BUNDLE --save FOLDER"
                )


def polygraphy() -> Any:
    """The module `polygraphy.json`; `ModuleNotFoundError` is told to the user by the command."""
    import polygraphy.json as module  # type: ignore[import-untyped]

    return module


class Recorder:
    """Writes calls one by one, so that none is kept in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[tuple[str, int]] = []
        self._json = polygraphy()

    def add(self, call: Call) -> None:
        """Write one call."""
        from polygraphy.comparator import RunResults  # type: ignore[import-untyped]

        results = RunResults()
        results.add([dict(call.outputs)], runner_name=RUNNER)
        number = sum(engine == call.engine for engine, _ in self.calls)
        for kind, content in (("inputs", dict(call.inputs)), ("outputs", results)):
            path = _file(self.folder, call.engine, kind, number)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._json.save_json(content, str(path))
        self.calls.append((call.engine, call.round))


def write_index(folder: Path, recording: Recording) -> None:
    """The last file to be written."""
    (folder / INDEX).write_text(dumps(encode(recording)), encoding="utf-8")


def recording_folder(target: Path) -> Any:
    """`staged` for recordings: only an empty folder or another recording is replaced."""
    return staged(target, check_target)


def check_target(target: Path) -> None:
    """Refuse a folder that no recording may replace; one that is not there is fine."""
    if not os.path.lexists(target):
        return
    if target.is_dir() and (not os.listdir(target) or (target / INDEX).is_file()):
        return
    raise InputError(
        f"{target}: is there and is no recording, and only a recording is replaced; "
        "choose another folder"
    )


def read_index(folder: Path) -> Recording:
    """What a folder was recorded of."""
    path = folder / INDEX
    if not path.is_file():
        raise InputError(
            f"{folder}: has no {INDEX}, so it is no recording; make one where PyTorch is: "
            f"eagle-chain parity BUNDLE --save {folder}"
        )
    try:
        data = parse_json(path.read_bytes().decode("utf-8"))
        recording: Recording = decode(Recording, data)
    except (InputError, ValueError) as error:
        raise InputError(f"{path}: {error}; record it again") from None
    if recording.format != FORMAT:
        raise InputError(
            f"{path}: format is {recording.format}, this version of eagle-chain reads {FORMAT}; "
            "record it again"
        )
    return recording


def read_calls(folder: Path, recording: Recording) -> Iterator[Call]:
    """The calls in the order in which they ran, one in memory at a time."""
    module, seen = polygraphy(), dict[str, int]()
    for engine, round in recording.calls:
        number = seen[engine] = seen.get(engine, -1) + 1
        inputs, results = (
            _loaded(module, _file(folder, engine, kind, number)) for kind in ("inputs", "outputs")
        )
        try:
            if RUNNER not in results:
                raise KeyError(RUNNER)
            outputs = {name: results[RUNNER][0][name] for name in results[RUNNER][0]}
            call = Call(engine, round, dict(inputs), outputs)
        except (TypeError, AttributeError, LookupError, ValueError) as error:
            path = _file(folder, engine, "outputs", number)
            raise InputError(
                f"{path}: is not what was recorded ({error}); record it again"
            ) from None
        yield call


def _file(folder: Path, engine: str, kind: str, number: int) -> Path:
    return folder / engine / kind / f"{number:010d}.json"


def _loaded(module: Any, path: Path) -> Any:
    from polygraphy.exception import PolygraphyException  # type: ignore[import-untyped]

    if not path.is_file():
        raise InputError(f"{path}: is missing; record it again")
    try:
        return module.load_json(str(path))
    except (PolygraphyException, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: is damaged ({error}); record it again") from None
