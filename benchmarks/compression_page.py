"""Write the figures of docs/compression.md, and draw its pictures, from what was measured.

    python -m benchmarks.compression_page

Reads benchmarks/results/compression.json and learning.json (benchmarks/compression.py and learning.py write them); what
stands between `<!-- NAME -->` and `<!-- end -->` in the page is replaced. A part that was not measured yet says so.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "compression.md"
IMAGES = ROOT / "docs" / "images"
WIRES = ("100 Mbit/s", "1 Gbit/s")
ONE_HOST = ("loopback", "shared memory")
BYTES_A_SECOND = 12.5e6
"""Of the wire that the picture of loss against time is drawn for: 100 Mbit/s."""
NOT_YET = "Not measured yet."
DPI = 80


def codecs(found: dict[str, Any]) -> str:
    """Speed and size of each codec."""
    lines = ["| strategy | GB/s on one core, written and read | times fewer bytes |", "| --- | --- | --- |"]
    for name, row in found["codecs"].items():
        if name != "none":
            lines.append(f"| `{name}` | {row['gb_per_s']:.2f} | {row['times_fewer_bytes']:.1f} |")
    return "\n".join(lines)


def wires(found: dict[str, Any]) -> str:
    """Milliseconds of a training step."""
    places = [place for place in (*WIRES, *ONE_HOST) if place in found]
    names = sorted(found[places[0]]["median_ms"], key=found[places[0]]["median_ms"].__getitem__)
    lines = [f"| | {' | '.join(places)} |", f"| --- |{' --- |' * len(places)}"]
    for name in names:
        cells = [
            f"{found[place]['median_ms'][name]:.1f}" if name in found[place]["median_ms"] else "" for place in places
        ]
        shown = f"DDP on Gloo{name[4:].replace(' ', ', with ')}" if name.startswith("gloo") else f"`{name}`"
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    auto = [f"{found[place]['auto_over_best']:.2f} ({place})" for place in places]
    every = [f"{found[place]['auto(1)_over_best']:.2f} ({place})" for place in places]
    lines += [
        "",
        f"`auto` over the best within its error: {', '.join(auto)}. `auto(1)` over the best: {', '.join(every)}.",
    ]
    return "\n".join(lines)


def learning(found: dict[str, Any]) -> str:
    """Loss and accuracy of each strategy."""
    # Without compression first, then by bytes, and last what shows that the limits can be missed.
    rows = sorted(found["summary"], key=lambda row: ("without" in row["name"], row["times_fewer_bytes"]))
    text = {row["name"]: row for row in rows if row["task"] == "text"}
    digits = {row["name"]: row for row in rows if row["task"] == "digits"}
    lines = [
        "| strategy | validation loss | worse by | allowed | digits | worse by | times fewer bytes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in text.items():
        allowed = "" if row["limit"] is None else f"{row['limit']:g}%"
        other = digits.get(name)
        accuracy = "" if other is None else f"{other['accuracy']:.2f}%"
        points = "" if other is None else f"{other['worse']:+.2f} points"
        fewer = f"{row['times_fewer_bytes']:.1f}"
        lines.append(
            f"| {name} | {row['loss']:.4f} | {row['worse']:+.2f}% | {allowed} | {accuracy} | {points} | {fewer} |"
        )
    broken = [f"{row['task']} {row['name']}" for row in found["summary"] if row["holds"] is False]
    lines += ["", f"Not kept: {', '.join(broken)}." if broken else "Every limit is kept."]
    return "\n".join(lines)


def draw(found: dict[str, Any]) -> str:
    """Loss against bytes and against time; returns the Markdown that shows them."""
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(12, 4.5), layout="constrained")
    against_bytes, against_time = figure.subplots(1, 2)
    runs = [run for run in found["runs"] if run["task"] == "text"]
    for number, name in enumerate(dict.fromkeys(run["name"] for run in runs)):
        same = [run for run in runs if run["name"] == name]
        curve = np.mean([run["curve"] for run in same], axis=0)
        steps, losses, sent = curve.T
        a_step = np.mean([(run["computing_seconds"] + run["codec_seconds"]) / run["steps"] for run in same])
        style = "--" if "without" in name else "-"
        against_bytes.plot(sent / 1e6, losses, style, color=f"C{number}", label=name)
        against_time.plot(steps * a_step + sent / BYTES_A_SECOND, losses, style, color=f"C{number}", label=name)
    against_bytes.set_xlabel("MB sent by each worker")
    against_time.set_xlabel("seconds at 100 Mbit/s: computing, codec and wire")
    for panel in (against_bytes, against_time):
        panel.set_xscale("log")
        panel.set_ylabel("validation loss")
        panel.set_ylim(top=3.2)
        panel.grid(visible=True, alpha=0.3)
    against_time.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(IMAGES / "compression.png", dpi=DPI)
    return "![Validation loss against bytes sent, and against time on a wire of 100 Mbit/s](images/compression.png)"


def main() -> int:
    """Rewrites the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, file, write in (
        ("codecs", "compression", codecs),
        ("wires", "compression", wires),
        ("learning", "learning", learning),
        ("pictures", "learning", draw),
    ):
        path = RESULTS / f"{file}.json"
        words = write(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else NOT_YET
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not mark.search(page):
            raise SystemExit(f"{PAGE} has no part <!-- {name} -->")
        page = mark.sub(lambda found, words=words: f"{found[1]}{words}\n{found[2]}", page)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
