"""Recorded calls played on the sessions of a bundle, whose states go on from call to call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.recording import Call
from eagle_chain.engines.spec import StatePair
from eagle_chain.runtime.buffers import Buffer, Memory
from eagle_chain.runtime.session import Binding, Session
from eagle_chain.runtime.weights import converted, from_bf16

Arrays = dict[str, NDArray[Any]]


class Player:
    """The buffers of every engine of a bundle.

    Engines whose states have one name share them, as they do in a chain. A pair that is not in
    place changes sides with each call that uses it.
    """

    def __init__(self, sessions: Mapping[str, Session], memory: Memory) -> None:
        self.sessions = sessions
        self._states: dict[str, tuple[StatePair, tuple[Buffer, Buffer]]] = {}
        self._side: dict[str, int] = {}
        self._plain: dict[str, dict[str, Buffer]] = {}
        self._bindings: dict[tuple[str, tuple[int, ...]], Binding] = {}
        for name, session in sessions.items():
            spec = session.spec
            self._plain[name] = {t.name: memory.allocate(t) for t in (*spec.inputs, *spec.outputs)}
            for pair in spec.states:
                self._add(name, pair, memory)

    def _add(self, engine: str, pair: StatePair, memory: Memory) -> None:
        known = self._states.get(pair.input)
        if known is None:
            first = memory.allocate(pair.tensors[0])
            second = first if pair.in_place else memory.allocate(pair.tensors[1])
            self._states[pair.input], self._side[pair.input] = (pair, (first, second)), 0
        elif known[0] != pair:
            raise InputError(f"{engine}: {pair.input} is another state than in the other engines")

    def play(self, call: Call) -> Arrays:
        """Run one call and return every output, floats as fp32.

        Raises:
            InputError: The recording is of another interface.
        """
        session = self.sessions[call.engine]
        plain = self._plain[call.engine]
        for tensor in session.spec.inputs:
            value = call.inputs.get(tensor.name)
            if value is None or tuple(value.shape) != tensor.shape:
                found = "nothing" if value is None else list(value.shape)
                raise InputError(
                    f"{call.engine}: the recording has {found} for {tensor.name}, expected "
                    f"{list(tensor.shape)}; record it again"
                )
            if tensor.dtype != "int32":
                value = converted(np.ascontiguousarray(value, np.float32), "F32", tensor)
            plain[tensor.name].write(value)
        self._bound(call.engine).run()
        outputs = {t.name: plain[t.name] for t in session.spec.outputs}
        for pair in session.spec.states:
            self._side[pair.input] ^= 1
            buffers = self._states[pair.input][1]
            outputs[pair.output] = buffers[self._side[pair.input]]
        return {name: as_float(buffer) for name, buffer in outputs.items()}

    def _bound(self, engine: str) -> Binding:
        session = self.sessions[engine]
        sides = tuple(self._side[pair.input] for pair in session.spec.states)
        if (engine, sides) not in self._bindings:
            tensors = dict(self._plain[engine])
            for pair, side in zip(session.spec.states, sides, strict=True):
                buffers = self._states[pair.input][1]
                tensors |= {pair.input: buffers[side], pair.output: buffers[1 - side]}
            self._bindings[engine, sides] = session.bind(tensors)
        return self._bindings[engine, sides]


def as_float(buffer: Buffer) -> NDArray[Any]:
    """What a buffer holds: whole numbers as they are, floats as fp32."""
    values, dtype = buffer.read(), buffer.spec.dtype
    if dtype == "bf16":
        return from_bf16(values)
    return values.astype(np.float32) if dtype == "fp16" else values
