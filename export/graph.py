"""The graphs of a bundle: trunk, encoder, draft layers over W rows and one, some for prompts."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.manifest import Weight
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
from eagle_chain.export.mtp import record_fused_mtp, record_mtp, record_mtp_prefill
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
    trunk: TrunkConfig,
    draft: DraftConfig | None,
    weights: Mapping[str, Weight],
    options: Options,
    mtp: bool = False,
    only: Collection[str] = (),
) -> dict[str, onnx.ModelProto]:
    """Author every graph; weights stay in the files that `weights` names (see `Weight`).

    Args:
        trunk: The trunk.
        draft: Its EAGLE-3 draft, if there is one.
        weights: Every tensor of both.
        options: Of all engines.
        mtp: Whether to author those of the trunk's own head.
        only: Names of graphs; empty means all.
    """
    aux_layers = draft.aux_layers if draft else ()
    graphs = {}
    for name, spec in engine_specs(trunk, draft, options, mtp).items():
        if only and name not in only:
            continue
        plain, sized = options.of_engine(name)
        profile = (STANDARD_PROFILES | ORT_PROFILES)[options.profile]
        if spec.reads_prompts and profile is Fused:
            profile = StockFused
        g = GraphBuilder(spec, weights, options.dtype, profile.opset)
        low = profile(g)
        if plain == "prefill":
            wide = PREFILLS.get(options.profile, Prefill)
            wide(g, low, trunk, aux_layers, sized).record()
        elif plain == "trunk":
            kind = TRUNKS.get(options.profile, TrunkGraph)
            kind(g, low, trunk, aux_layers, sized).record()
        elif plain.startswith("mtp"):
            _record_mtp(plain, g, low, trunk, sized)
        else:
            assert draft is not None, "all other engines are a draft's"
            _record_draft(plain, g, low, draft, sized)
        graphs[name] = g.model()
    return graphs


def _record_draft(
    name: str, g: GraphBuilder, low: Portable, draft: DraftConfig, options: Options
) -> None:
    rows = 1 if name == "draft_step" else options.width
    if name == "draft_prefill":
        record_draft_prefill(g, low, draft, options)
    elif isinstance(low, Fused):
        if name == "encoder":
            record_fused_encoder(g, low, draft)
        else:
            record_fused_draft(g, low, draft, rows, options)
    elif name == "encoder":
        record_encoder(g, low, draft)
    else:
        record_draft(g, low, draft, rows, options)


def _record_mtp(
    name: str, g: GraphBuilder, low: Portable, trunk: TrunkConfig, options: Options
) -> None:
    rows = 1 if name == "mtp_step" else options.width
    if name == "mtp_prefill":
        record_mtp_prefill(g, low, trunk, options)
    elif isinstance(low, Fused):
        record_fused_mtp(g, low, trunk, rows, options)
    else:
        record_mtp(g, low, trunk, rows, options)
