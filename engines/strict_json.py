"""Dataclasses as JSON and back, exactly: no missing or extra key, no cast."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import TensorSpec

T = TypeVar("T")

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def encode(value: Any) -> Any:
    """A dataclass as JSON data: fields in their order, mappings sorted by key, tensors as lists."""
    if isinstance(value, TensorSpec):
        return [value.name, value.dtype, list(value.shape)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: encode(value[name]) for name in sorted(value)}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value


def dumps(data: Any) -> str:
    """JSON text with one line for each number of a config, each tensor and each file."""
    return _layout(data, 0) + "\n"


def decode(kind: type[T], data: Any) -> T:
    """The dataclass that JSON data stands for; `InputError` names the first part that is wrong."""
    value: T = _decode(kind, data, "")
    return value


def shown(value: Any) -> str:
    """A value as it reads in the file, cut to a phrase."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def listed(names: Iterable[str]) -> str:
    """Names in order, for a message."""
    return ", ".join(sorted(names)) or "nothing"


def _layout(value: Any, depth: int) -> str:
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if (depth >= 2 and len(line) <= 200) or not value or not isinstance(value, (dict, list)):
        return line
    if isinstance(value, dict):
        rows = [
            f"{json.dumps(key, ensure_ascii=False)}: {_layout(item, depth + 1)}"
            for key, item in value.items()
        ]
    else:
        rows = [_layout(item, depth + 1) for item in value]
    pad = "\n" + "  " * depth
    return line[0] + ",".join(f"{pad}  {row}" for row in rows) + pad + line[-1]


def _decode(kind: Any, value: Any, where: str) -> Any:
    if kind is TensorSpec:
        return TensorSpec(*_decode(tuple[str, str, tuple[int, ...]], value, where))
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # X | None
        inner = next(a for a in arguments if a is not type(None))
        return None if value is None else _decode(inner, value, where)
    if origin is tuple:
        return _decode_tuple(arguments, value, where)
    if origin is dict:
        entries = _object(value, where).items()
        return {key: _decode(arguments[1], item, f"{where}[{key!r}]") for key, item in entries}
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise InputError(f"{where} is {shown(value)}, expected {_WORDS[kind]}")
    return value


def _decode_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise InputError(f"{where} is {shown(value)}, expected a list")
    if arguments[-1] is Ellipsis:
        arguments = arguments[:1] * len(value)
    if len(arguments) != len(value):
        raise InputError(f"{where} has {len(value)} entries, expected {len(arguments)}")
    pairs = enumerate(zip(arguments, value, strict=True))
    return tuple(_decode(kind, item, f"{where}[{i}]") for i, (kind, item) in pairs)


def _decode_dataclass(kind: Any, value: Any, where: str) -> Any:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    _object(value, where, names)
    dot = f"{where}." if where else ""
    return kind(**{name: _decode(hints[name], value[name], dot + name) for name in names})


def _object(value: Any, where: str, names: Iterable[str] | None = None) -> dict[str, Any]:
    """A JSON object, with exactly these keys if any are given."""
    if not isinstance(value, dict):
        raise InputError(f"{where or 'the top level'} is {shown(value)}, expected an object")
    wanted = value.keys() if names is None else set(names)
    faults = [("lacks", wanted - value.keys()), ("has the unknown key", value.keys() - wanted)]
    text = " and ".join(f"{verb} {listed(keys)}" for verb, keys in faults if keys)
    if text:
        raise InputError(f"{where or 'the top level'} {text}")
    return value
