"""`RankHistory`: the recent past of one rank, from its reports. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Final

from ringfort.telemetry.records import Step
from ringfort.telemetry.report import Report, Sums
from ringfort.telemetry.view import WINDOW, RankView, Split

KEPT_STEPS: Final = 128
"""Steps of a rank that are kept one by one."""
KEPT_REPORTS: Final = 32
"""Reports of a rank that means are taken of. One comes each second, so the window has fewer."""
SILENT: Final = 5.0
"""Seconds without a report after which a rank is silent: a viewer asks for one each second."""
PAUSED: Final = 5.0
"""Seconds without a step, or this many times the usual time of a step if that is longer, after which it is paused."""
CLOCK_WAS_SET: Final = 5.0
"""Seconds: no report is under way for so long."""
FORGOTTEN: Final = 600.0
"""Seconds for which a rank that has ended is shown."""
REPLACED: Final = 20.0
"""The same if another process has its rank."""


class RankHistory:
    """One process that trains."""

    def __init__(self, key: str, report: Report, now: float) -> None:
        self.key = key
        self.host, self.name = report.host, report.name
        self.pid, self.started = report.header.pid, report.header.started
        self.is_alive = report.is_alive
        self.is_finished = report.header.is_finished
        """Whether it ended as programs should."""
        self.is_nonsense = False
        self.offset = now - report.now
        """Seconds to add to its clock."""
        self.by_number: dict[int, Step] = {}
        self._numbers: deque[int] = deque()
        self._is_full = False
        """Whether older steps were dropped."""
        # The length of the window depends on what peers say, so it does not bound these alone.
        self._recent: deque[tuple[float, Sums]] = deque(maxlen=KEPT_REPORTS)
        """The sums of recent reports that have steps, and when they came."""
        self._traffic: deque[tuple[float, dict[int, float], float]] = deque(maxlen=KEPT_REPORTS)
        """The bytes per second of recent reports: when, sent by rank, received."""
        self._heard_at = self._stepped_at = now
        self._usual = 0.0
        self._ended_at = now
        self._about = report

    def take(self, report: Report, now: float) -> None:
        """Take its next report."""
        offset = now - report.now
        # Its clock was set, or this one's, if they differ much more or less than before.
        self.offset = offset if abs(offset - self.offset) > CLOCK_WAS_SET else min(self.offset, offset)
        self._about = report
        self._heard_at = now
        if self.is_alive:
            self._ended_at = now
        self.is_finished = report.header.is_finished or (self.is_finished and not report.is_alive)
        self.is_alive, self.is_nonsense = report.is_alive, False
        if report.sums.steps:
            self._stepped_at = now
            self._usual = report.sums.seconds / report.sums.steps
            self._recent.append((now, report.sums))
        if report.sent or report.received:
            self._traffic.append((now, report.sent, report.received))
        since = self._window_start(now)
        while self._traffic and self._traffic[0][0] <= since:
            self._traffic.popleft()
        while self._recent and self._recent[0][0] < since:
            self._recent.popleft()
        for step in report.steps:
            if step.number not in self.by_number:
                self._numbers.append(step.number)
            self.by_number[step.number] = step
        while len(self._numbers) > KEPT_STEPS:
            self._is_full = True
            del self.by_number[self._numbers.popleft()]

    # --- what is known ----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Its rank; -1 before it has one."""
        return self._about.header.rank

    @property
    def step(self) -> int:
        """Its latest step."""
        return self._about.step

    @property
    def total_steps(self) -> int:
        """The last step of the program; 0 if unknown."""
        return self._about.header.total_steps

    @property
    def world_size(self) -> int:
        """The ranks of its run, as it says."""
        return self._about.header.world_size

    @property
    def epoch(self) -> int:
        """The number of the group that its world size is of."""
        return self._about.header.epoch

    @property
    def program(self) -> str:
        """The program's name."""
        return self._about.header.program

    @property
    def codec_seconds(self) -> dict[str, float]:
        """What codecs would take for its gradients, by name."""
        return self._about.header.codec_seconds

    @property
    def sent(self) -> dict[int, float]:
        """Bytes per second, by rank: the mean of recent reports."""
        ranks = {rank for _, sent, _ in self._traffic for rank in sent}
        return {rank: sum(sent.get(rank, 0.0) for _, sent, _ in self._traffic) / len(self._traffic) for rank in ranks}

    @property
    def received(self) -> float:
        """Bytes per second, likewise."""
        return sum(received for _, _, received in self._traffic) / max(1, len(self._traffic))

    def has_told(self, number: int) -> bool:
        """Whether a step was reported, or was before the first one that this rank took part in."""
        first = self._numbers[0] if self._numbers else number + 1
        return number in self.by_number or (number < first and not self._is_full)

    @property
    def steps(self) -> Iterable[Step]:
        """The latest steps, oldest first."""
        return [self.by_number[number] for number in self._numbers]

    @property
    def heard_at(self) -> float:
        """When it was last heard of."""
        return self._heard_at

    @property
    def end(self) -> str:
        """How it has ended, if it has: as in `RankView.state`."""
        return "ended" if self.is_finished else "lost"

    @property
    def title(self) -> str:
        """What to call it in an event."""
        rank = f"rank {self.rank}" if self.rank >= 0 else "a process"
        return f"{rank} on {self.name}" if self.name else rank

    def state(self, now: float) -> str:
        """Its state, as in `RankView.state`."""
        if self.is_nonsense:
            return "nonsense"
        if not self.is_alive:
            return self.end
        if now - self._heard_at > SILENT:
            return "silent"
        if self._about.header.role == "learner":
            return "learner"
        # Before its first step a program may load data or compile for minutes.
        is_late = now - self._stepped_at > max(PAUSED, PAUSED * self._usual)
        return "paused" if is_late and self.step else "training"

    def is_seen(self, now: float) -> bool:
        """Whether it is known what it has done in the window: it is heard of, or has ended since."""
        if self.is_alive:
            return self.state(now) not in ("silent", "nonsense")
        return now - self._ended_at < WINDOW

    def is_forgotten(self, now: float, others: Collection[RankHistory]) -> bool:
        """Whether it ended so long ago that it is not shown any more."""
        if self.is_alive and now - self._heard_at < FORGOTTEN:
            return False
        gone = now - (self._heard_at if self.is_alive else self._ended_at)
        return gone > (REPLACED if any(map(self._is_replaced_by, others)) else FORGOTTEN)

    def _is_replaced_by(self, other: RankHistory) -> bool:
        """Whether another process has, or had later, the rank of this one."""
        return other is not self and other.rank == self.rank and (other.is_alive or other._ended_at > self._ended_at)

    def _window_start(self, now: float) -> float:
        """Since when steps count. Of a process that has ended the last ones do."""
        return (now if self.is_alive else min(now, self._ended_at)) - WINDOW - self._usual

    def sums(self, now: float) -> Sums:
        """All recent steps added up."""
        since = self._window_start(now)
        kept = [sums for at, sums in self._recent if at >= since]
        return Sums(*(sum(getattr(one, name) for one in kept) for name in Sums.__struct_fields__))

    def exchange(self, now: float) -> float:
        """The seconds of a step that it spends in collectives; 0 without recent steps."""
        total = self.sums(now)
        return total.exchange / total.steps if total.steps else 0.0

    def split(self, now: float, wires: dict[int, float], least: float) -> Split:
        """Where the time of its steps goes. `wires` are the seconds on the wire, by step; `least` is the mean of the
        rank that spends the least time in collectives, which counts while no recent step is known of all ranks."""
        total = self.sums(now)
        if not total.steps:
            return Split()
        exchange = total.exchange / total.steps
        since = self._window_start(now) - self.offset
        seen = [
            (step.exchange, wires[step.number])
            for step in self.by_number.values()
            if step.number in wires and step.at >= since
        ]
        of_wire = sum(wire for _, wire in seen) / max(1e-12, sum(own for own, _ in seen))
        wire = exchange * min(1.0, of_wire) if seen else min(exchange, least)
        data, codec, seal = total.data / total.steps, total.codec / total.steps, total.seal / total.steps
        compute = max(0.0, total.seconds / total.steps - exchange - data - codec - seal)
        return Split(compute, data, exchange - wire, wire, codec, seal)

    def view(self, now: float, split: Split) -> RankView:
        """Return what is shown of it."""
        total = self.sums(now)
        state, about = self.state(now), self._about
        # By the time of its own steps, not of the window: reports do not end where steps do.
        rate = total.steps / total.seconds if total.seconds and state == "training" else 0.0
        return RankView(
            self.key,
            self.rank,
            self.name,
            self.host,
            state,
            self.pid,
            self.step,
            split,
            rate,
            rate * total.samples / total.steps if total.steps else 0.0,
            max(0.0, now - self._heard_at),
            about.vitals,
            sum(self.sent.values()) if state == "training" else 0.0,
            self.received if state == "training" else 0.0,
            about.header.codec,
        )


def wire_of(ranks: Collection[RankHistory]) -> dict[int, float]:
    """The seconds on the wire, by step, of the steps that are known of all ranks: the least that any of them spent in
    collectives. The rank that came last waited for nobody."""
    if not ranks:
        return {}
    steps = [rank.by_number for rank in ranks]
    return {
        number: min(one[number].exchange for one in steps) for number in steps[0] if all(number in x for x in steps)
    }
