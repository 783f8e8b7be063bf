"""The command `tune`: which settings of a draft a text speaks for, among those no file can tell."""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle_chain.engines.config import DraftConfig
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.extras import require
from eagle_chain.engines.fields import read_json
from eagle_chain.engines.flavours import FLAVOURS
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.outcome import Outcome
from eagle_chain.engines.progress import counted, phases
from eagle_chain.runtime.along import Found
from eagle_chain.runtime.evidence import judged_tokens, too_few, wanted
from eagle_chain.runtime.load import (
    BACKENDS,
    Backend,
    Engines,
    check_threads,
    onnxruntime_for,
    open_engines,
    runnable,
)
from eagle_chain.runtime.payoff import capacity_for, confirm, fastest, part_times, speeds
from eagle_chain.runtime.plots import PLOT_HELP, check_plot, drawn
from eagle_chain.runtime.prompts import (
    TextFile,
    add_prompt_arguments,
    asked_prompts,
    check_prompt_sizes,
    read_text,
)
from eagle_chain.runtime.search import changes, every_setting, overrides_for, search, surely_better
from eagle_chain.runtime.tokenizer import Tokenizer
from eagle_chain.runtime.trial import Setting, Trial, write_variant
from eagle_chain.runtime.tune_report import advice, plot, rows, tables, verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `eagle-chain tune` takes."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="what `export` wrote")
    add_prompt_arguments(parser, "text like that to be decoded,", prompts=24, new_tokens=64)
    parser.add_argument(
        "-k", type=int, help="guesses per trunk pass as it is run now (all the width allows)"
    )
    parser.add_argument(
        "--draft-kv", choices=("kept", "scratch"), default="kept", help="as it is run now (kept)"
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,  # those of TensorRT are refused with the way to go
        metavar="{auto,onnxruntime-cpu,onnxruntime-cuda}",
        default="auto",
        help="what runs it (auto: the ONNX Runtime of the profile)",
    )
    parser.add_argument("--threads", type=int, help="CPU threads (all)")
    parser.add_argument("--plot", metavar="FILE", type=Path, help=PLOT_HELP)


def run(arguments: argparse.Namespace) -> Outcome:
    """Judge settings on one text, confirm the best by a chain, say what to type."""
    text = read_text(arguments.text)
    manifest = Manifest.load(arguments.bundle)
    draft, backend = _checked(arguments, manifest)
    check_plot(arguments.plot)  # now, not after the minutes that tuning takes
    prompts = _different_prompts(arguments, text)
    print(f"text      {text.path}: {text.kind}, SHA-256 {text.sha256[:12]}")
    print(
        f"prompts   {len(prompts)} of {counted(arguments.prompt_tokens, 'token')}, up to "
        f"{arguments.max_new_tokens} new ones each; backend {backend}\n",
        flush=True,
    )
    _warn(_too_few_at_best(arguments, manifest, len(prompts)))
    now = Setting(draft, arguments.draft_kv == "scratch")
    with tempfile.TemporaryDirectory(prefix="eagle-chain-") as temporary:
        folder = Path(temporary)
        best, judged = _judged(arguments, manifest, now, prompts, backend, folder / "trial")
        gc.collect()  # a chain and its cache know each other: one trunk goes, the next comes
        bundle = arguments.bundle
        if best.draft != draft:
            bundle = folder / "best"
            overrides = overrides_for(best.draft, draft, manifest.overrides)
            write_variant(arguments.bundle, manifest, best.draft, overrides, bundle)
        engines = open_engines(bundle, backend, threads=arguments.threads)
        report = _report(arguments, manifest, now, best, judged, engines)
    report = {"text_sha256": text.sha256, **report}
    print(tables(report))
    problem = drawn(plot, report, arguments.plot)
    return Outcome(report, passed=report["confirmed"]["exact"], problem=problem)


def _different_prompts(arguments: argparse.Namespace, text: TextFile) -> list[list[int]]:
    """The prompts, each once: the same one again would look as if there was no noise."""
    cut = asked_prompts(arguments, text, Tokenizer(arguments.bundle))
    prompts = [list(prompt) for prompt in dict.fromkeys(map(tuple, cut))]
    if len(prompts) < 2:
        raise InputError(f"{text.path}: all prompts that were cut from it are the same one")
    return prompts


def _checked(arguments: argparse.Namespace, manifest: Manifest) -> tuple[DraftConfig, Backend]:
    """The draft and what runs it, if all that was asked for can be done."""
    bundle, options = arguments.bundle, manifest.options
    if manifest.draft is None:
        raise InputError(
            f"{bundle}: has no EAGLE draft, and tune is about the settings of one; export it with "
            f"its draft: eagle-chain export TRUNK DRAFT -o {bundle}"
        )
    if arguments.backend in FLAVOURS:
        raise InputError(
            f"--backend is {arguments.backend}, and tune makes graphs that nobody has built: use "
            "onnxruntime-cpu or onnxruntime-cuda, as acceptance hardly depends on the backend, "
            "then export and build with what it finds"
        )
    check_threads(arguments.threads)
    check_prompt_sizes(arguments, options.capacity, prompts=2, new_tokens=options.width)
    if arguments.k is not None and not 1 <= arguments.k < options.width:
        raise InputError(f"-k is {arguments.k}, expected 1 to {options.width - 1}")
    backend = arguments.backend
    if backend == "auto":  # plans would be of no use
        backend = onnxruntime_for(options)
    require("onnx", "onnx_ir")  # graphs are made
    return manifest.draft, runnable(bundle, manifest, backend)


def _judged(
    arguments: argparse.Namespace,
    manifest: Manifest,
    now: Setting,
    prompts: Sequence[Sequence[int]],
    backend: Backend,
    folder: Path,
) -> tuple[Setting, dict[Setting, Found]]:
    """The best setting, and what every setting that was judged gave."""
    most, new = manifest.options.width - 1, arguments.max_new_tokens
    filed = _as_filed(arguments.bundle, manifest, now.draft)
    groups = changes(now.draft, filed, len(manifest.trunk.layer_types))
    drafts = every_setting(now.draft, groups)
    capacity = arguments.prompt_tokens + new
    bundle, threads, count = arguments.bundle, arguments.threads, len(prompts)
    trial = Trial(bundle, manifest, drafts, capacity, folder, backend, threads)
    with phases("tuning") as show:
        try:
            trial.read(prompts, new, lambda done: show("decoding", done, count))
        except FloatingPointError as error:
            raise InputError(f"prompt {len(trial.texts)}: {error}") from error
        if sum(text.rounds(most) > 0 for text in trial.texts) < 2:
            raise InputError(
                f"{arguments.text}: what the trunk makes of it ends or repeats itself before "
                f"{most} drafts can be judged: give another text, or more --max-new-tokens"
            )
        if not _too_few_at_best(arguments, manifest, count):  # or it has been said
            _warn(too_few(count, judged_tokens(trial.texts, most), at_best=False))

        def judge(setting: Setting) -> Found:
            show(f"setting {len(trial.judged) + 1}", 0, 0)
            return trial.found(setting)

        tuned = search(now.draft, filed, groups, lambda d: judge(Setting(d)), most)
        best, other = Setting(tuned, now.scratch), Setting(tuned, not now.scratch)
        if surely_better(judge(other), judge(best), most):
            best = other
        judge(now)
    return best, trial.judged


def _too_few_at_best(arguments: argparse.Namespace, manifest: Manifest, prompts: int) -> str | None:
    """What there is to say of the prompts before one is decoded, if none of them ends early."""
    room = arguments.max_new_tokens - manifest.options.width
    return too_few(prompts, max(1, prompts * room), at_best=True)


def _warn(sentence: str | None) -> None:
    if sentence:
        print(f"warning: {sentence}", file=sys.stderr, flush=True)


def _as_filed(bundle: Path, manifest: Manifest, draft: DraftConfig) -> DraftConfig:
    """The draft with the rotation that its config has, if that can still be read."""
    path = bundle / "weights/draft/config.json"
    others = replace(manifest.overrides, rotary_dim=None, rope_theta=None)
    try:
        return DraftConfig.from_json(read_json(path), manifest.trunk, str(path), others)
    except InputError:
        return draft


def _report(
    arguments: argparse.Namespace,
    manifest: Manifest,
    now: Setting,
    best: Setting,
    judged: Mapping[Setting, Found],
    engines: Engines,
) -> dict[str, Any]:
    """All that was found, and what takes the whole engines to find."""
    most, new, found = manifest.options.width - 1, arguments.max_new_tokens, judged[best]
    capacity = capacity_for(manifest.options, arguments.prompt_tokens + new)
    with phases("tuning") as show:
        show("timing", 0, 0)
        parts = part_times(engines, arguments.prompt_tokens, capacity)
        by_k = speeds(found, parts, most, scratch=best.scratch)
        asked = arguments.k or most
        k = fastest(by_k, asked)
        show("confirming", 0, 0)
        confirmed = confirm(engines, found.texts, k, new, scratch=best.scratch)
    settings, count = rows(judged, now, best, most), len(found.texts)
    tokens = judged_tokens(found.texts, most)
    few = too_few(count, tokens, at_best=False)
    return {
        "text": str(arguments.text),
        "prompts": count,
        "prompts_wanted": wanted(count, tokens),
        "judged_tokens": tokens,
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": sum(len(text.chosen) for text in found.texts),
        "backend": engines.backend,
        "most": most,
        "settings": settings,
        "capacity": capacity,
        "parts_ms": parts,
        "speeds": by_k,
        "best": advice(arguments.bundle, manifest, now, best, k),
        "confirmed": {**confirmed, "judged_tokens_per_pass": by_k[k]["tokens_per_pass"]},
        "verdict": verdict(settings, count, by_k, k, asked),
        "warnings": [few] if few else [],
    }
