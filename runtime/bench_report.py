"""What `bench` tells: a table for the terminal and a plot for a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_chain.engines.progress import human_bytes
from eagle_chain.runtime.drafters import engine_calls
from eagle_chain.runtime.plots import pyplot, save


def table(report: Mapping[str, Any]) -> str:
    """The report as text."""
    options = report["options"]
    sizes = options["capacities"]
    others = f", the smallest that holds it of {', '.join(map(str, sizes))}" if sizes[1:] else ""
    drafter = f", drafter {report['drafter']}" if report["drafter"] else ""
    lines = [
        f"{report['engines']}, {report['device']}, {options['dtype']}, KV {options['kv']}{drafter}",
        f"W = {options['width']}, position {report['position']} of {options['capacity']}{others}",
        "",
        f"{'part':16} {'median':>10} {'p10':>9} {'p90':>9} {'weights':>9} {'states':>9} "
        f"{'floor':>9} {'over':>6}",
    ]
    for name, part in report["parts"].items():
        lines.append(
            f"{name:16} {_times(part)} {human_bytes(part['weight_bytes']):>9} "
            f"{human_bytes(part['state_bytes']):>9} {_floor(part)}".rstrip()
        )
    for k, taken in report["rounds"].items():
        lines.append(f"{'round, k = ' + k:16} {_times(taken)} {'':19} {_floor(taken)}".rstrip())
    lines += ["", *_sweep(report.get("sweep", ()))]
    if report["wall"]:
        share = "" if report["host_share"] is None else f": host {report['host_share']:+.1%}"
        lines.append(f"{'in a chain':16} {_times(report['wall'])} a round by the wall{share}")
    lines.append(f"break-even at {report['break_even']:.2f} tokens per round")
    if "device_bytes" in report:
        lines.append(f"device memory in use: {human_bytes(report['device_bytes'])}")
    if measured := report["measured"]:
        lines.append(
            f"measured on the text: {measured['tokens_per_round']:.2f} tokens per round, "
            f"{measured['tokens_per_second']:.0f} tokens/s, plainly "
            f"{measured['plain_tokens_per_second']:.0f}\n"
            f"  (whole chains by the wall, {measured['round_ms']:.3f} ms a round at positions "
            f"{measured['from_position']} to {measured['to_position']}, capacity "
            f"{measured['capacity']})"
        )
    clock = f"{report['rounds'][str(report['k'])]['median_ms']:.3f} ms"
    lines.append(f"counted with the round of the table, {clock} at position {report['position']}:")
    lines += [
        f"  {speed['tokens_per_round']:.2f} tokens per round: {speed['tokens_per_second']:.0f} "
        f"tokens/s, {speed['over_plain']:.2f}x of plain decoding"
        for speed in report["speed"]
    ]
    return "\n".join(lines)


def _times(taken: Mapping[str, Any]) -> str:
    return f"{taken['median_ms']:7.3f} ms {taken['p10_ms']:9.3f} {taken['p90_ms']:9.3f}"


def _floor(taken: Mapping[str, Any]) -> str:
    return f"{taken['floor_ms']:9.3f} {taken['over_floor']:5.2f}x" if "floor_ms" in taken else ""


def _sweep(rows: Any) -> list[str]:
    """A line for every width, capacity and position, medians in milliseconds."""
    if not rows:
        return []
    names = ("width", "capacity", "position", "plain", "verify", "k", "round", "wall")
    lines = [" ".join(f"{name:>9}" for name in names)]
    for row in rows:
        cells = [
            "-" if row[n] is None else f"{row[n]:.3f}" if isinstance(row[n], float) else str(row[n])
            for n in names
        ]
        lines.append(" ".join(f"{cell:>9}" for cell in cells))
    return [*lines, ""]


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Time per round stacked by part against the floor, and tokens per second over acceptance.

    Raises:
        InputError: matplotlib is missing, or the file cannot be written.
    """
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(10, 4))
    _stacks(left, report)
    speeds = report["speed"]
    counts = [speed["tokens_per_round"] for speed in speeds]
    right.plot(counts, [speed["tokens_per_second"] for speed in speeds], "o-", label="chain")
    right.axhline(1e3 / report["plain_ms"], color="grey", linestyle="--", label="plain decoding")
    right.axvline(report["break_even"], color="grey", linestyle=":", label="break-even")
    if measured := report["measured"]:
        point = (measured["tokens_per_round"], measured["tokens_per_second"])
        right.plot(*point, "*", markersize=12, label="measured")
    right.set(xlabel="tokens per round", ylabel="tokens/s", ylim=(0, None))
    right.legend()
    figure.suptitle(f"{report['engines']} ({report['device']})")
    figure.tight_layout()
    save(figure, path)


def _stacks(axes: Any, report: Mapping[str, Any]) -> None:
    """A bar for the round of every k, its parts one on the other, and the floor beside each."""
    parts, ks = report["parts"], [int(k) for k in report["rounds"]]
    floors = all("floor_ms" in part for part in parts.values())
    half = 0.2 if floors else 0.0  # of the distance between the two bars
    bars = [(-half, "median_ms", 1.0), *([(half, "floor_ms", 0.45)] if floors else [])]
    for x, k in enumerate(ks):
        for shift, key, alpha in bars:
            bottom = 0.0
            for colour, (name, times) in enumerate(engine_calls(k, report["drafter"]).items()):
                height = times * parts[name][key] if times else 0.0
                label = name if k == max(ks) and key == "median_ms" else None
                style = {"color": f"C{colour}", "alpha": alpha, "label": label}
                axes.bar(x + shift, height, 0.38, bottom=bottom, **style)
                bottom += height
        # one graph hides the gaps between its parts, so a round may take less than their sum
        whole, label = report["rounds"][str(k)]["median_ms"], "whole round" if not x else None
        line = {"color": "black", "linewidth": 2, "label": label}
        axes.plot([x - half - 0.19, x - half + 0.19], [whole, whole], **line)
    axes.set_xticks(range(len(ks)), [f"k = {k}" for k in ks])
    axes.set(ylabel="ms a round" + (", pale: the floor" if floors else ""), xlim=(-0.6, None))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncol=3, frameon=False)
