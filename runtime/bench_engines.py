"""What `bench` measures: the engines of a bundle, or of a published pair's sizes, random weights.

Weights need not exist: random values made on the device are as fast and prove the speed without a
download.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from eagle_chain.engines.child import module_command, module_environment
from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.extras import require
from eagle_chain.engines.limits import HEADS
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.spec import Options, TensorSpec
from eagle_chain.engines.strict_json import decode
from eagle_chain.runtime.buffers import Buffer, Memory
from eagle_chain.runtime.cuda import CudaMemory
from eagle_chain.runtime.drafters import DRAFT_ENGINES
from eagle_chain.runtime.load import Backend, of_capacity, open_engines
from eagle_chain.runtime.measure import LOOKED_UP, random_tensors, weight_bytes
from eagle_chain.runtime.ort_cuda import OrtCudaSession, without_weights
from eagle_chain.runtime.session import Session
from eagle_chain.runtime.trt import TrtSession

SHAPES = ("qwen3.5-9b",)
DRAFT, MTP = DRAFT_ENGINES["eagle"][1:], DRAFT_ENGINES["mtp"][1:]
ENCODER = ("draft.fc.", "draft.fc_norm.", "draft.input_norm.")  # starts of its weights' names


@dataclass(frozen=True)
class Engines:
    """What is measured."""

    sessions: Mapping[str, Session]
    weights: Mapping[str, int]  # engine -> bytes of weights that one call reads
    options: Options
    label: str
    drafter: str | None  # whose engines are measured, one of `DRAFT_ENGINES`; None: there is none

    @property
    def memory(self) -> Memory:
        """Where they run."""
        return self.sessions["trunk"].memory

    def at(self, position: int) -> Engines:
        """Those that a chain runs at a position: of the smallest capacity that holds a call."""
        capacity = self.options.capacity_at(position)
        sessions = of_capacity(self.sessions, self.options, capacity)
        return replace(self, sessions=sessions, options=self.options.at(capacity))


def of_bundle(
    folder: Path, backend: Backend, threads: int | None, drafter: str | None = None
) -> Engines:
    """The engines of a bundle, those of its best drafter unless another is named.

    Raises:
        InputError: As `open_engines`, or the bundle does not have that drafter.
    """
    loaded = open_engines(folder, backend, threads=threads)
    manifest, read = loaded.manifest, {}
    has = [name for name in DRAFT_ENGINES if name in loaded.drafters]
    if drafter is not None and drafter not in has:
        raise InputError(
            f"{folder}: has no engines of the drafter {drafter}, only of {', '.join(has) or 'none'}"
        )
    for name, session in loaded.sessions.items():
        if specs := _bound(session):
            read[name] = weight_bytes(specs, head=head_of(name, manifest.trunk, manifest.draft))
        else:
            read[name] = _stored_bytes(manifest, name)
    label = f"{folder.name} on {loaded.backend}, profile {manifest.options.profile}"
    chosen = drafter or (has[0] if has else None)
    return Engines(loaded.sessions, read, manifest.options, label, chosen)


def head_of(engine: str, trunk: TrunkConfig, draft: DraftConfig | None) -> str:
    """The name of the weight that an engine chooses tokens by, "" if it chooses none."""
    if draft is not None and engine in DRAFT:
        return draft.head
    return trunk.head if engine in ("trunk", *MTP) else ""


def _bound(session: Session) -> tuple[TensorSpec, ...]:
    """The weights that an engine is given, none if they are part of it."""
    if isinstance(session, TrtSession):
        return session.engine.weights
    return session.weights if isinstance(session, OrtCudaSession) else ()


def _stored_bytes(manifest: Manifest, engine: str) -> int:
    """Bytes that an engine's weights take in the checkpoint."""
    total, head = 0, head_of(engine, manifest.trunk, manifest.draft)
    for name, weight in manifest.weights.items():
        if name == head:
            read = True
        elif name.endswith(LOOKED_UP) or name in HEADS:  # another engine's head
            read = False
        elif name.startswith(ENCODER):
            read = engine == "encoder"
        elif name.startswith("draft."):
            read = engine in DRAFT
        elif name.startswith("mtp."):
            read = engine in MTP
        else:
            read = engine == "trunk"
        total += weight.nbytes * read
    return total


def of_shapes(
    folder: Path,
    name: str,
    options: Options,
    shared: Engines | None = None,
    drafter: str = "eagle",
) -> Engines:
    """Engines of a published pair's sizes, the trunk's and those of one of `DRAFT_ENGINES`.

    `shared` lends its device and its weights. A trunk for one row comes alone: no draft stands
    behind it.
    """
    require("onnxruntime", "onnx", "onnx_ir")
    memory = shared.memory if shared else CudaMemory()
    assert isinstance(memory, CudaMemory), "shapes are measured on a GPU"
    given = {f"--{field}": getattr(options, field) for field in ("width", "capacity", "dtype")}
    given |= {"--profile": options.profile} | ({"--kv": options.kv} if options.kv else {})
    given |= {"--prefill": options.prefill, "--drafter": drafter}
    words = (str(word) for pair in given.items() for word in pair)
    command = module_command("eagle_chain.export.shapes", name, "-o", str(folder), *words)
    subprocess.run(command, env=module_environment(), check=True)
    described = json.loads((folder / "shapes.json").read_text())
    trunk = decode(TrunkConfig, described["trunk"])
    draft = decode(DraftConfig, described["draft"]) if described["draft"] else None
    specs = engine_specs(trunk, draft, options, described["mtp"])
    made = specs if options.width > 1 else {"trunk": specs["trunk"]}
    sessions = without_weights(folder, made, options, memory)
    _give(sessions, memory, shared)
    read = {
        engine: weight_bytes(session.weights, head=head_of(engine, trunk, draft))
        for engine, session in sessions.items()
    }
    return Engines(sessions, read, options, f"{name}, profile {options.profile}", drafter)


def _give(
    sessions: Mapping[str, OrtCudaSession], memory: CudaMemory, shared: Engines | None
) -> None:
    """Random weights, those of the engines that are measured already where they are the same."""
    held: dict[TensorSpec, Buffer] = {}
    for session in shared.sessions.values() if shared else ():
        assert isinstance(session, OrtCudaSession), "shapes run on this backend"
        held |= {spec: session.bound[spec.name] for spec in session.weights}
    wanted = dict.fromkeys(spec for session in sessions.values() for spec in session.weights)
    made = held | random_tensors((spec for spec in wanted if spec not in held), memory)
    for session in sessions.values():
        session.bound = {spec.name: made[spec] for spec in session.weights}
