"""How long an elastic run stands still when machines die and come: `python -m benchmarks.elastic`.

    python -m benchmarks.elastic --kills 100
    python -m benchmarks.elastic --storm 1800 --every 29 --faults kill,freeze,cut
    python -m benchmarks.elastic --churn 3600
    python -m benchmarks.elastic --kills 0 --freezes 0 --joins 0 --cuts 20 --patience 10 --strict
    python -m benchmarks.elastic --against torchft --seconds 1200

Members live in network namespaces (or on loopback), encrypted, with whole-number gradients; computing is a sleep, so
that the cores of this machine do not decide. The state of each member is compared at every step with that of a run
without faults. elastic_member.py is what a member runs, elastic_cluster.py starts members, elastic_storms.py hurts
them. `--against torchft` is another program, elastic_compared.py, with options of its own: a model of torch, trained by
both.

Each figure with a target says whether it was met. With --strict the command fails where one was not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.elastic_cluster import Cluster, Member, cluster
from benchmarks.elastic_member import COMPUTE, EVERY, MICROBATCH, RATE
from benchmarks.elastic_storms import (
    ABSENCE,
    BATCH,
    CHURN_GAP,
    CHURN_HOSTS,
    alone,
    churn,
    churn_figures,
    figures,
    storm,
    target_of,
)
from tests.helpers.namespaces import why_not

STEP = 32
"""Samples per step where recoveries are timed: 40 ms of computing for 4 members, so that the recovery is seen."""
KINDS = ("kill", "freeze", "cut")
KILL, LEADER_KILL = {"median_to": 0.5, "worst_to": 1.5}, {"worst_to": 2.0}
"""Seconds to the next step after a kill, at most."""
BEYOND = 1.0
"""Seconds beyond the patience until a freeze or a cut is over for the others."""
JOIN = 3.0
"""Seconds after its imports within which a joiner takes part."""


class Report:
    """Prints figures, and writes each as a line of JSON with `--json`."""

    def __init__(self, path: str | None, given: argparse.Namespace) -> None:
        self._path = None if path is None else Path(path)
        self.missed: list[str] = []
        """The figures whose target was not met."""
        self._setting = {name: getattr(given, name) for name in ("members", "mib", "state_mb", "patience", "batch")}

    def figure(self, name: str, text: str, *, met: bool | None = None, **values: Any) -> None:
        """Report a figure in words and in numbers, and whether its target was met, if it has one."""
        print(text, flush=True)
        if met is not None:
            values["met"] = met
        if met is False:
            self.missed.append(name)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"figure": name, **values, "setting": self._setting}) + "\n")

    def times(
        self,
        name: str,
        text: str,
        taken: Sequence[float],
        *,
        median_to: float = float("inf"),
        worst_to: float = float("inf"),
        met: bool = True,
        **values: Any,
    ) -> None:
        """Report the median, the 95th percentile and the worst of some times, and whether they are within their
        targets (and whatever else the target asks for was `met`)."""
        ordered = sorted(taken)
        found = {"median_s": median(ordered), "p95_s": ordered[ceil(0.95 * len(ordered)) - 1], "worst_s": ordered[-1]}
        words = f"median {found['median_s']:.2f} s, 95% {found['p95_s']:.2f} s, worst {found['worst_s']:.2f} s"
        limits = {"median": median_to, "worst": worst_to}
        targets = [f"{what} {limit:g} s" for what, limit in limits.items() if limit < float("inf")]
        met = met and found["median_s"] <= median_to and found["worst_s"] <= worst_to
        told = f" (target {', '.join(targets)}: {_yes(met)})" if targets else ""
        values |= {"met": met, "target": targets} if targets else {}
        self.figure(name, f"{text}: {words} of {len(ordered)}{told}", **found, count=len(ordered), **values)


def kill_one(all_members: Cluster, *, leader: bool) -> float:
    """Kill a member or the leader. Return the seconds to the next step that is sealed without it; it returns."""
    size = len(all_members.alive)
    victim = next(m for m in all_members.alive if m.last["leads"] == leader)
    died, epoch = victim.kill(), victim.last["epoch"]

    def after() -> list[float]:
        lines = (line for m in all_members.alive for line in m.lines[-50:])
        return [line["at"] for line in lines if line["at"] > died and line["epoch"] > epoch]

    all_members.until(lambda: bool(after()), "a step after the death")
    seconds = min(after()) - died
    who = "the leader" if leader else "a member"
    all_members.tell(f"{who}, {victim.number}, was killed: {seconds:.2f} s", died, died + seconds)
    all_members.start(victim.number)
    all_members.whole(size)
    return seconds


def freeze_one(all_members: Cluster, away: float) -> tuple[float, float]:
    """Stop all processes of a member with SIGSTOP until `away` seconds after the others have gone on without it. Return
    the seconds to their next step, and those from its return until it takes part again."""
    size = len(all_members.alive)
    victim = next(m for m in all_members.alive if not m.last["leads"])
    others = [m for m in all_members.alive if m is not victim]
    epoch, begin = victim.last["epoch"], time.monotonic()
    victim.freeze()

    def after(m: Member, wanted: int) -> list[float]:
        return [one["at"] for one in m.lines[-200:] if one["epoch"] > epoch and one["members"] == wanted]

    all_members.until(lambda: any(after(m, size - 1) for m in others), "a step without the frozen one")
    seconds = min(at for m in others for at in after(m, size - 1)) - begin
    all_members.tell(f"member {victim.number} was frozen: {seconds:.2f} s", begin, begin + seconds)
    time.sleep(away)
    back = time.monotonic()
    victim.thaw()
    all_members.until(lambda: bool(after(victim, size)), "the frozen one is back")
    returned = after(victim, size)[0] - back
    numbers = (victim.number, others[0].number)
    all_members.tell(f"member {victim.number} is back: {returned:.2f} s", back, back + returned, numbers)
    all_members.whole(size)
    return seconds, returned


def cut_one(all_members: Cluster, seconds: float) -> tuple[bool, float]:
    """Cut a member off for so many seconds. Return whether the others lost it, and the longest time between two steps
    of another member."""
    size = len(all_members.alive)
    victim, other = all_members.alive[-1], all_members.alive[0]
    before, begin = other.last["epoch"], time.monotonic()
    all_members.cut(victim)
    time.sleep(seconds)
    all_members.heal(victim)
    all_members.whole(size)
    times = [line["at"] for line in other.lines if line["at"] > begin - 2]
    all_members.tell(f"member {victim.number} was cut off for {seconds:g} s", begin, times[-1])
    return other.last["epoch"] != before, max(b - a for a, b in pairwise(times))


def join_one(all_members: Cluster, number: int) -> tuple[float, float, float]:
    """Start one more. Return the seconds from its imports to its first step as a member, the longest time between two
    steps of the others meanwhile, and their median step before."""
    others = all_members.alive
    joiner = all_members.start(number)
    all_members.until(lambda: any(line["members"] > len(others) for line in joiner.lines), "the joiner takes part")
    first = next(line["at"] for line in joiner.lines if line["members"] > len(others))
    numbers = (number, others[0].number)
    all_members.tell(f"member {number} joined: {first - joiner.ready:.2f} s", joiner.ready, first, numbers)
    times = [line["at"] for line in others[0].lines]
    gaps = [(b - a, b) for a, b in pairwise(times)]
    usual = median(gap for gap, end in gaps[-200:] if end < joiner.ready)
    longest = max(gap for gap, end in gaps if joiner.ready - 0.5 < end <= first + 0.5)
    return first - joiner.ready, longest, usual


def kill_all(all_members: Cluster) -> tuple[float, int]:
    """Kill all at once and start them again. Return the seconds from the last one's imports to the next step, and the
    number of steps that were lost."""
    numbers, before = [m.number for m in all_members.alive], max(m.last["step"] for m in all_members.alive)
    for member in all_members.alive:
        member.process.kill()
    for member in all_members.alive:
        member.kill()
    all_members.settle()
    before = max(before, *(m.last["step"] for m in all_members.members.values()))
    made = [all_members.start(number) for number in numbers]
    all_members.until(lambda: all(m.lines for m in made), "a step after all were killed")
    first = min(m.lines[0]["step"] for m in made)
    begun = min(m.lines[0]["at"] for m in made)
    all_members.whole(len(numbers))
    return begun - max(m.ready for m in made), before - first + 1


def measure_recoveries(given: argparse.Namespace, report: Report) -> None:
    """Report what each kind of fault costs, one fault at a time."""
    with cluster("recoveries", given.members + 1, given) as all_members:
        for number in range(given.members):
            all_members.start(number)
        all_members.whole(given.members)
        for leader in (False, True):
            taken = [kill_one(all_members, leader=leader) for _ in range(given.kills)]
            if taken:
                who = "the leader" if leader else "a member"
                report.times(
                    f"kill of {who}", f"SIGKILL of {who} to the next step", taken, **(LEADER_KILL if leader else KILL)
                )
        taken = [freeze_one(all_members, away=0.3) for _ in range(given.freezes)]
        if taken:
            gone, back = zip(*taken, strict=True)
            patience = f"at patience {given.patience:g} s"
            text = f"SIGSTOP of all processes of a member {patience} to the next step"
            report.times("freeze", text, gone, worst_to=given.patience + BEYOND)
            report.times("return", "a frozen member is back after SIGCONT", back)
        taken = [cut_one(all_members, given.cut) for _ in range(0 if given.loopback else given.cuts)]
        if taken:
            lost, gaps = zip(*taken, strict=True)
            may_be_lost = given.cut >= given.patience
            report.times(
                "cut",
                f"a cut of {given.cut:g} s at patience {given.patience:g} s, {sum(lost)} of {len(lost)} lost the "
                f"member; longest time without a step",
                gaps, worst_to=given.patience + BEYOND, met=may_be_lost or not any(lost), lost=sum(lost),
                cut_s=given.cut,
            )  # fmt: skip
        for _ in range(given.joins):
            seconds, longest, usual = join_one(all_members, given.members)
            met = seconds <= JOIN and longest <= 2 * usual
            report.figure(
                "join",
                f"a joiner takes part {seconds:.2f} s after its imports; meanwhile the longest step of the others is "
                f"{longest:.2f} s, usually {usual:.2f} s (target {JOIN:g} s, and two usual steps: {_yes(met)})",
                met=met, seconds=seconds, longest_s=longest, usual_s=usual,
            )  # fmt: skip
            all_members.members[given.members].kill()
            all_members.whole(given.members)
        if given.all_killed:
            seconds, lost = kill_all(all_members)
            text = f"all killed: the first step {seconds:.2f} s after the imports, {lost} steps lost"
            text = f"{text} (saved every {EVERY}: {_yes(lost <= EVERY)})"
            report.figure("all killed", text, met=lost <= EVERY, seconds=seconds, lost=lost, every=EVERY)


def measure_storm(given: argparse.Namespace, report: Report) -> None:
    """Report what a member does alone, what all do in calm and what they do in a storm."""
    kinds, chance = given.faults, random.Random(given.seed)
    with cluster("storm", given.members, given) as all_members:
        all_members.start(0)
        rate = alone(all_members, given.alone)
        report.figure(
            "alone",
            f"alone a member seals {rate:.1f} samples/s; computing alone would give {RATE:.0f} "
            f"({MICROBATCH} samples per {COMPUTE * 1e3:g} ms)",
            samples_per_s=rate, pure_samples_per_s=RATE,
        )  # fmt: skip
        for number in range(1, given.members):
            all_members.start(number)
        all_members.whole(given.members)
        calm = figures(all_members, *storm(all_members, given.calm, 0.0, (), chance), rate)
        report.figure(
            "calm",
            f"calm, {calm['seconds']:.0f} s: goodput {calm['goodput']:.1%}, raw {calm['raw']:.1%}, "
            f"{calm['samples_per_s']:.1f} samples/s, longest gap {calm['longest_gap_s']:.2f} s, "
            f"{calm['busy_cores']:.1f} cores busy",
            **calm,
        )
        steps, faults = storm(all_members, given.storm, given.every, kinds, chance)
        found = figures(all_members, steps, faults, rate)
        target = target_of(kinds, given.every, faults.done, found["seconds"], given.patience)
        found |= {"of_calm": found["goodput"] / calm["goodput"], "every_s": given.every, "kinds": kinds}
        found |= {"target": target.goodput, "met": found["goodput"] >= target.goodput, "seed": given.seed}
        found |= {"target_gap_s": target.gap, "met_gap": found["longest_gap_s"] <= (target.gap or float("inf"))}
        if not found["met_gap"]:
            report.missed.append("longest gap of the storm")
        report.figure("storm", storm_text(found, target.why), **found)
        if found["errors"]:
            sys.exit(1)


def storm_text(found: dict[str, Any], why: str) -> str:
    """Return the figures of a storm in words."""
    count = ", ".join(f"{number} {kind}s" for kind, number in sorted(found["faults"].items())) or "none"
    gap = "" if found["target_gap_s"] is None else f" (target {found['target_gap_s']:g} s: {_yes(found['met_gap'])})"
    lines = [
        f"storm, {found['seconds']:.0f} s, a fault every {found['every_s']:g} s: {count}; seed {found['seed']}",
        f"  {found['of_the_leader']} hit the leader, {found['left_out']} left out; {found['steps']} steps",
        f"  goodput {found['goodput']:.1%}, target {found['target']:.1%} ({why}): {_yes(found['met'])}",
        f"  raw {found['raw']:.1%}; {found['of_calm']:.1%} of calm's goodput; {found['samples_per_s']:.1f} samples/s",
        f"  {found['busy_cores']:.1f} of {os.cpu_count()} cores busy",
        f"  {found['mean_present']:.2f} members present; {found['lost_joining']:.1%} of their time went into joining",
        f"  {found['joins']} joins: {_join_text(found)}",
        f"  {found['lost_away']:.1%} of their time they were frozen or cut off",
        f"  longest gap {found['longest_gap']}{gap}",
        _result_text(found),
    ]
    return "\n".join(lines)


def measure_churn(given: argparse.Namespace, report: Report) -> None:
    """Report how a run goes on while members come and go all the time."""
    with cluster("churn", CHURN_HOSTS, given) as all_members:
        for number in range(2):
            all_members.start(number)
        all_members.whole(2)
        found = churn_figures(all_members, *churn(all_members, given.churn, random.Random(given.seed)))
        gaps = found["long_gaps"]
        lines = [
            f"churn, {found['seconds']:.0f} s, up to {CHURN_HOSTS} hosts; seed {given.seed}",
            f"  {found['kills']} kills, {found['kills_of_the_leader']} of the leader",
            f"  {found['starts']} starts: {found['joins']} joined, {found['killed_before_they_joined']} died before",
            f"  {_join_text(found)}",
            f"  {found['mean_present']:.2f} members present; {found['steps']} steps",
            f"  {found['busy_cores']:.1f} of {os.cpu_count()} cores busy",
            f"  longest gap {found['longest_gap']}",
            f"  gaps over {CHURN_GAP:g} s: {len(gaps) or 'none'}",
            *(f"    {gap}" for gap in gaps),
            _result_text(found),
        ]
        report.figure("churn", "\n".join(lines), **found, seed=given.seed, met=not gaps)
        if found["errors"]:
            sys.exit(1)


def _join_text(found: dict[str, Any]) -> str:
    return f"imports to first step: median {found['join_median_s']:.2f} s, worst {found['join_worst_s']:.2f} s"


def _result_text(found: dict[str, Any]) -> str:
    again = (
        f"; {found['steps_again']} steps were sealed again in a new branch, after a checkpoint"
        if found["steps_again"]
        else ""
    )
    failures = f"; {len(found['errors'])} ERRORS" if found["errors"] else ""
    return f"  the state of each member at each step is that of a run without faults{again}{failures}"


def _yes(is_met: bool) -> str:
    return "met" if is_met else "NOT met"


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    unknown = set(kinds) - set(KINDS)
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown fault {', '.join(unknown)}; choose from {', '.join(KINDS)}")
    return kinds


def _batch(text: str) -> int:
    # The mean times the batch must be the sum to the bit, which division by a power of two keeps.
    batch = int(text)
    if batch < MICROBATCH or batch & (batch - 1):
        raise argparse.ArgumentTypeError(f"must be a power of two, at least {MICROBATCH}")
    return batch


def main() -> None:
    """Run the command line."""
    if sys.argv[1:3] == ["--against", "torchft"]:
        from benchmarks import elastic_compared  # needs torch

        elastic_compared.main(sys.argv[3:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--members", type=int, default=4, help="members [%(default)s]")
    add("--mib", type=float, default=16.0, help="MiB of gradients [%(default)s]")
    add("--state-mb", type=float, default=84.0, help="MB of state beside the weights [%(default)s]")
    add("--patience", type=float, default=2.0, help="seconds [%(default)s]")
    add(
        "--batch", type=_batch, help=f"samples per step, a power of two [{STEP}; storms: {BATCH}]. Each 4 take 20 ms, "
        f"so {STEP} are 40 ms of computing for 4 members, beside 100 ms on the wire where the members share 2 cores: a "
        f"storm would measure the wire. {BATCH} are 0.64 s. With more, a step that is repeated takes too long for the "
        "longest gap of 3 s"
    )  # fmt: skip
    add("--loopback", action="store_true", help="processes on loopback, without namespaces, and so without cuts")
    add("--json", metavar="FILE", help="append each figure to this file, as a line of JSON")
    add("--strict", action="store_true", help="fail if a figure misses its target")
    add("--keep", metavar="FOLDER", help="keep the logs of all members there; without it only after an error")
    one = parser.add_argument_group("one fault at a time (without --storm and --churn)")
    add = one.add_argument
    add("--kills", type=int, default=10, help="kills of a member, and of the leader [%(default)s]")
    add("--freezes", type=int, default=3, help="members that are stopped for a while [%(default)s]")
    add("--cuts", type=int, default=0, help="members that are cut off for a while [%(default)s]")
    add("--cut", type=float, default=2.0, help="seconds of such a cut [%(default)s]")
    add("--joins", type=int, default=1, help="joins of one more member [%(default)s]")
    add("--all-killed", type=int, default=1, help="0: do not kill all at once in the end [%(default)s]")
    add("--timeline", action="store_true", help="print where the time of recoveries and joins went")
    long = parser.add_argument_group("storm and churn")
    add = long.add_argument
    add("--storm", type=float, default=0.0, metavar="SECONDS", help="hurt any member at fixed times")
    add("--every", type=float, default=29.0, help="seconds between two faults of the storm [%(default)s]")
    add("--away", type=float, default=5.0, help="seconds before a killed one is started [%(default)s]")
    add(
        "--faults", type=_kinds, default=["kill"], help="kinds of faults, of kill,freeze,cut [kill]. Freezes and cuts "
        f"last {ABSENCE[0]:g} to {ABSENCE[1]:g} s"
    )  # fmt: skip
    add("--alone", type=float, default=30.0, help="seconds for which a member alone is measured before [%(default)s]")
    add("--calm", type=float, default=60.0, help="seconds of calm before the storm [%(default)s]")
    add("--churn", type=float, default=0.0, metavar="SECONDS", help="start or kill a member every 0.5 to 2 s")
    add("--seed", type=int, default=1, help="of the random choices of storm and churn [%(default)s]")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and namespaces are removed
    if not given.loopback and why_not():
        print(f"on loopback: {why_not()}")
        given.loopback = True
    if given.loopback and "cut" in given.faults:
        print("no cuts on loopback")
        given.faults = [kind for kind in given.faults if kind != "cut"] or ["kill"]
    if given.batch is None:
        given.batch = BATCH if given.storm else STEP
    report = Report(given.json, given)
    load = os.getloadavg()[0]
    members = f"up to {CHURN_HOSTS}" if given.churn and not given.storm else given.members
    print(
        f"{members} members, {given.mib:g} MiB of gradients, {given.state_mb:g} MB of state beside, batch "
        f"{given.batch}, load {load:.1f} on {os.cpu_count()} cores",
        flush=True,
    )
    if given.storm:
        measure_storm(given, report)
    if given.churn:
        measure_churn(given, report)
    if not given.storm and not given.churn:
        measure_recoveries(given, report)
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    if given.strict and report.missed:
        print(f"targets that were missed: {', '.join(report.missed)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
