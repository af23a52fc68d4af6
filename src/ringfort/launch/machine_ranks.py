"""The ranks of one machine under `ringfort run`: their environment, their output, their failures and their end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import IO, Final

from ringfort.config import Environment, format_address, is_set
from ringfort.launch.agreement import Assignment
from ringfort.launch.drawing import Drawing
from ringfort.launch.failure_report import Failure
from ringfort.launch.output_files import OutputFiles
from ringfort.launch.printer import Shown
from ringfort.launch.processes import Child, Children
from ringfort.launch.run_options import Program, RunOptions

STOP_SECONDS: Final = 10.0
"""How long ranks may take to end after a signal before they are killed: enough to finish a step and write a checkpoint,
and what container engines allow too."""


def rank_variables(assignment: Assignment, local_rank: int, options: RunOptions, interface: str = "") -> dict[str, str]:
    """The environment of a rank: torchrun's variables, so that programs written for it work, and Ringfort's.

    `interface` is the one that leads to the other machines. Variables that the user has set stay as they are.
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
        "RINGFORT_PATIENCE": f"{options.patience_seconds:g}",
        "RINGFORT_RESTART_COUNT": assignment.restarts,
        # Libraries look for these to recognise a launcher. The store belongs to rank 0, not to an agent.
        "TORCHELASTIC_RUN_ID": options.run_name,
        "TORCHELASTIC_RESTART_COUNT": assignment.restarts,
        "TORCHELASTIC_MAX_RESTARTS": options.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    defaults = default_variables(assignment.local_world_size, interface)
    return {name: str(value) for name, value in variables.items()} | defaults


def default_variables(local_world_size: int, interface: str = "") -> dict[str, str]:
    """The variables of each rank that the user has not set."""
    defaults = {"PYTHONUNBUFFERED": "1"}  # without it, lines wait in the rank until there are kilobytes of them
    if local_world_size > 1:
        defaults["OMP_NUM_THREADS"] = "1"  # as torchrun does: ranks that each take all cores slow each other down
    if interface:
        defaults |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return {name: value for name, value in defaults.items() if not is_set(name)}


@dataclass
class MachineRanks:
    """The ranks of this machine, once they are started."""

    host: str
    options: Program
    logs: OutputFiles = field(default_factory=OutputFiles)
    children: Children = field(default_factory=Children)
    stopped: int | None = None
    """How many ran when a signal was sent to them; their exit codes mean nothing any more. None before that."""
    _drawings: dict[tuple[Child, bool], Drawing] = field(default_factory=dict[tuple[Child, bool], Drawing])
    _kill_at: float = inf
    _is_alone: bool = True

    def start(
        self,
        assignment: Assignment,
        options: RunOptions,
        interface: str = "",
        listener: socket.socket | None = None,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """Start all ranks. The first one gets `listener`, if there is one; all get the variables `more`."""
        self._is_alone = assignment.group_world_size == 1
        for local_rank in range(assignment.local_world_size):
            passed = [listener.fileno()] if listener is not None and local_rank == 0 else []
            variables = rank_variables(assignment, local_rank, options, interface) | dict(more or {})
            variables["RINGFORT_LISTEN_FD"] = "".join(map(str, passed))
            number = assignment.first_rank + local_rank
            marks = _marks(assignment, local_rank)
            is_first, restarts = local_rank == 0, assignment.restarts
            self.start_rank(number, variables, restarts, is_first=is_first, marks=marks, pass_fds=passed)

    def start_rank(
        self,
        number: int,
        variables: Mapping[str, str],
        restarts: int,
        *,
        is_first: bool,
        marks: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start one rank, for the first time or again. The first one of the machine gets the launcher's standard
        input."""
        self.logs.begin(number, restarts)
        child = self.children.start(
            number,
            [sys.executable, *marks, *self.options.command],
            variables,
            stdin=_standard_input() if is_first else subprocess.DEVNULL,
            pass_fds=pass_fds,
        )
        self.logs.started(number, child.process.pid)
        return child

    def forget(self, child: Child) -> None:
        """Drop a rank that is over, before it is started again."""
        for is_error in (False, True):
            self._drawings.pop((child, is_error), None)
        self.children.forget(child)

    def poll(self) -> list[Shown]:
        """Wait a moment for output of the ranks, keep it, and return what changed in what is printed."""
        outputs = self.children.poll()
        for output in outputs:
            self.logs.write(output.child.number, output.data)
        written = {(output.child, output.is_error): output.data for output in outputs}
        now = time.monotonic()
        if now >= self._kill_at:
            self.children.signal(signal.SIGKILL)
        for key in written:
            self._drawings.setdefault(key, Drawing())
        shown: list[Shown] = []
        for (child, is_error), drawing in self._drawings.items():
            data = written.get((child, is_error))
            rows = drawing.feed(now, data) if data else []
            rows += drawing.finished(now)
            # A process that left its group may hold the stream open after the rank has ended.
            if data == b"" or child.is_over:
                rows += drawing.end()
            child.keep([row.text for row in rows])
            if (rows or data is not None) and self.options.is_printed(child.number):
                shown.append(Shown(child.number, is_error, rows, drawing.live()))
        return shown

    def failure(self) -> Failure | None:
        """The first failure among these ranks, once it is known; None after `stop`."""
        if self.stopped is not None:
            return None
        return self.children.first_failure(self.host, is_alone=self._is_alone)

    def stop(self, signum: int = signal.SIGTERM, grace: float = STOP_SECONDS) -> None:
        """Send `signum` to all ranks; those that still run `grace` seconds later are killed."""
        self.stopped = sum(child.exit_code is None for child in self.children.children)
        self._kill_at = min(self._kill_at, time.monotonic() + grace)
        self.children.signal(signum)


def _marks(assignment: Assignment, local_rank: int) -> list[str]:
    """Interpreter options that tell our torch plug-in, in one rank per machine, to warn of plaintext groups
    (torch/plaintext.py)."""
    if assignment.group_world_size == 1 or local_rank != 0 or Environment.from_mapping().encryption == "off":
        return []
    end = assignment.first_rank + assignment.local_world_size
    return ["-X", f"ringfort-local-ranks={assignment.first_rank}:{end}"]


def _standard_input() -> IO[bytes] | int:
    """Pass on a pipe, but not a terminal: ranks have sessions of their own and could not read it."""
    stream = sys.stdin
    try:
        return subprocess.DEVNULL if stream is None or stream.isatty() else stream.fileno()  # pyright: ignore[reportUnnecessaryComparison]
    except (OSError, ValueError):  # closed, or not a file
        return subprocess.DEVNULL
