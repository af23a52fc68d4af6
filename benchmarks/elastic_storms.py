"""Faults one after the other, for minutes: the storm and the churn of `python -m benchmarks.elastic`.

A storm has a fixed number of hosts and hurts one of them at fixed times. Churn starts and kills members of up to six
hosts at random moments, like the stress test of PCCL. Both compare every state at every step (see `Cluster.settle`).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import psutil

from benchmarks.elastic_cluster import LIMIT, Cluster, Member, MemberFailedError
from benchmarks.elastic_member import RATE

BATCH = 512
"""Samples per step of a storm: 0.64 s of computing for 4 members."""
CHURN_HOSTS = 6
CHURN_PAUSE = (0.5, 2.0)
"""Seconds between two events of churn."""
CHURN_GAP = 5.0
"""Seconds without a step that are reported."""
ABSENCE = (0.5, 6.0)
"""Seconds that a freeze or a cut lasts."""
MEMBER_OUTAGE, LEADER_OUTAGE = 0.5, 2.0
"""Seconds without a step that the death of one may cost; ELASTIC's figures."""
NEAR = 3.0
"""Seconds before a gap in which what happened may have to do with it."""
TICK = 0.01


@dataclass
class Fault:
    """Something that was done to a host, or a member that was started."""

    kind: str
    """kill, freeze, cut or start."""
    host: int
    at: float
    leads: bool = False
    seconds: float = 0.0
    """How long it lasts; 0 for one that has no end."""

    def allowed(self, patience: float) -> float:
        """Return how long the run may stand still for it."""
        if self.kind == "kill":
            return LEADER_OUTAGE if self.leads else MEMBER_OUTAGE
        return self.seconds if self.seconds < patience else patience + 1.0

    def describe(self, since: float) -> str:
        """Return it in words, with the seconds after `since`."""
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        leader = ", the leader" if self.leads else ""
        return f"{self.kind} of {self.host}{leader}{lasts} at {self.at - since:+.2f} s"


@dataclass(frozen=True)
class Gap:
    """A time without a sealed step."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def describe(self, since: float, faults: Sequence[Fault]) -> str:
        """Return it in words: when, and what happened around it, in seconds after its beginning."""
        near = [
            fault.describe(self.begin)
            for fault in faults
            if fault.at < self.end and fault.at + fault.seconds > self.begin - NEAR
        ]
        return f"{self.seconds:.2f} s at {self.begin - since:.1f} s ({'; '.join(near) or 'nothing happened'})"


@dataclass
class Steps:
    """The steps that were sealed between two moments."""

    begin: float
    end: float
    first: int
    """The last step before."""
    last: int
    times: list[float] = field(default_factory=list)
    """When the first member said that it has applied each step."""
    again: int = 0
    """Steps that were sealed once more, because a new branch began with a checkpoint."""

    @classmethod
    def of(cls, members: Sequence[Member], begin: float, end: float) -> Steps:
        """Return those of all members."""
        sealed: dict[tuple[int, str], float] = {}
        for member in members:
            for line in member.lines:
                if line["at"] <= end:
                    key = (line["step"], line["branch"])
                    sealed[key] = min(sealed.get(key, end), line["at"])
        earliest: dict[int, float] = {}
        for (step, _), at in sealed.items():
            earliest[step] = min(earliest.get(step, end), at)
        new = {key: at for key, at in sealed.items() if at > begin}
        first = max((step for (step, _), at in sealed.items() if at <= begin), default=0)
        again = sum(at > earliest[step] for (step, _), at in new.items())
        return cls(begin, end, first, max((first, *earliest)), sorted(new.values()), again)

    @property
    def count(self) -> int:
        return self.last - self.first

    @property
    def gaps(self) -> list[Gap]:
        """The times without a step, longest first."""
        found = [Gap(a, b) for a, b in pairwise((self.begin, *self.times, self.end))]
        return sorted(found, key=lambda gap: gap.seconds, reverse=True)


def seconds_alive(members: Sequence[Member], begin: float, end: float) -> float:
    """Return the sum over members of the seconds that they were alive after their imports."""
    return sum(max(0.0, min(m.died, end) - max(m.ready, begin)) for m in members)


def seconds_joining(members: Sequence[Member], begin: float, end: float) -> float:
    """Return the sum over members of the seconds from their imports to their first step."""
    total = 0.0
    for m in members:
        total += max(0.0, min(m.joined, m.died, end) - max(m.ready, begin))
    return total


def join_figures(members: Sequence[Member], begin: float, end: float) -> dict[str, Any]:
    """Return how many members were started between two moments, and the seconds from their imports to their first step
    of those that came to one."""
    started = [m for m in members if begin <= m.started <= end]
    joined = [m for m in started if m.joined <= end]
    took = [m.joined - m.ready for m in joined] or [0.0]
    return {
        "starts": len(started),
        "joins": len(joined),
        "join_median_s": median(took),
        "join_worst_s": max(took),
        "killed_before_they_joined": sum(m.died <= end and m not in joined for m in started),
    }


def alone(cluster: Cluster, seconds: float) -> float:
    """Return the samples per second that the only member seals."""
    [member] = cluster.alive
    cluster.until(lambda: len(member.lines) > 2, "a member alone")
    first, begin = len(member.lines) - 1, time.monotonic()
    cluster.until(lambda: time.monotonic() > begin + seconds and len(member.lines) > first + 1, "steps alone")
    lines = member.lines[first:]
    return (len(lines) - 1) * cluster.given.batch / (lines[-1]["at"] - lines[0]["at"])


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


class Faults:
    """Hurts members and ends what it has begun."""

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self.cluster, self.chance = cluster, chance
        self.done: list[Fault] = []
        self.errors: list[str] = []
        self.left_out = 0
        """Times at which there was nobody to hurt."""
        self.cores = 0.0
        """Cores of this machine that were busy on average: how much was left, and whether something else ran."""
        self._stuck_since = self._begin = time.monotonic()
        self._busy = _busy_seconds()

    def able(self) -> list[Member]:
        """Return the members that take part and that nothing is done to."""
        return [m for m in self.cluster.alive if m.has_joined and not m.is_frozen and not m.is_cut]

    def hurt(self, kind: str, victim: Member, seconds: float = 0.0) -> None:
        """Begin a fault."""
        fault = Fault(kind, victim.number, time.monotonic(), victim.last["leads"], seconds)
        self.done.append(fault)
        match kind:
            case "kill":
                victim.kill()
            case "freeze":
                victim.freeze()
            case _:
                self.cluster.cut(victim)

    def heal(self, victim: Member) -> None:
        """End a freeze or a cut."""
        if victim.is_frozen:
            victim.thaw()
        if victim.is_cut:
            self.cluster.heal(victim)

    def start(self, number: int) -> None:
        """Start the member of a host."""
        self.done.append(Fault("start", number, time.monotonic()))
        self.cluster.start(number)

    def settle(self, begin: float) -> list[Member]:
        """Take what all have said. Return those that ended by themselves since. Raise if no step comes any more."""
        cluster = self.cluster
        cluster.settle()
        failed = cluster.failed[:]
        cluster.failed.clear()
        for member in failed:
            why = f"member {member.number} ended by itself with {member.process.returncode}"
            self._fail(f"{why} at {member.died - begin:.1f} s; {member.log} ends:\n{member.tail}")
        latest = max((m.last["at"] for m in cluster.alive), default=0.0)
        self._stuck_since = max(self._stuck_since, latest)
        if time.monotonic() > self._stuck_since + LIMIT:
            gap = Gap(self._stuck_since, time.monotonic())
            raise TimeoutError(f"no step any more: {gap.describe(begin, self.done)}")
        return failed

    def end(self, size: int, numbers: Sequence[int] = ()) -> float:
        """Return when the next step was sealed. Then the rest is started, and all must come together again."""
        try:
            end = self.cluster.next_step()
        except (TimeoutError, MemberFailedError) as exc:  # the figures of the time before are good all the same
            end = time.monotonic()
            self._fail(f"after the last fault: {exc}")
        self.cores = (_busy_seconds() - self._busy) / (time.monotonic() - self._begin)
        for number in numbers:
            self.cluster.start(number)
        try:
            self.cluster.whole(size)
        except (TimeoutError, MemberFailedError) as exc:
            self._fail(f"after the last fault: {exc}")
        return end

    def _fail(self, why: str) -> None:
        self.errors.append(why)
        print(why, flush=True)


def storm(
    cluster: Cluster, seconds: float, every: float, kinds: Sequence[str], chance: random.Random
) -> tuple[Steps, Faults]:
    """Hurt any member every so many seconds. A killed one is started again after `--away`. With no `kinds`, hurt
    nobody. Everything is healed at the end, and all must come together again."""
    size = len(cluster.alive)
    begin = cluster.next_step()  # from step to step: a part of one is not seen, and would count as lost
    faults = Faults(cluster, chance)
    starts: list[tuple[float, int]] = []
    ends: list[tuple[float, Member]] = []
    next_fault = begin + every if kinds else float("inf")
    while (now := time.monotonic()) < begin + seconds:
        starts += [(now + cluster.given.away, member.number) for member in faults.settle(begin)]
        if now >= next_fault:
            next_fault += every
            able = faults.able()
            if len(able) > 1:
                victim, kind = chance.choice(able), chance.choice(kinds)
                if kind == "kill":
                    faults.hurt(kind, victim)
                    starts.append((now + cluster.given.away, victim.number))
                else:
                    lasts = chance.uniform(*ABSENCE)
                    faults.hurt(kind, victim, lasts)
                    ends.append((now + lasts, victim))
            else:
                faults.left_out += 1
        for due in [one for one in starts if one[0] <= now]:
            starts.remove(due)
            faults.start(due[1])
        for over in [one for one in ends if one[0] <= now]:
            ends.remove(over)
            faults.heal(over[1])
        time.sleep(TICK)
    for _, member in ends:
        faults.heal(member)
    end = faults.end(size, [number for _, number in starts])
    return Steps.of(cluster.all, begin, end), faults


class Target(NamedTuple):
    """What a storm must show."""

    goodput: float
    gap: float | None
    """The longest time without a step, in seconds; None if nothing was decided."""
    why: str


def target_of(kinds: Sequence[str], every: float, faults: Sequence[Fault], seconds: float, patience: float) -> Target:
    """Return what a storm must show: what was decided for kills every 29 and every 5 s, otherwise one minus the
    allowed outages over the time."""
    allowed = sum(fault.allowed(patience) for fault in faults if fault.kind != "start")
    decided = {29.0: (0.977, 3.0), 5.0: (0.85, None)}
    if set(kinds) == {"kill"} and every in decided:
        goodput, gap = decided[every]
        return Target(goodput, gap, f"one kill per {every:g} s")
    gap = 3.0 if set(kinds) == {"kill"} else patience + 3.0
    return Target(max(0.0, 1 - allowed / seconds), gap, f"1 - {allowed:.1f} s of allowed outages / {seconds:.0f} s")


def figures(cluster: Cluster, steps: Steps, faults: Faults, rate: float) -> dict[str, Any]:
    """Return the figures of a storm or of calm. `rate` is what one member seals alone, in samples per second."""
    seconds, batch = steps.end - steps.begin, cluster.given.batch
    samples = steps.count * batch
    present = seconds_alive(cluster.all, steps.begin, steps.end)
    away = sum(min(f.at + f.seconds, steps.end) - f.at for f in faults.done)
    kinds = Counter(f.kind for f in faults.done if f.kind != "start")
    return {
        "seconds": seconds,
        "goodput": samples / (present * rate),
        "raw": samples / (present * RATE),
        "samples_per_s": samples / seconds,
        "busy_cores": faults.cores,
        "steps": steps.count,
        "steps_again": steps.again,
        "mean_present": present / seconds,
        **join_figures(cluster.all, steps.begin, steps.end),
        "lost_joining": seconds_joining(cluster.all, steps.begin, steps.end) / present,
        "lost_away": away / present,
        "longest_gap_s": steps.gaps[0].seconds,
        "longest_gap": steps.gaps[0].describe(steps.begin, faults.done),
        "faults": dict(kinds),
        "of_the_leader": sum(f.leads for f in faults.done),
        "left_out": faults.left_out,
        "errors": faults.errors,
    }


def churn(cluster: Cluster, seconds: float, chance: random.Random) -> tuple[Steps, Faults]:
    """Start or kill a member every 0.5 to 2 s, on up to as many hosts as there are. The last one that has the state is
    not killed, so the run goes on from memory."""
    event = begin = cluster.next_step()
    faults = Faults(cluster, chance)
    while (now := time.monotonic()) < begin + seconds:
        faults.settle(begin)
        if now >= event:
            event = now + chance.uniform(*CHURN_PAUSE)
            alive = cluster.alive
            holders = [m for m in alive if m.has_joined]
            # Any of them may die, also one that is still joining, as long as another one with the state is left.
            able = [m for m in alive if not m.has_joined or len(holders) > 1] if len(alive) > 1 else []
            free = [number for number in range(len(cluster.hosts)) if number not in {m.number for m in alive}]
            if able and (not free or chance.random() < 0.5):
                faults.hurt("kill", chance.choice(able))
            elif free:
                faults.start(chance.choice(free))
            else:
                faults.left_out += 1
        time.sleep(TICK)
    end = faults.end(len(cluster.alive))
    return Steps.of(cluster.all, begin, end), faults


def churn_figures(cluster: Cluster, steps: Steps, faults: Faults) -> dict[str, Any]:
    """Return the figures of churn."""
    seconds = steps.end - steps.begin
    gaps = [gap for gap in steps.gaps if gap.seconds > CHURN_GAP and alive_throughout(cluster.all, gap)]
    kills = [f for f in faults.done if f.kind == "kill"]
    return {
        "seconds": seconds,
        "busy_cores": faults.cores,
        "steps": steps.count,
        "steps_again": steps.again,
        "samples_per_s": steps.count * cluster.given.batch / seconds,
        "mean_present": seconds_alive(cluster.all, steps.begin, steps.end) / seconds,
        **join_figures(cluster.all, steps.begin, steps.end),
        "kills": len(kills),
        "kills_of_the_leader": sum(f.leads for f in kills),
        "longest_gap_s": steps.gaps[0].seconds,
        "longest_gap": steps.gaps[0].describe(steps.begin, faults.done),
        "long_gaps": [gap.describe(steps.begin, faults.done) for gap in gaps],
        "errors": faults.errors,
    }


def alive_throughout(members: Sequence[Member], gap: Gap) -> bool:
    """Return whether some member was alive at every moment of a gap."""
    covered = gap.begin
    for member in sorted(members, key=lambda m: m.ready):
        if member.ready <= covered < member.died:
            covered = member.died
    return covered >= gap.end
