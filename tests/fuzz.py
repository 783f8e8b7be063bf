"""Damages everything that a command reads, one input after the other, and watches what it does.

`python -m tests.fuzz [--seconds N] [--seed N] [TARGET ...]` tries all targets, or some, for N
seconds of one processor each, and prints how many inputs each got. Input i of a target comes from
seed i alone, so a finding names the seed that shows it again (`--seed I --inputs 1 TARGET`).

An input must end in success or in one sentence with exit code 2, within `PATIENCE` seconds and
`MEMORY` bytes, with nothing half written. A traceback, any other exit code, a hang, a crash of the
process and a command that runs out of that memory are findings.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eagle_chain.engines.cli import main
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import MANIFEST
from eagle_chain.engines.plan_file import MAGIC
from eagle_chain.runtime import chat, open_engines
from eagle_chain.runtime.tokenizer import Tokenizer
from tests.faults import SMALL, SMALL_DRAFT, contents, fork_compilers
from tests.standin import standins
from tests.toy_pair import write_pair

MEMORY = 3 << 30  # bytes of address space on top of what the process has when it starts
PATIENCE = 60  # seconds for one input, on a machine that does other things too

WEIRD: list[Any] = [
    *(None, True, 0, 1, -1, 3, 7, 64, 2**31, 2**63, 10**30, 0.5, -0.0, 1e-320, 1e308),
    *(float("nan"), float("inf"), "", "x", "llama", "\ud800", "\0", "a" * 3000, "../../x"),
    *("full_attention", [], {}, [[]], [None], {"a": 1}, [1, 2, 3], [0] * 3000),
]
PIECES = [
    *(b"null", b"1e999", b"-1", b"99999999999999999999", b"NaN", b'"', b"{", b"}", b"[", b"]"),
    *(b"\xff\xfe", b"\\ud800", b"\xed\xa0\x80", b"\0", b"[" * 3000, b'{"a":' * 3000, b"1" * 6000),
]
TEMPLATE_PIECES = [
    *("{{", "}}", "{%", "%}", "{#", "for m in messages", "endfor", "if", "endif", "range(99999)"),
    *("''.__class__.__mro__", "| tojson", "| join", "* 99999", "** 99999", "set x = ", "[", "]"),
    *("messages[0].content", "raise_exception('no')", "break", "macro f()", "endmacro", "f()"),
    *("loop", "namespace()", "cycler(1)", "lipsum(9999)", "self", "import 'x'", "include 'x'"),
    *("{{ 'x' * 10 ** 12 }}", "{{ 10 ** 10 ** 8 }}", "{% for i in range(99999) %}", "\ud800"),
    *("| format(9)", "'%999999999d' | format(1)", "| map('x')", "| groupby('role')", "| batch(2)"),
]
WORDS = [
    *("export", "build", "generate", "verify", "inspect", "bench", "--json", "--help", "-o", "-k"),
    *("--prompt", "--chat", "--width", "--capacity", "--dtype", "--aux-layers", "--threads"),
    *("--text", "--drafters", "--backend", "--rollback", "--max-new-tokens", "--rope-theta"),
    *("--compute-capability", "--level", "--workspace", "--weights", "--profile", "--debug"),
    *("", "0", "-1", "5", "9" * 30, "1e999", "nan", "inf", "1,2", ",", "none", "eagle", "auto"),
    *("bf16", "fp32", "8.9", "99GB", "link", "\ud800", "\x1b[2J", "a" * 5000, "bundle", "trunk"),
    *("draft", "/nonexistent", "/dev/null", "/proc/self/mem", "README", ".", "..", "tensorrt-rtx"),
]

Damage = Callable[[random.Random, bytes], bytes]


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value[:20]))
    paths = [(*path, key) for key, _ in items]
    return paths + [spot for key, inner in items for spot in spots(inner, (*path, key))]


def other_value(rng: random.Random, content: bytes) -> bytes:
    """JSON with a value or two that are odd, gone, doubled, renamed or a little off."""
    data = json.loads(content)
    for _ in range(rng.choice([1, 1, 2])):
        if not (found := spots(data)):
            break
        *path, key = rng.choice(found)
        holder = data
        for step in path:
            holder = holder[step]
        what = rng.randrange(8)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, dict):
            holder[rng.choice(["x", "", "model_type", "\ud800"])] = holder.pop(key)
        elif what == 2 and isinstance(holder, list):
            holder.append(deepcopy(holder[key]))
        elif what == 3 and type(holder[key]) is int:
            holder[key] += rng.choice([1, -1, 2, 8, -8, 1000])
        elif what == 4:
            holder[key] = [holder[key]]
        else:
            holder[key] = deepcopy(rng.choice(WEIRD))
    return json.dumps(data).encode()


def other_bytes(rng: random.Random, content: bytes) -> bytes:
    """Bytes flipped, cut out, doubled, moved, or something odd put in."""
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        if not damaged:
            break
        at, size = rng.randrange(len(damaged)), rng.choice([1, 2, 8, 50, 500])
        what = rng.randrange(6)
        if what == 0:
            damaged[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            damaged[at] = rng.randrange(256)
        elif what == 2:
            del damaged[at : at + rng.choice([1, size, len(damaged)])]
        elif what == 3:
            damaged[at:at] = damaged[at : at + size]
        elif what == 4:
            there = rng.randrange(len(damaged))
            damaged[at : at + size] = damaged[there : there + size]
        else:
            damaged[at : at + 1] = rng.choice(PIECES)
    return bytes(damaged)


def damaged_json(rng: random.Random, content: bytes) -> bytes:
    """Half of them keep the syntax, so that they get past the parser."""
    return rng.choice([other_value, other_bytes])(rng, content)


def damaged_weights(rng: random.Random, content: bytes) -> bytes:
    """A safetensors file whose header is another one, now and then its length or its data."""
    size = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + size], content[8 + size :]
    part = rng.random()
    if part < 0.1:
        return other_bytes(rng, content[:8]) + content[8:]
    if part < 0.2:
        return other_bytes(rng, content)
    header = damaged_json(rng, header)
    return len(header).to_bytes(8, "little") + header + data


def damaged_pieces(rng: random.Random, content: bytes) -> bytes:
    """A file of pieces whose header is another one, now and then its length or its plans."""
    begin = len(MAGIC) + 8
    end = begin + int.from_bytes(content[len(MAGIC) : begin], "little")
    if rng.random() < 0.2:
        return other_bytes(rng, content)
    header = damaged_json(rng, content[begin:end])
    return MAGIC + len(header).to_bytes(8, "little") + header + content[end:]


def damaged_template(rng: random.Random, content: bytes) -> bytes:
    """A chat template with pieces of templates in it, or made of nothing else."""
    text = content.decode() if rng.random() < 0.5 else ""
    for _ in range(rng.choice([1, 2, 4, 8, 16])):
        at = rng.randrange(len(text) + 1)
        text = f"{text[:at]} {rng.choice(TEMPLATE_PIECES)} {text[at:]}"
    made = text.encode("utf-8", "surrogatepass")
    return made if rng.random() < 0.8 else other_bytes(rng, made)


def damaged_text(rng: random.Random, content: bytes) -> bytes:
    """Text to read prompts from: plain or JSON lines, with something odd."""
    lines = [json.dumps({"text": content.decode()}), json.dumps({"t": "x" * rng.randrange(200)})]
    start = content if rng.random() < 0.5 else "\n".join(lines * rng.randrange(1, 4)).encode()
    return rng.choice([other_bytes, other_bytes, lambda rng, content: content])(rng, start)


def damaged_words(rng: random.Random, content: bytes) -> bytes:
    """A command line."""
    return "\0".join(rng.choices(WORDS, k=rng.randrange(1, 9))).encode("utf-8", "surrogatepass")


# What is done with a damaged file: each returns the exit code -----------------------------------


def export(pair: Path, bundle: Path) -> int:
    """Make a bundle of a pair."""
    words = ["export", str(pair / "trunk"), str(pair / "draft"), "-o", str(bundle)]
    return main([*words, "--capacity", "32"])


def exported(folder: Path) -> int:
    """An export, which must leave nothing if it fails."""
    out = folder / "out"
    try:
        code = export(folder, out / "bundle")
        assert code == 0 or not out.exists(), "an export that failed has left something"
        return code
    finally:
        shutil.rmtree(out, ignore_errors=True)


def exported_shards(folder: Path) -> int:
    """The same with the pair in shards."""
    return exported(folder / "sharded")


def inspected(folder: Path) -> int:
    """What a bundle holds, with its plans."""
    return main(["inspect", str(folder / "bundle")])


def generated(folder: Path, *words: str) -> int:
    """A few tokens of a bundle."""
    few = ["--max-new-tokens", "2", "--threads", "1", "--backend", "onnxruntime-cpu"]
    return main(["generate", str(folder / "bundle"), *few, *(words or ("--prompt", "ab"))])


def generated_from_file(folder: Path) -> int:
    """A few tokens behind a prompt out of a file."""
    return generated(folder, "--prompt-file", str(folder / "prompt.txt"))


def verified(folder: Path) -> int:
    """A certificate over a text."""
    words = ["--text", str(folder / "text.txt"), "--prompts", "1", "--prompt-tokens", "6"]
    words += ["--max-new-tokens", "2", "--drafters", "scripted", "-k", "2", "--threads", "1"]
    return main(["verify", str(folder / "bundle"), *words, "--backend", "onnxruntime-cpu"])


def rehashed(folder: Path, table: str, name: str) -> None:
    """Put the hash of a damaged file into the manifest, so that it is not refused for that."""
    path = folder / "bundle" / MANIFEST
    data = json.loads(path.read_text())
    digest = hashlib.sha256((folder / "bundle" / name).read_bytes()).hexdigest()
    entry = data[table][name]
    data[table][name] = {**entry, "sha256": digest} if isinstance(entry, dict) else digest
    path.write_text(json.dumps(data))


def built_from_graph(folder: Path) -> int:
    """A forged graph through the parser of TensorRT's stand-in, or refused before."""
    rehashed(folder, "graphs", "encoder.onnx")
    return built(folder, "--force")


def loaded_forged(folder: Path) -> int:
    """A plan with its hash."""
    rehashed(folder, "plans", f"{PLANS.removeprefix('bundle/')}/encoder.plan")
    return loaded(folder)


def loaded_forged_pieces(folder: Path) -> int:
    """A plan in pieces with its hash, by TensorRT 8.6."""
    rehashed(folder, "plans", f"{PLANS_8.removeprefix('bundle/')}/trunk.plan")
    with standins(STANDIN_VERSION="8.6.1"):
        return loaded(folder)


def built(folder: Path, *words: str) -> int:
    """A build over a copy of the bundle, which must stay as it was if that fails."""
    bundle = Path(shutil.copytree(folder / "bundle", folder / "again", symlinks=True))
    try:
        before = contents(bundle)
        code = main(["build", str(bundle), *words])
        assert code == 0 or contents(bundle) == before, "a failed build changed the bundle"
        return code
    finally:
        shutil.rmtree(bundle)


def rebuilt(folder: Path) -> int:
    """A build that is made whatever there is."""
    return built(folder, "--force")


def loaded(folder: Path) -> int:
    """The engines of the plans."""
    return outcome(lambda: open_engines(folder / "bundle", "tensorrt"))


def templated(folder: Path) -> int:
    """A conversation in the form of a template."""
    message = {"role": "user", "content": "héllo"}
    return outcome(lambda: Tokenizer(folder / "bundle").encode_chat([message]))


def tokenized(folder: Path) -> int:
    """Text there and back."""

    def there_and_back() -> None:
        tokenizer = Tokenizer(folder / "bundle")
        stream = tokenizer.stream()
        for token in [*tokenizer.encode("héllo <|im_end|> 123 \n"), 0, 299, 255]:
            stream.push(token)
        stream.end()

    return outcome(there_and_back)


REQUEST = {"ids": [1, 2, 3], "max_new_tokens": 4, "k": 2, "stop_ids": [5, 6], "append": False}
_ENGINES: list[Any] = []  # opened once in a process


def requested(folder: Path) -> int:
    """A request to a chain, whose arguments may be anything."""
    try:
        data = json.loads((folder / "request.json").read_bytes())
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or "ids" not in data:
        return outcome(_no_request)
    if not _ENGINES:
        _ENGINES.append(open_engines(folder / "bundle", "onnxruntime-cpu", threads=1).chain())
    given = {name: value for name, value in data.items() if name in REQUEST}
    return outcome(lambda: _ENGINES[0].generate(given.pop("ids"), **given))


def _no_request() -> None:
    raise InputError("no request")


def forked_render(command: list[str], *, input: bytes, timeout: float, **rest: Any) -> Any:
    """What `subprocess.run` is to chat templates, without a new Python for each."""
    with tempfile.TemporaryFile() as asked:
        asked.write(input)
        asked.seek(0)
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.dup2(asked.fileno(), 0)
                os.dup2(writer, 1)
                sys.stdin, sys.stdout = open(0), open(1, "w")
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                chat.MEMORY += pages * os.sysconf("SC_PAGE_SIZE")
                chat.main()
                sys.stdout.flush()
            finally:
                os._exit(0)
        os.close(writer)
    deadline, answer = time.monotonic() + timeout, b""
    try:
        while select.select([reader], [], [], max(deadline - time.monotonic(), 0))[0]:
            if not (block := os.read(reader, 1 << 16)):
                return subprocess.CompletedProcess(command, 0, answer, b"")
            answer += block
        raise subprocess.TimeoutExpired(command, timeout)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def spoken(folder: Path) -> int:
    """A command line, in a folder where it can do no harm."""
    words = (folder / "words").read_bytes().decode("utf-8", "surrogatepass").split("\0")
    here = os.getcwd()
    os.chdir(folder)
    try:
        return main(words)
    finally:
        os.chdir(here)
        for left in ("out", "0", "-1", "5", "none"):
            shutil.rmtree(folder / left, ignore_errors=True)


def outcome(action: Callable[[], Any]) -> int:
    """An action as an exit code, as the command line has it."""
    try:
        action()
    except InputError as error:
        print(f"eagle-chain: {error}", file=sys.stderr)
        return 2
    return 0


@dataclass(frozen=True)
class Target:
    """A file of the world that is damaged, how, and what is done with it then."""

    file: str
    damage: Damage
    run: Callable[[Path], int]


TRUNK, BUNDLE = "trunk/model.safetensors", "bundle/tokenizer"
PLANS = "bundle/plans/tensorrt-10.9.0.34-Stand-in-GPU"
PLANS_8 = "bundle/plans/tensorrt-8.6.1-Stand-in-GPU"
TARGETS: dict[str, Target] = {
    "config of the trunk": Target("trunk/config.json", damaged_json, exported),
    "config of the draft": Target("draft/config.json", damaged_json, exported),
    "weights of the trunk": Target(TRUNK, damaged_weights, exported),
    "weights of the draft": Target("draft/model.safetensors", damaged_weights, exported),
    "index": Target("sharded/trunk/model.safetensors.index.json", damaged_json, exported_shards),
    "weights of a bundle": Target(TRUNK, damaged_weights, generated),
    "manifest": Target("bundle/manifest.json", damaged_json, generated),
    "manifest, inspected": Target("bundle/manifest.json", damaged_json, inspected),
    "graph, forged hash": Target("bundle/encoder.onnx", other_bytes, built_from_graph),
    "plan": Target(f"{PLANS}/encoder.plan", other_bytes, loaded),
    "plan, built again": Target(f"{PLANS}/encoder.plan", other_bytes, built),
    "plan, forged hash": Target(f"{PLANS}/encoder.plan", other_bytes, loaded_forged),
    "pieces, forged hash": Target(f"{PLANS_8}/trunk.plan", damaged_pieces, loaded_forged_pieces),
    "timing cache": Target(f"{PLANS}.timing.cache", other_bytes, rebuilt),
    "layers of a plan": Target(f"{PLANS}/trunk.layers.json", damaged_json, inspected),
    "tokenizer": Target(f"{BUNDLE}/tokenizer.json", damaged_json, tokenized),
    "tokenizer config": Target(f"{BUNDLE}/tokenizer_config.json", damaged_json, templated),
    "chat template": Target(f"{BUNDLE}/chat_template.jinja", damaged_template, templated),
    "prompt": Target("prompt.txt", other_bytes, generated_from_file),
    "text of verify": Target("text.txt", damaged_text, verified),
    "token ids": Target("request.json", damaged_json, requested),
    "command line": Target("words", damaged_words, spoken),
}


def make_world(folder: Path) -> None:
    """A pair in shards, a pair in single files, a bundle with plans, texts."""
    sizes: dict[str, Any] = {"layers": 8, "sizes": SMALL, "draft_sizes": SMALL_DRAFT}
    write_pair(folder, tokenizer=True, **sizes)
    write_pair(folder / "sharded", shards=3, **sizes)
    assert export(folder, folder / "bundle") == 0
    assert main(["build", str(folder / "bundle")]) == 0
    with standins(STANDIN_VERSION="8.6.1"):
        assert main(["build", str(folder / "bundle")]) == 0
    (folder / "request.json").write_text(json.dumps(REQUEST))
    text = "A text with ümlauts, 日本語 and 👩‍👩‍👧.\n" * 3
    for name, content in (("prompt.txt", "héllo, 日本\n"), ("text.txt", text)):
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "words").write_text("inspect\0bundle")
    template = json.loads((folder / BUNDLE / "tokenizer_config.json").read_text())["chat_template"]
    (folder / BUNDLE / "chat_template.jinja").write_text(template)


class Finding(Exception):
    """What an input did that it must not."""


def attempt(target: Target, folder: Path, seed: int) -> int:
    """Try one input; its exit code, or a `Finding`."""
    file, manifest = folder / target.file, folder / "bundle" / MANIFEST
    content, kept = file.read_bytes(), manifest.read_bytes()
    file.write_bytes(target.damage(random.Random(seed), content))
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = target.run(folder)
    except BaseException as error:
        lines = "".join(traceback.format_exception(error)[-4:])
        raise Finding(f"{type(error).__name__}: {error}\n{lines}") from error
    finally:
        if file.parent.is_dir():
            file.write_bytes(content)
        manifest.write_bytes(kept)
    said.flush()
    words = said.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]
    if code not in (0, 2) and not (code == 1 and target.run is verified):
        raise Finding(f"exit code {code}: {words[-500:]}")
    if code == 2 and words.count("eagle-chain: ") != 1:
        raise Finding(f"not one sentence: {words[-1000:]}")
    if "not enough memory" in words or "Traceback" in words:
        raise Finding(f"memory or a traceback: {words[-1000:]}")
    return code


def worker_main(name: str, folder: Path, seed: int, inputs: int, seconds: float, out: Path) -> None:
    """Try inputs in this process until the time is over; progress and findings go to `out`."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    start, codes, target = time.process_time(), Counter[int](), TARGETS[name]
    with open(out, "a", buffering=1) as log:
        for i in range(seed, seed + inputs):
            own = resource.getrusage(resource.RUSAGE_CHILDREN)
            if time.process_time() - start + own.ru_utime + own.ru_stime > seconds:
                break
            log.write(f"at {i}\n")
            try:
                codes[attempt(target, folder, i)] += 1
            except Finding as finding:
                codes[-1] += 1
                log.write(f"finding {json.dumps([i, str(finding)])}\n")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        log.write(f"done {json.dumps([codes, peak])}\n")


def fuzz(name: str, base: Path, seed: int, inputs: int, seconds: float) -> dict[str, Any]:
    """One target in processes of its own: a crash or a hang ends one and is a finding."""
    world, out = base / "world", base / "log"
    codes: Counter[str] = Counter()
    findings: list[tuple[int, str]] = []
    peak, end, last = 0, seed + inputs, seed
    deadline = time.monotonic() + 20 * seconds + 10 * PATIENCE
    while last < end and seconds > 0 and time.monotonic() < deadline:
        folder = Path(shutil.copytree(world, base / "copy", symlinks=True))
        out.write_text("")
        start, pid = time.process_time(), os.fork()
        if not pid:
            try:
                null = os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1, 2):
                    os.dup2(null, stream)
                worker_main(name, folder, last, end - last, seconds, out)
            except BaseException:  # of this file, not of what it tries
                with open(out, "a") as log:
                    log.write(f"finding {json.dumps([-1, traceback.format_exc()])}\n")
            finally:
                os._exit(0)
        status = watched(pid, out)
        lines = out.read_text().splitlines()
        findings += [tuple(json.loads(x[8:])) for x in lines if x.startswith("finding ")]  # type: ignore[misc]
        done = [json.loads(x[5:]) for x in lines if x.startswith("done ")]
        tried = [int(x[3:]) for x in lines if x.startswith("at ")]
        shutil.rmtree(folder)
        if done:
            codes.update(done[0][0])
            peak = max(peak, done[0][1])
            break
        findings.append((tried[-1] if tried else last, status))
        codes["crash"] += 1
        codes["0"] += len(tried) - 1
        last = tried[-1] + 1 if tried else end
        seconds -= time.process_time() - start + len(tried) * 0.05
    return {
        "inputs": sum(codes.values()),
        "refused": codes["2"],
        "peak_mb": peak // 1024,
        "findings": findings,
    }


def watched(pid: int, out: Path) -> str:
    """Wait for a worker; one that says nothing for too long is killed. How it ended."""
    size, since = -1, time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if (now := out.stat().st_size) != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > PATIENCE:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"nothing for {PATIENCE} seconds"
        time.sleep(0.02)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All targets asked for, in the order of the table."""
    report = {}
    with tempfile.TemporaryDirectory() as name, standins():
        base = Path(name)
        (base / "world").mkdir()
        fork_compilers()
        chat.subprocess = SimpleNamespace(  # type: ignore[assignment,attr-defined]
            run=forked_render, TimeoutExpired=subprocess.TimeoutExpired
        )
        with contextlib.redirect_stdout(io.StringIO()):
            make_world(base / "world")
        for target in arguments.targets or TARGETS:
            report[target] = fuzz(target, base, arguments.seed, arguments.inputs, arguments.seconds)
            print(f"{target:<24} {json.dumps(report[target])[:2000]}", file=sys.stderr, flush=True)
    return report


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line of the fuzzer."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=float, default=60, help="per target (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the first input (0)")
    parser.add_argument("--inputs", type=int, default=10**9, help="at most, per target")
    arguments = parser.parse_args(words)
    unknown = sorted(set(arguments.targets) - TARGETS.keys())
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}")
    return arguments


if __name__ == "__main__":
    report = run(parse())
    print(json.dumps(report))
    sys.exit(any(target["findings"] for target in report.values()))
