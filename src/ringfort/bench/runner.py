"""A benchmark run: starts the workers of every engine for each world size, and lets them take turns.

In each round every engine makes one burst of calls, in alternating order, so that what disturbs the machine disturbs
all alike. A burst has as many calls as fit into a moment, so that a fast engine is not measured cold because a slow one
was called before it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple

from ringfort.bench.engines import ENGINES
from ringfort.bench.engines.base import Host
from ringfort.bench.engines.ours import RingfortEngine
from ringfort.bench.machine import describe_machine
from ringfort.bench.options import MAX_ROUNDS, MIN_ROUNDS, Case, Options
from ringfort.bench.patterns import element_type
from ringfort.bench.results import OURS, Report, Row, Timing
from ringfort.bench.workers import Message, WorkersFailedError, start_workers

BURST_SECONDS = 0.02
"""Per burst: long compared with the barrier between bursts, short compared with the drift of a machine."""
MAX_BURST = 2000
"""Calls. Ranks that were woken for a burst may share a core for some milliseconds: bursts of 50 calls of 4 B, which
are over by then, had medians of 14 and of 85 microseconds over TCP, by chance."""
WARM_UP = 2
"""Calls, at least, before any counts, besides the two that check and estimate: socket windows grow, caches fill."""
WARM_UP_SECONDS = 0.2
"""An engine that takes longer than this for one call does not get faster by another one."""

Round = Mapping[str, int]
"""How many calls each engine makes."""
Ask = Callable[..., Sequence[Message]]
"""`Workers.ask`: gives a command to all ranks of an engine, and returns their answers."""


class Step(NamedTuple):
    """How far a run is."""

    done: float
    """Cases, with the share of the current one."""
    total: int
    case: Case
    row: Row | None
    """The result, when the case is done."""


def run_bench(options: Options, on_step: Callable[[Step], None], hosts: Sequence[Host] = ()) -> Report:
    """Measure everything in `options`, with ranks on `hosts` in turn; on this host by default.

    Raises `WorkersFailedError` if one of our own ranks fails. Leaves no process behind.
    """
    element_type(options.dtype)  # fail before any process starts
    names = (OURS, *options.against)
    packages = dict.fromkeys(["numpy", *(package for name in names for package in ENGINES[name].packages)])
    machine = describe_machine(packages)
    total = sum(len(options.cases(ranks)) for ranks in options.ranks)
    rows: list[Row] = []
    for ranks in options.ranks:
        cases = options.cases(ranks)
        on_step(Step(len(rows), total, cases[0], None))
        with all_workers(options, ranks, hosts) as schedule:
            for case in cases:
                begun = Step(len(rows), total, case, None)
                row = schedule.measure(case, lambda part, begun=begun: on_step(begun._replace(done=begun.done + part)))
                rows.append(row)
                on_step(Step(len(rows), total, case, row))
            schedule.end()
    return Report(options, machine, rows)


@contextmanager
def all_workers(options: Options, ranks: int, hosts: Sequence[Host] = ()) -> Generator[Schedule, None, None]:
    """Start the workers of every engine. An engine that does not start is left out, unless it is ours."""
    engines: dict[str, Ask] = {}
    lost: dict[str, str] = {}
    with ExitStack() as stack:
        for name in (OURS, *options.against):
            try:
                engines[name] = stack.enter_context(start_workers(name, options, ranks, hosts)).ask
            except WorkersFailedError as exc:
                if is_ours(name):
                    raise
                lost[name] = " ".join(str(exc).split())
        yield Schedule(engines, lost, options)


def plan_rounds(seconds: Mapping[str, float], options: Options) -> list[Round]:
    """Plan the rounds, given the seconds that one call of each engine takes."""
    bursts = {name: _calls(taken) for name, taken in seconds.items()}
    if options.repeat is not None:  # the same number of calls for all engines, as asked for
        least = min(bursts.values())
        whole, rest = divmod(options.repeat, least)
        return [dict.fromkeys(seconds, calls) for calls in [least] * whole + ([rest] if rest else [])]
    one_round = sum(bursts[name] * taken for name, taken in seconds.items())
    rounds = min(max(MIN_ROUNDS, int(options.min_time * len(seconds) / one_round)), MAX_ROUNDS)
    return [bursts] * rounds


def _calls(seconds: float) -> int:
    """Calls per burst, if one takes `seconds`."""
    return min(max(1, int(BURST_SECONDS / seconds)), MAX_BURST)


@dataclass
class Schedule:
    """Measures one case after the other, with all engines among the same number of ranks.

    A failure of our own engine ends the run. Another engine that fails is reported, and left out from then on.
    """

    engines: dict[str, Ask]
    lost: dict[str, str]
    """Engines that failed, and why."""
    options: Options

    def measure(self, case: Case, on_part: Callable[[float], None]) -> Row:
        """Measure one case. `on_part` is told which share of it is done."""
        skipped: dict[str, str] = {}
        seconds: dict[str, float] = {}
        for name in list(self.engines):
            taken = self._prepare(name, case, skipped)
            if taken is not None:
                seconds[name] = taken
        times: dict[str, list[list[list[int]]]] = {name: [] for name in seconds}
        rounds = plan_rounds(seconds, self.options)
        for turn, calls in enumerate(rounds):
            for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
                answers = self._ask(name, do="burst", calls=calls[name])
                if answers is not None:
                    times[name].append([answer["nanoseconds"] for answer in answers])
            on_part((turn + 1) / len(rounds))
        for name in list(self.engines):
            self._ask(name, do="drop")
        timings = {name: Timing.of(taken) for name, taken in times.items() if name in self.engines}
        return Row(case.world_size, case.nbytes, timings, {**skipped, **self.lost})

    def end(self) -> None:
        """Let every engine leave its group in its own way."""
        for name in list(self.engines):
            self._ask(name, do="end")

    def _prepare(self, name: str, case: Case, skipped: dict[str, str]) -> float | None:
        answers = self._ask(name, do="prepare", case=asdict(case))
        if answers is None:
            return None
        if "skipped" in answers[0]:
            skipped[name] = answers[0]["skipped"]
            return None
        seconds = _slowest(answers)
        if seconds < WARM_UP_SECONDS:
            answers = self._ask(name, do="burst", calls=max(WARM_UP, _calls(seconds)))
            seconds = None if answers is None else _slowest(answers)
        return seconds

    def _ask(self, name: str, **command: object) -> Sequence[Message] | None:
        """The answers of all ranks; None if the engine is lost."""
        if name not in self.engines:
            return None
        try:
            return self.engines[name](**command)
        except WorkersFailedError as exc:
            if is_ours(name):
                raise
            self.lost[name] = str(exc).splitlines()[0].rstrip(":")
            del self.engines[name]
            return None


def is_ours(name: str) -> bool:
    """Whether the engine is this library (or one of its strategies), which is never left out."""
    return issubclass(ENGINES.get(name, RingfortEngine), RingfortEngine)


def _slowest(answers: Sequence[Message]) -> float:
    """Seconds of the last call of a burst, at its slowest rank."""
    return max(1, *(answer["nanoseconds"][-1] for answer in answers)) / 1e9
