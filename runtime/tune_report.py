"""What `tune` tells: a table of settings, one of drafts per round, a plot, and what to type."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.plans import rebuild_command
from eagle_chain.runtime.along import Found, gain
from eagle_chain.runtime.diagnosis import LOW
from eagle_chain.runtime.evidence import NOISE, to_tell
from eagle_chain.runtime.plots import pyplot, save
from eagle_chain.runtime.search import difference, overrides_for
from eagle_chain.runtime.trial import Setting, with_overrides

DRAWN = 6  # settings of a plot, the best ones
Report = Mapping[str, Any]


def rows(
    judged: Mapping[Setting, Found], now: Setting, best: Setting, most: int
) -> list[dict[str, Any]]:
    """Every setting that was judged, the one with most tokens a pass first."""
    found = []
    for setting, each in judged.items():
        behind, error = gain(judged[best], each, most)
        found.append(
            {
                "changed": flags(setting, now),
                "now": setting == now,
                "best": setting == best,
                "tokens_per_pass": each.tokens_per_pass(most),
                "by_position": each.by_position(most),
                "rounds": sum(map(len, each.accepted(most))),
                "behind": behind,
                "error": error,
                "within_noise": abs(behind) <= NOISE * error and setting != best,
            }
        )
    return sorted(found, key=lambda row: -row["tokens_per_pass"])


def flags(setting: Setting, now: Setting) -> list[str]:
    """What a setting changes, as it is typed."""
    words = list(difference(setting.draft, now.draft).words())
    if setting.scratch != now.scratch:
        words += ["--draft-kv", "scratch" if setting.scratch else "kept"]
    return words


def advice(bundle: Path, manifest: Manifest, now: Setting, best: Setting, k: int) -> dict[str, Any]:
    """The flags of the best setting, and the commands to type."""
    overrides = overrides_for(best.draft, now.draft, manifest.overrides)
    generate = ["-k", str(k), *(["--draft-kv", "scratch"] if best.scratch else [])]
    commands = []
    if best.draft != now.draft:
        commands.append(with_overrides(manifest, overrides).export_command(bundle))
        plans = manifest.plans.values()
        commands += sorted({rebuild_command(bundle, plan) for plan in plans})
    commands.append(shlex.join(["eagle-chain", "generate", str(bundle), *generate]))
    return {
        "changed": flags(best, now),
        "export_flags": list(overrides.words()),
        "generate_flags": generate,
        "k": k,
        "draft_kv": "scratch" if best.scratch else "kept",
        "commands": commands,
    }


def verdict(
    settings: Sequence[Report], prompts: int, speeds: Sequence[Report], k: int, asked: int
) -> list[str]:
    """What the settings mean, and k drafts a round instead of those asked for, in sentences."""
    now, best = (next(row for row in settings if row[name]) for name in ("now", "best"))
    first = settings[0]
    found = f"{now['tokens_per_pass']:.2f} tokens a pass"
    if best is not now:
        sentence = (
            f"change it: {' '.join(best['changed'])} gives {best['tokens_per_pass']:.2f} tokens a "
            f"pass instead of {now['tokens_per_pass']:.2f}: {now['behind']:.2f} ± "
            f"{now['error']:.2f} more"
        )
    else:
        sentence = f"keep the draft as it is, with {found}"
    if first["behind"] < 0:
        number = to_tell(prompts, first["behind"], first["error"])
        sentence += (
            f"; {' '.join(first['changed']) or 'no change'} has {-first['behind']:.2f} ± "
            f"{first['error']:.2f} more yet, which may be noise (below {NOISE:g} standard errors): "
            f"{number} --prompts would tell, were they like these"
        )
    sentences = [sentence]
    right = max(row["by_position"][0] for row in settings)
    if right < LOW:
        sentences.append(
            f"even so at most {right:.0%} of the first drafts are right: none of "
            "these settings is the cause. The draft was probably made for another trunk, or the "
            "text is unlike what it was trained on; try --drafter mtp or ngram"
        )
    if k != asked:
        ours, theirs = (speeds[j]["tokens_per_second"] for j in (k, asked))
        sentences.append(f"take -k {k}: {ours:.0f} tokens/s expected, {theirs:.0f} with {asked}")
    if not k:
        sentences.append(
            "drafts do not pay on this machine: a round takes more time than its tokens save"
        )
    elif k == len(speeds) - 1:
        sentences.append(
            f"a width of {k + 1} has room for no more than {k} a round: export with a larger "
            "--width to try more"
        )
    return sentences


def tables(report: Report) -> str:
    """The report as text, what to do last."""
    confirmed, best = report["confirmed"], report["best"]
    exact = "every token is that of plain decoding" if confirmed["exact"] else "NOT EXACT"
    told = [
        (
            "confirmed",
            f"by a chain with k {best['k']}: {exact}, {confirmed['tokens_per_pass']:.2f} "
            f"tokens a pass ({confirmed['judged_tokens_per_pass']:.2f} judged), "
            f"{confirmed['tokens_per_second']:.0f} tokens/s",
        ),
        *(("verdict", sentence) for sentence in report["verdict"]),
        *(("type", command) for command in best["commands"]),
    ]
    lines = [*_settings(report), "", *_speeds(report), ""]
    return "\n".join([*lines, *(f"{name:9}  {words}" for name, words in told)])


def _settings(report: Report) -> list[str]:
    """A line for each setting."""
    places = "".join(f" {f'd{j}':>5}" for j in range(1, report["most"] + 1))
    lines = [f"{'a pass':>8} {'behind the best':>16} {places}  changed"]
    for row in report["settings"]:
        gap = "" if row["best"] else f"{row['behind']:.2f} ± {row['error']:.2f}"
        shares = "".join(f" {share:5.2f}" for share in row["by_position"])
        kinds = {"now": "now", "best": "best", "within_noise": "within noise"}
        marks = ", ".join(word for kind, word in kinds.items() if row[kind])
        words = " ".join(row["changed"]) or "nothing"
        end = f"  <- {marks}" if marks else ""
        lines.append(f"{row['tokens_per_pass']:8.2f} {gap:>16} {shares}  {words}{end}")
    return lines


def _speeds(report: Report) -> list[str]:
    """A line for each number of drafts."""
    lines = [f"{'k':>8} {'a pass':>8} {'ms a round':>11} {'tokens/s':>9}"]
    for row in report["speeds"]:
        end = "  <- best" if row["k"] == report["best"]["k"] else ""
        lines.append(
            f"{row['k']:8} {row['tokens_per_pass']:8.2f} {row['round_ms']:11.2f} "
            f"{row['tokens_per_second']:9.1f}{end}"
        )
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in report["parts_ms"].items())
    what = f"what the engines of capacity {report['capacity']} take here"
    return [*lines, f"{'':9}expected from {what}, in ms: {parts}"]


def plot(report: Report, path: Path) -> None:
    """Acceptance by position: a line for the setting of now and for each of the best ones.

    Raises:
        InputError: matplotlib is missing, or the file cannot be written.
    """
    figure, axes = pyplot().subplots(figsize=(9, 5))
    places = range(1, report["most"] + 1)
    for i, row in enumerate(report["settings"]):
        if i < DRAWN or row["now"] or row["best"]:
            style = "o-" if row["best"] else "s--" if row["now"] else ".:"
            label = f"{row['tokens_per_pass']:.2f}  {' '.join(row['changed']) or 'as it is'}"
            axes.plot(places, row["by_position"], style, label=label)
    axes.set(xlabel="draft", ylabel="share of rounds that accept it", ylim=(0, 1), xticks=places)
    axes.legend(title="tokens a pass, and what is changed", fontsize="small")
    figure.tight_layout()
    save(figure, path)
