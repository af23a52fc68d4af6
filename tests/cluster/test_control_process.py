"""The control process beside a training process: what others learn when either of them is busy, killed or forked."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.agents import until
from tests.helpers.namespaces import ROOT
from tests.helpers.nodes import Node, agree

PROMPT = 0.5
"""Seconds within which a death is known. It takes 5 ms; silence would take one to two seconds."""


class Local:
    """In place of a host: this one's loopback."""

    namespace = "loopback"

    def start(self, *arguments: str, variables: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
        environment = {**os.environ, **variables, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        return subprocess.Popen(arguments, env={**environment, "RINGFORT_INTERFACES": "127.0.0.1"}, **options)


@contextmanager
def ring_of(count: int) -> Iterator[list[Node]]:
    """Nodes that have formed a ring, in the order of their ranks."""
    with tempfile.TemporaryDirectory(prefix="ringfort-control-") as folder:
        key = NetworkNamespace.generate("home").join_code()
        nodes = [Node(Local(), key, Path(folder) / str(number)) for number in range(count)]  # type: ignore[arg-type]
        try:
            for node in nodes:
                node.do("start", settle=0.2)
            for node in nodes:
                node.peer = node.next("started")["started"]
            agree(nodes)
            for node in nodes:
                node.do("establish")
            yield [node for _, node in sorted((node.next("rank")["rank"], node) for node in nodes)]
        finally:
            for node in nodes:
                node.kill()
                node.process.stdin.close()
                node.process.stdout.close()


def is_gone(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def reducing(*nodes: Node) -> None:
    """All of them are in one all-reduce after the other."""
    for node in nodes:
        node.do("reduce", rounds=1_000_000)


def told(node: Node, event: str) -> list[str]:
    """What a node has said of such events so far."""
    return [line["text"] for line in node.lines if line.get("event") == event]


def test_a_program_that_holds_its_interpreter_lock_is_degraded_and_nobody_gives_it_up() -> None:
    with ring_of(2) as (busy, other):
        busy.do("busy", seconds=2.6)  # longer than any silence is forgiven
        busy.do("reduce")
        other.do("reduce")
        assert other.next("sum")["sum"] == busy.next("sum")["sum"] == 3.0
        degraded = f"{busy.peer} is degraded (was healthy): its program is busy and does not respond"
        assert degraded in told(other, "HealthEvent")
        assert not told(other, "PeerLost") + told(other, "EpochEnded")


def test_signals_to_all_processes_of_a_program_leave_the_control_process_alone() -> None:
    with ring_of(2) as (one, other):
        control = one.ask("control", "control")
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU"):
            os.kill(control, signal.Signals[name])
        one.do("reduce")
        other.do("reduce")
        assert one.next("sum")["sum"] == other.next("sum")["sum"] == 3.0
        assert one.ask("look", "peers")


def test_whichever_process_of_a_node_is_killed_the_others_know_at_once_and_it_ends_in_words() -> None:
    with ring_of(3) as (first, second, third):
        controls = [node.ask("control", "control") for node in (first, second, third)]
        reducing(first, second, third)
        at = time.monotonic()
        os.kill(controls[0], signal.SIGKILL)
        for node in (first, second, third):
            assert node.next("failed")["at"] - at < PROMPT
        first.do("establish")
        words = "ControlLostError: the control process of this node was killed by SIGKILL"
        assert first.next("failed")["failed"] == words
        agree([second, third])
        for node in (second, third):
            node.do("establish")
        for node in (second, third):
            node.next("rank")

        third.do("fork")
        child, said = (line := third.next("child"))["child"], line["forked"]
        try:  # the child keeps copies of all connections, and leaves the node alone
            assert "this process was forked" in said
            reducing(second, third)
            at = time.monotonic()
            third.process.kill()
            failed = second.next("failed")
            assert "its process ended without closing its node" in failed["failed"]
            assert failed["at"] - at < PROMPT
            print(f"known after {failed['at'] - at:.3f} s")
            assert any(third.peer in text and "is gone" in text for text in told(second, "PeerLost"))
            until(lambda: is_gone(controls[2]), "the control process is still there")
            assert not is_gone(child)
        finally:
            os.kill(child, signal.SIGKILL)
