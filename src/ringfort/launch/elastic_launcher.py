"""`ringfort run --elastic` on one machine: starts the ranks, starts those again that crash, and passes signals on.

Launchers of an elastic run do not talk to each other. Each rank is a member of the run by itself: its `elastic()` finds
the others. So a rank may crash, and be started again, while the rest of the run continues. Only if the program shards
its model over the ranks of the machine, the machine is the member: if one rank crashes, all are started again.
"""

from __future__ import annotations

import platform
import signal
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from ringfort.cluster.discovery.interfaces import choose
from ringfort.cluster.discovery.static import parse_peers
from ringfort.cluster.discovery.system import list_interfaces
from ringfort.config import Environment, is_set
from ringfort.errors import DistributedError
from ringfort.identity.credentials import Credentials
from ringfort.launch.failure_report import Failure, describe_exit
from ringfort.launch.launcher import signals_to
from ringfort.launch.machine_ranks import MachineRanks, default_variables
from ringfort.launch.place import LOOPBACK
from ringfort.launch.printer import Printer, summary
from ringfort.launch.processes import Child
from ringfort.launch.restarts import Restarts
from ringfort.launch.run_options import ElasticOptions
from ringfort.launch.run_watch import RunWatch
from ringfort.training.elastic.launched import MACHINE
from ringfort.transport import tcp

LEAVE_SECONDS: Final = 60.0
"""How long ranks may take to leave the run after a signal: to finish a step and write the last checkpoint."""
MAX_CAUSE: Final = 200
"""Characters of a rank's last line in the message about its crash: the line itself was printed before."""
ASKED: Final = (signal.SIGTERM, signal.SIGINT)
"""The signals by which a person or a system asks one rank to end. That is no crash: systemd sees them so too."""
FOLLOW_SECONDS: Final = 5.0
"""How long the other ranks of a machine that is one member may take to end after a crash: to say goodbye to the run."""
_PLACE: Final = ("GROUP_RANK", "GROUP_WORLD_SIZE", "RINGFORT_MASTER", "RINGFORT_LISTEN_FD")
"""A member of an elastic run has no place that stays, so these must not come from another launcher around this one."""


def run_elastic(options: ElasticOptions) -> int:
    """Run a program as members of an elastic run. Returns the exit code for a shell.

    Raises `ConfigError` for an unknown interface or an invalid peer address, and `IdentityError` if the key or the
    secret of the cluster cannot be read: those would make every rank fail.
    """
    told = Environment.from_mapping()
    parse_peers(options.peers)
    choose(list_interfaces(), options.interfaces)
    if told.encryption != "off":
        Credentials.load(told)
    with ExitStack() as stack:
        inbox: SimpleQueue[signal.Signals] = SimpleQueue()
        stack.enter_context(signals_to(inbox.put))
        mark = stack.enter_context(_mark_file())
        printer = Printer()
        watch = stack.enter_context(closing(RunWatch(options, printer)))
        return _ElasticLauncher(options, printer, inbox, mark, watch).run()


@contextmanager
def _mark_file() -> Generator[Path | None, None, None]:
    """The file in which `elastic()` leaves a mark; None if it cannot be created."""
    try:
        file = tempfile.NamedTemporaryFile(prefix="ringfort-elastic-")  # noqa: SIM115
    except OSError:
        yield None
        return
    with file:
        yield Path(file.name)


def free_port() -> int:
    """A port of this machine that is free now: torch's own store cannot take over a socket. Raises `TransportError`."""
    with tcp.listen(LOOPBACK, 0) as listener:
        return int(listener.getsockname()[1])


def member_variables(
    options: ElasticOptions, local_rank: int, restarts: int, mark: Path | None, port: int
) -> dict[str, str]:
    """The environment of a rank: the options that were given, for `elastic()`, and torchrun's variables for a process
    group of this machine's ranks. The rest stays as the user set it."""
    given = {
        "RINGFORT_ELASTIC_NODES": options.nodes,
        "RINGFORT_ELASTIC_NAME": options.name,
        "RINGFORT_PATIENCE": None if options.patience is None else f"{options.patience:g}",
        "RINGFORT_INTERFACES": ",".join(options.interfaces),
        "RINGFORT_PEERS": ",".join(options.peers),
        "RINGFORT_RESTART_WITHOUT": ",".join(options.restart_without),
    }
    return {
        **{name: "" for name in _PLACE if is_set(name)},
        **{name: value for name, value in given.items() if value},
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(local_rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(options.local)),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "RINGFORT_RESTART_COUNT": str(restarts),
        "RINGFORT_ELASTIC_FILE": "" if mark is None else str(mark),
        **default_variables(options.local),
    }


@dataclass
class _Rank:
    """One rank of this machine, over all its processes."""

    number: int
    restarts: Restarts
    child: Child | None = None
    """Its process; None before a start and after the end."""
    started_at: float = 0.0
    start_at: float = inf
    """When it is started again."""
    is_done: bool = False
    """Whether it has ended with 0."""
    asked: signal.Signals | None = None
    """The signal that was sent to it alone, and by which it ended."""
    failure: Failure | None = None
    """How it ended for good, if not with 0."""

    @property
    def is_over(self) -> bool:
        return self.child is None and self.start_at == inf


@dataclass
class _ElasticLauncher:
    """The loop and its state."""

    options: ElasticOptions
    printer: Printer
    inbox: SimpleQueue[signal.Signals]
    mark: Path | None
    watch: RunWatch
    _signal: signal.Signals | None = None
    """The first signal that was passed on."""
    _ranks: list[_Rank] = field(default_factory=list[_Rank])
    _kill_at: float = inf
    """When those ranks are killed that have not followed a crashed one of their member."""

    def __post_init__(self) -> None:
        self._port = free_port()
        self._host = platform.node()
        self._machine = MachineRanks(self._host, self.options, self.watch.logs)
        self._ranks = [_Rank(number, Restarts(self.options.max_restarts)) for number in range(self.options.local)]
        self.printer.set_world(self.options.local)

    def run(self) -> int:
        """Run until all ranks have ended, and return the exit code."""
        try:
            self._start_all()
            while not all(rank.is_over for rank in self._ranks):
                self.watch.tick()
                self.printer.show(self._machine.poll())
                while not self.inbox.empty():
                    self._interrupt(self.inbox.get())
                if self.printer.is_broken and self._signal is None:
                    self._interrupt(signal.SIGPIPE)
                if self._kill_at != inf:
                    self._end_together(time.monotonic())
                for rank in self._ranks:
                    self._watch(rank, time.monotonic())
        finally:
            self._machine.children.close()
            self.printer.finish()
        return self._end()

    # --- ranks ------------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        started = [f"rank {rank.number} (pid {self._start(rank)})" for rank in self._ranks]
        who = started[0] if len(started) == 1 else f"{', '.join(started[:-1])} and {started[-1]}"
        wanted = "" if self.options.nodes is None else f" with --nodes {self.options.nodes}"
        self._say(f"started {who} of {self._title}{wanted} on {self._host}; each finds the other members by itself")

    @property
    def _title(self) -> str:
        name = self.options.name
        return self.options.title if name is None else f"{self.options.title} ({name!r})"

    def _start(self, rank: _Rank) -> int:
        restarts = rank.restarts.used
        variables = member_variables(self.options, rank.number, restarts, self.mark, self._port)
        variables |= self.watch.traces.variables
        rank.start_at, rank.started_at = inf, time.monotonic()
        rank.child = self._machine.start_rank(rank.number, variables, restarts, is_first=rank.number == 0)
        return rank.child.process.pid

    def _watch(self, rank: _Rank, now: float) -> None:
        """Start the rank again when that is due; handle its end."""
        child = rank.child
        if child is None:
            if now >= rank.start_at and self._kill_at == inf:
                self._start_again(rank, now)
        elif child.is_over:
            rank.child = None
            self._machine.forget(child)
            code = child.exit_code or 0
            rank.is_done, rank.asked = code == 0, _asked(code)
            if self._signal is not None:
                return
            if rank.asked is not None:
                lived = _duration(now - rank.started_at)
                self._say(f"rank {rank.number} was ended by {rank.asked.name} after {lived}{self._rest}")
            elif code and self._kill_at == inf:  # otherwise it has followed another
                failure = Failure.of_rank(rank.number, self._host, code, child.tail)
                self._crashed(rank, failure, now)
                if self._is_one_member:
                    self._kill_at = now + FOLLOW_SECONDS
                    for other in self._ranks:
                        other.restarts = rank.restarts

    @property
    def _is_one_member(self) -> bool:
        """Whether the program has said that the ranks of this machine are one member, none of which can go on alone."""
        return len(self._ranks) > 1 and self.mark is not None and self.mark.read_bytes() == MACHINE

    def _end_together(self, now: float) -> None:
        """A rank of a machine that is one member has crashed: once all have ended, they are started again with it."""
        if any(rank.child is not None for rank in self._ranks):
            if now >= self._kill_at:
                self._machine.children.signal(signal.SIGKILL)
            return
        self._kill_at, self._port = inf, free_port()
        start_at = min(rank.start_at for rank in self._ranks)
        for rank in self._ranks:
            rank.start_at = start_at

    def _start_again(self, rank: _Rank, now: float) -> None:
        try:
            pid = self._start(rank)
        except DistributedError as exc:  # the system has no process or memory left, for now
            self._crashed(rank, Failure.of_rank(rank.number, self._host, 1, [str(exc)]), now)
            return
        self._say(f"started rank {rank.number} again (pid {pid}), restart {_of(rank.restarts)}")

    def _crashed(self, rank: _Rank, failure: Failure, now: float) -> None:
        lived = now - rank.started_at
        what = f"rank {rank.number} {describe_exit(failure.exit_code)} after {_duration(lived)}"
        wait = None if failure.is_final else rank.restarts.crashed(lived)
        if wait is not None:
            rank.start_at = now + wait
            # What a rank said before a signal ended it is not the cause.
            last = f" ({failure.tail[-1].strip()[:MAX_CAUSE]})" if failure.tail and failure.exit_code > 0 else ""
            who = f"all {len(self._ranks)} ranks, which are one member," if self._is_one_member else "it"
            self._say(f"{what}{last}; starting {who} again in {wait:g} s, restart {_of(rank.restarts)}")
            return
        rank.failure = failure
        why = "a restart would not help" if failure.is_final else f"{_of(rank.restarts)} restarts are used"
        tail = "\nits last lines:" + "".join(f"\n    {line}" for line in failure.tail) if failure.tail else ""
        self._say(f"{what}; {why}{self._rest}{tail}")

    @property
    def _rest(self) -> str:
        others = sum(not other.is_over for other in self._ranks)
        if others and self._is_one_member:
            return "; the others here are one member with it, and end"
        return f"; {others} other{'s'[: others > 1]} here continue{'s'[: others == 1]}" if others else ""

    # --- the end ----------------------------------------------------------------------------------------------------

    def _interrupt(self, signum: signal.Signals) -> None:
        """Pass the first signal on to the ranks; kill them at the second."""
        if self._signal is not None:
            self._machine.children.signal(signal.SIGKILL)
            return
        self._signal = signum
        for rank in self._ranks:
            rank.start_at = inf
        # Ranks leave well by these two. SIGHUP would end them at once, and Python ignores SIGPIPE.
        self._machine.stop(signum if signum == signal.SIGINT else signal.SIGTERM, LEAVE_SECONDS)
        if signum == signal.SIGINT:
            self._say("the ranks leave the run; press Ctrl-C again to kill those that are slow")

    def _end(self) -> int:
        """Say how the run ended here, and return the exit code."""
        if all(rank.is_done for rank in self._ranks):
            if not self._signal and self.mark is not None and not self.mark.stat().st_size:
                alone = "it ran alone" if self.options.local == 1 else f"its {self.options.local} ranks ran alone"
                self._say(f"{self.options.title} never called ringfort.elastic(): {alone}")
            return 0
        if self._signal is not None:
            failure = Failure(self._host, -self._signal, why=f"{self._signal.name} on {self._host}")
            self._say(summary(failure, self._host, self._machine.stopped))
            return failure.status
        failed = [rank.failure for rank in self._ranks if rank.failure is not None]
        if not failed:  # those that were asked to end leave the result to the others
            asked = [rank.asked for rank in self._ranks if rank.asked is not None]
            return 0 if len(asked) < len(self._ranks) else 128 + asked[0]
        if len(self._ranks) > 1 and not self._is_one_member:
            numbers = ", ".join(str(failure.rank) for failure in failed)
            self._say(f"failed: rank{'s'[: len(failed) > 1]} {numbers}; {len(self._ranks) - len(failed)} ended well")
        return failed[0].status

    def _say(self, text: str) -> None:
        """Print a message with the time of day: a run may last for days."""
        self.printer.say(f"{time.strftime('%H:%M:%S')} {text}")


def _asked(code: int) -> signal.Signals | None:
    """The signal that asked a process to end, if it ended because of one: by itself, as shells report it, or at
    once."""
    return next((signum for signum in ASKED if code in (-signum, 128 + signum)), None)


def _of(restarts: Restarts) -> str:
    return f"{restarts.used} of {restarts.limit}"


def _duration(seconds: float) -> str:
    """A time span in words."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"
