"""Who is called how often, in which order: what disturbs the machine must disturb all engines alike.

Each round gives every engine one burst of calls, in alternating order. A burst has as many calls as fit in a moment,
so that a fast engine is not measured cold because a slow one stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

from ringfort.bench.engines import ENGINES
from ringfort.bench.engines.ours import RingfortEngine
from ringfort.bench.options import MAX_ROUNDS, MIN_ROUNDS, Case, Options
from ringfort.bench.results import Row, Timing
from ringfort.bench.worker_protocol import Message
from ringfort.bench.workers import Crew, CrewFailedError

BURST_SECONDS = 0.02
"""Of one engine before the next one's turn: long beside the barrier between, short beside what drifts on a machine."""
MAX_BURST = 2000
"""Calls. Ranks that were woken for their turn may share a core for some milliseconds: bursts of 50 calls of 4 B, which
are over by then, had medians of 14 and of 85 microseconds over TCP, by chance."""
WARM_UP = 2
"""Calls at least before any counts, beside the two that check and estimate: sockets' windows grow, caches fill."""
WARM_UP_SECONDS = 0.2
"""An engine that takes longer for one call is not made faster by another."""

Round = Mapping[str, int]
"""How many calls each engine makes."""


def schedule(seconds: Mapping[str, float], options: Options) -> list[Round]:
    """The rounds, given how long a call of each engine takes."""
    bursts = {name: _calls(taken) for name, taken in seconds.items()}
    if options.repeat is not None:  # as many calls of everybody, since it was asked for
        least = min(bursts.values())
        whole, rest = divmod(options.repeat, least)
        return [dict.fromkeys(seconds, calls) for calls in [least] * whole + ([rest] if rest else [])]
    one_round = sum(bursts[name] * taken for name, taken in seconds.items())
    rounds = min(max(MIN_ROUNDS, int(options.min_time * len(seconds) / one_round)), MAX_ROUNDS)
    return [bursts] * rounds


def _calls(seconds: float) -> int:
    """Of a burst, if one takes so long."""
    return min(max(1, int(BURST_SECONDS / seconds)), MAX_BURST)


class Turns:
    """All engines among as many ranks, one case after the other.

    One of ours that fails ends the run; another engine's failure is said, and it is left out from then on.
    """

    def __init__(self, crews: Mapping[str, Crew], lost: Mapping[str, str], options: Options) -> None:
        self._crews = dict(crews)
        self._lost = dict(lost)
        """Engines that failed, and how."""
        self._options = options

    def measure(self, case: Case, on_part: Callable[[float], None]) -> Row:
        """One case. `on_part` is told how much of it is done."""
        skipped: dict[str, str] = {}
        seconds: dict[str, float] = {}
        for name in list(self._crews):
            taken = self._prepare(name, case, skipped)
            if taken is not None:
                seconds[name] = taken
        times: dict[str, list[list[list[int]]]] = {name: [] for name in seconds}
        rounds = schedule(seconds, self._options)
        for turn, calls in enumerate(rounds):
            for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
                answers = self._ask(name, do="burst", calls=calls[name])
                if answers is not None:
                    times[name].append([answer["nanoseconds"] for answer in answers])
            on_part((turn + 1) / len(rounds))
        for name in list(self._crews):
            self._ask(name, do="drop")
        timings = {name: Timing.of(taken) for name, taken in times.items() if name in self._crews}
        return Row(case.world_size, case.nbytes, timings, {**skipped, **self._lost})

    def end(self) -> None:
        """Let every engine leave its group in its own way."""
        for name in list(self._crews):
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
            answers = self._ask(name, do="warm", calls=max(WARM_UP, _calls(seconds)))
            seconds = None if answers is None else _slowest(answers)
        return seconds

    def _ask(self, name: str, **command: object) -> list[Message] | None:
        """Everybody's answers; None if the engine is lost."""
        if name not in self._crews:
            return None
        try:
            return self._crews[name].ask(**command)
        except CrewFailedError as exc:
            if is_ours(name):
                raise
            self._lost[name] = str(exc).splitlines()[0].rstrip(":")
            del self._crews[name]
            return None


def is_ours(name: str) -> bool:
    """Whether an engine is this library: it may not be left out."""
    return issubclass(ENGINES[name], RingfortEngine)


def _slowest(answers: list[Message]) -> float:
    return max(1e-9, *(float(answer["seconds"]) for answer in answers))
