"""The PyTorch reference behind the runtime's session protocol, in any compute dtype, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.spec import EngineSpec
from eagle_chain.export.eager import TORCH_TYPES, EagerSession
from eagle_chain.export.teacher import reference_sessions
from eagle_chain.runtime.buffers import Buffer, HostBuffer, HostMemory
from eagle_chain.runtime.load import Engines
from eagle_chain.runtime.session import check_tensors


class TorchSession:
    """An eager session over host buffers."""

    def __init__(self, eager: EagerSession, memory: HostMemory) -> None:
        self.eager, self.memory = eager, memory
        self.spec: EngineSpec = eager.spec

    def bind(self, tensors: Mapping[str, Buffer]) -> TorchBinding:
        """As in the protocol."""
        check_tensors(self.spec, self.memory, tensors)
        return TorchBinding(self.eager, tensors)


class TorchBinding:
    """One eager session with its buffers."""

    def __init__(self, eager: EagerSession, tensors: Mapping[str, Buffer]) -> None:
        self.eager, self.tensors = eager, tensors

    def run(self) -> None:
        """Copy in, run, copy out."""
        spec = self.eager.spec
        feeds = {
            t.name: torch.from_numpy(self.tensors[t.name].read()).view(TORCH_TYPES[t.dtype])
            for t in spec.all_inputs
        }
        for name, value in self.eager.run(feeds).items():
            bits = value.contiguous()
            if value.dtype == torch.bfloat16:
                bits = bits.view(torch.int16)
            buffer = self.tensors[name]
            assert isinstance(buffer, HostBuffer)
            buffer.array[...] = bits.numpy().view(buffer.array.dtype)


def torch_engines(bundle: Path, dtype: str, manifest: Manifest | None = None) -> Engines:
    """The engines of an fp32 bundle, or of another manifest over it, computed in `dtype`."""
    manifest = manifest or Manifest.load(bundle)
    sessions = reference_sessions(bundle, manifest, dtype)
    memory = HostMemory()
    specs = {name: session.spec for name, session in sessions.items()}
    return Engines(
        replace(manifest, options=replace(manifest.options, dtype=dtype), specs=specs),
        "pytorch",
        memory,
        {name: TorchSession(session, memory) for name, session in sessions.items()},
        frozenset(),
    )
