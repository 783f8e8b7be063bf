"""Text in, token windows out: a jsonl corpus, one register (kind of text) per document.

One JSON object a line: `t` the text, `c` its register, `v` true if the document is held out. The
register `py` has the special token `<|py|>`; every document is stored as register token, text,
`<|endoftext|>`.
"""

from __future__ import annotations

import json
import lzma
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

WEIGHTS = {"py": 0.60, "doc": 0.15, "book": 0.25}  # share of the training windows
EOS = "<|endoftext|>"


@dataclass(frozen=True)
class Corpus:
    """The token streams of each register, and the ids of the register tokens."""

    train: dict[str, Tensor]  # int32 [tokens]
    held_out: dict[str, Tensor]
    register: dict[str, int]

    def windows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Random training windows, int64 [count, length], registers drawn by `WEIGHTS`."""
        names = [name for name in WEIGHTS if name in self.train]
        share = torch.tensor([WEIGHTS[name] for name in names])
        picks = torch.multinomial(share, count, replacement=True, generator=generator)
        parts = [
            take(self.train[name], int((picks == i).sum()), length, self.register[name], generator)
            for i, name in enumerate(names)
        ]
        return torch.cat(parts)

    def held_out_windows(
        self, name: str, count: int, length: int, generator: torch.Generator
    ) -> Tensor:
        """Random held-out windows of one register, each starting with its register token."""
        stream = self.held_out[name]
        return take(stream, count, length, self.register[name], generator, marked=1.0)


def take(
    stream: Tensor,
    count: int,
    length: int,
    register: int,
    generator: torch.Generator,
    marked: float = 0.5,
) -> Tensor:
    """Cut windows at random places; a share `marked` of them starts with the register token."""
    if len(stream) < length:
        raise ValueError(f"a window of {length} tokens from a stream of only {len(stream)}")
    start = torch.randint(len(stream) - length + 1, (count, 1), generator=generator)
    rows = stream[start.to(stream.device) + torch.arange(length, device=stream.device)].long()
    mark = torch.rand(count, generator=generator).to(rows.device) < marked
    rows[:, 0] = torch.where(mark, register, rows[:, 0])
    return rows


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a special token that the tokenizer must have."""
    index: int | None = tokenizer.token_to_id(token)
    if index is None:
        raise ValueError(f"the tokenizer has no token {token}")
    return index


def documents(path: Path) -> Iterator[dict[str, object]]:
    """Read a .jsonl or .jsonl.xz file."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def tokenise(path: Path, tokenizer_path: Path, batch: int = 256) -> dict[str, np.ndarray]:
    """Token streams as uint16 arrays named `train.py`, `held_out.book`, ..."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    eos = special_id(tokenizer, EOS)
    streams: dict[str, list[np.ndarray]] = defaultdict(list)
    pending: list[tuple[str, int, str]] = []

    def flush() -> None:
        for (key, register, _), code in zip(
            pending, tokenizer.encode_batch([text for _, _, text in pending]), strict=True
        ):
            streams[key].append(np.array([register, *code.ids, eos], np.uint16))
        pending.clear()

    for doc in documents(path):
        name = str(doc["c"])
        register = special_id(tokenizer, f"<|{name}|>")
        part = "held_out" if doc.get("v") else "train"
        pending.append((f"{part}.{name}", register, str(doc["t"])))
        if len(pending) == batch:
            flush()
    flush()
    return {key: np.concatenate(parts) for key, parts in streams.items()}


def load(path: Path, tokenizer_path: Path, device: torch.device) -> Corpus:
    """Read a corpus (.jsonl, .jsonl.xz) or the token streams saved from one (.npz)."""
    if path.suffix == ".npz":
        with np.load(path) as saved:
            streams = {key: saved[key] for key in saved.files}
    else:
        streams = tokenise(path, tokenizer_path)
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    parts: dict[str, dict[str, Tensor]] = {"train": {}, "held_out": {}}
    for key, ids in streams.items():
        part, name = key.split(".")
        parts[part][name] = torch.from_numpy(ids.astype(np.int32)).to(device)
    register = {name: special_id(tokenizer, f"<|{name}|>") for name in parts["train"]}
    return Corpus(parts["train"], parts["held_out"], register)
