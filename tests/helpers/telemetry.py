"""A run that never happened: ranks with given speeds, in virtual time, whose reports a `History` takes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ringfort.telemetry.history import History
from ringfort.telemetry.records import Event, Header, Step, Values
from ringfort.telemetry.report import Report, Sums
from ringfort.telemetry.view import LinkView, RunView


@dataclass(eq=False)
class Rank:
    """How a made-up rank behaves."""

    name: str
    compute: float = 0.1
    data: float = 0.0
    codec: float = 0.0
    samples: int = 32
    host: str = ""
    vitals: Mapping[str, float] = field(default_factory=dict[str, float])
    clock: float = 0.0
    """Seconds by which its clock is ahead."""
    is_alive: bool = True
    is_finished: bool = False
    is_seen: bool = True
    """Whether its reports arrive."""
    pid: int = 100
    role: str = ""
    numbers_from: int = 0
    """Added to the numbers of its steps."""


class SimulatedRun:
    """Ranks that train together: a step ends for all of them when the slowest has computed and the wire has passed."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        *,
        wire: float = 0.02,
        links: Sequence[LinkView] = (),
        run: str = "train.py",
        compression: str = "",
        codec_seconds: Mapping[str, float] | None = None,
        total_steps: int = 0,
        start: float = 1_000_000.0,
    ) -> None:
        self.ranks = list(ranks)
        self.wire = wire
        self.now = start
        self.history = History(clock=lambda: self.now)
        self.history.set_links(links)
        self._run, self._compression = run, compression
        self._codec_seconds, self._total = dict(codec_seconds or {}), total_steps
        self._step = 0
        self._next_step_at = start
        self._started = start

    def advance(self, seconds: float) -> RunView:
        """Let time pass; the ranks report each second. Return the view at the end."""
        end = self.now + seconds
        while self.now < end:
            until = min(end, self.now + 1.0)
            steps = self._steps_until(until)
            self.now = until
            for rank, made in zip(self.ranks, steps, strict=True):
                if rank.is_seen:
                    self.history.take(self.report(rank, made))
        return self.view()

    def view(self) -> RunView:
        """The view now."""
        return self.history.view()

    def _steps_until(self, until: float) -> list[list[Step]]:
        made: list[list[Step]] = [[] for _ in self.ranks]
        while True:
            living = [rank for rank in self.ranks if rank.is_alive]
            slowest = max((rank.compute + rank.data + rank.codec for rank in living), default=1e9)
            seconds = slowest + self.wire
            end = self._next_step_at + seconds
            if end > until:
                return made
            self._step += 1
            self._next_step_at = end
            for rank, steps in zip(self.ranks, made, strict=True):
                if rank.is_alive:
                    exchange = seconds - rank.compute - rank.data - rank.codec
                    at = end + rank.clock
                    number = self._step + rank.numbers_from
                    step = Step(number, at, seconds, rank.data, exchange, rank.codec, 0.0, rank.samples)
                    steps.append(step)

    def report(self, rank: Rank, steps: Sequence[Step], events: Sequence[Event] = ()) -> Report:
        """What a rank reports of these steps."""
        number = self.ranks.index(rank)
        header = Header(
            rank.pid + number,
            self._started,
            number,
            len(self.ranks),
            program="train.py",
            run=self._run,
            role=rank.role,
            total_steps=self._total,
            codec=self._compression,
            codec_seconds=self._codec_seconds,
            is_finished=rank.is_finished,
        )
        totals = [
            sum(getattr(step, name) for step in steps) for name in ("seconds", "data", "exchange", "codec", "seal")
        ]
        return Report(
            header,
            self.now + rank.clock,
            rank.host or rank.name,
            rank.name,
            rank.is_alive,
            self._step,
            Sums(len(steps), *totals, sum(step.samples for step in steps)),
            tuple(steps[-20:]),
            values=tuple(Values(step.number, step.at, {"loss": 10 / step.number}) for step in steps[-1:]),
            events=tuple(events),
            sent={other: 1e6 for other in range(len(self.ranks)) if other != number},
            vitals=dict(rank.vitals),
        )


def size_of(history: History) -> int:
    """The bytes of all that a history refers to."""
    seen: set[int] = set()
    waiting: list[object] = [history]
    total = 0
    while waiting:
        found = waiting.pop()
        if id(found) in seen or callable(found):
            continue
        seen.add(id(found))
        total += sys.getsizeof(found)
        waiting.extend(gc.get_referents(found))
    return total
