"""A pair of models in lines for people: sizes, variant, and where each setting comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.draft_keys import FLAGS
from eagle_chain.engines.overrides import NONE, DraftOverrides
from eagle_chain.engines.spec import Options


def pair_lines(
    trunk: TrunkConfig,
    draft: DraftConfig | None,
    ignored: Mapping[str, int],
    options: Options,
    overrides: DraftOverrides = NONE,
    *,
    mtp: bool,
) -> list[str]:
    """What a pair is and what engines are made of it, a line each."""
    lines = [f"trunk    {trunk_line(trunk)}"]
    sizes = ", ".join(map(str, options.capacities))
    capacity = f"{'capacities' if options.smaller else 'capacity'} {sizes}"
    if draft is not None:
        lines += draft_lines(draft, overrides)
    if mtp:
        lines.append("mtp      the trunk's own draft head, one layer; shares embedding and head")
    return [
        *lines,
        f"ignored  {ignored_line(ignored)}",
        f"engines  width {options.width}, {capacity}, {options.dtype}, "
        f"KV {options.kv_type}, profile {options.profile}",
    ]


def trunk_line(trunk: TrunkConfig) -> str:
    """A trunk in one line."""
    kinds = Counter(trunk.layer_types)
    return (
        f"{len(trunk.layer_types)} layers ({kinds['linear_attention']} linear, "
        f"{kinds['full_attention']} full attention), hidden {trunk.hidden_size}, "
        f"vocabulary {trunk.vocab_size}, {'tied' if trunk.tied_head else 'own'} head"
    )


def draft_lines(draft: DraftConfig, overrides: DraftOverrides = NONE) -> list[str]:
    """A draft, its variant and which layers it reads, a line each."""
    layers = ", ".join(map(str, draft.aux_layers))
    source = f" ({draft.aux_source})" if draft.aux_source else ""
    lines = [
        f"draft    {draft_line(draft)}",
        f"variant  {variant_line(draft)}",
        f"features outputs of layers {layers}{source}",
    ]
    words = overrides.words()
    return [*lines, f"override {' '.join(words)}"] if words else lines


def source_lines(draft: DraftConfig) -> list[str]:
    """Where the flags of a draft come from, and what its file cannot tell, a line each."""
    titles = ["flags   ", *["        "] * len(draft.sources)]
    lines = [f"{title} {text}" for title, text in zip(titles, draft.sources, strict=False)]
    if draft.rotary_dim < draft.head_dim:
        lines.append(
            f"check    rotary {draft.rotary_dim} of {draft.head_dim} dims: many trainers rotate "
            f"the whole head whatever the config says; compare with --rotary-dim {draft.head_dim}"
        )
    return lines


def variant_line(draft: DraftConfig) -> str:
    """What is special about a draft, in one line."""
    own = {True: "own", False: "the trunk's"}
    parts = [name for name in FLAGS if getattr(draft, name)]
    if draft.qk_norm:
        parts.append("norms on queries and keys")
    if not draft.fc:
        parts.append("no fc")
    if draft.biases:
        short = [name.rpartition(".")[2].removesuffix("_proj") for name in draft.biases]
        parts.append(f"biases on {', '.join(short)}")
    if draft.absolute_d2t:
        parts.append("d2t of absolute ids")
    if draft.logit_scale != 1:
        parts.append(f"logits times {draft.logit_scale:g}")
    embedding = f"{own[draft.embedding.startswith('draft.')]} embedding"
    head = f"{own[draft.head.startswith('draft.')]} head"
    if draft.head.endswith("embed_tokens.weight"):
        head = "the embedding as head"
    return f"{', '.join(parts) or 'plain EAGLE-3'}; {embedding}, {head}"


def draft_line(draft: DraftConfig) -> str:
    """A draft in one line."""
    return (
        f"hidden {draft.hidden_size}, vocabulary {draft.draft_vocab_size} of {draft.vocab_size}, "
        f"rotary {draft.rotary_dim} of {draft.head_dim} dims, base {draft.rope_theta:g}"
    )


def ignored_line(ignored: Mapping[str, int]) -> str:
    """The tensors that are not used, in one line."""
    counts = [f"{count} {kind}" for kind, count in sorted(ignored.items())]
    return f"{', '.join(counts)} tensors" if counts else "no tensors"
