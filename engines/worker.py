"""Runs the compiler process: shows its progress, ends it on Ctrl-C, gives its words to errors."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from eagle_chain.engines.child import module_command, module_environment
from eagle_chain.engines.compiler import Request
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.progress import human_bytes, phases

LOG = "build.log"  # TensorRT's warnings and whatever it prints
_SECONDS_BETWEEN_LOOKS = 0.5


def compile_all(request: Request, folder: Path) -> dict[str, dict[str, Any]]:
    """Compile every job of `request`; returns the report of each.

    Args:
        request: Its paths must be absolute.
        folder: Where the process runs and its log goes.

    Raises:
        InputError: A job failed, or the process died.
        KeyboardInterrupt: The process has been killed.
    """
    request_file = folder / ".request.json"
    request_file.write_text(request.dumps(), encoding="utf-8")
    reports: dict[str, dict[str, Any]] = {}
    with open(folder / LOG, "wb", buffering=0) as log, _started(request_file, log) as (child, pipe):
        messages = _messages(pipe)
        for job in request.jobs:
            with phases(f"building {job.name}") as show:
                report = _follow(messages, show, log)
            if report is None:
                break
            reports[job.name] = report
            print(
                f"built    {job.name}: {human_bytes(report['bytes'])} in {report['seconds']:.1f} s",
                flush=True,
            )
        code = child.wait()
    request_file.unlink()
    if len(reports) < len(request.jobs):
        raise InputError(_death(code, request.jobs[len(reports)].name, folder / LOG))
    return reports


@contextmanager
def _started(
    request_file: Path, log: IO[bytes]
) -> Iterator[tuple[subprocess.Popen[bytes], BinaryIO]]:
    """The compiler process and the pipe it writes to; it does not outlive the block."""
    reader, writer = os.pipe()
    try:
        child = subprocess.Popen(
            module_command("eagle_chain.engines.compiler", request_file.name, str(writer)),
            cwd=request_file.parent,
            env=module_environment(),
            pass_fds=(writer,),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    finally:
        os.close(writer)
    with open(reader, "rb", buffering=0) as pipe:
        try:
            yield child, pipe
        finally:
            child.kill()
            child.wait()


def _messages(pipe: BinaryIO) -> Iterator[dict[str, Any] | None]:
    """What the compiler says, and None now and then while it says nothing."""
    rest = b""
    while True:
        if not select.select([pipe], [], [], _SECONDS_BETWEEN_LOOKS)[0]:
            yield None
            continue
        block = pipe.read(1 << 16)
        if not block:
            return
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield json.loads(line)


def _follow(
    messages: Iterator[dict[str, Any] | None], show: Callable[[str, int, int], None], log: IO[bytes]
) -> dict[str, Any] | None:
    """Show progress until a job is done and return its report, or None if the process ended."""
    phase: tuple[str, int, int] = ("", 0, 0)
    for message in messages:
        if message is None:
            show(*phase)
        elif "phase" in message:
            phase = (message["phase"], message["done"], message["total"])
            show(*phase)
        elif "log" in message:
            log.write(message["log"].encode() + b"\n")
        elif "warning" in message:
            print(f"warning  {message['warning']}", file=sys.stderr, flush=True)
        elif "error" in message:
            raise InputError(message["error"])
        else:
            report: dict[str, Any] = message["report"]
            return report
    return None


def _death(code: int, job: str, log: Path) -> str:
    """Why the process ended before its work was done."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    words = " | ".join(line.strip() for line in lines[-4:]) or "it printed nothing"
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    if code == -signal.SIGKILL:
        how += ", as the system does when memory runs out"
    return f"{job}: TensorRT ended its process ({how}) while building: {words}"
