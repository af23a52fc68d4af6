"""The ranks of one machine: what each is told, who of them failed first, and how they are stopped."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import IO, Final

from ringfort.config import DEFAULT_PATIENCE, STEP_FILE, Environment, format_address, is_set
from ringfort.launch.agreement import Assignment
from ringfort.launch.drawing import Drawing
from ringfort.launch.failure_report import Failure
from ringfort.launch.processes import Child, Children
from ringfort.launch.show import Shown

STOP_SECONDS: Final = 10.0
"""How long ranks may take to end by a signal before they are killed: enough to finish a step and write a checkpoint,
and what container engines give too."""
BLAME_SECONDS: Final = 1.0
"""How long to wait, after a rank lost another of this machine, for that other to end too."""
BLAME_AFAR_SECONDS: Final = 3.0
"""The same where the other may be on another machine: the launcher there says what became of it, or is itself lost.
Ranks and launchers have the same patience, so they find that out within a second or two of each other."""


@dataclass(frozen=True)
class Program:
    """What the ranks run, and what they are told beside their place."""

    command: Sequence[str]
    """After the interpreter's name."""
    run: str = "ringfort"
    patience: float = DEFAULT_PATIENCE
    max_restarts: int = 0
    step_file: str | None = None
    """Where they write how far they are."""


def rank_variables(assignment: Assignment, local_rank: int, program: Program, interface: str = "") -> dict[str, str]:
    """The environment of a rank: torchrun's names, so that programs written for it work, and Ringfort's.

    `interface` is the one that leads to the others. What a person has set is left alone.
    """
    place, rank = assignment.place, assignment.first_rank + local_rank
    variables = {
        "RANK": rank,
        "WORLD_SIZE": assignment.world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": assignment.local_world_size,
        "GROUP_RANK": assignment.group_rank,
        "GROUP_WORLD_SIZE": assignment.group_world_size,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": assignment.world_size,
        "MASTER_ADDR": place.host,
        "MASTER_PORT": place.torch_port,
        "RINGFORT_MASTER": format_address(place.host, place.ringfort_port),
        "RINGFORT_PATIENCE": f"{program.patience:g}",
        "RINGFORT_RESTART_COUNT": assignment.restarts,
        # Libraries look for these to see that a launcher has set everything up. The store is rank 0's own.
        "TORCHELASTIC_RUN_ID": program.run,
        "TORCHELASTIC_RESTART_COUNT": assignment.restarts,
        "TORCHELASTIC_MAX_RESTARTS": program.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    if program.step_file is not None:
        variables[STEP_FILE] = program.step_file
    wishes = {"PYTHONUNBUFFERED": "1"}  # else lines wait in the rank until there are kilobytes of them
    if assignment.local_world_size > 1:
        wishes["OMP_NUM_THREADS"] = "1"  # as torchrun does: ranks that each take all cores slow each other down
    if interface:
        wishes |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    wishes = {name: value for name, value in wishes.items() if not is_set(name)}
    return {name: str(value) for name, value in variables.items()} | wishes


class MachineRanks:
    """The ranks of this machine, once they are started."""

    def __init__(self, children: Children, host: str) -> None:
        self._children = children
        self._host = host
        self._drawings: dict[tuple[Child, bool], Drawing] = {}
        self._blame_at = inf
        self._kill_at = inf
        self._is_alone = True
        self._seen = 0
        self.was_stopped = False
        """A signal was passed on, so how they end says nothing any more."""

    def start(self, assignment: Assignment, program: Program, interface: str, listener: socket.socket | None) -> None:
        """Start them all. Rank 0 gets `listener`; the machine's first rank also what is piped into the launcher."""
        self._is_alone = assignment.group_world_size == 1
        for local_rank in range(assignment.local_world_size):
            variables = rank_variables(assignment, local_rank, program, interface)
            has_listener = listener is not None and local_rank == 0
            variables["RINGFORT_LISTEN_FD"] = str(listener.fileno()) if listener and has_listener else ""
            self._children.start(
                assignment.first_rank + local_rank,
                [sys.executable, *_marks(assignment, local_rank), *program.command],
                variables,
                stdin=_standard_input() if local_rank == 0 else subprocess.DEVNULL,
                pass_fds=(listener.fileno(),) if listener and has_listener else (),
            )

    @property
    def is_over(self) -> bool:
        """Whether all have ended and all their output was read."""
        return self._children.is_over

    @property
    def ended_well(self) -> bool:
        """Whether that is so, and none of them failed."""
        return self.is_over and not self._children.failed

    @property
    def running(self) -> int:
        """How many have not ended."""
        return sum(child.exit_code is None for child in self._children.children)

    def poll(self) -> list[Shown]:
        """What the ranks wrote and what changed in it; waits a moment for it."""
        written = {(output.child, output.is_error): output.data for output in self._children.poll()}
        now = time.monotonic()
        if now >= self._kill_at:
            self._children.signal(signal.SIGKILL)
        for key in written:
            self._drawings.setdefault(key, Drawing())
        shown: list[Shown] = []
        for (child, is_error), drawing in self._drawings.items():
            data = written.get((child, is_error))
            rows = drawing.feed(now, data) if data else []
            rows += drawing.finished(now)
            # A process that left its group may hold the stream open when all others have ended.
            if data == b"" or self._children.is_over:
                rows += drawing.end()
            child.keep([row.text for row in rows])
            if rows or data is not None:
                shown.append(Shown(child.number, is_error, rows, drawing.live()))
        return shown

    def failure(self) -> Failure | None:
        """The first of these ranks that failed, as soon as it is known which; none after `stop`."""
        if self.was_stopped:
            return None
        now = time.monotonic()
        patience = BLAME_SECONDS if self._is_alone else BLAME_AFAR_SECONDS
        for child in self._children.failed[self._seen :]:
            self._blame_at = min(self._blame_at, now + (patience if self._of(child).is_victim else 0.0))
        self._seen = len(self._children.failed)
        is_known = now >= self._blame_at or (self._is_alone and self.is_over)
        if not self._seen or not is_known:
            return None
        return min(map(self._of, self._children.failed), key=lambda failure: failure.is_victim)

    def _of(self, child: Child) -> Failure:
        assert child.exit_code is not None
        return Failure.of_rank(child.number, self._host, child.exit_code, child.tail)

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Pass `signum` on; what still runs a while later is killed."""
        self.was_stopped = True
        self._kill_at = min(self._kill_at, time.monotonic() + STOP_SECONDS)
        self._children.signal(signum)

    def kill(self) -> None:
        """At once."""
        self.was_stopped = True
        self._children.signal(signal.SIGKILL)


def _marks(assignment: Assignment, local_rank: int) -> list[str]:
    """The interpreter's options by which torch's plug-in knows that it is to look for plaintext groups, in one rank of
    each machine; see torch/plaintext.py."""
    if assignment.group_world_size == 1 or local_rank != 0 or Environment.from_mapping().encryption == "off":
        return []
    end = assignment.first_rank + assignment.local_world_size
    return ["-X", f"ringfort-local-ranks={assignment.first_rank}:{end}"]


def _standard_input() -> IO[bytes] | int:
    """What is piped in is passed on. A terminal is not: the ranks have sessions of their own and could not read it."""
    stream = sys.stdin
    try:
        return subprocess.DEVNULL if stream is None or stream.isatty() else stream.fileno()  # pyright: ignore[reportUnnecessaryComparison]
    except (OSError, ValueError):  # closed, or no file at all
        return subprocess.DEVNULL
