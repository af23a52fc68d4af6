"""How long an elastic run stands still when machines die and come: `python -m benchmarks.elastic`.

Members live in network namespaces (or on loopback), encrypted, with whole-number gradients; computing is a sleep, so
that the cores of this machine do not decide. All members' states are compared at every step.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import ringfort
from ringfort.config import AutoDiscoveryConfig
from ringfort.identity.namespace import NetworkNamespace
from ringfort.training.elastic import timeline
from tests.helpers.namespaces import Host, Lan, lan, why_not

MIB = 1 << 20
BATCH, MICROBATCH, SAMPLES = 32, 4, 4096
COMPUTE = 0.020
"""Seconds per micro-batch."""
RATE = MICROBATCH / COMPUTE
"""Samples per second of a member that only computes."""
FOREVER = 1_000_000
"""Steps."""
LIMIT = 120.0
"""Seconds for any one thing."""
EVERY = 20
"""Steps between two checkpoints."""


# --- one member -------------------------------------------------------------------------------------------------------


_printing = threading.Lock()


def say(**what: Any) -> None:
    """Print a line of JSON; any thread may."""
    with _printing:
        print(json.dumps(what), flush=True)


class _Printer(logging.Handler):
    """Prints the time line as JSON."""

    def emit(self, record: logging.LogRecord) -> None:
        say(note=record.getMessage(), at=time.monotonic())


def member_main(given: argparse.Namespace) -> None:
    """Train, and print a line of JSON for each step."""
    elastic = ringfort.elastic  # before the clock starts: the first use imports it
    say(ready=time.monotonic())
    if given.timeline:
        logger = logging.getLogger(timeline.LOGGER)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(_Printer())
    size = int(given.mib * MIB) // 4
    state = {"w": np.zeros(size, np.float32), "more": np.zeros(int(given.state_mb * 1e6), np.uint8)}
    interfaces = ["127.0.0.1"] if given.loopback else None
    with elastic(
        state,
        nodes="1:8",
        name="benchmark",
        patience=given.patience,
        checkpoint=given.folder,
        checkpoint_every=EVERY,
        config=AutoDiscoveryConfig(interfaces=interfaces),
    ) as run:
        gradient = np.empty(size, np.float32)
        for step in run.steps(FOREVER, samples=SAMPLES, batch=BATCH, microbatch=MICROBATCH, seed=3):
            for part in step:
                time.sleep(COMPUTE)
                gradient.fill((part % 2).sum() / len(part))
                step.add({"w": gradient})
            state["w"] += step.mean()["w"] * BATCH
            members = run._participant.members
            epoch = members.epoch
            say(
                step=step.number,
                at=time.monotonic(),
                members=len(run.members),
                epoch=0 if epoch is None else epoch.number,
                leads=epoch is not None and epoch.leader == members.node.peer_id,
                w=[float(state["w"][0]), float(state["w"][-1])],
            )


# --- all of them ------------------------------------------------------------------------------------------------------


class Member:
    """A process of a member and what it said."""

    def __init__(self, number: int, host: Host | None, key: str, folder: Path, given: argparse.Namespace) -> None:
        self.number, self._host = number, host
        self.lines: list[dict[str, Any]] = []
        self.notes: list[dict[str, Any]] = []
        self.ready = float("inf")
        self.died = float("inf")
        self._come: queue.Queue[dict[str, Any]] = queue.Queue()
        own = folder / str(number)
        own.mkdir(0o700, exist_ok=True)
        variables = {"RINGFORT_KEY": key, "RINGFORT_HOME": str(own), "RINGFORT_CLUSTER": ""}
        # An installed package has its bytecode: a member that compiles what its control process imports takes longer.
        variables |= {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
        command = [sys.executable, "-m", "benchmarks.elastic", "--member", "--folder", str(own / "checkpoints")]
        command += ["--mib", str(given.mib), "--state-mb", str(given.state_mb), "--patience", str(given.patience)]
        if given.timeline:
            command.append("--timeline")
        if host is None:
            environment = {**os.environ, **variables}
            command.append("--loopback")
            self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        else:
            self.process = host.start(*command, variables=variables, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.endswith("}\n"):
                self._come.put(json.loads(line))

    def settle(self) -> None:
        """Take what it has said."""
        while not self._come.empty():
            line = self._come.get()
            if "ready" in line:
                self.ready = line["ready"]
            elif "note" in line:
                self.notes.append(line)
            else:
                self.lines.append(line)

    @property
    def last(self) -> dict[str, Any]:
        return self.lines[-1] if self.lines else {"step": 0, "members": 0, "epoch": 0, "leads": False, "at": 0.0}

    def kill(self) -> float:
        """Kill it with SIGKILL. Return when."""
        self.died = time.monotonic()
        self.process.kill()
        self.process.wait(LIMIT)
        return self.died


class Cluster:
    """All members."""

    def __init__(self, network: Lan | None, size: int, folder: Path, given: argparse.Namespace) -> None:
        self.network, self._folder, self._given = network, folder, given
        self.hosts: Sequence[Host | None] = [None] * size if network is None else network.hosts
        self._key = NetworkNamespace.generate("benchmark").join_code()
        self.members: dict[int, Member] = {}
        self.past: list[Member] = []
        self._states: dict[int, tuple[float, ...]] = {}

    def start(self, number: int) -> Member:
        """Start the member of a host."""
        if number in self.members:
            self.past.append(self.members[number])
        made = Member(number, self.hosts[number], self._key, self._folder, self._given)
        self.members[number] = made
        return made

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members.values() if member.process.poll() is None]

    def settle(self) -> None:
        """Take what all have said, and compare their states."""
        for member in (*self.past, *self.members.values()):
            seen = len(member.lines)
            member.settle()
            for line in member.lines[seen:]:
                if self._states.setdefault(line["step"], tuple(line["w"])) != tuple(line["w"]):
                    raise AssertionError(f"two states after step {line['step']}")

    def until(self, is_it: Callable[[], bool], what: str) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + LIMIT
        while True:
            self.settle()
            if is_it():
                return
            failed = [m for m in self.members.values() if m.process.poll() not in (None, -9)]
            if failed:
                raise ChildProcessError(f"member {failed[0].number} ended with {failed[0].process.poll()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {LIMIT:g} s")
            time.sleep(0.002)

    def whole(self, size: int) -> None:
        """Wait until `size` members have done some steps together."""
        self.until(
            lambda: len(self.alive) == size and all(m.last["members"] == size for m in self.alive), f"{size} together"
        )
        begin = max(m.last["step"] for m in self.alive)
        self.until(lambda: all(m.last["step"] > begin + 2 for m in self.alive), "some steps")

    def end(self) -> None:
        for member in self.alive:
            member.kill()

    def tell(self, what: str, begin: float, end: float, only: Sequence[int] = ()) -> None:
        """Print the time line of all members, or of some, with `--timeline`."""
        if not self._given.timeline:
            return
        members = [m for m in self.members.values() if not only or m.number in only]
        found = [(one["at"], m.number, one["note"]) for m in members for one in m.notes if begin <= one["at"] <= end]
        print(f"--- {what}")
        for at, number, text in sorted(found):
            print(f"    {at - begin:7.3f} s  member {number}: {text[:160]}")


@contextmanager
def cluster(size: int, given: argparse.Namespace) -> Iterator[Cluster]:
    """Yield hosts for `size` members, none started."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringfort-elastic-")))
        network = None if given.loopback else stack.enter_context(lan(size, machine_ids=True))
        made = Cluster(network, size, folder, given)
        stack.callback(made.end)
        yield made


# --- what is measured -------------------------------------------------------------------------------------------------


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
    """Stop a member with SIGSTOP for `away` seconds longer than the others take to go on without it. Return the seconds
    to their next step, and those from its return until it takes part again."""
    size = len(all_members.alive)
    victim = next(m for m in all_members.alive if not m.last["leads"])
    others = [m for m in all_members.alive if m is not victim]
    epoch, begin = victim.last["epoch"], time.monotonic()
    victim.process.send_signal(signal.SIGSTOP)

    def after(m: Member, wanted: int) -> list[float]:
        return [one["at"] for one in m.lines[-200:] if one["epoch"] > epoch and one["members"] == wanted]

    all_members.until(lambda: any(after(m, size - 1) for m in others), "a step without the frozen one")
    seconds = min(at for m in others for at in after(m, size - 1)) - begin
    all_members.tell(f"member {victim.number} was frozen: {seconds:.2f} s", begin, begin + seconds)
    time.sleep(away)
    back = time.monotonic()
    victim.process.send_signal(signal.SIGCONT)
    all_members.until(lambda: bool(after(victim, size)), "the frozen one is back")
    returned = after(victim, size)[0] - back
    numbers = (victim.number, others[0].number)
    all_members.tell(f"member {victim.number} is back: {returned:.2f} s", back, back + returned, numbers)
    all_members.whole(size)
    return seconds, returned


def cut_one(all_members: Cluster, seconds: float) -> tuple[bool, float]:
    """Cut a member off for so many seconds. Return whether an epoch has ended, and the longest time between two steps
    of another member."""
    network, size = all_members.network, len(all_members.alive)
    assert network is not None
    victim, other = all_members.alive[-1], all_members.alive[0]
    host = all_members.hosts[victim.number]
    assert host is not None
    before, begin = other.last["epoch"], time.monotonic()
    network.cut(host)
    time.sleep(seconds)
    network.heal(host)
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


def storm(all_members: Cluster, seconds: float, every: float, away: float) -> dict[str, float]:
    """Kill any member every so many seconds, and start it again after `away`. With `every` 0, kill nobody."""
    begin = time.monotonic()
    first = max(m.last["step"] for m in all_members.alive)
    alive: list[Member] = list(all_members.alive)
    back: list[tuple[float, int]] = []
    next_kill = begin + every if every else float("inf")
    while (now := time.monotonic()) < begin + seconds:
        all_members.settle()
        if now >= next_kill and len(all_members.alive) > 1:
            victim = random.choice(all_members.alive)
            victim.kill()
            back.append((now + away, victim.number))
            next_kill += every
        for when, number in [one for one in back if one[0] <= now]:
            back.remove((when, number))
            alive.append(all_members.start(number))
        time.sleep(0.01)
    all_members.settle()
    end = time.monotonic()
    steps = sorted({line["step"] for m in alive for line in m.lines if begin <= line["at"] <= end})
    times = sorted({line["step"]: line["at"] for m in alive for line in m.lines if begin <= line["at"]}.values())
    present = sum(max(0.0, min(m.died, end) - max(m.ready, begin)) for m in alive)
    samples = (steps[-1] - first) * BATCH
    gaps = [b - a for a, b in zip([begin, *times], times, strict=False)]
    return {"goodput": samples / (present * RATE), "samples/s": samples / (end - begin), "longest gap s": max(gaps)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=__doc__)
    parser.add_argument("--member", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--members", type=int, default=4, help="members [%(default)s]")
    parser.add_argument("--kills", type=int, default=10, help="kills of a member, and of the leader [%(default)s]")
    parser.add_argument("--storm", type=float, default=60.0, help="seconds of the storm, and of calm [%(default)s]")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills of the storm [%(default)s]")
    parser.add_argument("--away", type=float, default=5.0, help="seconds before a killed one is started [%(default)s]")
    parser.add_argument("--mib", type=float, default=16.0, help="MiB of gradients [%(default)s]")
    parser.add_argument("--state-mb", type=float, default=84.0, help="MB of state beside the weights [%(default)s]")
    parser.add_argument("--patience", type=float, default=2.0, help="seconds [%(default)s]")
    parser.add_argument("--timeline", action="store_true", help="print where the time of recoveries and joins went")
    parser.add_argument("--freezes", type=int, default=3, help="members that are stopped for a while [%(default)s]")
    parser.add_argument("--cuts", type=int, default=0, help="members that are cut off for a while [%(default)s]")
    parser.add_argument("--cut", type=float, default=2.0, help="seconds of such a cut [%(default)s]")
    parser.add_argument("--joins", type=int, default=1, help="joins of one more member [%(default)s]")
    parser.add_argument("--loopback", action="store_true", help="processes on loopback, without namespaces")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and namespaces are removed
    if given.member:
        member_main(given)
        return
    if not given.loopback and why_not():
        print(f"on loopback: {why_not()}")
        given.loopback = True
    load = os.getloadavg()[0]
    print(f"{given.members} members, {given.mib:g} MiB of gradients, load {load:.1f} on {os.cpu_count()} cores")
    with cluster(given.members + 1, given) as all_members:
        for number in range(given.members):
            all_members.start(number)
        all_members.whole(given.members)
        for leader in (False, True):
            taken = [kill_one(all_members, leader=leader) for _ in range(given.kills)]
            if taken:
                who = "the leader" if leader else "a member"
                print(f"SIGKILL of {who} to the next step: median {median(taken):.2f} s, worst {max(taken):.2f} s")
        taken = [freeze_one(all_members, away=0.3) for _ in range(given.freezes)]
        if taken:
            gone, back = zip(*taken, strict=True)
            print(
                f"SIGSTOP of a member at patience {given.patience:g} s to the next step: median {median(gone):.2f} s, "
                f"worst {max(gone):.2f} s; it is back {median(back):.2f} s after SIGCONT, worst {max(back):.2f} s"
            )
        taken = [cut_one(all_members, given.cut) for _ in range(0 if given.loopback else given.cuts)]
        if taken:
            lost, longest_gaps = zip(*taken, strict=True)
            print(
                f"a cut of {given.cut:g} s at patience {given.patience:g} s: {sum(lost)} of {len(lost)} end an epoch, "
                f"longest time without a step {max(longest_gaps):.2f} s"
            )
        for _ in range(given.joins):
            seconds, longest, usual = join_one(all_members, given.members)
            print(
                f"a joiner takes part {seconds:.2f} s after its imports; meanwhile the longest step of the others is "
                f"{longest:.2f} s, usually {usual:.2f} s"
            )
            all_members.members[given.members].kill()
            all_members.whole(given.members)
        seconds, lost = kill_all(all_members)
        print(f"all killed: the first step {seconds:.2f} s after the imports, {lost} steps lost (saved every {EVERY})")
        for what, every in (("calm", 0.0), (f"a kill every {given.every:g} s", given.every)):
            if given.storm:
                found = storm(all_members, given.storm, every, given.away)
                print(f"{what}: {', '.join(f'{name} {value:.3g}' for name, value in found.items())}")
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
