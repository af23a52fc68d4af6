"""Five minutes of kills, freezes, cuts and resets on four hosts that train: every sum is right, no two groups are at
work, the rest go on within seconds, and all are together again when it is over."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.namespaces import Lan, lan, needs_namespaces, why_no_resets
from tests.helpers.nodes import Node, nodes_on
from tests.stress.test_nodes import check_history

pytestmark = needs_namespaces

SECONDS = float(os.environ.get("STORM_SECONDS", "300"))
SEED = int(os.environ.get("STORM_SEED", "1"))
MEDIAN, WORST = 1.5, 3.5
"""Seconds from a fault to the next all-reduce that succeeds, at the default patience."""
WHOLE = 1.0
"""Seconds from calm to an all-reduce of all four: the median."""
LONGEST = 60.0
"""Seconds after which something is called a hang."""
FAULTS = ("kill", "die", "freeze", "cut", *(() if why_no_resets() else ("reset", "reject")))


class Trainer(Node):
    """A process of `tests.workers.storm`."""

    module = "tests.workers.storm"

    def begun(self) -> None:
        """Waits until it looks for others."""
        line = self.next("started", patience=LONGEST)
        self.peer, self.started = line["started"], line["at"]


def hurt(net: Lan, node: Trainer, kind: str) -> None:
    match kind:
        case "kill" | "die":
            node.kill(word=kind == "kill")
        case "freeze":
            node.process.send_signal(signal.SIGSTOP)
        case "cut":
            net.cut(node.host)
        case "reset":
            net.reset(node.host)
        case _:
            net.reset(node.host)
            net.cut(node.host)


def heal(net: Lan, node: Trainer, kind: str) -> None:
    match kind:
        case "kill" | "die":
            node.restart()
            node.begun()
        case "freeze":
            node.process.send_signal(signal.SIGCONT)
        case "cut" | "reject":
            net.heal(node.host)
        case _:
            pass


def first_success(nodes: list[Trainer], since: float, *, is_new: Callable[[dict[str, Any]], bool]) -> float:
    """When the first of `nodes` had an all-reduce that `is_new` after `since`."""
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        for node in nodes:
            node.settle()
        found = [
            line["at"]
            for node in nodes
            for line in node.lines[-400:]
            if "ok" in line and line["at"] > since and is_new(line)
        ]
        if found:
            return min(found)
        time.sleep(0.005)
    told = "\n".join(f"{node}: {[line for line in node.lines if 'ok' not in line][-8:]}" for node in nodes)
    raise AssertionError(f"no success within {LONGEST:g} s:\n{told}")


def epoch_of(nodes: list[Trainer]) -> int:
    """The latest that any of them was at work in."""
    return max((line["epoch"] for node in nodes for line in node.lines[-400:] if "ok" in line), default=0)


def whole(nodes: list[Trainer], since: float) -> float:
    """When all of them had an all-reduce of all after `since`; returns the last one's first."""
    return max(first_success([node], since, is_new=lambda line: line["ok"] == len(nodes)) for node in nodes)


def left_over(node: Trainer) -> tuple[tuple[int, int], tuple[int, int]]:
    """Descriptors and threads of this process when it first trained with all, and now."""
    of_this = [line for line in node.lines if line.get("ok") == 4 and line["who"] == node.peer]
    return tuple((line["descriptors"], line["threads"]) for line in (of_this[0], of_this[-1]))  # type: ignore[return-value]


def control_descriptors(node: Trainer) -> int:
    return sum(child.num_fds() for child in psutil.Process(node.process.pid).children())


def what_is_open(node: Trainer) -> str:
    """For the message of a failure."""
    controls = psutil.Process(node.process.pid).children()
    folders = [Path(f"/proc/{control.pid}/fd") for control in controls]
    files = [f"{path} {path.readlink()}" for folder in folders for path in sorted(folder.iterdir())]
    return "\n".join((node.host.run("ss", "-tanp"), *files))


@pytest.mark.timeout(int(SECONDS) + 240)
def test_a_storm_of_faults_never_gives_a_wrong_sum_or_two_groups() -> None:
    chance = random.Random(SEED)
    took: dict[str, list[float]] = {kind: [] for kind in FAULTS}
    healed: dict[str, list[float]] = {}
    """Seconds until all were together again, by what had happened."""
    with lan(4) as net, nodes_on(list(net.hosts), kind=Trainer) as (nodes,):
        for node in nodes:
            node.begun()
        whole(nodes, 0.0)
        before = {node.peer: control_descriptors(node) for node in nodes}
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            victims = chance.sample(nodes, chance.choice((1, 1, 1, 2)))
            faults = [(victim, chance.choice(FAULTS)) for victim in victims]
            epoch = epoch_of(nodes)
            at = time.monotonic()
            for victim, kind in faults:
                hurt(net, victim, kind)
            rest = [node for node in nodes if node not in victims]
            if len(faults) == 1:  # of four, any three go on
                seen = first_success(rest, at, is_new=lambda line: line["epoch"] > epoch)  # noqa: B023
                took[faults[0][1]].append(seen - at)
            time.sleep(chance.uniform(0.0, 3.0))
            for victim, kind in faults:
                heal(net, victim, kind)
            calm = time.monotonic()
            what = " and ".join(sorted(kind for _, kind in faults))
            healed.setdefault(what, []).append(whole(nodes, calm) - calm)
        kept = [node for node in nodes if node.peer in before]
        deadline = time.monotonic() + LONGEST  # a link may be measured just then
        while any(control_descriptors(node) > before[node.peer] for node in kept) and time.monotonic() < deadline:
            time.sleep(0.1)
        after = {node.peer: control_descriptors(node) for node in kept}
        leaks = [what_is_open(node) for node in kept if after[node.peer] > before[node.peer]]
        counts = [left_over(node) for node in nodes]
        lines = [line for node in nodes for line in node.lines]
    for kind, seconds in took.items():
        if seconds:
            print(f"{kind}: {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (most) of {len(seconds)}")
    wholes = [seconds for one in healed.values() for seconds in one]
    late = {what: f"{max(seconds):.2f}" for what, seconds in healed.items() if max(seconds) > WHOLE}
    print(f"whole again: {statistics.median(wholes):.2f} s (median), {max(wholes):.2f} s (most) of {len(wholes)}")
    print(f"of these {sum(seconds > WHOLE for seconds in wholes)} after more than {WHOLE:g} s: {late}")
    every = [seconds for kind in took.values() for seconds in kind]
    print(f"success after a fault: {statistics.median(every):.2f} s (median), {max(every):.2f} s (most)")
    assert [line["wrong"] for line in lines if "wrong" in line] == []
    epochs = [line for line in lines if line.get("event", "").startswith("Epoch")]
    # Not before all have met: until then one that starts late is lawfully alone beside the others.
    met = min(line["at"] for line in epochs if len(line["peers"]) == len(nodes))
    check_history([line for line in epochs if line["at"] >= met])
    assert all(now == first for first, now in counts), counts
    assert not leaks, "\n".join((f"{before} before, {after} after", *leaks))
    assert statistics.median(every) <= MEDIAN
    assert max(every) <= WORST
    assert statistics.median(wholes) <= WHOLE
