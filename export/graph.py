"""The graphs of a pair: trunk, encoder, draft (W rows), draft_step (1 row), and for prompts two."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.manifest import Weight, engine_specs
from eagle_chain.engines.spec import Options
from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.draft import record_draft, record_encoder
from eagle_chain.export.fused import (
    Fused,
    FusedTrunk,
    record_fused_draft,
    record_fused_encoder,
)
from eagle_chain.export.lowering import Portable
from eagle_chain.export.ort_cuda import OrtCuda, OrtCudaTrunk
from eagle_chain.export.prefill import Prefill, PrefillRows, record_draft_prefill
from eagle_chain.export.prefill_cuda import FusedPrefill, OrtCudaPrefill, StockFused
from eagle_chain.export.standard import Standard
from eagle_chain.export.trunk import TrunkGraph

TRUNKS: dict[str, type[TrunkGraph]] = {"ort-cuda": OrtCudaTrunk, "ort-fused": FusedTrunk}
PREFILLS: dict[str, type[PrefillRows]] = {"ort-cuda": OrtCudaPrefill, "ort-fused": FusedPrefill}
STANDARD_PROFILES: dict[str, type[Portable]] = {"portable": Portable, "standard": Standard}
ORT_PROFILES: dict[str, type[Portable]] = {"ort-cuda": OrtCuda, "ort-fused": Fused}


def build_graphs(
    trunk: TrunkConfig, draft: DraftConfig, weights: Mapping[str, Weight], options: Options
) -> dict[str, onnx.ModelProto]:
    """Author every graph; weights stay in the files that `weights` names (see `Weight`)."""
    graphs = {}
    for name, spec in engine_specs(trunk, draft, options).items():
        profile = (STANDARD_PROFILES | ORT_PROFILES)[options.profile]
        if name in ("prefill", "draft_prefill") and profile is Fused:
            profile = StockFused
        g = GraphBuilder(spec, weights, options.dtype, profile.opset)
        low = profile(g)
        if name == "prefill":
            wide = PREFILLS.get(options.profile, Prefill)
            wide(g, low, trunk, draft.aux_layers, options).record()
        elif name == "draft_prefill":
            record_draft_prefill(g, low, draft, options)
        elif name == "trunk":
            kind = TRUNKS.get(options.profile, TrunkGraph)
            kind(g, low, trunk, draft.aux_layers, options).record()
        elif isinstance(low, Fused):
            _record_fused(name, g, low, draft, options)
        else:
            _record(name, g, low, draft, options)
        graphs[name] = g.model()
    return graphs


def _record(
    name: str, g: GraphBuilder, low: Portable, draft: DraftConfig, options: Options
) -> None:
    if name == "encoder":
        record_encoder(g, low, draft)
    else:
        record_draft(g, low, draft, 1 if name == "draft_step" else options.width, options)


def _record_fused(
    name: str, g: GraphBuilder, low: Fused, draft: DraftConfig, options: Options
) -> None:
    if name == "encoder":
        record_fused_encoder(g, low, draft)
    else:
        record_fused_draft(g, low, draft, 1 if name == "draft_step" else options.width, options)
