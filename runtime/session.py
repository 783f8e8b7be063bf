"""What runs an engine: a session binds a fixed set of buffers once and then only runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import EngineSpec
from eagle_chain.runtime.buffers import Buffer, Memory


class Binding(Protocol):
    """One engine with the addresses of all its inputs and outputs settled."""

    def run(self) -> None:
        """Run the engine once, or queue it on its memory's stream: `Buffer.read` waits."""
        ...


class Session(Protocol):
    """A loaded engine. It holds no sequence: any number of chains may bind it."""

    @property
    def spec(self) -> EngineSpec:
        """Names, dtypes and shapes of what it takes and gives."""
        ...

    @property
    def memory(self) -> Memory:
        """Where the buffers it binds must live."""
        ...

    def bind(self, tensors: Mapping[str, Buffer]) -> Binding:
        """Settle the address of every input and output; made once, before the first run.

        Args:
            tensors: A buffer for each name of `spec.all_inputs` and `spec.all_outputs`.

        Raises:
            InputError: A name is missing or unknown, or a buffer does not fit.
        """
        ...


def check_tensors(spec: EngineSpec, memory: Memory, tensors: Mapping[str, Buffer]) -> None:
    """Compare buffers with what an engine needs, all differences in one message.

    Raises:
        InputError: A name is missing or unknown, a dtype, shape or device differs, or the two
            sides of a state that must change places share one buffer.
    """
    wanted = {t.name: t for t in (*spec.all_inputs, *spec.all_outputs)}
    faults = [f"no buffer for {name}" for name in wanted.keys() - tensors.keys()]
    faults += [f"{name} is not a tensor of this engine" for name in tensors.keys() - wanted.keys()]
    for name in wanted.keys() & tensors.keys():
        want, buffer = wanted[name], tensors[name]
        got = buffer.spec
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            faults.append(
                f"{name} is {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"
            )
        if buffer.device != memory.device:
            faults.append(f"{name} is on {buffer.device}, the engine runs on {memory.device}")
    for pair in spec.states:
        source, target = tensors.get(pair.input), tensors.get(pair.output)
        if source and target and source.address == target.address and not pair.in_place:
            faults.append(f"{pair.input} and {pair.output} share a buffer but are not in place")
    if faults:
        raise InputError(f"{spec.name}: {'; '.join(sorted(faults))}")
