"""How the benchmark looks: a progress bar or lines while it runs, then the machine and a table with ratios."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ringfort.bench.results import OURS, Report, Row, Timing
from ringfort.bench.run import Step

WIDE = 1
"""So many other engines stand beside us; with more, each has a line of its own, so that the table fits a terminal."""


class Watcher:
    """Shows how far a run is: a bar on a terminal, one line a case elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("starting", total=None)

    def shown(self) -> AbstractContextManager[object]:
        """Within it, `step` shows."""
        return nullcontext() if self._bar is None else self._bar

    def step(self, step: Step) -> None:
        """The run has got this far."""
        if self._bar is not None:
            what = f"{step.case.op} {size(step.case.nbytes)}, {step.case.world_size} ranks"
            self._bar.update(self._task, description=what, completed=step.done, total=step.total)
        elif step.row is not None:
            times = ", ".join(f"{name} {duration(timing.median_us)}" for name, timing in step.row.timings.items())
            line = f"{step.case.op} {size(step.row.bytes)}, {step.row.ranks} ranks: {times}"
            self._console.print(line, highlight=False, soft_wrap=True)


def print_report(console: Console, report: Report) -> None:
    """The machine, the table, the means, and what was left out."""
    machine = report.machine
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    console.print(
        f"{machine['processor']}, {machine['cores']} cores ({machine['threads']} threads), "
        f"{machine['memory_gib']} GiB, load {machine['load_at_start']}; {machine['system']}\n{versions}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table(report))
    for engine in report.options.against:
        means = report.geometric_means(engine)
        if means:
            parts = [f"{name} ranks {mean:.2f}" for name, mean in means.items() if name != "all"]
            line = f"ratio: {engine}/{OURS}; geometric mean: {', '.join(parts)}; all {means['all']:.2f}"
            console.print(line, highlight=False, soft_wrap=True)
    for engine, why in _skips(report).items():
        console.print(f"{engine} was left out where it cannot do this: {why}", highlight=False, soft_wrap=True)
    most = max(report.options.ranks)
    if most > machine["threads"]:
        console.print(
            f"{most} ranks share {machine['threads']} processors: that measures the scheduler too; trust the ratios.",
            highlight=False,
            soft_wrap=True,
        )


def _table(report: Report) -> Table:
    options = report.options
    way = "" if options.strategy == "auto" else f", {options.strategy}"
    way += ", encrypted" if options.encryption == "on" else ", encryption off"
    way += "" if options.shared_memory == "on" else ", shared memory off"
    title = f"{options.op} of {options.dtype}{way}: median, 10th to 90th percentile"
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1)
    )
    wide = len(options.against) <= WIDE
    for head in (
        _wide_heads(options.against) if wide else ["ranks", "size", "engine", "time", "10-90%", "GB/s", "ratio"]
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for index, row in enumerate(report.rows):
        last = index + 1 == len(report.rows) or report.rows[index + 1].ranks != row.ranks
        if wide:
            table.add_row(*_wide_cells(row, options.against), end_section=last)
            continue
        for engine in row.timings:
            table.add_row(*_long_cells(row, engine), end_section=engine == list(row.timings)[-1])
    return table


def _wide_heads(against: tuple[str, ...]) -> list[str]:
    return ["ranks", "size", OURS, "10-90%", "GB/s", *(head for name in against for head in (name, "10-90%", "ratio"))]


def _wide_cells(row: Row, against: tuple[str, ...]) -> list[str]:
    """A case's line, with the other engines beside us."""
    ours = row.timings[OURS]
    cells = [str(row.ranks), size(row.bytes), duration(ours.median_us), _spread(ours), _speed(row, OURS)]
    for engine in against:
        timing = row.timings.get(engine)
        if timing is None:
            cells += ["-", "-", "-"]
        else:
            cells += [duration(timing.median_us), _spread(timing), _ratio(row, engine)]
    return cells


def _long_cells(row: Row, engine: str) -> list[str]:
    """A case's line of one engine."""
    timing = row.timings[engine]
    where = [str(row.ranks), size(row.bytes)] if engine == OURS else ["", ""]
    ratio = "" if engine == OURS else _ratio(row, engine)
    return [*where, engine, duration(timing.median_us), _spread(timing), _speed(row, engine), ratio]


def _speed(row: Row, engine: str) -> str:
    return f"{row.gigabytes_per_second(engine):.2f}" if row.bytes else "-"


def _ratio(row: Row, engine: str) -> str:
    ratio = row.ratio(engine)
    assert ratio is not None  # it was measured
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}[/]"


def _skips(report: Report) -> dict[str, str]:
    return {engine: why for row in report.rows for engine, why in row.skipped.items()}


def duration(microseconds: float) -> str:
    """With three digits and the unit that suits it: `28.1 us`, `9.46 ms`."""
    scale, unit = _unit(microseconds)
    return f"{_digits(microseconds / scale)} {unit}"


def _spread(timing: Timing) -> str:
    scale, _ = _unit(timing.median_us)  # the median's, which stands before it
    return f"{_digits(timing.p10_us / scale)}-{_digits(timing.p90_us / scale)}"


def _unit(microseconds: float) -> tuple[float, str]:
    return (1, "us") if microseconds < 999.5 else (1e3, "ms") if microseconds < 999.5e3 else (1e6, "s")


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def size(nbytes: int) -> str:
    """Bytes as they were asked for: `4 B`, `64 KiB`, `1 MiB`."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} B"
