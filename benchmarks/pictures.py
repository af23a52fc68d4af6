"""The pictures of docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ringfort.bench.results import OURS, Report
from ringfort.bench.tables import size

DPI = 80
"""Small files: the pictures live in the repository."""


class Pictures(NamedTuple):
    """Where the pictures of one machine are."""

    folder: Path
    machine: str

    def path(self, name: str) -> Path:
        """Where the picture `name` is written."""
        return self.folder / f"{name}-{self.machine}.png"

    def link(self, name: str) -> str:
        """What the page says for it."""
        return f"{self.folder.name}/{self.path(name).name}"


def _figure(width: float, panels: int) -> tuple[Any, list[Any]]:
    # The object interface, and not pyplot: no global state, and no window system is looked for.
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(width, 4.5), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def draw_times(reports: Sequence[Report], path: Path) -> None:
    """Time against size of every engine, one panel a world size."""
    figure, panels = _figure(6.5 * len(reports), len(reports))
    for panel, report in zip(panels, reports, strict=True):
        for number, engine in enumerate((OURS, *report.options.against)):
            rows = [row for row in report.rows if engine in row.timings]
            style = "-" if engine in (OURS, "tcp", "plain") else ":" if engine in ("sockets", "memcpy") else "--"
            times = [row.timings[engine].median_us for row in rows]
            panel.plot([row.bytes for row in rows], times, style, marker=".", color=f"C{number}", label=engine)
        sizes = [row.bytes for row in report.rows]
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(sizes, [size(nbytes) for nbytes in sizes], rotation=45, ha="right")
        panel.xaxis.minorticks_off()
        panel.set_title(f"{report.options.ranks[0]} ranks")
        panel.set_ylabel("microseconds, median")
        panel.grid(visible=True, alpha=0.3)
    panels[0].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))  # beside it: the lines fill it
    figure.savefig(path, dpi=DPI)


def draw_scaling(
    ranks: Sequence[int], lines: dict[str, Sequence[float]], predicted: Sequence[float], path: Path
) -> None:
    """The cost of a rank against the number of ranks, beside the algorithm's own."""
    figure, [panel] = _figure(6.5, 1)
    for name, costs in lines.items():
        panel.plot(ranks, costs, marker="o", label=name)
    panel.plot(ranks, predicted, "k--", label="2(n-1)/n")
    panel.set_xscale("log", base=2)
    panel.set_xticks(ranks, [str(number) for number in ranks])
    panel.set_ylim(bottom=0)
    panel.set_xlabel("ranks")
    panel.set_ylabel("cost of a rank and byte, 1 at two ranks")
    panel.grid(visible=True, alpha=0.3)
    panel.legend(fontsize="small")
    figure.savefig(path, dpi=DPI)


def draw_slow_links(
    lines: dict[str, tuple[Any, Any, str]], times: dict[str, dict[str, dict[str, float]]], path: Path
) -> None:
    """Loss against time on each wire, and against bytes. `lines` are units, loss, and the name of the way."""
    figure, panels = _figure(6.0 * (len(times) + 1), len(times) + 1)
    for number, (title, (units, loss, way)) in enumerate(lines.items()):
        style = "-" if title.startswith(("LocalSteps", "ours", "the same with int8")) else "--"
        look = {"color": f"C{number % 10}", "linestyle": style if way != "alone" else ":", "label": title}
        for panel, (rate, measured) in zip(panels, times.items(), strict=False):
            panel.plot(units * measured[way]["seconds"], loss, **look)
            panel.set_title(rate)
            panel.set_xlabel("seconds")
        if way != "alone":
            nbytes = next(iter(times.values()))[way]["bytes"]
            panels[-1].plot(units * nbytes, loss, **look)
    for panel in panels:
        panel.set_xscale("log")
        panel.set_ylim(top=3.5)  # what learns nothing would take all the room
        panel.set_ylabel("validation loss")
        panel.grid(visible=True, alpha=0.3)
    panels[-1].set_xlabel("bytes sent by a machine")
    panels[-1].legend(handles=panels[0].lines, fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=DPI)
