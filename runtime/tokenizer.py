"""Text to ids and back: the `tokenizers` library, text that streams, chat templates."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.files import read_plain
from eagle_chain.engines.stop_ids import (
    stop_token_ids,
    text_of,
    tokenizer_config,
    tokenizer_folder,
)
from eagle_chain.runtime.chat import render

BROKEN = "\ufffd"  # what an incomplete UTF-8 sequence decodes to
HELD = 32  # tokens after which broken text is let through: it will not become whole any more


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        stop_ids: The ids that end a text, as far as the files beside it name them: see
            `engines.stop_ids`.

    Args:
        folder: A bundle, or a folder with tokenizer.json.

    Raises:
        InputError: There is no tokenizer there, or it cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from tokenizers import Tokenizer as Backend

        self.folder = tokenizer_folder(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(
                f"{path}: no such file; put the model's tokenizer.json there, or work with token "
                "ids (generate --ids, Chain.generate)"
            )
        with _library_errors(f"{path}: not a tokenizer that can be read"):
            self._backend = Backend.from_buffer(read_plain(path))
        self._config = tokenizer_config(self.folder)
        self.stop_ids = stop_token_ids(self.folder)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._backend.get_vocab_size())

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a plain text, with whatever the tokenizer puts around one.

        Text that goes on behind other tokens (`append`) takes `special=False`: nothing around it.
        """
        return self._encode(text, add_special_tokens=special)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of the ids; `special` shows special tokens."""
        with _library_errors(f"{self.folder}: the tokenizer cannot decode these ids"):
            return str(self._backend.decode(list(ids), skip_special_tokens=not special))

    def stream(self, *, special: bool = False) -> TextStream:
        """Start a text that arrives token by token."""
        return TextStream(self, special)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Ids of a conversation with the opening of the next turn.

        Args:
            messages: `{"role": ..., "content": ...}`, oldest first.
            **variables: Handed to the template, for example `enable_thinking=False`.

        Raises:
            InputError: There is no chat template, or it refuses these messages.
        """
        return self._encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The conversation as the template writes it; arguments and errors as in `encode_chat`."""
        source = self._template()
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        tokens = {name: text_of(self._config.get(name)) or "" for name in names}
        given = {"messages": list(messages), "add_generation_prompt": True, **tokens, **variables}
        try:
            return render(source, given)
        except InputError as error:
            raise InputError(f"{self.folder}: {error}") from None

    def _encode(self, text: str, **options: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the text has a lone surrogate (character {error.start})") from None
        with _library_errors(f"{self.folder}: the tokenizer cannot encode this text"):
            return list(self._backend.encode(text, **options).ids)

    def _template(self) -> str:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            try:
                return read_plain(path).decode("utf-8")
            except (OSError, ValueError) as error:
                raise InputError(f"{path}: cannot be read as text: {error}") from error
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
            template = named[-1].get("template") if named else None
        if not isinstance(template, str):
            raise InputError(
                f"{self.folder}: has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): give the whole prompt as text"
            )
        return template


class TextStream:
    """Text from tokens as they come: each piece is whole characters, all pieces make the text."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._ids: list[int] = []  # context, then what is not settled
        self._context = 0
        self._told = 0  # characters of the decoded ids that have been given out

    def push(self, token: int) -> str:
        """Return the characters that `token` completes, possibly none."""
        self._ids.append(token)
        text = self._text()
        whole = text.rstrip(BROKEN)
        if len(whole) == len(text) or len(self._ids) - self._context > HELD:
            piece = text[self._told :]
            del self._ids[: self._context]
            self._context = len(self._ids)
            self._told = len(self._text())
            return piece
        piece = whole[self._told :]
        self._told = max(self._told, len(whole))
        return piece

    def end(self) -> str:
        """Return what is left: broken characters that no token has completed."""
        piece = self._text()[self._told :]
        self._ids, self._context, self._told = [], 0, 0
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, special=self._special)


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """Errors of the tokenizers library as `InputError`s: it raises plain Exception, or panics."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise InputError(f"{what}: {error}") from error
        raise
