"""The command `record`: the PyTorch reference of a bundle, kept in a folder for `parity`."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.outcome import Outcome
from eagle_chain.engines.progress import human_bytes, phases
from eagle_chain.engines.recording import Recorder, Recording, recording_folder, write_index
from eagle_chain.engines.schedule import schedule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `eagle-chain record` takes."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="what `export` wrote")
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", type=Path, required=True, help="folder to write"
    )
    parser.add_argument(
        "--part",
        action="store_true",
        help="leave out what `parity` does not read: states as inputs, empty rows of KV buffers "
        "(`polygraphy run` needs them)",
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Run every round and write every call."""
    from eagle_chain.export.teacher import Teacher, reference_sessions

    manifest = Manifest.load(arguments.bundle)
    options = manifest.options
    rounds = schedule(options.width, options.capacity, options.prefill)
    with recording_folder(arguments.output) as folder, phases("reference") as show:
        show("reading weights", 0, 0)
        recorder = Recorder(folder)
        teacher = Teacher(reference_sessions(arguments.bundle, manifest), manifest)
        for call in teacher.calls(rounds, whole=not arguments.part):
            recorder.add(call)
            show("rounds", call.round, len(rounds))
        recording = Recording(
            weights={name: file.sha256 for name, file in manifest.files.items()},
            layers=len(manifest.trunk.layer_types),
            width=options.width,
            capacity=options.capacity,
            dtype=options.dtype,
            whole=not arguments.part,
            accepted=tuple(round.accepted for round in rounds),
            calls=tuple(recorder.calls),
        )
        write_index(folder, recording)
        size = sum(path.stat().st_size for path in folder.rglob("*.json"))
    print(f"reference  {len(recording.calls)} calls in {len(rounds)} rounds, {human_bytes(size)}")
    return Outcome(
        {
            "recording": str(arguments.output),
            "rounds": len(rounds),
            "calls": len(recording.calls),
            "bytes": size,
            "whole": recording.whole,
        }
    )
