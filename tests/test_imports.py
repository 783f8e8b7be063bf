"""Who may import what: `export -> engines <- runtime`, and each library where it is owned."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_chain.engines.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PACKAGES = ("engines", "export", "runtime")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).glob("*.py"))
MAY_IMPORT = {  # package -> packages of ours that it may import
    "engines": {"engines"},
    "export": {"engines", "export"},
    "runtime": {"engines", "runtime"},
}
OWNERS = {  # library -> the only files that may import it, anywhere in them
    "torch": {
        "export/checkpoint.py",
        "export/eager.py",
        "export/eager_prefill.py",
        "export/kv_reference.py",
        "export/reference.py",
        "export/teacher.py",
    },
    "onnx": {
        "engines/bound.py",
        "engines/build.py",
        "engines/compiler.py",
        "engines/graphs.py",
        "engines/pieces.py",
        "export/builder.py",
        "export/bundle.py",
        "export/graph.py",
    },
    "onnx_ir": {
        "export/builder.py",
        "export/chunked.py",
        "export/draft.py",
        "export/fused.py",
        "export/kv.py",
        "export/lowering.py",
        "export/mtp.py",
        "export/ort_cuda.py",
        "export/prefill.py",
        "export/prefill_cuda.py",
        "export/sampling.py",
        "export/standard.py",
        "export/trunk.py",
    },
    "ml_dtypes": {"export/builder.py", "export/tensor_values.py", "export/reference.py"},
    "matplotlib": {"runtime/bench.py"},
    "onnxruntime": {"runtime/ort.py"},
    "cuda": {"runtime/cuda.py"},
    "tensorrt": {"engines/flavours.py"},
    "tensorrt_rtx": {"engines/flavours.py"},
    "tokenizers": {"runtime/tokenizer.py"},
    "jinja2": {"runtime/chat.py"},
    "rich": {"engines/progress.py", "runtime/parity.py"},
    "polygraphy": {"engines/recording.py"},
    "numpy": None,  # any file of export and runtime
}
AT_IMPORT = {  # libraries that a module may load when it is imported
    "engines": set[str](),
    "export": {"numpy", "onnx", "onnx_ir", "ml_dtypes", "torch"},  # each under its owners above
    "runtime": {"numpy"},
}


def imports(file: Path, everywhere: bool) -> Iterator[str]:
    """Modules that a file imports: on loading, or `everywhere` in functions and for types too."""
    nodes: list[ast.AST] = [ast.parse(file.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""
        deferred = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        if everywhere or not deferred:
            nodes += ast.iter_child_nodes(node)


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", FILES, ids=name)
def test_packages_import_along_the_arrows(file: Path) -> None:
    for module in imports(file, everywhere=True):
        top, _, rest = module.partition(".")
        assert top not in PACKAGES, f"{module}: write eagle_chain.{module}"
        if top == "eagle_chain":
            assert rest.partition(".")[0] in MAY_IMPORT[file.parent.name], module


@pytest.mark.parametrize("file", FILES, ids=name)
def test_libraries_are_imported_by_their_owners(file: Path) -> None:
    for module in imports(file, everywhere=True):
        top = module.partition(".")[0]
        if top == "eagle_chain" or top in sys.stdlib_module_names:
            continue
        assert top in OWNERS, f"{module}: a library without an owner"
        owners = OWNERS[top]
        assert owners is None or name(file) in owners, f"{module}: owned by {owners}"


@pytest.mark.parametrize("file", FILES, ids=name)
def test_nothing_heavy_is_loaded_on_import(file: Path) -> None:
    for module in imports(file, everywhere=False):
        top = module.partition(".")[0]
        if top != "eagle_chain" and top not in sys.stdlib_module_names:
            assert top in AT_IMPORT[file.parent.name], module


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_module(command: str) -> None:
    assert importlib.util.find_spec(COMMANDS[command][0]) is not None


def loaded(code: str) -> set[str]:
    """Top-level modules in a fresh process after `code`, which runs with warnings as errors."""
    code = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


HEAVY = {"torch", "onnx", "onnx_ir", "onnxruntime", "tensorrt", "cuda", "transformers", "rich"}


@pytest.mark.parametrize(
    "module",
    [
        "eagle_chain.runtime",
        "eagle_chain.engines.cli",
        *(module for module, _ in COMMANDS.values()),
    ],
)
def test_light_modules_load_no_heavy_library(module: str) -> None:
    assert not loaded(f"import {module}") & HEAVY


def test_public_names_are_reached_without_a_backend() -> None:
    assert not loaded("from eagle_chain.runtime import load") & HEAVY
