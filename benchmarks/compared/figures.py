"""The figures of a comparison, from what was written during it: pure, and repeatable without a new run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.compared.history import Step, doubled, history, samples
from benchmarks.compared.records import NEVER, Process, Record

SETTLING = 2.0
"""Seconds after the death of a coordinator in which the steps that had begun may end."""


def gaps(steps: Sequence[Step], begin: float, end: float) -> list[float]:
    """Return the times without a new step between two moments, the longest one first."""
    inside = sorted(step.at for step in steps if begin < step.at < end)
    return sorted((b - a for a, b in pairwise((begin, *inside, end))), reverse=True)


def after(steps: Sequence[Step], at: float) -> float:
    """Return the seconds from a kill to the first step of a group that is without the killed one."""
    group = next((step.group for step in reversed(steps) if step.at <= at), None)
    return next((step.at - at for step in steps if step.at > at and step.group != group), NEVER)


def next_after(steps: Sequence[Step], at: float) -> float:
    """Return the seconds to the next step."""
    return next((step.at - at for step in steps if step.at > at), NEVER)


def seconds_present(processes: Sequence[Process], begin: float, end: float) -> float:
    """Return the sum over processes of the seconds that they were alive after their imports."""
    return sum(max(0.0, min(one.died, end) - max(one.ready, begin)) for one in processes)


def spread(times: Sequence[float]) -> dict[str, float | int | None]:
    """Return the median, the worst and the number of some times. Those that never came count in `never` alone."""
    came = [time for time in times if time < NEVER]
    return {
        "median_s": median(came) if came else None,
        "worst_s": max(came) if came else None,
        "count": len(came),
        "never": len(times) - len(came),
    }


def _within(moments: Sequence[float], begin: float, end: float) -> int:
    return sum(begin < at <= end for at in moments)


def phase_figures(record: Record, name: str, rate: float) -> dict[str, Any] | None:
    """Return the figures of a phase, or None if the run did not come to it.

    Args:
        record: what the system has written.
        name: the phase, "calm" or "storm".
        rate: samples per second of a member that does nothing else, see plain.py.
    """
    window = record.phase(name)
    if window is None or window[0] == window[1]:
        return None
    begin, end = window
    record = record.until(end)  # what is lost later, for example with the coordinator, is not lost here
    steps, processes = history(record.processes), record.processes
    became = samples(processes, steps)
    sealed, present = _within(became.sealed, begin, end), seconds_present(processes, begin, end)
    kills = [kill for kill in record.of("kill", begin, end) if kill["had_joined"]]
    started = [one for one in processes if begin <= one.started <= end]
    joins = [one.joined - one.ready for one in started if one.joined < NEVER]
    return {
        "seconds": end - begin,
        "steps": sum(begin < step.at <= end for step in steps),
        "sealed": sealed,
        "samples_per_s": sealed / (end - begin),
        "lost": _within(became.lost, begin, end),
        "twice": _within(became.twice, begin, end),
        "computed_again": _within(became.again, begin, end),
        "goodput": sealed / (present * rate) if present else 0.0,
        "present": present / (end - begin),
        "longest_gap_s": gaps(steps, begin, end)[0],
        "kills": len(record.of("kill", begin, end)),
        "left_out": len(record.of("left out", begin, end)),
        "recovery": spread([after(steps, kill["at"]) for kill in kills]),
        "join": spread(joins),
        "died_before_joining": sum(one.joined == NEVER and one.died <= end for one in started),
        "ended_by_themselves": len(record.of("ended", begin, end)),
        "steps_with_two_results": doubled(processes),
        "cpu_ms_per_sample": _cpu(record, name, sealed) if not kills else None,  # that of killed ones is not known
        "mean_batch": sealed / max(1, sum(begin < step.at <= end for step in steps)),
        "loss": _last_loss(processes, end),
    }


def _cpu(record: Record, name: str, sealed: int) -> float | None:
    ended = next((event for event in record.of("end of phase") if event["name"] == name), {})
    return ended["cpu_s"] / sealed * 1e3 if sealed and "cpu_s" in ended else None


def _last_loss(processes: Sequence[Process], end: float) -> float | None:
    lines = [line for one in processes for line in one.committed if line["at"] <= end and line["loss"] is not None]
    newest = sorted(lines, key=lambda line: line["at"])[-20:]  # of one member's share each: a mean is less noisy
    return sum(line["loss"] for line in newest) / len(newest) if newest else None


def coordinator_figures(record: Record) -> dict[str, Any] | None:
    """Return what the death of the coordinator cost, or None if the run did not come to it."""
    killed = record.of("coordinator killed")
    window = record.phase("coordinator")
    if not killed or window is None:
        return None
    at, end = killed[0]["at"], window[1]
    steps = history(record.processes)
    back = next((event["at"] for event in record.of("coordinator started", at)), None)
    until = end if back is None else back
    return {
        "what": killed[0]["what"],
        "seconds_to_next_step": after(steps, at) if back is None else None,
        "longest_gap_s": gaps(steps, at, end)[0],
        "away_s": None if back is None else back - at,
        "steps_meanwhile": sum(at + SETTLING < step.at < until for step in steps) if back is not None else None,
        "seconds_after_its_return": None if back is None else next_after(steps, back),
        "ended_by_themselves": len(record.of("ended", at, end)),
        "weights_survived": any(step.at < at for step in steps),
    }


def all_figures(record: Record, rate: float) -> dict[str, Any]:
    """Return every figure of a system."""
    found: dict[str, Any] = {name: phase_figures(record, name, rate) for name in ("calm", "storm")}
    calm, storm = found["calm"], found["storm"]
    if calm and storm and calm["samples_per_s"]:
        storm["of_calm"] = storm["samples_per_s"] / calm["samples_per_s"]
    found["coordinator"] = coordinator_figures(record)
    return found
