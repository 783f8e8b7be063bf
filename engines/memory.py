"""How much memory building and running a bundle takes, and how much there is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.gpu import device_info
from eagle_chain.engines.progress import human_bytes
from eagle_chain.engines.spec import EngineSpec, TensorSpec

# Measured with TensorRT-RTX: the process itself, and what each node of a graph adds to it.
BUILDER_BYTES = 250_000_000
NODE_BYTES = 110_000
BAKED_COPIES = 3  # of a graph's weights: as parsed, as optimised, in the plan


@dataclass(frozen=True)
class Estimate:
    """Bytes; all but `build_host` are exact, apart from TensorRT's scratch memory."""

    weights: int  # on the device: each tensor once, in the dtype of the engines
    states: int  # KV, recurrent states (two buffers), inputs and outputs of one chain
    build_host: int  # peak of the building process

    @property
    def device(self) -> int:
        """Device memory of one chain."""
        return self.weights + self.states


def estimate(
    specs: Mapping[str, EngineSpec],
    weights: Mapping[str, Iterable[TensorSpec]],
    nodes: int,
    baked: bool,
) -> Estimate:
    """Memory for engines that use these weights, the largest graph having `nodes` nodes."""
    used = [tensor for tensors in weights.values() for tensor in tensors]
    distinct = {tensor.name: tensor for tensor in used}.values()
    on_device = sum(tensor.nbytes for tensor in (used if baked else distinct))
    build = BUILDER_BYTES + nodes * NODE_BYTES
    if baked:
        build += BAKED_COPIES * max(sum(t.nbytes for t in tensors) for tensors in weights.values())
    return Estimate(on_device, sum(map(_chain_bytes, _distinct_states(specs))), build)


def host_bytes_available() -> int:
    """Host memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_room(folder: Path, needed: Estimate, weights: str, device: int | None) -> None:
    """Refuse, with the numbers, what cannot fit in this memory, on this disk, on this GPU.

    Args:
        folder: The bundle.
        needed: What it takes.
        weights: bound or baked.
        device: The GPU that is to run it; None if that is another machine's.
    """
    host = host_bytes_available()
    if needed.build_host > host:
        raise InputError(
            f"building needs about {human_bytes(needed.build_host)} of memory, this machine has "
            f"{human_bytes(host)} free"
            + ("; --weights bound needs far less" if weights == "baked" else "")
        )
    free = shutil.disk_usage(folder).free
    if weights == "baked" and needed.weights > free:
        raise InputError(
            f"{folder}: plans with baked weights take {human_bytes(needed.weights)}, the disk has "
            f"{human_bytes(free)} free; --weights bound needs a few MB"
        )
    if device is not None:
        gpu = device_info(device)
        if needed.device > gpu.total_bytes:
            raise InputError(
                f"running this bundle needs {human_bytes(needed.device)} on the GPU, {gpu.name} "
                f"has {human_bytes(gpu.total_bytes)}: export with a shorter --capacity or another "
                "--dtype"
            )


def _distinct_states(specs: Mapping[str, EngineSpec]) -> list[EngineSpec]:
    """The specs, with a state that several engines share left in the first of them only."""
    seen: set[str] = set()
    kept = []
    for spec in specs.values():
        states = tuple(pair for pair in spec.states if pair.input not in seen)
        seen |= {pair.input for pair in states}
        kept.append(EngineSpec(spec.name, spec.inputs, spec.outputs, states))
    return kept


def _chain_bytes(spec: EngineSpec) -> int:
    swapped = any(not pair.in_place for pair in spec.states)  # the trunk: everything that comes out
    outputs = sum(t.nbytes for t in spec.outputs) * (2 if swapped else 1)
    states = sum(pair.tensors[0].nbytes * (1 if pair.in_place else 2) for pair in spec.states)
    return sum(t.nbytes for t in spec.inputs) + outputs + states
