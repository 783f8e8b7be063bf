"""A bundle's draft read in other ways: all of them over one trunk, or one as a bundle of its own.

Neither reads a checkpoint: the graphs are authored again, over the weights that the bundle names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from eagle_chain.engines import strict_json
from eagle_chain.engines.cli import dispatch
from eagle_chain.engines.config import DraftConfig
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.integrity import file_hash
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.overrides import DraftOverrides
from eagle_chain.runtime import ort_cuda
from eagle_chain.runtime.along import Found, Layer, Text, encode, record
from eagle_chain.runtime.buffers import Memory
from eagle_chain.runtime.load import Engines, bundle_stop_ids
from eagle_chain.runtime.ort_bound import open_bound
from eagle_chain.runtime.session import Session


@dataclass(frozen=True)
class Setting:
    """How a draft is read and run."""

    draft: DraftConfig
    scratch: bool = False  # whether its KV starts over in each round


class Trial:
    """Settings of a draft, judged on the features of one trunk.

    The trunk is loaded once and leaves the features of all layers that any setting reads. What a
    setting changes beside them is in the draft layer alone, and all layers share one copy of the
    weights.

    Args:
        bundle: The bundle.
        manifest: Its manifest.
        drafts: All settings that may be asked about.
        capacity: Longest text in tokens.
        folder: Where graphs go.
        backend: onnxruntime-cpu or onnxruntime-cuda.
        threads: CPU threads of one operator.

    Raises:
        InputError: A package is missing, or the backend cannot run the bundle.
    """

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        drafts: Sequence[DraftConfig],
        capacity: int,
        folder: Path,
        backend: str,
        threads: int | None,
    ) -> None:
        self.texts: list[Text] = []
        self.judged: dict[Setting, Found] = {}
        self._most = manifest.options.width - 1
        self._hidden = manifest.trunk.hidden_size
        self._taps = sorted({layer for draft in drafts for layer in draft.aux_layers})
        self._aux_layers = drafts[0].aux_layers
        layers = list(dict.fromkeys(map(self._layer, drafts)))
        self._names = {layer: f"draft_step.{i}" for i, layer in enumerate(layers)}
        plan = {"trunk": replace(drafts[0], aux_layers=tuple(self._taps)), "encoder": drafts[0]}
        plan |= {name: layer for layer, name in self._names.items()}
        options = manifest.options.at(capacity)
        author(bundle, plan, folder, capacity)
        specs = {}
        for name, draft in plan.items():
            spec = engine_specs(manifest.trunk, draft, options)[name.partition(".")[0]]
            specs[name] = replace(spec, name=name)
        held = replace(manifest, options=options, specs=specs)
        opened: tuple[Memory, dict[str, Session]] = (
            ort_cuda.open_sessions(folder, held)
            if backend == "onnxruntime-cuda"
            else open_bound(folder, held, threads)
        )
        stop_ids = bundle_stop_ids(bundle, manifest)
        engines = Engines(held, backend, *opened, stop_ids)
        self._sessions = engines.sessions
        self._chain = engines.chain(drafter="none", ahead=False)
        self._encoded: dict[tuple[int, ...], list[NDArray[Any]]] = {}

    def read(self, prompts: Sequence[Sequence[int]], new: int, done: Callable[[int], None]) -> None:
        """Decode the texts that settings are judged on; `done` hears how many there are.

        Raises:
            FloatingPointError: As in `Chain.stream`.
        """
        for prompt in prompts:
            done(len(self.texts))
            self.texts.append(record(self._chain, prompt, new))

    def found(self, setting: Setting) -> Found:
        """What a setting gives on the texts; judged once."""
        if setting not in self.judged:
            layer = Layer(self._sessions[self._names[self._layer(setting.draft)]])
            right = [
                layer.right_drafts(text, g, self._most, scratch=setting.scratch)
                for text, g in zip(self.texts, self._g(setting.draft.aux_layers), strict=True)
            ]
            self.judged[setting] = Found(self.texts, right)
        return self.judged[setting]

    def _layer(self, draft: DraftConfig) -> DraftConfig:
        """The setting with what its layer does not know of made the same."""
        return replace(draft, aux_layers=self._aux_layers)

    def _g(self, aux_layers: tuple[int, ...]) -> list[NDArray[Any]]:
        """The encoded features of every text."""
        if aux_layers not in self._encoded:
            starts = [self._taps.index(layer) * self._hidden for layer in aux_layers]
            columns = [start + i for start in starts for i in range(self._hidden)]
            encoder = self._sessions["encoder"]
            self._encoded[aux_layers] = [
                encode(encoder, t.features[:, columns]) for t in self.texts
            ]
        return self._encoded[aux_layers]


def author(
    bundle: Path, plan: Mapping[str, DraftConfig], folder: Path, capacity: int | None = None
) -> None:
    """Author the graphs of a plan (see `export.variants`) into a new folder with the weights."""
    path = folder / "plan.json"
    sized = [] if capacity is None else ["--capacity", str(capacity)]
    try:
        folder.mkdir()
        (folder / "weights").symlink_to((bundle / "weights").resolve())
        path.write_text(strict_json.dumps(strict_json.encode(plan)))
        dispatch(["variants", str(bundle), str(path), "-o", str(folder), *sized])
    except OSError as error:
        raise InputError(
            f"{folder}: graphs cannot be written there ({error.strerror}): make room, or set "
            "TMPDIR to another folder"
        ) from None


def write_variant(
    bundle: Path, manifest: Manifest, draft: DraftConfig, overrides: DraftOverrides, folder: Path
) -> None:
    """Write a bundle that differs from another in how its draft is read."""
    author(bundle, dict.fromkeys(manifest.specs, draft), folder)
    if (bundle / "tokenizer").exists():
        (folder / "tokenizer").symlink_to((bundle / "tokenizer").resolve())
    replace(
        with_overrides(manifest, overrides),
        draft=draft,
        specs=engine_specs(manifest.trunk, draft, manifest.options, manifest.mtp),
        graphs={name: file_hash(folder / name) for name in manifest.graphs},
        plans={},
    ).save(folder)


def with_overrides(manifest: Manifest, overrides: DraftOverrides) -> Manifest:
    """The manifest as if its draft had been exported with other overrides."""
    others = len(manifest.arguments) - len(manifest.overrides.words())
    arguments = (*manifest.arguments[:others], *overrides.words())
    return replace(manifest, arguments=arguments, overrides=overrides)
