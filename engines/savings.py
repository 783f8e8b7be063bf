"""What a bundle could be exported with to take less memory: KV in a smaller type, or shorter."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace

from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.progress import human_bytes
from eagle_chain.engines.spec import EngineSpec, Options

SMALLEST = "q8_0/q5_1"
STEP = 64  # capacities are told in multiples of this
Held = Callable[[Mapping[str, EngineSpec], Options], int]


def savings(
    manifest: Manifest, held: Held, lacking: int, *, shorten: int = -1, quantised: bool = True
) -> str:
    """Options of `export` that save as many bytes as are lacking, and what each of them saves.

    Where KV is not what is large nothing helps, and both together are named only where neither
    does alone.

    Args:
        manifest: Of the bundle.
        held: The bytes that engines of these specs and options hold.
        lacking: How many of them are too many.
        shorten: Which of the capacities may be shortened, 0 the smallest, -1 the largest.
        quantised: Whether what runs the bundle takes KV in ggml's types.

    Returns:
        "--kv q8_0/q5_1 (saves 10.3 GB) or --capacity 32768 (saves 9.9 GB)", "" if nothing helps.
    """
    options = manifest.options
    now = held(manifest.specs, options)

    def saved(changed: Options) -> int:
        specs = engine_specs(manifest.trunk, manifest.draft, changed, manifest.mtp)
        return now - held(specs, changed)

    def told(changed: Options) -> str:
        words = [f"--kv {changed.kv}"] if changed.kv != options.kv else []
        if changed.capacities != options.capacities:
            words.append(f"--capacity {','.join(map(str, changed.capacities))}")
        return f"{' '.join(words)} (saves {human_bytes(saved(changed))})"

    def shorter(changed: Options) -> Options | None:
        """The largest capacity that saves enough."""
        at = range(len(options.capacities))[shorten]
        below = options.capacities[at - 1] if at else 0
        sizes = range((below // STEP + 1) * STEP, options.capacities[at], STEP)
        enough = bisect_right(sizes, -lacking, key=lambda n: -saved(_resized(changed, at, n)))
        return _resized(changed, at, sizes[enough - 1]) if enough else None

    smaller = _smaller(manifest, quantised)
    alone = [smaller] if smaller and saved(smaller) >= lacking else []
    alone += [short] if (short := shorter(options)) else []
    if not alone and smaller and (short := shorter(smaller)):
        alone = [short]
    return " or ".join(map(told, alone))


def _resized(options: Options, at: int, size: int) -> Options:
    """The options with another size in the place of one capacity."""
    sizes = list(options.capacities)
    sizes[at] = size
    return replace(options, smaller=tuple(sizes[:-1]), capacity=sizes[-1])


def _smaller(manifest: Manifest, quantised: bool) -> Options | None:
    """The options with the smallest KV type that the heads allow, None if it is that already."""
    options = manifest.options
    if options.kv_type == SMALLEST:
        return None
    half = "bf16" if options.dtype == "bf16" else "fp16"
    kinds = [SMALLEST] if quantised else []
    kinds += [half] if options.kv_type == "fp32" else []
    for kind in kinds:
        changed = replace(options, kv=kind)
        try:
            engine_specs(manifest.trunk, manifest.draft, changed, manifest.mtp)
        except InputError:
            continue  # a head is no whole number of blocks
        return changed
    return None
