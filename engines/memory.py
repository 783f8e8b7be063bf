"""How much memory building and running a bundle takes, and how much there is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle_chain.engines.config import TrunkConfig
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.gpu import device_info
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.progress import human_bytes
from eagle_chain.engines.savings import savings
from eagle_chain.engines.spec import (
    ATTENTION_SCORES,
    ITEM_BYTES,
    EngineSpec,
    Options,
    TensorSpec,
)

# Measured with TensorRT-RTX: the process itself, and what each node of a graph adds to it.
BUILDER_BYTES = 250_000_000
NODE_BYTES = 110_000
BAKED_COPIES = 3  # of a graph's weights: as parsed, as optimised, in the plan
# By backend: what its GPU libraries (workspaces, code of kernels, constants of graphs) take beside
# weights and chains. Measured values only; what is not here counts as nothing.
LIBRARIES = {"onnxruntime-cuda": 600_000_000}
KERNEL_CHUNK = 64  # rows of a chunk of the delta rule in the kernels of `ort-fused`


@dataclass(frozen=True)
class Estimate:
    """Bytes; all but `build_host` are exact, apart from TensorRT's scratch memory."""

    weights: int  # on the device: each tensor once, in the dtype of the engines
    states: int  # what one chain holds beside them, see `chain_bytes`
    build_host: int  # peak of the building process

    @property
    def device(self) -> int:
        """Device memory of one chain."""
        return self.weights + self.states


def estimate(
    states: int, weights: Mapping[str, Iterable[TensorSpec]], nodes: int, baked: bool
) -> Estimate:
    """Memory for engines that use these weights, the largest graph having `nodes` nodes."""
    used = [tensor for tensors in weights.values() for tensor in tensors]
    distinct = {tensor.name: tensor for tensor in used}.values()
    on_device = sum(tensor.nbytes for tensor in (used if baked else distinct))
    build = BUILDER_BYTES + nodes * NODE_BYTES
    if baked:
        build += BAKED_COPIES * max(sum(t.nbytes for t in tensors) for tensors in weights.values())
    return Estimate(on_device, states, build)


@dataclass(frozen=True)
class Needs:
    """Bytes that a chain holds at one capacity; all but `scratch` exact to a few per cent."""

    kv: int  # of trunk and drafts, in place
    states: int  # recurrent states and conv windows, two buffers each
    logs: int  # of the last call's rows, two buffers each
    buffers: int  # what engines are fed and what they leave beside their states
    scratch: int  # what an engine needs while it runs; an estimate, one engine runs at a time

    @property
    def held(self) -> int:
        """What stays allocated between two calls."""
        return self.kv + self.states + self.logs + self.buffers

    @property
    def total(self) -> int:
        """All of it."""
        return self.held + self.scratch


def chain_needs(
    specs: Mapping[str, EngineSpec], options: Options, trunk: TrunkConfig
) -> dict[int, Needs]:
    """What a chain needs beside the weights, by capacity; each is allocated when first needed."""
    needs = {}
    for capacity in options.capacities:
        names = options.engines_at(capacity, specs)
        own = of_one_drafter({plain: specs[name] for plain, name in names.items()})
        pairs = {pair.input: pair for spec in own.values() for pair in spec.states}
        sizes = {"kv": 0, "states": 0, "logs": 0}
        for pair in pairs.values():
            kind = "kv" if pair.rows_axis is not None else "states"
            kind = "logs" if ".log_" in pair.input else kind
            sizes[kind] += pair.held_bytes
        buffers = sum(_plain_bytes(plain, spec, options.width) for plain, spec in own.items())
        features = sum(t.shape[-1] for t in own["trunk"].outputs if t.name == "features")
        scratch = _scratch(options.at(capacity), trunk, features)
        needs[capacity] = Needs(**sizes, buffers=buffers, scratch=scratch)
    return needs


def chain_bytes(specs: Mapping[str, EngineSpec], options: Options, trunk: TrunkConfig) -> int:
    """What a chain holds at all capacities together, the scratch of its engines left out."""
    return sum(needs.held for needs in chain_needs(specs, options, trunk).values())


def check_load(
    manifest: Manifest,
    weights: int,
    free: int,
    device: str,
    backend: str = "",
    *,
    quantised: bool = True,
) -> None:
    """Refuse, before anything is uploaded, what this device cannot hold even at first.

    Args:
        manifest: Of the bundle.
        weights: Bytes of all weights as they are uploaded.
        free: Bytes that nobody uses on the device before an engine is loaded.
        device: Its name.
        backend: Whose libraries come on top, see `LIBRARIES`.
        quantised: Whether the engines could have KV in ggml's types there.

    Raises:
        InputError: Weights and a chain at the smallest capacity take more than is free.
    """

    def first(specs: Mapping[str, EngineSpec], options: Options) -> Needs:
        return next(iter(chain_needs(specs, options, manifest.trunk).values()))

    needs, libraries = first(manifest.specs, manifest.options), LIBRARIES.get(backend, 0)
    lacking = weights + libraries + needs.total - free
    if lacking <= 0:
        return
    loaded = f", GPU libraries {human_bytes(libraries)}" if libraries else ""
    other = savings(
        manifest,
        lambda specs, options: first(specs, options).total,
        lacking,
        shorten=0,
        quantised=quantised,
    )
    raise InputError(
        f"the weights take {human_bytes(weights)}{loaded} and a chain of "
        f"{manifest.options.capacities[0]} tokens {human_bytes(needs.total)}, "
        f"{human_bytes(needs.kv)} of it KV; {device} has "
        f"{human_bytes(free)} of memory free: end other programs on it, or export with "
        f"{other or 'another --dtype'}"
    )


def of_one_drafter(specs: Mapping[str, EngineSpec]) -> dict[str, EngineSpec]:
    """A chain has one drafter: the bundle's draft if there is one, unless another is asked for."""
    left_out = "mtp" if "draft" in specs else ()
    return {name: spec for name, spec in specs.items() if not name.startswith(left_out)}


def prompt_scratch(trunk: TrunkConfig, rows: int) -> int:
    """Bytes that the kernels of `ort-fused` leave for one another in a linear layer of a prompt.

    `run_prompt` in engines/kernels/library.cu; of one layer at a time, two triangles for a chunk.
    """
    padded = -(-rows // KERNEL_CHUNK) * KERNEL_CHUNK
    heads, keys = trunk.linear_value_heads, trunk.linear_key_heads * trunk.linear_key_dim
    of_row = trunk.conv_channels + heads * trunk.linear_value_dim
    return 4 * (rows * of_row + padded * (2 * keys + heads * (4 + 2 * KERNEL_CHUNK)))


def _plain_bytes(plain: str, spec: EngineSpec, width: int) -> int:
    inputs, outputs = (sum(t.nbytes for t in tensors) for tensors in (spec.inputs, spec.outputs))
    if plain == "trunk":  # one set per parity
        return 2 * (inputs + outputs)
    if plain.endswith("_step"):  # a guess leaves its outputs for the next
        return max(0, width - 2) * outputs
    if plain.endswith("_prefill"):  # all but the ids is the prefill's own
        return spec.inputs[0].nbytes
    return inputs + outputs


def _scratch(options: Options, trunk: TrunkConfig, features: int) -> int:
    """Activations of the largest call: MLP and delta rule of all rows, scores, logits.

    What is alive at once, as ONNX Runtime and TensorRT reuse the memory of what is not; attention
    in primitives takes `ATTENTION_SCORES` of a prompt at a time, and all W rows of a call.
    """
    rows, item = max(options.width, options.prefill), ITEM_BYTES[options.dtype]
    wide = 3 * trunk.intermediate_size + 4 * trunk.hidden_size
    if options.profile == "ort-fused":
        linear = rows * _linear_row(trunk, item, features) + prompt_scratch(trunk, rows)
    else:
        heads = trunk.linear_value_heads * (trunk.linear_value_dim + 64)
        linear = rows * (trunk.conv_channels * (item + 3 * 4) + 6 * 4 * heads)
    row = trunk.attention_heads * options.kv_rows
    attention = 3 * 4 * max(row * options.width, min(row * options.prefill, ATTENTION_SCORES))
    own_kernels = options.profile == "ort-fused" and not options.prefill
    if own_kernels or (options.for_cuda and options.kv_type == options.dtype):
        attention = 0  # never as a whole
    elif options.kv_type != options.dtype:
        attention += 4 * 4 * trunk.kv_heads * trunk.head_dim * options.kv_rows
    logits = options.width * trunk.vocab_size * (item + 4)
    return max(rows * wide * item, linear, attention, logits)


def _linear_row(trunk: TrunkConfig, item: int, features: int) -> int:
    """Bytes of a row in a linear layer of `ort-fused`: projections, result, residual, features."""
    values = trunk.linear_value_heads * (trunk.linear_value_dim + 1)
    return item * (trunk.conv_channels + 2 * values + trunk.hidden_size + features)


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


def check_room(
    folder: Path,
    needed: Estimate,
    weights: str,
    device: int | None,
    other: Callable[[int], str] = lambda lacking: "",
) -> None:
    """Refuse, with the numbers, what cannot fit in this memory, on this disk, on this GPU.

    Args:
        folder: The bundle.
        needed: What it takes.
        weights: bound or baked.
        device: The GPU that is to run it; None if that is another machine's.
        other: What to export with to save so many bytes there, see `savings`.
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
        if (lacking := needed.device - gpu.total_bytes) > 0:
            raise InputError(
                f"running this bundle needs {human_bytes(needed.device)} on the GPU, {gpu.name} "
                f"has {human_bytes(gpu.total_bytes)}: export with "
                f"{other(lacking) or 'another --dtype'}"
            )
