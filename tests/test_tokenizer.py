"""Text in and out: streaming never breaks a character, templates are data, not code."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from eagle_chain.engines.cli import main
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.stop_ids import stop_token_ids
from eagle_chain.runtime import Tokenizer, load
from eagle_chain.runtime.chat import MEMORY
from tests.toy_pair import END_OF_TEXT, IM_END, exported, write_pair, write_tokenizer

TEXTS = [
    "plain",
    "naïve café",
    "日本語テキスト",
    "👩‍👩‍👧 family",
    "e\u0301",
    "\ufffd really",
    "a\n\n  b",
    "",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_whole_characters_and_the_whole_text(folder: Path, text: str) -> None:
    """One byte a token: every character of more than one byte arrives in parts."""
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.end() == text


def test_a_stream_of_any_bytes_equals_one_decode(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    for seed in range(200):
        ids = [random.Random(seed).randrange(256) for _ in range(seed % 90)]
        stream = tokenizer.stream()
        text = "".join([stream.push(token) for token in ids]) + stream.end()
        assert text.replace("\ufffd", "") == tokenizer.decode(ids).replace("\ufffd", "")


def test_special_tokens_are_hidden_unless_asked_for(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = [*tokenizer.encode("ok"), IM_END]
    assert tokenizer.decode(ids) == "ok" and tokenizer.decode(ids, special=True) == "ok<|im_end|>"
    hidden, shown = tokenizer.stream(), tokenizer.stream(special=True)
    assert "".join(hidden.push(i) for i in ids) == "ok"
    assert "".join(shown.push(i) for i in ids) == "ok<|im_end|>"


def test_a_continuation_gets_nothing_around_it(folder: Path) -> None:
    path = folder / "tokenizer.json"
    backend = Backend.from_file(str(path))
    special = [("<|im_end|>", IM_END)]
    backend.post_processor = TemplateProcessing(single="<|im_end|> $A", special_tokens=special)
    backend.save(str(path))
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("ok", special=False)
    assert IM_END not in ids and tokenizer.encode("ok") == [IM_END, *ids]


def test_stop_ids_come_from_the_tokenizer_config(folder: Path) -> None:
    assert Tokenizer(folder).stop_ids == {IM_END}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["eos_token"] = {"content": "<|im_end|>", "lstrip": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert stop_token_ids(folder) == {IM_END}
    (folder / "tokenizer_config.json").unlink()
    assert stop_token_ids(folder) == frozenset()


@pytest.mark.parametrize("value", [None, 7, [7, IM_END], [7, END_OF_TEXT, 7]], ids=str)
def test_text_ends_where_transformers_would_end_it(folder: Path, value: object) -> None:
    """And at the end of a turn, which only the tokenizer knows."""
    from transformers import GenerationConfig

    assert stop_token_ids(folder) == {IM_END}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    theirs = GenerationConfig.from_pretrained(folder).eos_token_id
    ids = {theirs} if isinstance(theirs, int) else set(theirs or ())
    assert stop_token_ids(folder) == Tokenizer(folder).stop_ids == ids | {IM_END}


@pytest.mark.parametrize("value", ['"x"', "[1.5]", "true", "-1", "{}"])
def test_stop_ids_that_are_none_are_refused(folder: Path, value: str) -> None:
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(InputError, match=r"eos_token_id is .* expected a token id or a list"):
        stop_token_ids(folder)


def test_a_bundle_stops_at_the_ids_of_its_generation_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = write_pair(tmp_path, layers=4, aux=[0, 1, 2], tokenizer=True)
    flags = ("--capacity", "64", "--aux-layers", "0,1,2")
    first = exported(pair, tmp_path / "first", *flags)
    prompt = [5, 6, 7]
    tokens = load(first).generate(prompt, max_new_tokens=20).tokens
    stop = tokens[10]
    (pair[0] / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, 300]}))
    second = exported(pair, tmp_path / "second", *flags)
    given = load(second).generate(prompt, max_new_tokens=20)
    assert given.tokens == tokens[: tokens.index(stop) + 1] and given.finish_reason == "eos"

    for place in (second, pair[0]):
        capsys.readouterr()
        assert main(["inspect", str(place)]) == 0
        want = ", ".join(map(str, sorted({END_OF_TEXT, IM_END, stop, 300})))
        assert f"\nstops    {want} (config.json {END_OF_TEXT}; gen" in capsys.readouterr().out
    assert main(["inspect", str(second), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stop_ids"] == sorted({END_OF_TEXT, IM_END, stop, 300})
    assert report["stop_sources"]["generation_config.json"] == [stop, 300]


def test_a_bundle_that_never_stops_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = write_pair(
        tmp_path, layers=4, aux=[0, 1, 2], tokenizer=True, sizes={"eos_token_id": None}
    )
    (pair[0] / "tokenizer_config.json").unlink()
    bundle = exported(pair, tmp_path / "bundle", "--capacity", "64", "--aux-layers", "0,1,2")
    assert main(["inspect", str(bundle)]) == 0
    assert "\nstops    NONE in config.json" in capsys.readouterr().out
    words = ["--prompt", "a", "--max-new-tokens", "2", "--threads", "1", "--json"]
    assert main(["generate", str(bundle), *words]) == 0
    assert any("no stop ids" in text for text in json.loads(capsys.readouterr().out)["warnings"])


def test_a_chat_ends_where_the_model_answers(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    messages = [{"role": "user", "content": "hi {{ 1 + 1 }}"}]
    text = "<|im_start|>user\nhi {{ 1 + 1 }}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages) == text
    ids = tokenizer.encode_chat(messages)
    assert ids.count(IM_END) == 1 and tokenizer.decode(ids, special=True) == text


def test_a_template_in_its_own_file_comes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% if enable_thinking is defined and not enable_thinking %}no {% endif %}"
        "{{ messages | tojson }}{% for m in messages %}{% break %}{% endfor %}{{ eos_token }}"
    )
    tokenizer = Tokenizer(folder)
    messages = [{"role": "user", "content": "é"}]
    want = '[{"role": "user", "content": "é"}]<|im_end|>'
    assert tokenizer.render_chat(messages) == want
    assert tokenizer.render_chat(messages, enable_thinking=False) == f"no {want}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% for %}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 // 0 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_template_cannot_reach_out_and_fails_in_one_sentence(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match="the chat template failed: "):
        Tokenizer(folder).encode_chat([{"role": "user", "content": "x"}])


ENDLESS = {
    "loops": "{% set r = range(99999) %}" + "{% for i in r %}" * 4 + "{% endfor %}" * 4,
    "one number": "{{ 10 ** (10 ** 9) }}",
    "text": "{{ 'x' * (10 ** 12) }}",
    "text kept": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "list": "{{ range(99999) | list * 99999 }}",
}


RENDERED = """
import resource, sys, time
from eagle_chain.engines.errors import InputError
from eagle_chain.runtime import Tokenizer, chat
chat.SECONDS = 1
start = time.monotonic()
try:
    Tokenizer(sys.argv[1]).encode_chat([{"role": "user", "content": "x"}])
except InputError as error:
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, time.monotonic() - start, error)
"""


@pytest.mark.parametrize("how", ENDLESS)
def test_a_template_without_end_is_ended(folder: Path, how: str) -> None:
    """In a process of its own, because a process knows only the largest of all its children."""
    (folder / "chat_template.jinja").write_text(ENDLESS[how])
    command = [sys.executable, "-c", RENDERED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    kilobytes, seconds, said = done.stdout.split(maxsplit=2)
    assert re.search(r"the chat template failed: .*(longer|more than|memory)", said)
    assert float(seconds) < 10 and int(kilobytes) < MEMORY >> 10


@pytest.mark.parametrize("value", [object(), {1: object()}, {"a"}, b"bytes"])
def test_only_plain_data_reaches_a_template(folder: Path, value: Any) -> None:
    with pytest.raises(InputError, match="the conversation is no plain data"):
        Tokenizer(folder).encode_chat([{"role": "user", "content": value}])


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json: no such file"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="not a tokenizer that can be read"):
        Tokenizer(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match="expected a JSON object"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InputError, match="has no chat template"):
        Tokenizer(tmp_path).encode_chat([])


DEEP = "[" * 100_000
BROKEN = {
    "config nested too deeply": ("tokenizer_config.json", DEEP, "cannot be read as JSON"),
    "tokenizer nested too deeply": ("tokenizer.json", DEEP, r"tokenizer\.json: "),
    "template is no text": ("chat_template.jinja", b"\xff", "cannot be read as text"),
    "template is half a character": ("chat_template.jinja", r"{{ '\ud800' }}", "lone surrogate"),
    "templates are no objects": (
        "tokenizer_config.json",
        '{"chat_template": ["x", {"name": []}]}',
        "has no chat template",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_files_end_in_one_sentence(folder: Path, fault: str) -> None:
    name, content, words = BROKEN[fault]
    content = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        Tokenizer(folder).encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("added", ['"x"', "[5]", '[{"content": "<|im_end|>"}]', '[{"id": []}]'])
def test_added_tokens_that_are_none_are_refused(folder: Path, added: str) -> None:
    (folder / "tokenizer.json").write_text(f'{{"added_tokens": {added}}}')
    with pytest.raises(InputError, match="added_tokens is not a list of tokens with an id"):
        stop_token_ids(folder)


def test_half_a_character_is_no_text(folder: Path) -> None:
    with pytest.raises(InputError, match=r"lone surrogate \(character 2\)"):
        Tokenizer(folder).encode("ab\ud800")


def test_a_bundle_keeps_it_in_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer")
    assert Tokenizer(tmp_path).encode("a") == Tokenizer(tmp_path / "tokenizer").encode("a")
