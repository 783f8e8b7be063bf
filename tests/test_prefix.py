"""A sequence kept in a file and taken up again: the same bits, or a sentence that says why not."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_chain.engines import cli
from eagle_chain.engines.errors import InputError
from eagle_chain.runtime import Chain, NoDrafter, generate, open_engines, prefix
from eagle_chain.runtime.load import Engines
from tests.toy import Toy
from tests.toy_pair import exported, write_pair


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy(3, capacity=80, prefill=16, smaller=(30,))


@pytest.mark.parametrize("length", [1, 9, 29, 50])
def test_many_continuations_of_one_prefix(toy: Toy, tmp_path: Path, length: int) -> None:
    """In another chain, as of another process; saved behind a prompt and behind a round."""
    prompt = toy.prompt(length, length)
    for new in (0, 7):
        first = toy.chain()
        made = first.generate(prompt, max_new_tokens=new).tokens
        size = first.save(tmp_path / "prefix")
        assert (tmp_path / "prefix").stat().st_size == size
        held = [*prompt, *made[:-1]]
        chain = toy.chain()
        for seed in (0, 1, 0):
            chain.restore(tmp_path / "prefix")
            assert chain.cache.tokens == held and chain.cache.pending == first.cache.pending
            more = toy.prompt(seed, 5)
            whole = [*held, *more]
            want, _ = toy.decode(whole, 15)
            result = chain.generate(more, max_new_tokens=15, append=True)
            assert result.tokens == want[len(whole) :]
            theirs = toy.chain()
            theirs.extend(held)
            assert (
                result.stats.accepted
                == theirs.generate(more, max_new_tokens=15, append=True).stats.accepted
            )  # the draft's rows were kept as well


@pytest.mark.parametrize("smaller", [(), (12,), (22, 44), (60,)], ids=str)
@pytest.mark.parametrize("length", [9, 29, 50])
def test_a_sequence_is_taken_up_at_the_capacities_that_there_are(
    toy: Toy, tmp_path: Path, smaller: tuple[int, ...], length: int
) -> None:
    """Whatever its own capacities were, 30 and 80: smaller first ones, larger ones, none."""
    prompt, more = toy.prompt(length, length), toy.prompt(1, 4)
    first = toy.chain()
    held = [*prompt, *first.generate(prompt, max_new_tokens=7).tokens[:-1]]
    first.save(tmp_path / "prefix")
    other = Toy(3, capacity=80, prefill=16, smaller=smaller)
    want, _ = other.decode([*held, *more], 15)
    theirs = other.chain()
    theirs.extend(held)
    accepted = theirs.generate(more, max_new_tokens=15, append=True).stats.accepted
    chain = other.chain()
    for k in (4, "auto", 0):
        chain.restore(tmp_path / "prefix")
        at = len(held)
        assert chain.cache.capacity == next(c for c in (*smaller, 80) if at + 5 <= c or c == 80)
        result = chain.generate(more, max_new_tokens=15, append=True, k=k)  # type: ignore[arg-type]
        assert result.tokens == want[at + 4 :]
        assert k != 4 or result.stats.accepted == accepted


def test_a_file_replaces_another_only_when_it_is_whole(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, path = toy.chain(), tmp_path / "prefix"
    chain.extend(toy.prompt(0, 5))
    chain.save(path)
    before = path.read_bytes()
    chain.extend(toy.prompt(1, 5))

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(InputError, match="No space left"):
        chain.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(InputError, match="cannot be written"):
        chain.save(tmp_path / "no" / "folder")


def test_only_a_prefix_is_replaced(toy: Toy, tmp_path: Path) -> None:
    chain = toy.chain()
    chain.extend(toy.prompt(0, 5))
    text, link = tmp_path / "text", tmp_path / "link"
    text.write_text("not a prefix")
    link.symlink_to(tmp_path / "nowhere")
    np.savez(tmp_path / "other.npz", about=np.array('{"format": 7}'))
    for path in (text, link, tmp_path / "other.npz", tmp_path):
        before = text.read_bytes()
        with pytest.raises(InputError, match=f"{path}: is there and is no prefix file"):
            chain.save(path)
        assert text.read_bytes() == before and link.is_symlink()
    chain.save(tmp_path / "prefix")
    assert chain.save(tmp_path / "prefix") == (tmp_path / "prefix").stat().st_size


def refused(chain: Chain, path: Path) -> str:
    """Why a file is refused; the chain stands where it stood."""
    held = list(chain.cache.tokens)
    with pytest.raises(InputError) as raised:
        chain.restore(path)
    assert chain.cache.tokens == held
    return str(raised.value)


def test_what_is_not_this_chain_s_is_refused(toy: Toy, tmp_path: Path) -> None:
    path, chain = tmp_path / "prefix", toy.chain()
    chain.extend(toy.prompt(0, 6))
    chain.save(path)
    assert "another bundle" in refused(Toy(5, capacity=80).chain(), path)
    plain = Toy(3, capacity=80, prefill=16, smaller=(30,))
    words = refused(plain.chain(lambda cache: NoDrafter()), path)
    assert "was saved with the drafter eagle" in words and "chain has none or ngram" in words
    long = Toy(3, capacity=80).chain()
    long.extend(toy.prompt(0, 60))
    long.save(path)
    short = Toy(3, capacity=40).chain()
    assert "capacity is 40" in refused(short, path)
    assert "cannot be read" in refused(chain, tmp_path / "absent")
    assert "cannot be read" in refused(chain, tmp_path)
    os.mkfifo(tmp_path / "pipe")  # opening one waits, and this may never end
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert "not a plain file" in refused(chain, path)
        with pytest.raises(InputError, match="not a plain file"):
            prefix.Prefix(path, 100)


def test_damage_is_refused_or_harmless(toy: Toy, tmp_path: Path) -> None:
    """Cut anywhere, any byte flipped, counters that lie, arrays of another size or with code."""
    path, chain = tmp_path / "prefix", toy.chain()
    chain.extend(toy.prompt(0, 6))
    chain.save(path)
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    for at in random.integers(0, len(whole), 40):
        path.write_bytes(whole[:at])
        refused(chain, path)
    for at in random.integers(0, len(whole), 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            chain.restore(path)
        except InputError:
            continue
    path.write_bytes(whole)
    with np.load(path) as held:
        arrays = dict(held)
    about = json.loads(str(arrays["about"]))
    for change in (
        {"position": 99},
        {"tokens": [1, 2, -3]},
        {"tokens": [10**6] * 6},
        {"pending": None},
        {"call": ["x"]},
        {"format": 2},
        {"engines": None},
    ):
        np.savez(path.open("wb"), **{**arrays, "about": np.array(json.dumps(about | change))})
        refused(chain, path)
    for change in (
        {"layers.0.S": arrays["layers.0.S"][:1]},
        {"layers.0.S": arrays["layers.0.S"].astype(np.float64)},
        {"layers.1.key": np.array([print], object)},
        {"more": np.zeros(3)},
        {"features": np.zeros((10**6,), np.float32)},
    ):
        np.savez(path.open("wb"), **{**arrays, **change})
        refused(chain, path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("about.npy", bytes(10**8))
    assert "expected" in refused(chain, path)


def test_what_was_checked_is_what_is_taken_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of the file is read once; the file at its path may change while engines load."""
    folders = write_pair(tmp_path / "pair", layers=4, aux=[0, 1, 2], tokenizer=True)
    bundle, file = tmp_path / "bundle", tmp_path / "prefix"
    exported(folders, bundle, "--aux-layers", "0,1,2", "--capacity", "64")
    words = ["generate", str(bundle), "--threads", "1", "--json"]
    keep = ["--prompt", "Call me", "--save-prefix", str(file), "--max-new-tokens", "0"]
    assert cli.main([*words, *keep]) == 0
    whole, head, heads = file.read_bytes(), prefix._about, list[object]()
    monkeypatch.setattr(prefix, "_about", lambda *given: heads.append(given) or head(*given))
    go_on = [*words, "--prompt", " Ishmael", "--prefix", str(file), "--max-new-tokens", "5"]

    def generated(meanwhile: Callable[[], object], code: int = 0) -> dict[str, object]:
        def opened(*given: Any, **options: Any) -> Engines:
            meanwhile()
            return open_engines(*given, **options)

        heads.clear()
        capsys.readouterr()
        monkeypatch.setattr(generate, "open_engines", opened)
        assert cli.main(go_on) == code and len(heads) == 1
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    def replaced() -> None:
        (tmp_path / "other").write_bytes(b"another file")
        (tmp_path / "other").replace(file)

    def damaged() -> None:
        at = zipfile.ZipFile(file).getinfo("layers.2.S.npy").header_offset + 999
        with file.open("r+b") as stream:
            stream.seek(at)
            stream.write(bytes(16 * [0x41]))

    ids = generated(lambda: None)["ids"]
    assert generated(replaced)["ids"] == ids
    file.write_bytes(whole)
    assert "is not a whole prefix file" in str(generated(damaged, 2)["error"])


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = write_pair(tmp_path / "pair", layers=4, aux=[0, 1, 2], tokenizer=True)
    bundle, file = str(tmp_path / "bundle"), str(tmp_path / "system")
    words = [*map(str, folders), "-o", bundle, "--aux-layers", "0,1,2", "--capacity", "256"]
    assert cli.main(["export", *words]) == 0

    def generate(*words: str, code: int = 0) -> dict[str, object]:
        capsys.readouterr()
        assert cli.main(["generate", bundle, "--threads", "1", "--json", *words]) == code
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    text = "You are a careful assistant. " * 4
    kept = generate("--prompt", text, "--save-prefix", file, "--max-new-tokens", "0")
    assert kept["tokens"] == 0 and kept["text"] == ""
    for question in ("Why?", "Who?"):
        got = generate("--prompt", question, "--prefix", file, "--max-new-tokens", "20", "--check")
        want = generate("--prompt", text + question, "--max-new-tokens", "20")
        assert got["exact"] is True and got["text"] == want["text"]
        assert got["prompt_tokens"] == len(question)
    whole = generate("--prompt", text, "--max-new-tokens", "20")
    going_on = ("--prefix", file, "--prompt", "", "--max-new-tokens")
    got = generate(*going_on, "20", "--check")  # with the token that the prompt left pending
    assert got["exact"] is True and (got["ids"], got["tokens"]) == (whole["ids"], whole["tokens"])
    assert generate(*going_on, "1")["text"] == str(whole["text"])[:1]
    assert "nothing to do" in str(generate(*going_on, "0", code=2)["error"])
    longer = ("--prefix", file, "--save-prefix", file, "--max-new-tokens", "20", "--check")
    assert generate("--prompt", " Who", *longer)["exact"] is True, "the file is longer now"
    got = generate("--prompt", "?", "--prefix", file, "--max-new-tokens", "20")
    assert got["text"] == generate("--prompt", f"{text} Who?", "--max-new-tokens", "20")["text"]
    words[words.index(bundle)], bundle = str(tmp_path / "grown"), str(tmp_path / "grown")
    assert cli.main(["export", *words[:-1], "64,256"]) == 0
    refusal = generate("--prompt", "Why?", "--prefix", file, code=2)
    assert "another bundle (one of other capacities is another)" in str(refusal["error"])
    refusal = generate("--prompt", "x", "--chat", "--prefix", file, code=2)
    assert "--chat" in str(refusal["error"])
