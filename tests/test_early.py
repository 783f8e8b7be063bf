"""What can be refused before minutes of work is refused then, and nothing is ignored in silence."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from eagle_chain.engines import cli
from eagle_chain.engines.outcome import Outcome
from eagle_chain.runtime import bench, bench_engines, demo, generate, parity, tune, verify
from eagle_chain.runtime.exactness import Comparison, Plain
from tests.toy_pair import exported, write_pair

Refused = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, a text, kept sequences of 40 tokens in `prefix` and 64, the capacity, in `full`."""
    folder = tmp_path_factory.mktemp("early")
    pair = write_pair(folder, layers=4, aux=[0, 1, 2], tokenizer=True)
    exported(pair, folder / "bundle", "--capacity", "64", "--aux-layers", "0,1,2")
    (folder / "text").write_text(
        "Nothing is worth more than this day, said the old man to her. " * 3
    )
    for name, length in (("prefix", 40), ("full", 64)):
        words = ["--save-prefix", str(folder / name), "--max-new-tokens", "0", "--threads", "1"]
        prompt = ["--prompt", "x" * length]
        assert cli.main(["generate", str(folder / "bundle"), *prompt, *words]) == 0
    return folder


@pytest.fixture
def refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refused:
    """The sentence with which a command refuses before it has loaded an engine or PyTorch."""

    def loaded(*arguments: object, **options: object) -> NoReturn:
        raise AssertionError("the work has begun")

    def run(command: str, *words: str) -> str:
        for module in (bench, generate, parity, tune, verify):
            monkeypatch.setattr(module, "open_engines", loaded, raising=False)
        monkeypatch.setattr(bench, "of_bundle", loaded)
        monkeypatch.setattr(parity, "dispatch", loaded)
        capsys.readouterr()
        assert cli.main([command, str(folder / "bundle"), *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        return error

    return run


GENERATE = {
    "k": (["-k", "9"], "k is 9, expected 0 to 4"),
    "temperature": (["--temperature", "1"], "export it with --sampling"),
    "no temperature": (["--temperature", "nan"], "expected a number from 0 up"),
    "seed": (["--seed", "-1"], "seed is -1"),
    "budget": (["--max-new-tokens", "-1"], "max_new_tokens is -1"),
    "empty": (["--prompt", ""], "the prompt is empty"),
    "long": (["--prompt", "x" * 65], "capacity is 64"),
    "long behind a prefix": (["--prompt", "x" * 30, "--prefix", "prefix"], "behind 40 cached"),
    "full prefix": (["--prompt", "", "--prefix", "full"], "nothing fits behind 64 cached tokens"),
    "prefix": (["--prefix", "text"], "is not a whole prefix file"),
    "no prefix": (["--prefix", "none"], "cannot be read"),
    "another drafter": (["--drafter", "ngram", "--prefix", "prefix"], "take --drafter eagle, or"),
    "drafter": (["--drafter", "eagle", "--backend", "tensorrt", "-k", "7"], "k is 7"),
    "another file": (["--save-prefix", "text"], "only a prefix file is replaced"),
    "a folder": (["--save-prefix", "bundle"], "only a prefix file is replaced"),
    "no folder": (["--save-prefix", "no/prefix"], "is no folder"),
    "a long name": (["--save-prefix", "x" * 250], "cannot be written (File name too long)"),
    "a closed folder": (["--save-prefix", "/proc/prefix"], "cannot be written ("),
}


@pytest.mark.parametrize("case", GENERATE)
def test_generate_refuses_before_it_loads(folder: Path, refused: Refused, case: str) -> None:
    words, sentence = GENERATE[case]
    words = [
        str(folder / word) if before.endswith("prefix") else word
        for before, word in itertools.pairwise(["", *words])
    ]
    text = (folder / "text").read_bytes()
    given = [] if "--prompt" in words else ["--prompt", "abc"]
    assert sentence in refused("generate", *given, *words)
    assert (folder / "text").read_bytes() == text


def test_generate_needs_a_template_and_a_tokenizer_first(
    folder: Path, refused: Refused, tmp_path: Path
) -> None:
    for name in ("tokenizer_config.json", "tokenizer.json"):
        place = folder / "bundle" / "tokenizer" / name
        place.rename(tmp_path / name)
        try:
            error = refused("generate", "--prompt", "abc", "--chat")
        finally:
            (tmp_path / name).rename(place)
        assert ("no chat template" if "config" in name else "no such file") in error


def test_a_kept_prefix_is_told_and_may_be_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "again"
    words = ["generate", str(folder / "bundle"), "--save-prefix", str(path), "--threads", "1"]
    for prompt in ("abcd", "abcdef"):
        capsys.readouterr()
        assert cli.main([*words, "--prompt", prompt, "--max-new-tokens", "2"]) == 0
        assert f"wrote {path}: a prefix of {len(prompt)} tokens" in capsys.readouterr().err
    assert cli.main([*words, "--prompt", "abc", "--max-new-tokens", "2", "--json"]) == 0
    saved = json.loads(capsys.readouterr().out)["saved_prefix"]
    assert saved == {"file": str(path), "tokens": 3, "bytes": path.stat().st_size}


def test_options_without_effect_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def warnings(*words: str) -> list[str]:
        capsys.readouterr()
        given = ["--prompt", "abc", "--max-new-tokens", "2", "--threads", "1", "--json", *words]
        assert cli.main(["generate", str(folder / "bundle"), *given]) == 0
        found: list[str] = json.loads(capsys.readouterr().out)["warnings"]
        return [warning for warning in found if "no effect" in warning]

    assert warnings("-k", "2") == warnings("--drafter", "none", "-k", "0") == []
    told = warnings("--drafter", "none", "-k", "4", "--seed", "3", "--draft-kv", "scratch")
    assert [warning.split(" ")[0] for warning in told] == ["-k", "--draft-kv", "--seed"]


@pytest.mark.parametrize("option", ["width", "capacity", "dtype", "kv", "profile"])
def test_bench_takes_no_sizes_with_a_bundle(refused: Refused, option: str) -> None:
    value = {"dtype": "fp16", "kv": "q8_0", "profile": "portable"}.get(option, "32")
    assert f"--{option} is for --shapes" in refused("bench", f"--{option}", value)


@pytest.mark.parametrize("command", ["bench", "tune"])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [("no/x.png", "there is no folder"), ("bundle", "is a folder"), ("x.csv", "ends in '.csv'")],
)
def test_a_plot_that_cannot_be_is_refused_first(
    folder: Path, refused: Refused, command: str, name: str, sentence: str
) -> None:
    pytest.importorskip("matplotlib")
    text = ["--text", str(folder / "text"), "--prompt-tokens", "8", "--max-new-tokens", "8"]
    words = ["--prompts", "2", *text] if command == "tune" else []
    assert sentence in refused(command, *words, "--plot", str(folder / name))


def test_a_plot_without_matplotlib_is_refused_first(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--plot needs matplotlib" in refused("bench", "--plot", "x.png")


FEW = ["--text", "TEXT", "--prompts", "2", "--prompt-tokens", "8", "--max-new-tokens", "8"]
MISSING: dict[str, tuple[str, tuple[Any, str], list[str]]] = {
    # library that is not there, what would be the work, command line
    "parity": ("torch", (parity, "dispatch"), ["parity", "BUNDLE"]),
    "parity --save": (
        "polygraphy",
        (parity, "dispatch"),
        ["parity", "BUNDLE", "--layers", "3", "--save", "OUT"],
    ),
    "parity --layers": (
        "onnxruntime",
        (parity, "dispatch"),
        ["parity", "BUNDLE", "--layers", "3"],
    ),
    "parity --layers on TensorRT": (
        "tensorrt",
        (parity, "dispatch"),
        ["parity", "BUNDLE", "--layers", "3", "--backend", "tensorrt"],
    ),
    "tune": ("onnxruntime", (tune, "Trial"), ["tune", "BUNDLE", *FEW]),
    "tune, graphs": ("onnx_ir", (tune, "Tokenizer"), ["tune", "BUNDLE", *FEW]),
    "verify": ("onnxruntime", (verify, "Tokenizer"), ["verify", "BUNDLE", *FEW]),
    "verify on TensorRT": (
        "tensorrt",
        (verify, "Tokenizer"),
        ["verify", "BUNDLE", *FEW, "--backend", "tensorrt"],
    ),
    "bench": ("onnxruntime", (bench, "Tokenizer"), ["bench", "BUNDLE", "--text", "TEXT"]),
    "bench --shapes": (
        "onnxruntime",
        (bench_engines, "CudaMemory"),
        ["bench", "--shapes", "qwen3.5-9b"],
    ),
    "demo": ("onnxruntime", (demo, "dispatch"), ["demo"]),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_library_is_told_before_the_work(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library, (module, work), words = MISSING[case]
    places = {"BUNDLE": folder / "bundle", "TEXT": folder / "text", "OUT": folder / "out"}
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(module, work, lambda *_, **__: pytest.fail("the work has begun"))
    capsys.readouterr()
    assert cli.main([str(places.get(word, word)) for word in words]) == 2
    error = capsys.readouterr().err
    trt = "TensorRT is not installed"
    assert (trt if library == "tensorrt" else f"needs the Python package {library}: ") in error
    assert error.count("\n") == 1


def test_few_layers_are_for_a_backend_that_takes_them(refused: Refused) -> None:
    few = ("parity", "--layers", "3", "--backend")
    assert "exported as bf16" in refused(*few, "onnxruntime-cpu", "--dtype", "bf16")
    assert "profile ort-fused" in refused(*few, "onnxruntime-cpu", "--profile", "ort-fused")


def test_parity_refuses_before_the_reference(folder: Path, refused: Refused) -> None:
    assert "--capacity is for the few layers" in refused("parity", "--capacity", "32")
    assert "TensorRT" in refused("parity", "--backend", "tensorrt")
    foreign = str(folder / "bundle")
    assert "is no recording" in refused("parity", "--layers", "2", "--save", foreign)


def test_verify_takes_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompts", "1", "--prompt-tokens", "8", "--max-new-tokens", "6", "--threads", "1"]
    words = ["verify", str(folder / "bundle"), "--text", str(folder / "text"), *sizes, "--json"]
    capsys.readouterr()
    assert cli.main([*words, "-k", "2", "--rollback", "both", "--draft-kv", "both"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    modes = {(r["rollback"], r["draft_kv"]) for r in runs if r["drafter"] == "eagle"}
    assert modes == {(r, kv) for r in ("log", "replay") for kv in ("kept", "scratch")}
    assert cli.main([*words, "--rollback", "all"]) == 2
    assert "expected some of log, replay, both" in capsys.readouterr().err


def test_an_interrupted_verify_tells_how_far_it_came(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add, left = Comparison.add, [3]

    def interrupted(self: Comparison, number: int, plain: Plain) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        add(self, number, plain)

    sizes = ["--prompts", "3", "--prompt-tokens", "8", "--max-new-tokens", "6", "--threads", "1"]
    words = ["verify", str(folder / "bundle"), "--text", str(folder / "text"), *sizes]
    words += ["-k", "1,2", "--drafters", "scripted"]
    monkeypatch.setattr(Comparison, "add", interrupted)
    capsys.readouterr()
    assert cli.main(words) == 130
    output = capsys.readouterr()
    assert "scripted  1  log       -   12 " in output.out
    assert "interrupted in prompt 2 of 3; of the 18 tokens compared so far 0 differ" in output.out
    assert output.err.endswith("eagle-chain: interrupted\n")
    left[0] = 3
    assert cli.main([*words, "--json"]) == 130
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["passed"], found["tokens"]) == ("interrupted", False, 18)
    left[0] = 0
    assert cli.main(words) == 130, "nothing was compared"
    assert "verdict" not in capsys.readouterr().out


def test_the_exit_code_of_an_interrupted_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "dispatch", lambda words: Outcome({}, interrupted=True))
    assert cli.main(["x"]) == 130
