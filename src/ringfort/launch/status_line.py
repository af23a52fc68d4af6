"""The line about the run below the output of its ranks, in a terminal.

    step 1,240/5,000 · loss 0.412 · 3 ranks · 1,920 samples/s · 12 min left · rank 0 waits 38% for rank 2

It says what the traces of this machine's ranks tell. If there are ranks on other machines too, their traces are not
read, so the line says `here`, and cannot say who waits for whom:

    step 1,240/5,000 · loss 0.412 · 2 of 6 ranks here · 640 samples/s here · 12 min left · 41% in collectives
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ringfort.telemetry.folder import traces
from ringfort.telemetry.history import History
from ringfort.telemetry.records import Header
from ringfort.telemetry.report import Report
from ringfort.telemetry.trace_set import TraceSet
from ringfort.telemetry.verdict import in_collectives
from ringfort.telemetry.view import ENDED, RankView, RunView

UPDATE_SECONDS: Final = 0.5
"""Between two changes of the line: figures that change faster cannot be read."""
WORTH: Final = 0.05
"""The smallest part of a step that is worth a word."""
ALIKE: Final = 0.05
"""Parts of a step that differ by less are alike."""
LOSS: Final = "loss"


class StatusLine:
    """Reads the traces in a folder, and makes the line."""

    def __init__(
        self, folder: Path, clock: Callable[[], float] = time.monotonic, time_of_day: Callable[[], float] = time.time
    ) -> None:
        self.text = ""
        self._clock = clock
        self._traces = TraceSet(lambda: traces(folder), clock=time_of_day)
        self._history = History(time_of_day)
        self._headers: dict[int, Header] = {}
        """Of the ranks that run, by process id."""
        self._losses: dict[int, float] = {}
        """Their latest, by process id: a history follows that of rank 0 alone, which may be on another machine."""
        self._update_at = 0.0

    def tick(self) -> None:
        """Make the line anew if that is due. To be called often."""
        now = self._clock()
        if now >= self._update_at:
            self._update_at = now + UPDATE_SECONDS
            for report in self._traces.reports():
                self._history.take(report)
                self._take(report)
            known = [pid for pid in self._headers if pid in self._losses]
            first = min(known, key=lambda pid: self._headers[pid].rank, default=-1)
            self.text = status_text(self._history.view(), self._losses.get(first))

    def _take(self, report: Report) -> None:
        pid = report.header.pid
        if not report.is_alive:
            self._headers.pop(pid, None)
            self._losses.pop(pid, None)
            return
        self._headers[pid] = report.header
        for values in report.values:
            if LOSS in values.values:
                self._losses[pid] = values.values[LOSS]

    def close(self) -> None:
        """Close the traces. Idempotent."""
        self._traces.close()


def status_text(view: RunView, loss: float | None = None) -> str:
    """Return the line for the ranks of this machine; empty if none has made a step."""
    ranks = [rank for rank in view.ranks if rank.state not in (*ENDED, "nonsense")]
    step, verdict = max((rank.step for rank in ranks), default=0), view.verdict
    if not step:
        return ""
    here = "" if view.is_whole else " here"
    parts = [f"step {step:,}" + (f"/{verdict.total_steps:,}" if verdict.total_steps else "")]
    if loss is not None:
        parts.append(f"loss {loss:.3g}" if abs(loss) < 1000 else f"loss {loss:,.0f}")
    count = len(ranks) if view.is_whole else view.world_size
    parts.append(("" if view.is_whole else f"{view.seen} of ") + f"{count} rank{'s'[: count != 1]}{here}")
    if verdict.samples_per_second:
        parts.append(f"{_number(verdict.samples_per_second)} samples/s{here}")
    elif verdict.steps_per_second:
        parts.append(f"{_number(verdict.steps_per_second)} steps/s")
    if not any(rank.state == "training" for rank in ranks):
        parts.append("paused" if any(rank.state == "paused" for rank in ranks) else ranks[0].state)
    elif verdict.total_steps > step and verdict.steps_per_second:
        parts.append(f"{_duration((verdict.total_steps - step) / verdict.steps_per_second)} left")
    return " · ".join((*parts, *_waiting(ranks, is_whole=view.is_whole)))


def _waiting(ranks: Sequence[RankView], *, is_whole: bool) -> list[str]:
    """Who waits for whom, if that costs much."""
    ranks = [rank for rank in ranks if rank.state == "training" and rank.split.total > 0]
    if not ranks:
        return []
    if not is_whole:
        part = in_collectives(ranks)
        return [f"{100 * part:.0f}% in collectives"] if part > WORTH else []
    most = max(rank.split.part("waiting") for rank in ranks)
    # Of those that wait about as long the first one, so that the line does not change all the time.
    first = next(rank for rank in ranks if rank.split.part("waiting") >= most - ALIKE)
    part = first.split.part("waiting")
    last = min(ranks, key=lambda rank: rank.split.waiting)
    return [f"rank {first.rank} waits {100 * part:.0f}% for rank {last.rank}"] if part > WORTH else []


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return (
        f"{minutes:.0f} min"
        if minutes < 90
        else f"{minutes / 60:.1f} h"
        if minutes < 2880
        else f"{minutes / 1440:.1f} d"
    )
