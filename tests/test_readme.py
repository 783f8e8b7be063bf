"""The README against the repository: its list of files, its commands, its Python."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from eagle_chain.engines import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["engines", "export", "runtime"])
def test_every_file_has_its_line(package: str) -> None:
    listed = dict(re.findall(rf"^\| `({package}/\w+\.py)` \| (.+?) \|$", README, re.MULTILINE))
    files = [p for p in sorted((ROOT / package).glob("*.py")) if not p.name.startswith("__")]
    assert sorted(listed) == [f"{package}/{p.name}" for p in files]
    for path in files:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = docstring.split("\n\n")[0].replace("\n", " ")
        assert listed[f"{package}/{path.name}"] == first


def test_every_command_in_the_readme_exists() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    words = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    named = {line[1] for line in words if line and line[0] == "eagle-chain"}
    assert named and named <= set(cli.COMMANDS)
    scripts = [line[0] for line in words if line and line[0].startswith("scripts/")]
    assert scripts and all((ROOT / script).is_file() for script in scripts)


def test_the_python_of_the_readme_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the shipped pair, exported where the README's commands put it."""
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    pair = [str(ROOT / "demo" / name) for name in ("trunk", "draft")]
    assert cli.main(["export", *pair, "-o", "bundle", "--capacity", "128"]) == 0
    capsys.readouterr()
    exec(compile(source, "README.md", "exec"), {})
    *whale, but, other = capsys.readouterr().out.rstrip("\n").split("\n")
    assert re.search(r" \d\.\d+$", "\n".join(whale))  # tokens a pass, behind the text
    assert but.startswith(" But") and other.startswith(" And") and len(but) > 9
    assert (tmp_path / "whale.npz").exists()
