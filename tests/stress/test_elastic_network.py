"""What the network does to elastic runs, in network namespaces: a short cut or a reset costs
nobody its state."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.elastic_programs import Program, programs
from tests.helpers.namespaces import Host, Lan, lan, needs_namespaces, needs_resets
from tests.workers.elastic import plain_loop

pytestmark = [needs_namespaces, pytest.mark.timeout(600)]

FOREVER = 10**6


class Machines:
    """One program on each host of a network, with a disk of its own."""

    def __init__(self, net: Lan, folder: Path, start: Callable[..., Program], **arguments: Any) -> None:
        self.net, self.folder, self._start, self._arguments = net, folder, start, arguments
        self._key = {"RINGFORT_KEY": NetworkNamespace.generate("home").join_code()}
        self.programs: list[Program] = []

    def start(self, host: Host) -> Program:
        """Start a program on a host. Once its file `hurry` is there, it computes quickly."""
        variables = {**self._key, "RINGFORT_HOME": str(self.folder / f"home{host.number}")}
        made = self._start(
            variables,
            _on(host),
            total=FOREVER,
            hurry=str(self.hurry(host)),
            checkpoint=str(self.checkpoints(host)),
            every=50,
            interfaces=[],
            **self._arguments,
        )
        self.programs.append(made)
        return made

    def hurry(self, host: Host) -> Path:
        """The file that makes the program of a host compute quickly."""
        return self.folder / f"hurry{host.number}"

    def checkpoints(self, host: Host) -> Path:
        """The folder of its checkpoints."""
        return self.folder / f"disk{host.number}"


def _on(host: Host) -> Callable[..., Any]:
    def launch(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[Any]:
        return host.start(*command, variables=env, **options)

    return launch


@contextmanager
def machines(hosts: int, folder: Path, **arguments: Any) -> Iterator[Machines]:
    with lan(hosts) as net, programs("tests.workers.elastic_cases", folder / "home") as start:
        made = Machines(net, folder, start, **arguments)
        try:
            yield made
        finally:
            for program in made.programs:
                program.kill()


def leave(members: Sequence[Program]) -> None:
    """All leave, one after the other; each has the state of a loop without faults at its last step, to the bit."""
    for member in members:
        member.process.send_signal(signal.SIGTERM)
        end = member.end()
        assert member.process.returncode == 143, member.lines[-5:]
        assert end["w"] == plain_loop(end["left"])["w"].tolist()


def steps_of(program: Program) -> list[int]:
    return [line["step"] for line in program.lines if "step" in line]


def test_a_cut_that_is_shorter_than_the_patience_ends_no_epoch(tmp_path: Path) -> None:
    with machines(3, tmp_path, nodes="3:3", patience=20.0) as world:
        members = [world.start(host) for host in world.net.hosts]
        known = together(members, 3)
        for victim in world.net.hosts:
            world.net.cut(victim)
            at = max(member.last_step for member in members)
            with pytest.raises(subprocess.TimeoutExpired):
                members[0].process.wait(2.0)
            assert max(member.last_step for member in members) <= at + 1  # nothing can be sealed meanwhile
            world.net.heal(victim)
            together(members, at + 5)
        for member in members:
            said = said_since(member, known[member])
            assert not any("has ended" in text or "has left" in text or "Copied" in text for text in said), said
            assert steps_of(member) == list(range(1, member.last_step + 1))
        leave(members[:1])


@needs_resets
def test_machines_whose_connections_are_reset_are_together_again_without_waiting_for_the_patience(
    tmp_path: Path,
) -> None:
    with machines(3, tmp_path, nodes="2:3", patience=60.0) as world:
        members = [world.start(host) for host in world.net.hosts]
        together(members, 3)
        for victim in world.net.hosts:
            begun = time.monotonic()
            world.net.reset(victim)
            together(members, max(member.last_step for member in members) + 5)
            print(f"together again after {time.monotonic() - begun:.1f} s")
            assert time.monotonic() - begun < 30.0
        leave(members[:2])


def together(members: Sequence[Program], number: int) -> dict[Program, int]:
    """Wait until all have applied a step of this number or a later one in an epoch of all. Return how many lines each
    has said."""
    for member in members:
        member.step(number, members=len(members))
    return {member: len(member.lines) for member in members}


def said_since(member: Program, line: int) -> list[str]:
    """What a member has logged since."""
    return [one["log"] for one in member.lines[line:] if "log" in one]
