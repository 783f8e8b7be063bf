"""Every kernel under random orders of its threads and under a sanitizer of races, on fibres.

A barrier taken out of one of the kernels changes what they leave in at least one of the orders: all
twelve of `prompt.h` were, one by one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from eagle_chain.engines.kernel_library import SOURCES

SOURCE = Path(__file__).with_name("kernel_orders.cc")
FLAGS = ("-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-I", str(SOURCES))


def built(folder: Path, *flags: str) -> Path:
    """The program with these flags."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the kernels with")
    program = folder / "kernel_orders"
    command = [compiler, *FLAGS, *flags, str(SOURCE), "-o", str(program)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in found.stderr:  # libubsan or libtsan
        pytest.skip("this compiler comes without its sanitizers")
    assert found.returncode == 0, found.stderr
    return program


def hashes(program: Path, **environment: str) -> list[str]:
    """What each launch left, a line each."""
    found = subprocess.run(
        [str(program)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert (found.returncode, found.stderr) == (0, ""), found.stderr + found.stdout
    return found.stdout.splitlines()


def test_no_order_of_threads_or_blocks_changes_a_bit(tmp_path: Path) -> None:
    """Nor does what shared memory, scratch and results held before; vectors are aligned."""
    program = built(tmp_path, "-fsanitize=alignment", "-fno-sanitize-recover")
    want = hashes(program)
    assert len(want) == 21
    for seed in ("1", "2", "3"):
        assert hashes(program, EAGLE_CHAIN_FIBRES=seed) == want


@pytest.mark.slow
def test_no_races_in_shared_memory(tmp_path: Path) -> None:
    """Each thread of a block is one to the sanitizer, and only barriers order them."""
    assert len(hashes(built(tmp_path, "-fsanitize=thread"))) == 21
