"""The command line: exit codes, one JSON object, and sentences instead of tracebacks."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eagle_chain.engines import cli
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.extras import install
from eagle_chain.engines.gpu import NoDevice
from eagle_chain.engines.outcome import Outcome
from eagle_chain.runtime import Tokenizer, load
from eagle_chain.runtime.answer import answer, printable
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.demo import PAIR
from eagle_chain.runtime.drafters import EagleDrafter
from eagle_chain.runtime.stats import Result
from tests.toy_pair import exported, write_pair

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "eagle_chain.engines"]
Install = Callable[[Callable[[], Outcome]], None]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a command `try` whose run is the given function."""

    def install(run: Callable[[], Outcome]) -> None:
        module = types.ModuleType("eagle_chain_try")
        module.add_arguments = lambda parser: parser.add_argument("--n", type=int)  # type: ignore[attr-defined]
        module.run = lambda arguments: run()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "eagle_chain_try", module)
        monkeypatch.setitem(cli.COMMANDS, "try", ("eagle_chain_try", "try it"))

    return install


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    pair = write_pair(folder, layers=4, aux=[0, 1, 2], tokenizer=True)
    return exported(pair, folder / "bundle", "--capacity", "64", "--aux-layers", "0,1,2")


def raises(error: BaseException) -> Callable[[], Outcome]:
    def run() -> Outcome:
        print("some text")
        raise error

    return run


def done(passed: bool) -> Callable[[], Outcome]:
    def run() -> Outcome:
        print("some text")
        return Outcome({"answer": 42}, passed)

    return run


OUTCOMES: dict[str, tuple[Callable[[], Outcome], int, dict[str, Any]]] = {
    "done": (done(True), 0, {"answer": 42}),
    "a check failed": (done(False), 1, {"answer": 42}),
    "bad input": (raises(InputError("no such thing")), 2, {"error": "no such thing"}),
    "interrupted": (raises(KeyboardInterrupt()), 130, {"error": "interrupted"}),
    "a place that may not be entered": (
        raises(PermissionError(13, "Permission denied", "bundle/manifest.json")),
        2,
        {"error": "bundle/manifest.json: Permission denied"},
    ),
    "missing library": (
        raises(ModuleNotFoundError("no", name="onnxruntime.capi")),
        2,
        {"error": f"this needs the Python package onnxruntime: {install('cpu')}"},
    ),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_exit_codes_and_text(
    command: Install, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run, code, report = OUTCOMES[name]
    command(run)
    assert cli.main(["try"]) == code
    output = capsys.readouterr()
    assert output.out == "some text\n"
    assert output.err == (f"eagle-chain: {report['error']}\n" if "error" in report else "")


@pytest.mark.parametrize("name", OUTCOMES)
def test_json_is_one_object_and_the_rest_goes_to_stderr(
    command: Install, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run, code, report = OUTCOMES[name]
    command(run)
    assert cli.main(["try", "--json"]) == code
    output = capsys.readouterr()
    assert json.loads(output.out) == report
    assert output.out.count("\n") == 1
    assert output.err.startswith("some text\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["--frobnicate"], "required: command"),
        (["try", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["try", "--n", "x"], "argument --n: invalid int value: 'x'"),
        (["try", "--js"], "unrecognized arguments: --js"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_bad_usage_is_one_sentence(
    command: Install,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str,
    as_json: bool,
) -> None:
    command(done(True))
    assert cli.main([*words, "--json"] if as_json else words) == 2
    output = capsys.readouterr()
    assert expected in output.err
    assert output.err.count("\n") == 1
    if as_json:
        assert expected in json.loads(output.out)["error"]


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_bug_is_not_hidden(
    command: Install, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    command(raises(ZeroDivisionError("division by zero")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["try", "--json"] if as_json else ["try"])
    if as_json:
        output = capsys.readouterr().out
        assert json.loads(output) == {"error": "ZeroDivisionError: division by zero"}


def test_a_missing_module_of_ours_is_a_bug(command: Install) -> None:
    command(raises(ModuleNotFoundError("no", name="eagle_chain.export.nothing")))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["try"])


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "eagle-chain 0.1.0\n"
    assert cli.main(["--version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": "0.1.0"}
    assert cli.main([]) == 0
    bare = capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    output = capsys.readouterr().out
    assert output == bare
    for name in ("export", "generate", "demo", "inspect"):
        assert f"\n  {name} " in output


@pytest.mark.parametrize("module", ["eagle_chain.engines.cli", "json", "eagle_chain.engines.kv"])
def test_an_interrupt_while_modules_load_is_a_word(module: str) -> None:
    """Ctrl-C hits while a module is being imported, the command line's own ones included."""
    code = f"""
import sys
class Impatient:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Impatient())
from eagle_chain.engines.entry import main
sys.exit(main())
"""
    child = subprocess.run(
        [sys.executable, "-c", code, "inspect", ".", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (child.returncode, child.stderr) == (130, "eagle-chain: interrupted\n")
    assert json.loads(child.stdout) == {"error": "interrupted"}


def test_an_interrupt_of_text_that_is_executed_is_an_exit_code_too(tmp_path: Path) -> None:
    """As dataclasses do at import; `python -m` would end by the signal although it was caught."""
    code = """
import sys
from eagle_chain.engines import cli, entry
def interrupted(words):
    exec("raise KeyboardInterrupt")
cli.dispatch = interrupted
sys.exit(entry.main())
"""
    (tmp_path / "impatient.py").write_text(code)
    words = [sys.executable, "-m", "impatient", "--json"]
    child = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (child.returncode, child.stderr) == (130, "eagle-chain: interrupted\n")
    assert json.loads(child.stdout) == {"error": "interrupted"}


TRUNK, DRAFT = str(PAIR / "trunk"), str(PAIR / "draft")
ENDLESS = {  # commands that write as they go, with room for minutes of it
    "generate": ["generate", "BUNDLE", "--ids", "1,2,3", "--max-new-tokens", "4000"],
    "runtime": ["BUNDLE", "--ids", "1,2,3", "--max-new-tokens", "4000"],
    "demo": ["demo", "--max-new-tokens", "3000"],
}


@pytest.mark.parametrize("name", ENDLESS)
def test_sigterm_ends_a_command_as_ctrl_c_does(name: str, tmp_path: Path) -> None:
    """What docker stop and systemd send: nothing is left in TMPDIR, and a word is said."""
    module = f"eagle_chain.{name}" if name == "runtime" else "eagle_chain.engines"
    words = [word.replace("BUNDLE", str(tmp_path / "bundle")) for word in ENDLESS[name]]
    if name != "demo":
        assert cli.main(["export", TRUNK, DRAFT, "-o", str(tmp_path / "bundle")]) == 0
    (tmp_path / "temporary").mkdir()
    child = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    begun = child.stdout.read(900 if name == "demo" else 40)  # the demo's begins with its export
    assert bool(os.listdir(tmp_path / "temporary")) == (name == "demo"), begun
    child.send_signal(signal.SIGTERM)
    _, error = child.communicate(timeout=30)
    assert child.returncode == 143
    assert error.decode().splitlines()[-1] == "eagle-chain: interrupted"
    assert b"Traceback" not in error
    assert os.listdir(tmp_path / "temporary") == []


def test_an_ignored_sigterm_stays_ignored(bundle: Path) -> None:
    code = f"""
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from eagle_chain.engines import cli, entry
run = cli._run
def killed(words):
    signal.raise_signal(signal.SIGTERM)
    return run(words)
cli._run = killed
sys.exit(entry.main(["inspect", {str(bundle)!r}, "--json"]))
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert child.returncode == 0 and json.loads(child.stdout)["bundle"]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"usage: eagle-chain {name} ")
    assert "--json" in output


@pytest.mark.parametrize("words", [["inspect", "BUNDLE"], ["--help"]], ids=["inspect", "help"])
def test_a_closed_pipe_is_quiet(bundle: Path, words: list[str]) -> None:
    """The reader, like `head`, has gone before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [str(bundle) if word == "BUNDLE" else word for word in words]
    child = subprocess.run([*COMMAND, *words], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert child.returncode in ((0, 141) if "--help" in words else (141,))  # argparse may shrug
    assert child.stderr == b""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_no_crash(bundle: Path, closed: str) -> None:
    words = [*COMMAND, "generate", str(bundle), "--max-new-tokens", "2"]
    given = [] if closed == "<&-" else ["--prompt", "a"]
    child = subprocess.run(
        ["bash", "-c", f'"$@" {closed}', "bash", *words, *given], capture_output=True, timeout=60
    )
    assert b"Traceback" not in child.stderr
    if closed == "<&-":
        assert child.returncode == 2 and b"the prompt is empty" in child.stderr
    else:
        assert child.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_an_output_that_is_full_is_one_sentence(bundle: Path, options: list[str]) -> None:
    with open("/dev/full", "w") as full:
        child = subprocess.run(
            [*COMMAND, "inspect", str(bundle), *options],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert child.returncode == 2 and b"Traceback" not in child.stderr
    assert child.stderr.endswith(
        b"eagle-chain: the output cannot be written (No space left on device)\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["inspect", "BUNDLE"], ["inspect", "none"]], ids=" ".join)
def test_errors_that_cannot_be_written_are_no_failed_check(bundle: Path, words: list[str]) -> None:
    words = [word.replace("BUNDLE", str(bundle)) for word in words]
    with open("/dev/full", "w") as full:
        run = partial(subprocess.run, [*COMMAND, *words, "--json"], stderr=full, timeout=60)
        assert run(stdout=full).returncode == 2
        child = run(stdout=subprocess.PIPE)
    assert child.returncode == 2
    assert "none" not in words or "no such folder" in json.loads(child.stdout)["error"]


@pytest.mark.parametrize("module", ["eagle_chain.export", "eagle_chain.runtime"])
def test_packages_run_as_modules(module: str, tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert child.returncode == 0
    assert "usage: eagle-chain" in child.stdout


@pytest.mark.parametrize(
    ("library", "words", "extra"),
    [("onnx", ["export", "A", "B", "-o", "C"], "export"), ("onnx_ir", None, "export")],
    ids=["onnx", "onnx_ir"],
)
def test_a_missing_library_names_the_pip_command(
    bundle: Path, library: str, words: list[str] | None, extra: str
) -> None:
    pair = [str(bundle.parent / "trunk"), str(bundle.parent / "draft")]
    words = words or ["export", *pair, "-o", str(bundle.parent / "other")]
    code = f"import sys; sys.modules[{library!r}] = None\nfrom eagle_chain.engines import cli\n"
    child = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(cli.main(sys.argv[1:]))", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == 2
    assert child.stderr.endswith(f"this needs the Python package {library}: {install(extra)}\n")


def test_what_to_install_depends_on_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/somewhere")
    assert "pip install '.[export]' in the clone" in install("export")
    assert "pip install . in its clone" in install("")
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    assert install("export") == install("") == f"rm -rf {ROOT}/.venv, then run the script again"
    assert "pip install '.[plot]'" in install("plot")  # no script puts that there


# inspect --------------------------------------------------------------------------------------


def test_inspect_a_bundle(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(bundle), "--json", "--check"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["engines"]) == {
        *("trunk", "encoder", "draft", "draft_step", "mtp", "mtp_step"),
        *("prefill", "draft_prefill", "mtp_prefill"),
    }
    assert report["capacity"] == 64
    assert report["changed"] == []
    key = next(state for state in report["states"] if state["name"] == "layers.3.key")
    assert key["shape"][2] == 64 + 5
    assert key["bytes"] == 4 * key["shape"][1] * (64 + 5) * key["shape"][3]
    recurrent = next(state for state in report["states"] if state["name"] == "layers.0.S")
    assert recurrent["buffers"] == 2
    memory = report["memory"]
    one_drafter = [state for state in report["states"] if not state["name"].startswith("mtp.")]
    assert memory["states"] == sum(state["bytes"] for state in one_drafter)
    assert memory["total"] == memory["weights"] + memory["states"]


def test_inspect_for_people(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(bundle)]) == 0
    short = capsys.readouterr().out
    for phrase in ("features outputs of layers 0, 1, 2", "profile portable", "\nmemory "):
        assert phrase in short
    assert "layers.*.S" not in short
    assert cli.main(["inspect", str(bundle), "--tensors"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(short) and "\ntrunk.onnx\n" in output and "layers.*.S" in output


def test_inspect_check_finds_a_changed_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trunk, draft = write_pair(tmp_path, layers=4, aux=[0, 1, 2])
    words = ["export", str(trunk), str(draft), "-o", str(tmp_path / "bundle")]
    assert cli.main([*words, "--capacity", "64", "--aux-layers", "0,1,2"]) == 0
    weights = bytearray((trunk / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (trunk / "model.safetensors").write_bytes(weights)
    capsys.readouterr()
    assert cli.main(["inspect", str(tmp_path / "bundle"), "--check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["changed"] == ["weights/trunk/model.safetensors"]


def test_inspect_checkpoints(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trunk, draft = str(bundle.parent / "trunk"), str(bundle.parent / "draft")
    assert cli.main(["inspect", trunk, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["ignored"]) == ("trunk", {"visual": 2})
    assert report["mtp"] is True  # what export would do
    assert cli.main(["inspect", trunk]) == 0
    words = capsys.readouterr().out
    assert re.search(r"^mtp      15 tensors, .* which export takes along", words, re.MULTILINE)
    assert "ignored  2 visual tensors" in words
    assert cli.main(["inspect", draft]) == 2
    assert "--trunk" in capsys.readouterr().err
    for option in ("--check", "--tensors"):
        assert cli.main(["inspect", trunk, option]) == 2
        assert f"is a checkpoint; {option} needs a bundle" in capsys.readouterr().err
    assert cli.main(["inspect", str(bundle), "--trunk", trunk]) == 2
    neither = "is neither a bundle (manifest.json) nor a checkpoint (config.json)"
    for place in (bundle.parent, bundle / "manifest.json"):
        assert cli.main(["inspect", str(place)]) == 2
        assert neither in capsys.readouterr().err


# generate -------------------------------------------------------------------------------------

FIELDS = {
    "text",
    "prompt_tokens",
    "tokens",
    "rounds",
    "acceptance_length",
    "acceptance_by_position",
    "exact",
    "tokens_per_second",
}


def generate(bundle: Path, *words: str) -> int:
    return cli.main(["generate", str(bundle), "--max-new-tokens", "12", "--threads", "1", *words])


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Let standard input be a pipe with this content."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_generate_reports(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(bundle, "--prompt", "hello", "--check", "--json") == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert set(report) >= FIELDS
    assert report["exact"] is True
    assert len(report["ids"]) == report["tokens"] <= 12
    assert report["acceptance_length"] == (report["tokens"] - 1) / report["rounds"]
    assert f"{report['tokens']} tokens (end of text), exact" in output.err
    assert f"[prompt of {report['prompt_tokens']} tokens in 0." in output.err
    summary = output.err[output.err.index("[prompt") : output.err.index("]\n")]
    assert max(map(len, summary.splitlines())) < 80


@pytest.mark.parametrize(
    "words",
    [(), ("-k", "1"), ("--drafter", "none"), ("--draft-kv", "scratch"), ("--rollback", "replay")],
    ids=lambda words: "_".join(words).strip("-") or "default",
)
def test_generate_gives_the_same_text_whatever_drafts_it(
    bundle: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert generate(bundle, "--prompt", "hello", "-k", "0") == 0
    plain = capsys.readouterr().out
    assert generate(bundle, "--prompt", "hello", "--check", *words) == 0
    assert capsys.readouterr().out == plain


def test_generate_takes_its_prompt_from_anywhere(
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "prompt.txt").write_text("hällo\n")
    feed(monkeypatch, "hällo\n".encode())
    counts, texts = [], []
    for words in (
        ["--prompt", "hällo"],
        ["--prompt-file", str(tmp_path / "prompt.txt")],
        [],
        ["--prompt", "hällo\n"],
    ):
        assert generate(bundle, *words, "--json") == 0
        report = json.loads(capsys.readouterr().out)
        counts.append(report["prompt_tokens"])
        texts.append(report["ids"])
    assert texts[0] == texts[1] == texts[2]
    assert counts == [counts[0]] * 3 + [counts[0] + 1]  # an argument is taken as it is


def test_generate_chat_uses_the_template(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for words in ([], ["--chat"]):
        assert generate(bundle, "--prompt", "hello", "--json", *words) == 0
        counts.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert counts[1] > counts[0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "\udcff"], "--prompt is not UTF-8"),
        (["--prompt", "a", "--prompt-file", "b"], "not allowed with argument"),
        (["--prompt-file", "/nonexistent"], "/nonexistent: cannot be read"),
        (["--prompt-file", "LATIN1"], "is not UTF-8 text (byte 1)"),
        (["--prompt", "a", "-k", "5"], "k is 5, expected 0 to 4"),
        (["--prompt", "a", "-k", "-1"], "k is -1"),
        (["--prompt", "a", "--max-new-tokens", "-1"], "max_new_tokens is -1"),
        (["--prompt", "a", "--threads", "0"], "threads is 0"),
        (["--prompt", "a" * 100], "capacity"),
        (["--prompt", "a", "--drafter", "magic"], "invalid choice"),
        (["--ids", "1,b"], "argument --ids: got '1,b', wanted token ids like 1,2,3"),
        (["--ids", "1", "--chat"], "--chat is for text"),
    ],
    ids=lambda value: "_".join(value)[:30] if isinstance(value, list) else "",
)
def test_generate_refuses(
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str,
) -> None:
    (tmp_path / "latin1").write_bytes(b"h\xe4llo")
    words = [str(tmp_path / "latin1") if word == "LATIN1" else word for word in words]
    assert generate(bundle, *words) == 2
    output = capsys.readouterr()
    assert expected in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_a_checkpoint_is_no_bundle(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(bundle.parent / "trunk", "--prompt", "a") == 2
    assert "is a checkpoint, so it is not a bundle" in capsys.readouterr().err


def test_a_bundle_that_lost_its_tokenizer_names_the_place(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(bundle, tmp_path / "bundle")
    shutil.rmtree(tmp_path / "bundle" / "tokenizer")
    assert generate(tmp_path / "bundle", "--prompt", "a") == 2
    message = capsys.readouterr().err
    assert f"{tmp_path}/bundle/tokenizer/tokenizer.json: no such" in message
    assert "generate --ids" in message


def test_ids_need_no_tokenizer(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = Tokenizer(bundle).encode("hello")
    assert generate(bundle, "--prompt", "hello", "--json") == 0
    ids = json.loads(capsys.readouterr().out)["ids"]
    shutil.copytree(bundle, tmp_path / "bundle")
    shutil.rmtree(tmp_path / "bundle" / "tokenizer")
    for words in (",".join(map(str, prompt)), json.dumps(prompt)):
        assert generate(bundle, "--ids", words) == 0
        assert capsys.readouterr().out == ",".join(map(str, ids)) + "\n"
    assert generate(tmp_path / "bundle", "--ids", words, "--json") == 0
    report = json.loads(capsys.readouterr().out)  # no end of text without a tokenizer
    assert (report["text"], report["ids"][: len(ids)]) == (None, ids)


def test_an_export_without_a_tokenizer_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trunk, draft = write_pair(tmp_path, layers=4, aux=[0, 1, 2])
    capsys.readouterr()
    exported((trunk, draft), tmp_path / "bundle", "--capacity", "64", "--aux-layers", "0,1,2")
    message = capsys.readouterr().err
    assert f"notice   {trunk}: has no tokenizer.json" in message and "--ids" in message


def test_a_folder_that_may_not_be_written_is_named_not_the_lock_in_it(
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = os.open

    def closed(path: Path, *flags: int, **more: Any) -> int:
        if str(path).endswith(".lock"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *flags, **more)

    monkeypatch.setattr(os, "open", closed)
    pair = [str(bundle.parent / name) for name in ("trunk", "draft")]
    words = ["export", *pair, "-o", str(tmp_path / "b"), "--aux-layers", "0,1,2"]
    assert cli.main([*words, "--capacity", "64"]) == 2
    assert f"{tmp_path}: Permission denied; nothing was" in capsys.readouterr().err


def test_a_folder_that_never_was_a_bundle_is_not_to_be_exported_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(tmp_path, "--prompt", "a") == 2
    message = capsys.readouterr().err
    assert "make one: eagle-chain export TRUNK DRAFT -o BUNDLE" in message
    (tmp_path / "weights").mkdir()
    assert generate(tmp_path, "--prompt", "a") == 2
    assert "export it again: eagle-chain export" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("profile", "way_out"),
    [
        ("ort-fused", "export it again with --profile portable --dtype fp32\n"),
        ("portable", "-cpu runs"),
    ],
)
def test_without_a_gpu_the_way_out_is_named(
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    profile: str,
    way_out: str,
) -> None:
    def no_device(index: int = 0) -> None:
        raise NoDevice("no CUDA device: none")

    monkeypatch.setattr("eagle_chain.runtime.cuda.device_info", no_device)
    if profile != "portable":
        pair = [bundle.parent / name for name in ("trunk", "draft")]
        flags = ("--profile", profile, "--dtype", "bf16", "--aux-layers", "0,1,2")
        bundle = exported(pair, tmp_path / "bundle", *flags, "--capacity", "64")
    words = [] if profile != "portable" else ["--backend", "onnxruntime-cuda"]
    assert generate(bundle, "--prompt", "a", *words) == 2
    message = capsys.readouterr().err
    assert "no CUDA device: none; " in message and way_out in message


@pytest.mark.parametrize("alone", [False, True])
def test_a_draft_in_the_trunk_s_place_is_told_apart(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], alone: bool
) -> None:
    trunk, draft = (str(bundle.parent / name) for name in ("trunk", "draft"))
    folders = [draft] if alone else [draft, trunk]
    assert cli.main(["export", *folders, "-o", str(tmp_path / "bundle")]) == 2
    order = "TRUNK DRAFT" if alone else f"{trunk} {draft}"
    assert f"the trunk comes first: {order}\n" in capsys.readouterr().err


def test_a_long_prompt_shows_its_progress(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate(bundle, "--prompt", "hello " * 5) == 0
    assert "prompt, " not in capsys.readouterr().err
    clock = itertools.count()  # every look at it is a second later
    monkeypatch.setattr("eagle_chain.engines.progress.time.monotonic", lambda: next(clock))
    assert generate(bundle, "--prompt", "hello " * 5) == 0
    assert re.match(r"prompt, \d+ of \d+, 1 s\n", capsys.readouterr().err)


def test_generate_warns_when_no_draft_is_ever_accepted(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: EagleDrafter, token: int, k: int) -> list[int]:
        self.observe(token)
        return [-1] * k

    monkeypatch.setattr(EagleDrafter, "propose", never)
    assert generate(bundle, "--prompt", "hello", "--check") == 0
    assert "(exactly 1 token a pass)" in capsys.readouterr().err


def test_generate_fails_on_a_token_that_differs(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: Chain, *arguments: Any, **options: Any) -> Result:
        plain = original(self, *arguments, **options)
        return Result([*plain.tokens[:3], 0, *plain.tokens[4:]], "length", plain.stats)

    original = Chain.generate
    monkeypatch.setattr(Chain, "generate", wrong)
    assert generate(bundle, "--prompt", "hello", "--check", "--json") == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["exact"] is False
    assert "differs from token 3 on" in output.err


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2J\tb\n\x9bc\x7f") == "a\ufffd[2J\tb\n\ufffdc\ufffd"


# demo -----------------------------------------------------------------------------------------


def test_demo_is_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["demo", "--bundle", str(tmp_path / "bundle"), "--max-new-tokens", "24", "--json"]
    assert cli.main(words) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["exact"] is True
    assert [run["register"] for run in report["runs"]] == ["code", "documentation", "book"]
    for run in report["runs"]:
        assert set(run) >= FIELDS
        assert run["exact"] is True
    assert report["acceptance_length"] > 1.5
    assert "--- code ---" in output.err
    assert (tmp_path / "bundle/manifest.json").is_file()


def test_demo_marks_accepted_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the marks the text is the same, and the marks enclose accepted drafts."""
    texts = {}
    for marks in ("none", "brackets", "colour"):
        assert cli.main(["demo", "--max-new-tokens", "16", "--marks", marks]) == 0
        output = capsys.readouterr().out
        assert max(len(line) for line in output.splitlines() if line.startswith("--- ")) < 80
        texts[marks] = output[output.index("--- code ---") : output.index("--- 16 tokens")]
    colours = re.findall(r"\x1b\[[0-9;]*m", texts["colour"])
    assert colours[:2] == ["\x1b[2m", "\x1b[0m"]  # the prompt
    assert colours[2:] == ["\x1b[1;32m", "\x1b[0m"] * (len(colours) // 2 - 1) != []
    assert re.sub(r"\x1b\[[0-9;]*m", "", texts["colour"]) == texts["none"]
    undimmed = re.sub(r"\x1b\[2m(.*?)\x1b\[0m", r"\1", texts["colour"], flags=re.DOTALL)
    brackets = undimmed.replace("\x1b[1;32m", "[").replace("\x1b[0m", "]")
    assert brackets == texts["brackets"]


def test_exactly_the_accepted_drafts_are_marked(tmp_path: Path) -> None:
    words = ["export", str(PAIR / "trunk"), str(PAIR / "draft"), "-o", str(tmp_path / "bundle")]
    assert cli.main([*words, "--capacity", "128"]) == 0
    tokenizer = Tokenizer(tmp_path / "bundle")
    marks: list[bool] = []
    given = answer(
        load(tmp_path / "bundle"),
        tokenizer,
        tokenizer.encode("<|py|>def add(a, b):\n"),
        max_new_tokens=32,
        k=None,
        check=False,
        show=lambda piece, drafted: marks.append(drafted),
    )
    assert len(marks) == given.result.stats.tokens  # plain ASCII: a piece for each token
    assert sum(marks) == given.result.stats.accepted > 0
    assert marks[0] is False  # the prompt's own choice


def test_demo_without_the_pair_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_chain.runtime.demo.PAIR", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo"]) == 2
    assert "scripts/demo.sh" in capsys.readouterr().err
    assert cli.main(["demo", "nowhere"]) == 2
    assert "nowhere: has no trunk/config.json" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], [str(ROOT / "demo")]], ids=["here", "named"])
def test_an_installed_package_finds_the_pair_of_a_clone(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    monkeypatch.setattr("eagle_chain.runtime.demo.PAIR", tmp_path)
    monkeypatch.chdir(tmp_path if words else ROOT)
    assert cli.main(["demo", *words, "--max-new-tokens", "2"]) == 0
    assert "every token is that of plain greedy decoding" in capsys.readouterr().out


@pytest.mark.parametrize("count", ["0", "-1", "100000"])
def test_demo_names_its_own_option(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--max-new-tokens", count]) == 2
    assert f"--max-new-tokens is {count}, expected 1 to 3840" in capsys.readouterr().err


@pytest.mark.parametrize("k", ["0", "9"])
def test_demo_refuses_other_ks(k: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "-k", k]) == 2
    assert "expected 1 to 8" in capsys.readouterr().err
