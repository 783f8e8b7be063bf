"""Chat templates rendered in a process of their own, which has little time and little memory.

A template comes with a checkpoint, so it is somebody else's program: Jinja's sandbox keeps it from
reaching out, but not from counting for ever or from asking for all memory. `render` starts this
module, which reads the template and its variables as JSON and answers with the text.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

from eagle_chain.engines.child import module_command, module_environment
from eagle_chain.engines.errors import InputError

SECONDS = 10  # of the clock and of a processor; the templates of Qwen3.5 take 0.2, mostly to start
MEMORY = 1 << 30  # bytes of address space
LARGEST = 16 << 20  # characters of a conversation


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text that a template makes of its variables, which are plain JSON data.

    Raises:
        InputError: The template is wrong, refuses the variables, or asks for too much.
    """
    try:
        request = json.dumps([source, variables], default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the conversation is no plain data: {error}") from None
    try:
        done = subprocess.run(
            module_command("eagle_chain.runtime.chat"),
            input=request.encode(),
            capture_output=True,
            env=module_environment(),
            cwd="/",
            timeout=SECONDS,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise InputError(f"the chat template failed: it takes longer than {SECONDS} s") from None
    except ValueError:  # no answer: it was ended, or its interpreter was
        words = done.stderr.decode(errors="replace").strip().splitlines()
        reason = words[-1] if words else f"its process ended with {done.returncode}"
        raise InputError(f"the chat template failed: {reason}") from None
    if "error" in answer:
        raise InputError(f"the chat template failed: {answer['error']}")
    text: str = answer["text"]
    return text


def _plain(value: Any) -> Any:
    """Mappings that are no dict, for JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is neither text, number, list nor object")


def _rendered(source: str, variables: dict[str, Any]) -> str:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    text = environment.from_string(source).render(**variables)
    if len(text) > LARGEST:
        raise ValueError(f"it makes {len(text)} characters, expected at most {LARGEST}")
    return text


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise ValueError(message)


def _limit(what: int, amount: int) -> None:
    with suppress(ValueError, OSError):  # a lower limit is in force, or the system has none
        resource.setrlimit(what, (amount, amount))


def main() -> None:
    """Render what stands on stdin; whatever happens is said on stdout."""
    source, variables = json.loads(sys.stdin.buffer.read())
    _limit(resource.RLIMIT_CPU, SECONDS)
    _limit(resource.RLIMIT_AS, MEMORY)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    try:
        answer = {"text": _rendered(source, variables)}
    except MemoryError:
        answer = {"error": f"it takes more than {MEMORY >> 20} MB of memory"}
    except Exception as error:  # a template may do anything that an expression can
        answer = {"error": str(error)[:1000] or type(error).__name__}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
