"""The documents against the repository: links, anchors, files they name, commands they print."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from eagle_chain.engines import cli

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("tests/**/*.md")])
FOLDERS = ("demo", "docs", "engines", "export", "runtime", "scripts", "tests", ".ci")
PROGRAMS = {  # what is started otherwise than as `eagle-chain`: where its options are read
    r"python -m (tests(?:\.\w+)+)": ("tests/**/*.py",),
    r"(?:python )?(tests/gpu/\w+\.(?:sh|py))": ("tests/gpu/*.py",),
    r"python (demo/\w+\.py)": ("demo/*.py",),
}
QUICK = ("export", "generate", "inspect")  # seconds
each = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@each
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", _text(document)):
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


@each
def test_files_that_are_named_exist(document: Path) -> None:
    """Paths from the root, in backticks or in a command; `*` stands for anything."""
    named = re.findall(
        rf"(?<![\w/.])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*-]+", _text(document)
    )
    wrong = [name for name in named if not list(ROOT.glob(name.rstrip("./")))]
    assert [name for name in wrong if not name.startswith("tests/FILE")] == []


@each
def test_commands_are_parsed_as_they_stand(document: Path) -> None:
    for line in _commands(document):
        words = shlex.split(re.split(r" [>|] ", line)[0].replace("[-", "-"), comments=True)
        if words and words[0] == "eagle-chain":
            words = [word.rstrip("]") for word in words]
            # an InputError names what it does not take
            arguments = _parser(words[1]).parse_args(words[2:])
            if words[1] == "verify" and document.parent.name == "docs":  # of the user's own
                assert arguments.text.suffix in (".txt", ".jsonl", ".py")


def test_commands_of_the_readme_do_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In their order, but for those that take longer (their own files test them) or a GPU."""
    for name in ("demo", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    lines = [shlex.split(line) for line in _commands(ROOT / "README.md")]
    quick = [words[1:] for words in lines if words[1:2] and words[1] in QUICK]
    assert len(quick) >= 7
    for words in quick:
        if "TRUNK" not in words:
            assert cli.main(words) == 0, f"{words}: {capfd.readouterr().err}"


@each
def test_options_that_are_named_exist(document: Path) -> None:
    """In prose: `--option`, or `command --option`, of the command that is named."""
    spans = re.findall(r"`([^`\n]+)`", _text(document))
    for span in [*spans, *_commands(document)]:
        options = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", span)
        first = re.match(r"(?:eagle-chain )?(\w+)", span)
        if first and first[1] in cli.COMMANDS:
            known = {o for a in _parser(first[1])._actions for o in a.option_strings}
            assert [option for option in options if option not in known] == [], span
        for pattern, sources in PROGRAMS.items():
            if found := re.match(pattern, span):
                assert (ROOT / found[1]).exists() or _module(found[1]).exists(), span
                code = "".join(_text(p) for source in sources for p in ROOT.glob(source))
                assert [option for option in options if f'"{option}"' not in code] == [], span
        if span.startswith("--"):
            everywhere = "".join(map(_text, ROOT.glob("*/*.py")))
            assert f'"{options[0]}"' in everywhere + "".join(
                map(_text, ROOT.glob("tests/gpu/*.py"))
            )


def _commands(document: Path) -> Iterator[str]:
    """The lines of code blocks, fenced or indented; one that ends in a backslash goes on."""
    text = _text(document)
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    blocks += [re.sub(r"^    ", "", m, flags=re.M) for m in re.findall(r"(?m)(?:^    .*\n)+", text)]
    for block in blocks:
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            yield re.split(r"\s# ", line)[0]


@cache
def _parser(command: str) -> argparse.ArgumentParser:
    return cli.parser_for(command)


def _module(name: str) -> Path:
    return ROOT / f"{name.replace('.', '/')}.py"


def _anchors(document: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _text(document), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
