"""The one history that the weights have at the end: which steps are in them, and which samples in these.

A system can commit a step on one member, lose that member, and commit a step of the same number on the others. So the
lines are followed back from the last one: each says the digest of the weights before and after its step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.compared.records import NEVER, Process


@dataclass(frozen=True)
class Step:
    """A step that is in the weights."""

    number: int
    at: float
    """When the first member said that it had applied it."""
    applied: tuple[int, ...]
    group: int
    members: int
    weights: int


def history(processes: Sequence[Process]) -> list[Step]:
    """Return the steps that led to the weights of the last line, first one first."""
    lines: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    latest: dict[str, Any] | None = None
    for process in processes:
        for line in process.committed:
            lines[line["step"]][line["weights"]].append(line)
            if latest is None or line["at"] > latest["at"]:
                latest = line
    if latest is None:
        return []
    number, weights = latest["step"], latest["weights"]
    found: list[Step] = []
    while number in lines:
        same = lines[number][weights]
        best = min((line for line in same if line["members"]), key=lambda line: line["at"], default=same[0])
        found.append(Step(number, best["at"], tuple(best["applied"]), best["group"], best["members"], weights))
        number -= 1
        if number not in lines:
            break
        before = next((line["before"] for line in same if line["before"] is not None), None)
        if before in lines[number]:
            weights = before
        else:  # nobody is left who has said it
            weights = max(lines[number], key=lambda one: len(lines[number][one]))
    return found[::-1]


def doubled(processes: Sequence[Process]) -> int:
    """Return the number of steps that have several results: members disagree, or a result was lost again."""
    results: dict[int, set[int]] = defaultdict(set)
    for process in processes:
        for line in process.committed:
            results[line["step"]].add(line["weights"])
    return sum(len(found) > 1 for found in results.values())


@dataclass
class Samples:
    """What became of the samples that were drawn."""

    sealed: list[float] = field(default_factory=list)
    """When each sample that is in the weights exactly once, or for the first time, was applied."""
    twice: list[float] = field(default_factory=list)
    """When a sample was applied once more in the same pass."""
    lost: list[float] = field(default_factory=list)
    """When each sample was drawn that was never applied, and that nobody computes any more."""
    again: list[float] = field(default_factory=list)
    """When a sample was drawn once more in the same pass, because the first one who had it was lost."""


class _Draws:
    """When each sample was drawn, for which pass, and which draws were applied."""

    def __init__(self) -> None:
        self._open: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self._last: dict[int, int] = {}

    def add(self, sample: int, at: float, number: int) -> None:
        self._open[sample].append((at, number))

    def take(self, sample: int, at: float) -> tuple[int, int]:
        """Return which sample of which pass was applied at a moment: the newest draw that was not applied before.
        Members may be in different passes, so that one step has the sample of two of them."""
        waiting = self._open[sample]
        place = bisect_right(waiting, (at, NEVER)) - 1
        if place >= 0:
            self._last[sample] = waiting.pop(place)[1]
        return sample, self._last.get(sample, -1)


def samples(processes: Sequence[Process], steps: Sequence[Step]) -> Samples:
    """Return what became of the samples. A sample of one pass is another one than the same sample of the next."""
    found, draws = Samples(), _Draws()
    first: dict[tuple[int, int], float] = {}
    open_still: set[tuple[int, int]] = set()
    drawn_by = [(line["at"], one, line) for one in processes for line in one.drew]
    for at, process, line in sorted(drawn_by, key=lambda item: item[0]):
        for sample in line["drew"]:
            key = (sample, line["number"])
            draws.add(sample, at, line["number"])
            if key in first:
                found.again.append(at)
            first.setdefault(key, at)
            if process.died == NEVER and at > process.settled:
                open_still.add(key)
    applied: Counter[tuple[int, int]] = Counter()
    for step in steps:
        for sample in step.applied:
            key = draws.take(sample, step.at)
            (found.twice if applied[key] else found.sealed).append(step.at)
            applied[key] += 1
    found.lost = [at for key, at in first.items() if not applied[key] and key not in open_still]
    return found
