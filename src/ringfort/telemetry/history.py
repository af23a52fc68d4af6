"""`History`: gathers the reports of all ranks that are seen, and makes views of them. Its memory is bounded. Pure.

Times of other machines are shifted to the viewer's clock by the smallest difference seen between a report's time and
its arrival: clocks differ by any amount, and a report is never earlier than it was sent.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from ringfort.telemetry.curves import Points
from ringfort.telemetry.event_log import EventLog, Teller
from ringfort.telemetry.link_use import links_in_use
from ringfort.telemetry.rank_history import FORGOTTEN, RankHistory, wire_of
from ringfort.telemetry.records import Step
from ringfort.telemetry.report import Report
from ringfort.telemetry.step_model import RATIOS
from ringfort.telemetry.verdict import judge, judge_some, why_nothing
from ringfort.telemetry.view import LinkView, RankView, RunView, ShownEvent, ShownStep, Split, Verdict

MAX_RUNS: Final = 16
MAX_RANKS: Final = 256
"""Processes of one run, those that have ended included."""
MAX_CURVES: Final = 32
TELLER_IS_GONE: Final = 10.0
"""Seconds after which another rank tells the values of a curve."""
SAMPLES: Final = "samples/s"
STEPS: Final = "steps/s"


class _Run:
    """One run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ranks: OrderedDict[str, RankHistory] = OrderedDict()
        self.events = EventLog()
        self.curves: dict[str, Points] = {}
        self.heard_at = 0.0
        self._tellers: dict[str, tuple[int, float]] = {}
        """The rank that tells the values of each name, and when it last did."""
        self._second = 0
        self._samples = 0
        self._steps: dict[str, int] = {}

    def tell(self, rank: RankHistory, now: float, kind: str, text: str) -> None:
        """Add an event about a rank."""
        self.events.add(ShownEvent(now, kind, text, rank.name, rank.rank), Teller(rank.host, rank.key))

    @property
    def hosts(self) -> set[str]:
        """The machines that report it."""
        return {rank.host for rank in self.ranks.values()}

    def count(self, key: str, report: Report, received_at: float) -> None:
        """Add to the throughput of this second."""
        second = int(received_at)
        if second != self._second:
            if self._second:
                step = max((rank.step for rank in self.ranks.values()), default=0)
                gap = max(1, second - self._second)
                self.points(SAMPLES if self._samples else STEPS).add(
                    float(self._second), step, (self._samples or max(self._steps.values(), default=0)) / gap
                )
            self._second, self._samples, self._steps = second, 0, {}
        self._samples += report.sums.samples
        self._steps[key] = self._steps.get(key, 0) + report.sums.steps

    def is_told_by(self, name: str, rank: int, now: float) -> bool:
        """Whether a rank tells the values of this name: the lowest one that does. Another takes over when nothing has
        come from that for a while."""
        teller, at = self._tellers.get(name, (rank, now))
        if rank > teller and now - at < TELLER_IS_GONE:
            return False
        if name in self._tellers or len(self._tellers) < MAX_CURVES:
            self._tellers[name] = rank, now
        return True

    def points(self, name: str) -> Points:
        """The curve of this name; one that nobody sees if there are too many."""
        found = self.curves.get(name)
        if found is None:
            found = Points()
            if len(self.curves) < MAX_CURVES:
                self.curves[name] = found
        return found


class History:
    """What is known of all runs that are seen. For use by one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._links: tuple[LinkView, ...] = ()
        self.notice = ""
        """What a viewer should know."""

    @staticmethod
    def rank_key(host: str, pid: int) -> str:
        """Identifies a process."""
        return f"{host}:{pid}"

    def take(self, report: Report, received_at: float | None = None) -> None:
        """Take a report, from any source."""
        now = self._clock() if received_at is None else received_at
        key = self.rank_key(report.host, report.header.pid)
        run = self._run(report.header.run_name, report.host)
        known = run.ranks.get(key)
        if known is None or known.started != report.header.started:
            known = self._new_rank(run, key, report, now)
        if known.is_nonsense:
            self.notice = ""  # it can be read again
        was_alive = known.is_alive
        known.take(report, now)
        run.heard_at = now
        run.count(key, report, now)
        offset = known.offset
        for values in report.values:
            for name, value in values.values.items():
                if run.is_told_by(name, report.header.rank, now):
                    run.points(name).add(min(values.at + offset, now), values.step, value)
        for event in report.events:
            run.tell(known, event.at + offset, event.kind, event.text)
        if report.dropped:
            run.tell(known, now, "dropped", f"{report.dropped} more events in this second were not shown")
        if was_alive and not known.is_alive:
            run.tell(known, now, known.end, f"{known.title} has ended")

    def _new_rank(self, run: _Run, key: str, report: Report, now: float) -> RankHistory:
        rank = run.ranks[key] = RankHistory(key, report, now)
        run.ranks.move_to_end(key)
        if report.is_alive and now - run.heard_at < FORGOTTEN and run.heard_at:
            run.tell(rank, now, "joined", f"{rank.title} is here")
        while len(run.ranks) > MAX_RANKS:
            del run.ranks[_one_too_many(run, key)]
        return rank

    def _run(self, name: str, host: str) -> _Run:
        run = self._runs.get(name)
        if run is None:
            while len(self._runs) >= MAX_RUNS:
                del self._runs[self._run_too_many(host)]
            run = self._runs[name] = _Run(name)
        return run

    def _run_too_many(self, host: str) -> str:
        """The run that makes room for another one of `host`. A machine that reports many runs which nobody else takes
        part in loses one of its own."""
        alone = {name: hosts.pop() for name, one in self._runs.items() if len(hosts := one.hosts) == 1}
        counts = Counter(alone.values())
        counts[host] += 1
        most = max(counts, key=counts.__getitem__)
        names = [name for name, one in alone.items() if one == most] if counts[most] > 1 else list(self._runs)
        return min(names or self._runs, key=lambda name: self._runs[name].heard_at)

    def lost(self, host: str, pid: int, *, left: bool = False) -> None:
        """A process is known to have ended; `left` if it has said goodbye before."""
        now = self._clock()
        for run in self._runs.values():
            rank = run.ranks.get(self.rank_key(host, pid))
            if rank is not None and rank.is_alive:
                rank.is_alive, rank.is_finished = False, left
                run.tell(rank, now, rank.end, f"{rank.title} has ended")

    def nonsense(self, host: str, name: str) -> None:
        """A machine sends what cannot be understood."""
        for run in self._runs.values():
            for rank in run.ranks.values():
                if rank.host == host:
                    rank.is_nonsense = True
        self.notice = f"{name} sends reports that cannot be read: is another version of Ringfort installed there?"

    def set_links(self, links: Iterable[LinkView]) -> None:
        """Set what is known of the links between machines. What is used of them comes from the reports."""
        self._links = tuple(links)

    def add_event(self, event: ShownEvent, run: str | None = None) -> None:
        """Add something that the viewer has noticed itself; to all runs, or to one."""
        for one in self._runs.values():
            if run is None or one.name == run:
                one.events.add(event)

    # --- views ----------------------------------------------------------------------------------------------------

    def view(self, run: str | None = None, now: float | None = None) -> RunView:
        """Return what is known of a run; by default, of the one that was heard of last."""
        now = self._clock() if now is None else now
        names = tuple(self._runs)
        chosen = self._runs.get(run) if run is not None else self._best(now)
        if chosen is None:
            return RunView(now, run or "", runs=names, notice=self.notice)
        shown = [rank for rank in chosen.ranks.values() if not rank.is_forgotten(now, chosen.ranks.values())]
        shown.sort(key=lambda rank: (rank.rank if rank.rank >= 0 else 1 << 20, rank.key))
        training = [rank for rank in shown if rank.state(now) == "training"]
        # Of a run that has ended, its last steps are shown.
        judged = training or [rank for rank in shown if not rank.is_alive]
        stepping = [rank for rank in judged if rank.sums(now).steps]
        wires = wire_of(stepping)
        least = min((rank.exchange(now) for rank in stepping), default=0.0)
        mean = {rank.key: rank.split(now, wires, least) for rank in shown}
        views = tuple(rank.view(now, mean[rank.key]) for rank in shown)
        links = links_in_use(self._links, shown)
        view = RunView(
            now,
            chosen.name,
            next((rank.program for rank in shown), ""),
            Verdict(),
            views,
            links,
            chosen.events.all(),
            tuple(points.curve(name) for name, points in chosen.curves.items() if len(points)),
            _timelines([rank for rank in shown if rank.is_alive] or stepping, stepping, wires, least),
            names,
            self.notice,
            # Of the newest group: a learner, and who has fallen silent, still name that of an earlier one.
            world_size=max(
                ((rank.epoch, rank.world_size) for rank in shown if rank.is_alive and rank.rank >= 0), default=(0, 0)
            )[1],
            # A process that took the place of another one has the same rank.
            seen=len({rank.rank for rank in shown if rank.rank >= 0 and rank.is_seen(now)}),
        )
        return msgspec.structs.replace(view, verdict=self._verdict(chosen, training, view))

    def _best(self, now: float) -> _Run | None:
        def worth(run: _Run) -> tuple[int, float]:
            return sum(rank.state(now) == "training" for rank in run.ranks.values()), run.heard_at

        return max(self._runs.values(), key=worth, default=None)

    def _verdict(self, run: _Run, training: list[RankHistory], view: RunView) -> Verdict:
        ranks = [rank for rank in view.ranks if rank.state == "training" and rank.split.total > 0]
        step = max((rank.step for rank in run.ranks.values()), default=0)
        total = max((rank.total_steps for rank in training or run.ranks.values()), default=0)
        rate = sum(rank.steps_per_second for rank in ranks) / len(ranks) if ranks else 0.0
        samples = sum(rank.samples_per_second for rank in ranks)
        speed_up = _speed_up(ranks, samples) if view.is_whole else None
        codecs = {name: max((rank.codec_seconds.get(name, 0.0) for rank in training), default=0.0) for name in RATIOS}
        learners = [rank.name or f"rank {rank.rank}" for rank in view.ranks if rank.state == "learner"]
        found = judge(ranks, view.links, codecs, speed_up, learners) if view.is_whole else judge_some(ranks, view)
        loss = run.curves.get("loss")
        return Verdict(
            found.sentence if ranks else why_nothing(view.ranks),
            found.cause,
            found.culprit,
            found.saving,
            step,
            total,
            None if loss is None or loss.newest is None or loss.newest != loss.newest else loss.newest,
            samples or None,
            rate,
            (total - step) / rate if total > step and rate > 0 else None,
            speed_up,
        )


def _speed_up(ranks: list[RankView], samples: float) -> float | None:
    """How many times faster than the fastest rank alone, which would load and compute, and wait for nobody. Without
    samples, each rank is taken to have as many as the others."""
    speeds: list[float] = []
    for rank in ranks:
        own = rank.split.compute + rank.split.data
        if own <= 0 or rank.steps_per_second <= 0:
            continue
        per_step = rank.samples_per_second / rank.steps_per_second if samples else 1.0
        speeds.append(per_step / own)
    if not speeds or max(speeds) <= 0:
        return None
    together = samples or sum(rank.steps_per_second for rank in ranks)
    return together / max(speeds)


def _one_too_many(run: _Run, newest: str) -> str:
    """The process that makes room for `newest`: of the machine with the most of them, one that has ended, or else the
    one that was not heard of for longest."""
    counts = Counter(rank.host for rank in run.ranks.values())
    most = max(counts, key=counts.__getitem__)
    candidates = [rank for key, rank in run.ranks.items() if rank.host == most and key != newest]
    return min(candidates or run.ranks.values(), key=lambda rank: (rank.is_alive, rank.heard_at)).key


def _timelines(
    ranks: list[RankHistory], training: list[RankHistory], wires: dict[int, float], least: float
) -> dict[int, tuple[ShownStep, ...]]:
    """The steps that all of `training` have reported, by rank: reports come at different times, and leave out different
    steps if there are many. All steps, if ranks number them differently. Of a step that is not known of all ranks, the
    wire takes as long as usual: `least`."""
    stepping = [rank for rank in training if rank.by_number]
    has_common = len(stepping) < 2 or bool(wire_of(stepping))
    return {
        rank.rank: tuple(
            ShownStep(step.number, step.at - step.seconds + rank.offset, _split_of(step, wires.get(step.number, least)))
            for step in rank.steps
            if not has_common or all(other.has_told(step.number) for other in stepping)
        )
        for rank in ranks
        if rank.rank >= 0
    }


def _split_of(step: Step, wire: float) -> Split:
    wire = min(step.exchange, wire)
    return Split(step.compute, step.data, step.exchange - wire, wire, step.codec, step.seal)
