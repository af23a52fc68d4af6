"""What the demo prints: a live table in a terminal, plain lines elsewhere, and the proof at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ringfort.demo.proof import Outcome, Training, relative_differences
from ringfort.demo.settings import Settings
from ringfort.demo.story import Story

LINE_SECONDS = 2.0
"""Between two lines of progress without a terminal: few enough for a log."""
CURVE_ROWS = 6
"""Steps of the two loss curves that are printed side by side."""
CURVE_HEIGHT = 6
"""Lines of the curve: with the table of 3 ranks it fits into 24 lines."""
WIDTH = 72
"""Characters of tables and curves."""
BLOCKS = " ▁▂▃▄▅▆▇█"
"""Eighths of the height of a character."""
EVENTS = 4
"""Lines of what happened, below the table."""
STYLES = {
    "starting": "dim",
    "joining": "yellow",
    "training": "green",
    "killed": "bold red",
    "copying": "yellow",
    "done": "",
}
"""The states of a peer, and how each looks."""
NEXT = (
    ("ringfort key show", "on this machine: print a join code"),
    ("ringfort key join", "on the other machine: enter the code"),
    ("ringfort run --nodes 2 train.py", "on both: run your program, one rank on each"),
)
"""What to do after the demo."""


class Show:
    """Prints everything. With `live` it updates a table in place; without, it prints lines."""

    def __init__(self, console: Console, settings: Settings, *, live: bool) -> None:
        self._console = console
        self._settings = settings
        self._draws = live
        self._live: Live | None = None

    def phase(self, title: str, story: Story) -> AbstractContextManager[object]:
        """The context in which `happened` shows the training of a run."""
        self._story = story
        self._events: list[str] = []
        self._title = title
        self._next_line = time.monotonic() + LINE_SECONDS
        if not self._draws:
            self._print(title, style="bold")
            return nullcontext()
        self._live = Live(self._picture(), console=self._console, refresh_per_second=8)
        return self._live

    def happened(self, events: Sequence[str]) -> None:
        """Show what the story has become."""
        self._events += events
        if self._live is not None:
            self._live.update(self._picture())
            return
        for event in events:
            self._print(f"  {event}")
        if self._story.is_training and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            self._print(self._line())

    def _line(self) -> str:
        peers = self._story.peers.values()
        rate = sum(peer.samples_per_second for peer in peers)
        training = sum(peer.state == "training" for peer in peers)
        step, loss = self._story.points[-1]
        total = self._settings.steps
        return (
            f"  step {step:>{len(str(total))}}/{total}  loss {loss:.3f}  {rate:,.0f} samples/s  {group_name(training)}"
        )

    def _picture(self) -> Group:
        events = [*self._events[-EVENTS:], *[""] * (EVENTS - len(self._events))]
        lines = events if len(self._story.peers) > 1 else []
        curve = self._curve(self._story.points)
        return Group(Text(self._title, style="bold"), self._table(), Text("\n".join([*lines, *curve])))

    def _curve(self, points: Sequence[tuple[int, float]]) -> list[str]:
        """The curve of the loss, as wide as the table."""
        width = min(WIDTH, self._console.width)
        is_unicode = self._console.encoding.lower().startswith("utf")
        return curve(points, self._settings.steps, width=width, height=CURVE_HEIGHT, blocks=is_unicode)

    def _table(self) -> Table:
        table = Table(min_width=min(WIDTH, self._console.width))
        for name in ("peer", "process", "step", "loss", "samples/s"):
            table.add_column(name, justify="right")
        table.add_column("state", min_width=max(map(len, STYLES)))
        for number, peer in sorted(self._story.peers.items()):
            known = (
                (str(peer.pid), f"{peer.step}/{self._settings.steps}", f"{peer.loss:.3f}") if peer.pid else ("",) * 3
            )
            rate = f"{peer.samples_per_second:,.0f}"
            table.add_row(str(number), *known, rate, Text(peer.state, style=STYLES.get(peer.state, "")))
        return table

    def after_training(self, training: Training) -> None:
        """Print the result of the training."""
        if not self._draws:
            self._print("\n".join(self._curve(list(enumerate(training.losses, 1)))))
        before, after = training.validation
        rate = self._settings.batch * self._settings.steps / training.seconds
        self._print(f"{training.seconds:.1f} s, {rate:,.0f} samples/s in total")
        self._print(f"loss on held-out text: {before:.3f} before, {after:.3f} after")
        self._print("\nThe model writes:", style="bold")
        self._console.print(
            Padding(Text(training.sample, style="italic"), (0, 2, 1, 2)), width=min(80, self._console.width)
        )

    def proof(self, outcome: Outcome) -> None:
        """Print the two loss curves side by side, and whether the claims hold."""
        table = Table(title="The same loss, step by step", title_justify="left", title_style="bold")
        for name in ("step", group_name(outcome.settings.ranks), "one process", "relative difference"):
            table.add_column(name, justify="right")
        ours, theirs = outcome.group.losses, outcome.reference.losses
        differences = relative_differences(ours, theirs)
        if len(differences) == len(ours):
            for step in curve_steps(len(ours)):
                row = (f"{ours[step]:.7f}", f"{theirs[step]:.7f}", f"{differences[step]:.1e}")
                table.add_row(str(step + 1), *row)
        self._console.print(table)
        self._print("Floats are added in the order of who computed what, so the last digits differ.\n")
        for claim in outcome.claims():
            self._claim(*claim)

    def next_steps(self) -> None:
        """Print what to do next."""
        self._print("\nNext, with a second machine on the same network:", style="bold")
        for command, what in NEXT:
            self._print(f"  {command:<{max(len(one) for one, _ in NEXT)}}   {what}")
        self._print("`ringfort` lists the commands; `ringfort doctor` finds connection problems.")

    def _claim(self, holds: bool, claim: str, evidence: str) -> None:
        verdict = (" PASS  " if holds else " FAIL  ", "bold green" if holds else "bold red")
        self._console.print(Text.assemble(verdict, (claim, "bold"), f"\n       {evidence}"), soft_wrap=True)

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(Text(text, style=style or ""), soft_wrap=True)


def group_name(ranks: int) -> str:
    """Such as `3 peers` or `1 peer`."""
    return f"{ranks} peer{'' if ranks == 1 else 's'}"


def curve_steps(steps: int) -> list[int]:
    """A few steps from the first to the last, evenly spaced."""
    return sorted({round(i * (steps - 1) / (CURVE_ROWS - 1)) for i in range(CURVE_ROWS)})


def curve(
    points: Sequence[tuple[int, float]], steps: int, *, width: int, height: int, blocks: bool = True
) -> list[str]:
    """Draw the losses of `points` (step, loss) over `steps` steps as lines of at most `width` characters.

    The height of a column is the mean loss of its steps. Without points there are no lines. Without `blocks`, the curve
    is plain ASCII.
    """
    if not points:
        return []
    steps_done, losses = (np.array(column) for column in zip(*points, strict=True))
    labels = {height: f"{losses.max():.2f}", 1: f"{losses.min():.2f}"}
    label = max(map(len, labels.values()))
    room = max(1, width - label - 3)
    places = np.minimum(room - 1, (steps_done - 1) * room // max(1, steps))
    totals, counts = np.bincount(places, losses), np.bincount(places)
    # A column without points repeats the one before it.
    used = np.maximum.accumulate(np.where(counts > 0, np.arange(len(counts)), places[0]))
    # A column shows at least an eighth, so that the lowest loss is visible too.
    share = (totals[used] / counts[used] - losses.min()) / (np.ptp(losses) or 1.0)
    levels = np.maximum(1, np.rint(share * 8 * height)).astype(int)
    cells, bar = (BLOCKS, "│") if blocks else (" ########", "|")
    lines = [
        f"{labels.get(row, ''):>{label}} {bar} {''.join(cells[level] for level in np.clip(levels - 8 * row + 8, 0, 8))}"
        for row in range(height, 0, -1)
    ]
    caption = f"{'':>{label}}   step 1 to {steps}: loss {losses[0]:.2f} at first, {losses[-1]:.2f} now"
    return [*(line.rstrip() for line in lines), caption]
