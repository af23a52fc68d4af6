"""The report as a plot: time against size, and the ratio to each other engine, one line per world size."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

from ringfort.bench.results import OURS, Report
from ringfort.bench.tables import size
from ringfort.errors import BackendUnavailableError, InvalidArgumentError

SUFFIXES = (".png", ".svg")
LINES = ("-", "--", ":", "-.")
"""One line style per world size; engines have colours."""


def check_plot(path: Path, op: str) -> None:
    """Raise if the suffix of `path` is unknown, `op` cannot be plotted, or matplotlib is not installed."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidArgumentError("plot", str(path), f"must end in {' or '.join(SUFFIXES)}")
    if op == "barrier":
        raise InvalidArgumentError("plot", str(path), "a barrier has no sizes to plot")
    if find_spec("matplotlib") is None:
        raise BackendUnavailableError("matplotlib (for --plot)", "pip install 'ringfort[plot]'")


def write_plot(report: Report, path: Path) -> None:
    """Plot `report` into the file `path`, whose suffix gives the format."""
    # The object interface, not pyplot: it has no global state and needs no window system.
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(12, 5), layout="constrained")
    axes: list[Any] = list(figure.subplots(1, 2 if report.options.against else 1, squeeze=False)[0])
    for number, engine in enumerate((OURS, *report.options.against)):
        for ranks, style in zip(report.options.ranks, cycle(LINES), strict=False):
            rows = [row for row in report.rows if row.ranks == ranks and engine in row.timings]
            timings = [row.timings[engine] for row in rows]
            x = [row.bytes for row in rows]
            line = {"ls": style, "marker": "o", "color": f"C{number}", "label": f"{engine}, {ranks} ranks"}
            axes[0].plot(x, [timing.median_us for timing in timings], **line)
            low, high = [timing.p10_us for timing in timings], [timing.p90_us for timing in timings]
            axes[0].fill_between(x, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
            if engine != OURS:
                axes[1].plot(x, [row.ratio(engine) for row in rows], **line)
    axes[0].set_yscale("log")
    axes[0].set_ylabel("microseconds: median, 10th to 90th percentile")
    for panel in axes[1:]:
        panel.axhline(1, color="grey", linewidth=1)
        panel.set_yscale("log", base=2)  # twice as fast and half as fast are equally far from 1
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_ylabel(f"time of the other engine / time of {OURS}")
    sizes = sorted({row.bytes for row in report.rows})
    for panel in axes:
        panel.set_xscale("log")
        panel.set_xticks(sizes, [size(nbytes) for nbytes in sizes], rotation=45, ha="right")
        panel.xaxis.minorticks_off()
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize="small")
    figure.suptitle(f"{report.options.op} of {report.options.dtype} on {report.machine['processor']}")
    figure.savefig(path)
