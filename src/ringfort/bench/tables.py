"""What the benchmark prints: a progress bar or lines while it runs, then the machine and a table."""

from __future__ import annotations

from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ringfort.bench.explain import AUTO, Explained, Explanation
from ringfort.bench.results import OURS, Report, Row, Timing
from ringfort.bench.runner import Step


class Watcher:
    """Shows the progress of a run: a bar in a terminal, one line per case elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        """`step` is shown inside this context."""
        self._task = self.bar.add_task("starting", total=None)

    def step(self, step: Step) -> None:
        """Show that the run has got this far."""
        if not self.bar.disable:
            what = f"{step.case.op} {size(step.case.nbytes)}, {step.case.world_size} ranks"
            self.bar.update(self._task, description=what, completed=step.done, total=step.total)
        elif step.row is not None:
            times = ", ".join(f"{name} {duration(timing.median_us)}" for name, timing in step.row.timings.items())
            line = f"{step.case.op} {size(step.row.bytes)}, {step.row.ranks} ranks: {times}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def explained(self, row: Explained) -> None:
        """Show the choice for one size."""
        self._console.print(f"{row.ranks} ranks, {size(row.bytes)}: {row.chosen}", highlight=False)


def print_report(console: Console, report: Report) -> None:
    """Print the machine, the table, the means, and what was left out."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    machine = report.machine
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    say(
        f"{machine['processor']}, {machine['cores']} cores ({machine['threads']} threads), "
        f"{machine['memory_gib']} GiB, load {machine['load_at_start']}; {machine['system']}\n{versions}"
    )
    console.print(_table(report))
    for engine in report.options.against:
        means = report.geometric_means(engine)
        if means:
            parts = [f"{name} ranks {mean:.2f}" for name, mean in means.items() if name != "all"]
            say(f"ratio: {engine}/{OURS}; geometric mean: {', '.join(parts)}; all {means['all']:.2f}")
    for engine, why in {engine: why for row in report.rows for engine, why in row.skipped.items()}.items():
        say(f"{engine} was left out: {why}")
    most = max(report.options.ranks)
    if most > machine["threads"]:
        say(
            f"{most} ranks share {machine['threads']} processors: the times include the operating system's scheduler. "
            "Trust the ratios."
        )


def _table(report: Report) -> Table:
    options = report.options
    way = "" if options.strategy == "auto" else f", {options.strategy}"
    way += ", encrypted" if options.encryption == "on" else ", encryption off"
    way += "" if options.shared_memory == "on" else ", shared memory off"
    table = new_table(f"{options.op} of {options.dtype}{way}: median, 10th to 90th percentile")
    for head in ("ranks", "size", "engine", "time", "10-90%", "GB/s", "ratio"):
        table.add_column(head, justify="right", no_wrap=True)
    for index, row in enumerate(report.rows):
        is_last = index + 1 == len(report.rows) or report.rows[index + 1].ranks != row.ranks
        case = (str(row.ranks), size(row.bytes))
        for engine, timing in row.timings.items():
            ratio = row.ratio(engine) or 1.0
            times = duration(timing.median_us), _spread(timing), _speed(row, engine)
            shown = "" if engine == OURS else f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}[/]"
            ends = engine == list(row.timings)[-1] and (is_last or len(row.timings) > 1)
            table.add_row(*case, engine, *times, shown, end_section=ends)
            case = ("", "")
    return table


def print_explanation(console: Console, explanation: Explanation) -> None:
    """Print a line per strategy: predicted, measured, and which one AUTO chose."""
    options = explanation.options
    table = new_table(f"{options.op} of {options.dtype}: how AUTO chooses")
    for head in ("ranks", "size", "strategy", "predicted", "measured", ""):
        # Only the notes in the last column may be wrapped.
        width = len("halving_doubling") if head == "strategy" else len("0.00 ms") if head else None
        table.add_column(head, justify="right" if head else "left", no_wrap=bool(head), min_width=width)
    for row in explanation.rows:
        case = (str(row.ranks), size(row.bytes))
        for name in sorted(row.predicted, key=row.measured.__getitem__):
            notes = [word for word, holds in (("chosen", name == row.chosen), ("best", name == row.best)) if holds]
            times = duration(row.predicted[name]), duration(row.measured[name])
            table.add_row(*case, name, *times, ", ".join(notes))
            case = ("", "")
        note = f"{row.over_best:.2f} of the best: {row.chosen}"
        if row.connections > 1:
            note += f", {row.connections} connections"
        table.add_row(*case, AUTO, "", duration(row.measured[AUTO]), note, end_section=not row.compression)
        for name, micros in sorted(row.compressed.items(), key=lambda item: item[1]):
            table.add_row("", "", name, duration(micros), "", "compressed" if name != "none" else "not compressed")
        if row.compression:
            table.add_row("", "", "compression", "", "", row.compression, end_section=True)
    console.print(table)


def new_table(title: str) -> Table:
    """An empty table in the style of the benchmark."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1)
    )


def _speed(row: Row, engine: str) -> str:
    return f"{row.gigabytes_per_second(engine):.2f}" if row.bytes else "-"


def duration(microseconds: float) -> str:
    """A time with three digits and a unit: `28.1 us`, `9.46 ms`."""
    scale, unit = _unit(microseconds)
    return f"{_digits(microseconds / scale)} {unit}"


def _spread(timing: Timing) -> str:
    scale, _ = _unit(timing.median_us)  # of the median, which is shown beside it
    return f"{_digits(timing.p10_us / scale)}-{_digits(timing.p90_us / scale)}"


def _unit(microseconds: float) -> tuple[float, str]:
    return (1, "us") if microseconds < 999.5 else (1e3, "ms") if microseconds < 999.5e3 else (1e6, "s")


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def size(nbytes: int) -> str:
    """Bytes with a unit: `4 B`, `64 KiB`, `1 MiB`."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} B"
