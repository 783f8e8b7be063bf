"""Lets one file operation of a command go wrong, each in its turn, and checks what is left.

`python -m tests.faults COMMAND FOLDER [STEP]` makes a small bundle and runs the command (export or
build) over it again and again. Run i stops at the i-th operation on a file in its folder, counted
by an audit hook, which sees every one that Python code asks for; with STEP only at some of them.
Each kind of fault in its turn:

    kill      the process is gone (SIGKILL)
    interrupt Ctrl-C
    full      the operation fails as on a full disk, and so do all that write after it
    readonly  it fails as on a read-only file system, and so do all that write after it
    vanish    the file that is to be read or renamed is not there any more

After each run the bundle from before (or, from the moment of the change, the new one) must be
whole, and the same command must succeed without any cleaning and leave nothing behind. The compiler
process of `build`, with the stand-in for TensorRT, is a fork instead of a fresh interpreter: its
operations are counted too.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eagle_chain.engines import compiler, worker
from eagle_chain.engines.cli import main
from eagle_chain.engines.manifest import Manifest
from eagle_chain.export import bundle
from tests.standin import standins
from tests.toy_pair import write_pair

SMALL = {"hidden_size": 16, "vocab_size": 300, "intermediate_size": 24, "head_dim": 8}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"linear_key_head_dim": 4, "linear_value_head_dim": 6}
SMALL_DRAFT = {"intermediate_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL_DRAFT |= {"head_dim": 8, "draft_vocab_size": 40}
WRITES = {"os.mkdir", "os.rename", "os.symlink", "os.link", "os.truncate", "os.chmod"}
REMOVES = {"os.remove", "os.rmdir"}
READS = {"os.listdir", "os.scandir"}
SIGNALS = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}
ERRORS = {"full": errno.ENOSPC, "readonly": errno.EROFS}
EXPORT = ["export", "trunk", "draft", "-o", "bundle", "--capacity", "32", "--aux-layers", "0,1,3"]
EXPORT += ["--prefill", "0"]
COMMANDS = {
    "export": [*EXPORT, "--weights", "copy"],  # the same graphs, so that plans are carried over
    "build": ["build", "bundle", "--force", "--level", "1"],
}


class ForkedCompiler:
    """What `subprocess.Popen` is to the worker, without the seconds that a new Python takes."""

    def __init__(self, command: list[str], *, cwd: Path, stdout: Any, **rest: Any) -> None:
        self.pid, self.returncode = os.fork(), None
        if not self.pid:
            code = 70
            try:
                os.dup2(stdout.fileno(), 1)
                os.dup2(stdout.fileno(), 2)
                os.chdir(cwd)
                code = compiler.main(*command[-2:])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def kill(self) -> None:
        """As `Popen.kill`."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """As `Popen.wait`."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def fork_compilers() -> None:
    """Let builds of this process and its forks use `ForkedCompiler`."""
    shim = SimpleNamespace(Popen=ForkedCompiler, DEVNULL=subprocess.DEVNULL)
    worker.subprocess = shim  # type: ignore[assignment,attr-defined]


class Fault:
    """The audit hook of one process: nothing until it is armed, then a fault at one operation."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.kind, self.at, self.count, self.what = "", -1, 0, ""
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count what happens to files in the folder."""
        if not self.kind:
            return
        writes = event in WRITES
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        elif event == "ctypes.dlsym" and arguments[1] == "renameat2":
            path, writes = self.folder, True
        elif writes or event in REMOVES | READS:
            path = arguments[0]
        else:
            return
        path = os.path.abspath(os.fsdecode(path)) if isinstance(path, (str, bytes, Path)) else ""
        if not f"{path}/".startswith(f"{self.folder}/") or path.endswith(".lock"):
            return
        self.count += 1
        if self.count == self.at:
            self.what = f"{event} {os.path.relpath(path, self.folder)}"
            Path(f"{self.folder}.what").write_text(self.what)
            self.strike(event, path)
        elif self.count > self.at > 0 and self.kind in ERRORS and writes:
            raise OSError(ERRORS[self.kind], os.strerror(ERRORS[self.kind]), path)

    def strike(self, event: str, path: str) -> None:
        """The fault itself."""
        kind, code = self.kind, ERRORS.get(self.kind)
        if kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[kind])
        elif kind == "vanish":
            self.kind = ""
            if event in ("open", "os.rename") and os.path.isfile(path):
                gone = Path(f"{self.folder}.gone")
                gone.mkdir(exist_ok=True)
                os.rename(path, gone / os.path.relpath(path, self.folder).replace("/", "|"))
            self.kind = kind
        elif code is not None and (event not in READS):
            raise OSError(code, os.strerror(code), path)


def contents(bundle: Path) -> dict[str, bytes | None]:
    """The manifest of a bundle and every file that it names; None for one that is not there."""
    manifest = Manifest.load(bundle)
    names = ["manifest.json", *manifest.graphs, *manifest.files, *manifest.plans]
    return {n: (bundle / n).read_bytes() if (bundle / n).is_file() else None for n in names}


def in_child(folder: Path, action: Callable[[], int], errors: Path) -> int:
    """Run `action` in a fork inside `folder`; its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if not pid:
        code = 70
        try:
            handle = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)
            os.chdir(folder)
            code = action()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def same(one: dict[str, bytes | None], other: dict[str, bytes | None]) -> bool:
    """Whether two bundles hold the same, wherever their plans lie: rebuilt ones take turns."""
    one, other = ({n.replace("~/", "/"): content for n, content in x.items()} for x in (one, other))
    plans = any(name.startswith("plans/") for name in one)
    return all(one[n] == other.get(n) for n in one if not (plans and n == "manifest.json"))


@contextmanager
def graphs_made_once() -> Iterator[None]:
    """Let all exports of one kind share their graphs: what is tried here are files."""
    made: dict[str, Any] = {}
    build, check = bundle.build_graphs, bundle.check_graph

    def build_graphs(*arguments: Any) -> Any:
        key = str(arguments)
        if key not in made:
            made[key] = build(*arguments)
        return made[key]

    bundle.build_graphs, bundle.check_graph = build_graphs, lambda *_: None
    bundle.onnx.checker.check_model, checker = lambda *_: None, bundle.onnx.checker.check_model
    yield
    bundle.build_graphs, bundle.check_graph = build, check
    bundle.onnx.checker.check_model = checker


class Sweep:
    """A command, the bundle before it and the bundle after it."""

    def __init__(self, command: str, base: Path) -> None:
        self.words, self.base = COMMANDS[command], base
        self.fresh, self.folder, self.errors = base / "fresh", base / "work", base / "stderr"
        self.fault = Fault(self.folder)
        self.fresh.mkdir(parents=True)
        sizes = {"sizes": SMALL, "draft_sizes": SMALL_DRAFT}
        write_pair(self.fresh, layers=4, aux=[0, 1, 3], tokenizer=True, **sizes)
        self.start()
        os.chdir(self.folder)
        assert main(EXPORT) == 0 and main(COMMANDS["export"]) == 0  # here, for the forks to find
        os.chdir(base)
        self.start()
        assert self.run(EXPORT, ["build", "bundle"]) == 0, self.errors.read_text()
        shutil.rmtree(self.fresh)
        shutil.copytree(self.folder, self.fresh, symlinks=True)
        self.old = contents(self.folder / "bundle")
        assert self.run(self.words) == 0, self.errors.read_text()
        self.new = contents(self.folder / "bundle")
        self.names = sorted(os.listdir(self.folder))

    def start(self) -> None:
        """Everything as it was before the command."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.fresh, self.folder, symlinks=True)

    def run(self, *lines: list[str]) -> int:
        """Commands without a fault."""
        return in_child(self.folder, lambda: max(main(line) for line in lines), self.errors)

    def strike(self, kind: str, at: int) -> dict[str, Any] | None:
        """One fault and what came of it, None if there are fewer operations."""
        self.start()
        told, gone = Path(f"{self.folder}.what"), Path(f"{self.folder}.gone")
        told.unlink(missing_ok=True)

        def faulty() -> int:
            self.fault.kind, self.fault.at = kind, at
            return main(self.words)

        code = in_child(self.folder, faulty, self.errors)
        said = self.errors.read_text()
        if not told.exists():
            assert code == 0, said
            return None
        what = f"{kind} at operation {at}, {told.read_text()}"
        for file in gone.iterdir() if gone.is_dir() else ():  # what had vanished is brought back
            place = self.folder / file.name.replace("|", "/")
            if place.parent.is_dir() and not place.exists() and ".partial" not in file.name:
                shutil.move(file, place)
        shutil.rmtree(gone, ignore_errors=True)
        assert code in (0, 2, 130, -signal.SIGKILL), f"{what}: exit code {code}\n{said}"
        assert "Traceback" not in said, f"{what}:\n{said}"
        assert code <= 0 or said.count("eagle-chain: ") == 1, f"{what}:\n{said}"
        found = contents(self.folder / "bundle")
        assert found in (self.old, self.new), f"{what}: neither the old bundle nor the new\n{said}"
        assert code or found == self.new, f"{what}: it says that it worked, and did not"
        assert self.run(self.words) == 0, f"{what}: the next run fails: {self.errors.read_text()}"
        assert same(contents(self.folder / "bundle"), self.new), what
        left = [p for p in self.folder.rglob("*") if ".partial" in p.name or ".old" in p.name]
        assert not left and sorted(os.listdir(self.folder)) == self.names, f"{what}: leaves {left}"
        operation = told.read_text()
        return {"operation": operation, "code": code, "bundle": ["old", "new"][found == self.new]}


def sweep(command: str, base: Path, step: int = 1) -> dict[str, list[dict[str, Any]]]:
    """Every `step`-th fault of each kind; an AssertionError at the first that leaves harm."""
    run = Sweep(command, base)
    kinds = (*SIGNALS, *ERRORS, "vanish")
    seen: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for i, kind in enumerate(kinds):
        at = 1 + i * step // len(kinds)  # with a step, each kind has operations of its own
        while (found := run.strike(kind, at)) is not None:
            seen[kind].append(found)
            at += step
    return seen


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored in background jobs of a shell
    with standins(), graphs_made_once(), redirect_stdout(sys.stderr):
        fork_compilers()
        seen = sweep(sys.argv[1], Path(sys.argv[2]).resolve(), int((*sys.argv[3:], 1)[0]))
    print(json.dumps(seen))
