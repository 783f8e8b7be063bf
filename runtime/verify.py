"""The command `verify`: the exactness certificate of a bundle on a user's own text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.outcome import Outcome
from eagle_chain.engines.progress import counted, phases
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.exactness import (
    BIT_EXACT,
    Comparison,
    Script,
    decode_plainly,
)
from eagle_chain.runtime.load import (
    DRAFTERS,
    WITH_KV,
    Engines,
    add_backend_arguments,
    bundle_drafters,
    open_engines,
    runnable,
)
from eagle_chain.runtime.prompts import (
    add_prompt_arguments,
    asked_prompts,
    check_prompt_sizes,
    read_text,
)
from eagle_chain.runtime.tokenizer import Tokenizer
from eagle_chain.runtime.verify_report import PlainTotals, Run, Way, print_report, report_of

SCRIPTED = "scripted"
CHOICES = {
    "drafters": (SCRIPTED, *(name for name in DRAFTERS if name != "none")),
    "draft_kv": ("kept", "scratch"),
    "rollback": ("log", "replay"),
}
BOTH = "both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `eagle-chain verify` takes."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="what `export` wrote")
    add_prompt_arguments(parser, "text", prompts=20, new_tokens=128)
    parser.add_argument(
        "--drafters",
        metavar="NAMES",
        help="with commas between: scripted (plain's own tokens, spoiled so that every accepted "
        f"count comes equally often), {', '.join(CHOICES['drafters'][1:])} (all the bundle has)",
    )
    parser.add_argument(
        "-k", metavar="K", help="guesses per trunk pass, like 1,2,4 (all the bundle's width allows)"
    )
    parser.add_argument(
        "--draft-kv", metavar="MODES", default="kept", help="kept, scratch or both (kept)"
    )
    parser.add_argument(
        "--rollback", metavar="MODES", default="log", help="log, replay or both (log)"
    )
    add_backend_arguments(parser)


def run(arguments: argparse.Namespace) -> Outcome:
    """Decode every prompt plainly and in every way asked for; a token that differs may fail."""
    text = read_text(arguments.text)
    manifest = Manifest.load(arguments.bundle)
    ways = _ways(arguments, manifest)
    check_prompt_sizes(arguments, manifest.options.capacity)
    runnable(arguments.bundle, manifest, arguments.backend)
    tokenizer = Tokenizer(arguments.bundle)
    prompts = asked_prompts(arguments, text, tokenizer)
    engines = open_engines(arguments.bundle, arguments.backend, threads=arguments.threads)
    count = len(text.documents)
    documents = f", {count} documents" if count > 1 else ""
    print(f"text      {text.path}: {text.kind}{documents}")
    print(
        f"prompts   {len(prompts)} of {counted(arguments.prompt_tokens, 'token')}, "
        f"up to {arguments.max_new_tokens} new ones each; backend {engines.backend}",
        flush=True,
    )
    runs = _runs(engines, ways, len(prompts), arguments.max_new_tokens)
    plain = PlainTotals()
    try:
        _compare(engines, runs, prompts, arguments.max_new_tokens, plain)
    except KeyboardInterrupt:
        if not any(comparison.tokens for _, comparison in runs):
            raise  # nothing to tell
        plain.interrupted = True
    report = report_of(arguments, text, engines, plain, runs)
    print_report(report, runs, tokenizer)
    return Outcome(report, passed=report["passed"], interrupted=plain.interrupted)


def _ways(arguments: argparse.Namespace, manifest: Manifest) -> list[Way]:
    """All combinations of what was asked for."""
    asked = arguments.drafters
    held = [SCRIPTED, *(name for name in bundle_drafters(manifest) if name != "none")]
    asked = ",".join(held) if asked is None else asked
    drafters = _listed("--drafters", asked, CHOICES["drafters"])
    lacking = [name for name in drafters if name not in held]
    if lacking:
        raise InputError(
            f"{arguments.bundle}: has no {lacking[0]}, so that only --drafters {','.join(held)} "
            "can be verified"
        )
    widest = manifest.options.width - 1
    numbers = [str(k) for k in range(1, widest + 1)]
    ks = [int(k) for k in _listed("-k", arguments.k or ",".join(numbers), numbers)]
    rollbacks = _modes("--rollback", arguments.rollback, CHOICES["rollback"])
    draft_kvs = _modes("--draft-kv", arguments.draft_kv, CHOICES["draft_kv"])
    return [
        Way(drafter, k, rollback, draft_kv)
        for drafter in drafters
        for rollback in rollbacks
        for draft_kv in (draft_kvs if drafter in WITH_KV else [None])
        for k in ks
    ]


def _listed(option: str, text: str, choices: Sequence[str]) -> list[str]:
    """The words of a list with commas, each once."""
    words = [word.strip() for word in text.split(",")]
    wrong = next((word for word in words if word not in choices), None)
    if wrong is not None:
        raise InputError(f"{option} has {wrong!r}, expected some of {', '.join(choices)}")
    return list(dict.fromkeys(words))


def _modes(option: str, text: str, choices: Sequence[str]) -> list[str]:
    """One of two words, or both of them."""
    words = _listed(option, text, (*choices, BOTH))
    return list(choices) if BOTH in words else words


def _runs(engines: Engines, ways: Sequence[Way], prompts: int, budget: int) -> list[Run]:
    """A comparison for each way; ways that differ only in k share a chain."""
    chains: dict[tuple[str, str, str | None], Chain] = {}
    runs = []
    for way in ways:
        key = (way.drafter, way.rollback, way.draft_kv)
        scripted = way.drafter == SCRIPTED
        if key not in chains:
            options: dict[str, Any] = {"rollback": way.rollback}
            options["drafter"] = "none" if scripted else way.drafter
            if way.draft_kv:
                options["draft_kv"] = way.draft_kv
            chains[key] = engines.chain(**options)
        chain = chains[key]
        script = Script(chain) if scripted else None
        bit_exact = engines.backend in BIT_EXACT
        comparison = Comparison(chain, way.k, script, budget, prompts * budget, bit_exact)
        runs.append((way, comparison))
    return runs


def _compare(
    engines: Engines,
    runs: Sequence[Run],
    prompts: Sequence[list[int]],
    budget: int,
    totals: PlainTotals,
) -> None:
    """Prompt by prompt, so that the logits of one prompt are all that is kept."""
    chain = engines.chain(drafter="none")
    total, done = len(prompts) * (1 + len(runs)), 0
    with phases("verifying") as show:
        for number, prompt in enumerate(prompts):
            show("plain", done, total)
            try:
                plain = decode_plainly(chain, prompt, budget)
            except FloatingPointError as error:
                raise InputError(f"prompt {number}: {error}") from error
            totals.tokens += len(plain.tokens)
            totals.before_repeat += plain.fresh
            totals.logits = bool(plain.logits)
            totals.prompts += 1
            done += 1
            for way, comparison in runs:
                show(way.words, done, total)
                comparison.add(number, plain)
                done += 1
