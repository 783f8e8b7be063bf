"""What `verify` tells: a certificate for programs, a table and a verdict for people."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from eagle_chain.engines.flavours import FLAVOURS
from eagle_chain.engines.manifest import MANIFEST
from eagle_chain.engines.version import UNKNOWN, library_version
from eagle_chain.runtime.answer import printable
from eagle_chain.runtime.exactness import TOKENS_PER_MISMATCH, Comparison, Mismatch
from eagle_chain.runtime.load import Engines
from eagle_chain.runtime.prompts import TextFile
from eagle_chain.runtime.stats import Stats
from eagle_chain.runtime.tokenizer import Tokenizer

LIBRARIES = ("onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx-cu13", "cuda-python")
SHOWN = 5  # mismatches of a run that people are shown; the JSON has them all


@dataclass(frozen=True)
class Way:
    """One way to decode that is compared with plain decoding."""

    drafter: str
    k: int
    rollback: str
    draft_kv: str | None  # None for drafters that have no KV

    @property
    def words(self) -> str:
        """It in a line."""
        return " ".join(filter(None, (self.drafter, f"k {self.k}", self.rollback, self.draft_kv)))


Run = tuple[Way, Comparison]


@dataclass
class PlainTotals:
    """What plain decoding gave over all prompts."""

    tokens: int = 0
    before_repeat: int = 0
    logits: bool = False
    prompts: int = 0  # that were decoded
    interrupted: bool = False  # by Ctrl-C, before all was compared


def report_of(
    arguments: argparse.Namespace,
    text: TextFile,
    engines: Engines,
    plain: PlainTotals,
    runs: Sequence[Run],
) -> dict[str, Any]:
    """The certificate."""
    exact = not any(comparison.mismatches for _, comparison in runs)
    passed = all(comparison.passed for _, comparison in runs) and not plain.interrupted
    differences = [comparison.differences for _, comparison in runs]
    return {
        "passed": passed,
        "exact": exact,
        "verdict": "interrupted" if plain.interrupted else _verdict(passed, exact),
        "tokens": sum(comparison.tokens for _, comparison in runs),
        "mismatches": sum(len(comparison.mismatches) for _, comparison in runs),
        "largest_logit_difference": max((d.largest for d in differences if d), default=None),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "bundle": _bundle(arguments.bundle, engines),
        "versions": _versions(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "device": engines.memory.device,
        },
        "settings": {
            "text": str(text.path),
            "text_sha256": text.sha256,
            "text_kind": text.kind,
            "documents": len(text.documents),
            "prompts": arguments.prompts,
            "prompt_tokens": arguments.prompt_tokens,
            "prefix": arguments.prefix,
            "max_new_tokens": arguments.max_new_tokens,
            "backend": engines.backend,
            "bit_exact": all(comparison.bit_exact for _, comparison in runs),
            "threads": arguments.threads,
        },
        "plain": {
            "prompts": plain.prompts,
            "tokens": plain.tokens,
            "tokens_before_repeat": plain.before_repeat,
            "logits": plain.logits,
        },
        "runs": [_run_report(way, comparison) for way, comparison in runs],
    }


def _verdict(passed: bool, exact: bool) -> str:
    if exact and passed:
        return "exact"
    return "within the bound" if passed else "failed"


def _bundle(folder: Path, engines: Engines) -> dict[str, Any]:
    """What identifies the bundle; the hashes of the weight files are those of the export."""
    manifest = engines.manifest
    plans = manifest.plans.items() if engines.backend in FLAVOURS else ()
    return {
        "folder": str(folder),
        "manifest_sha256": hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest(),
        "graphs_sha256": manifest.graphs,
        "weights_sha256": {name: file.sha256 for name, file in manifest.files.items()},
        "plans_sha256": {n: p.sha256 for n, p in plans if p.flavour == engines.backend},
        "options": asdict(manifest.options),
        "made_with": manifest.made_with,
    }


def _versions() -> dict[str, str]:
    """What runs here, as far as it is installed."""
    versions = {"python": platform.python_version()}
    for name in ("eagle-chain", "numpy", "tokenizers", *LIBRARIES):
        if (version := library_version(name)) != UNKNOWN:
            versions[name] = version
    return versions


def _run_report(way: Way, comparison: Comparison) -> dict[str, Any]:
    differences = comparison.differences
    return {
        **asdict(way),
        "passed": comparison.passed,
        "tokens": comparison.tokens,
        "mismatches": [
            {**asdict(mismatch), "within_bound": not comparison.beyond(mismatch)}
            for mismatch in comparison.mismatches
        ],
        "broken_off": comparison.too_many,
        "bound": comparison.bound,
        "largest_logit_difference": differences.largest if differences else None,
        "accepted_counts": comparison.counts,
        "unplanned_counts": comparison.unplanned if comparison.script else None,
        "acceptance": _acceptance(comparison.stats),
        "before_repeat": _acceptance(comparison.fresh_stats),
    }


def _acceptance(stats: Stats) -> dict[str, Any]:
    return {
        "rounds": stats.rounds,
        "tokens_per_pass": stats.acceptance_length,
        "by_position": stats.acceptance_by_position,
    }


def print_report(report: dict[str, Any], runs: Sequence[Run], tokenizer: Tokenizer) -> None:
    """The certificate for people."""
    plain = report["plain"]
    print(
        f"plain     {plain['tokens']} tokens, {plain['tokens_before_repeat']} of them before the "
        "text repeats itself\n"
    )
    head = ("drafter", "k", "rollback", "KV", "tokens", "differ", "a pass", "before", "accepted")
    rows = [head, *(_row(way, comparison) for way, comparison in runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    print(
        "\na pass: tokens per trunk pass, in the whole text and before it repeats itself; "
        "accepted:\nrounds by accepted drafts (scripted), or share of drafts 1, 2, ... (the others)"
    )
    for way, comparison in runs:
        for line in _faults(way, comparison, tokenizer):
            print(line)
    if report["mismatches"] and not plain["logits"]:
        print(
            "\nThe bundle gives no logits, so nobody can tell a near-tie from a fault: export it "
            "with\n--debug logits and run this again."
        )
    print(f"\nverdict   {_sentence(report)}")


def _row(way: Way, comparison: Comparison) -> tuple[str, ...]:
    """A line of the table."""
    stats = comparison.stats
    lengths = [stats.acceptance_length, comparison.fresh_stats.acceptance_length]
    accepted = [f"{share:.3f}".lstrip("0") for share in stats.acceptance_by_position]
    if comparison.script:
        lengths[1], accepted = None, [str(count) for count in comparison.counts]
    return (
        way.drafter,
        str(way.k),
        way.rollback,
        way.draft_kv or "-",
        str(comparison.tokens),
        str(len(comparison.mismatches)),
        *(f"{length:.2f}" if length else "-" for length in lengths),
        " ".join(accepted),
    )


def _faults(way: Way, comparison: Comparison, tokenizer: Tokenizer) -> list[str]:
    """What differs, and what the bound says to it."""
    lines = [
        _mismatch_words(mismatch, comparison, tokenizer)
        for mismatch in comparison.mismatches[:SHOWN]
    ]
    if len(comparison.mismatches) > SHOWN:
        lines.append(f"  and {len(comparison.mismatches) - SHOWN} more")
    if comparison.too_many:
        lines.append(f"  broken off: more than one token in {TOKENS_PER_MISMATCH} differs")
    if comparison.unplanned:
        lines.append(
            f"  in {comparison.unplanned} rounds the tokens are right, but not as many drafts were "
            "accepted as the script had right"
        )
    if comparison.bits_differ:
        lines.append("  logits differ where the tokens agree: a row depends on its neighbours")
    if not lines:
        return []
    noise = comparison.differences
    words = f"; logits differ by up to {noise.largest:.3g} where the tokens agree" if noise else ""
    bound = "not known" if comparison.bound is None else f"{comparison.bound:.3g}"
    return [f"\n{way.words}: bound {bound}{words}", *lines]


def _mismatch_words(mismatch: Mismatch, comparison: Comparison, tokenizer: Tokenizer) -> str:
    plain, chain = (_token_words(id, tokenizer) for id in (mismatch.plain, mismatch.chain))
    line = f"  prompt {mismatch.prompt}, position {mismatch.position}: plain {plain}, chain {chain}"
    if mismatch.margin is None:
        return line
    where = "beyond" if comparison.beyond(mismatch) else "within"
    return (
        f"{line}; top-2 margin {mismatch.margin:.3g}, between the two {mismatch.gap:.3g}: "
        f"{where} the bound"
    )


def _token_words(id: int, tokenizer: Tokenizer) -> str:
    return "nothing" if id < 0 else f"{id} {printable(tokenizer.decode([id], special=True))!r}"


def _sentence(report: dict[str, Any]) -> str:
    tokens, mismatches = report["tokens"], report["mismatches"]
    if report["verdict"] == "interrupted":
        asked, reached = report["settings"]["prompts"], report["plain"]["prompts"]
        return (
            f"none: interrupted in prompt {reached} of {asked}; of the {tokens} tokens compared so "
            f"far {mismatches} differ from plain greedy decoding"
        )
    if report["verdict"] == "exact":
        same = report["largest_logit_difference"] == 0
        return f"exact: all {tokens} tokens are those of plain greedy decoding" + (
            ", and so are their logits, bit for bit" if same else ""
        )
    if report["passed"]:
        return (
            f"within the bound: {mismatches} of {tokens} tokens differ from plain greedy decoding, "
            "each a near-tie of the trunk"
        )
    if report["exact"]:
        return f"FAILED, though all {tokens} tokens are those of plain greedy decoding"
    return f"FAILED: {mismatches} of {tokens} tokens differ from plain greedy decoding"
