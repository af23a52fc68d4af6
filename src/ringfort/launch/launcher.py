"""`ringfort run` on one machine: forms the cluster, starts the ranks when all launchers agree, and watches them.

One loop in one thread waits for output of the ranks, for signals and for events of the cluster, passes them to
`Agreement`, and carries out its instructions.
"""

from __future__ import annotations

import platform
import signal
import socket
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from math import inf
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Final

from ringfort.cluster.core import events
from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.cluster.core.proposer import TOO_FEW
from ringfort.cluster.core.versions import differ, upgrade_advice
from ringfort.cluster.net.profile import own_version
from ringfort.config import AutoDiscoveryConfig, HealthConfig
from ringfort.errors import ProtocolError, RendezvousTimeoutError
from ringfort.launch.agreement import Agreement, Assignment, Finish, Hold, Instruction, Start, Stop, Tell
from ringfort.launch.agreement_messages import Place, decode, encode, topic_of
from ringfort.launch.failure_report import Failure, first
from ringfort.launch.machine_ranks import MachineRanks
from ringfort.launch.place import interface_towards, open_place
from ringfort.launch.printer import Printer, summary
from ringfort.launch.run_options import RunOptions
from ringfort.launch.run_watch import RunWatch
from ringfort.launch.ticket import ticket_of

if TYPE_CHECKING:
    from ringfort.cluster.node import ClusterNode

LOOK_SECONDS: Final = 3.0
"""After which other runs in the cluster are reported: a machine of this run is found sooner."""
ALONE: Final = "this.machine"
"""The peer id of a launcher that needs no cluster."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals by which a user or the system asks a program to end."""

Item = signal.Signals | events.ClusterEvent


def run_job(options: RunOptions) -> int:
    """Run a program on this machine and those that join the run. Returns the exit code for a shell.

    Raises `RendezvousTimeoutError` if too few machines came, and what `ClusterNode` raises.
    """
    with ExitStack() as stack:
        inbox: SimpleQueue[Item] = SimpleQueue()  # its `put` may be called from other threads and signal handlers
        stack.enter_context(signals_to(inbox.put))
        printer = Printer()
        watch = stack.enter_context(closing(RunWatch(options, printer)))
        node: ClusterNode | None = None
        if not options.is_alone:
            from ringfort.cluster.node import ClusterNode

            fewest, most = options.node_range
            config = AutoDiscoveryConfig(
                min_peers=fewest - 1,
                max_peers=most - 1,
                timeout=options.timeout,
                program=options.title,
                peers=options.peers,
                interfaces=options.interfaces,
                run=options.run_name,
                health=HealthConfig(patience=options.patience_seconds),
                restart_without=options.restart_without,
            )
            node = ClusterNode(config, slots=options.local, steps_done=watch.traces.step, telemetry=watch.traces.folder)
            stack.callback(node.subscribe(inbox.put))
            stack.enter_context(node)
        return _Launcher(options, printer, inbox, node, watch).run()


@contextmanager
def signals_to(put: Callable[[signal.Signals], None]) -> Generator[None, None, None]:
    """Pass signals to `put` inside the block. Signals that were ignored stay so, as `nohup` wants."""

    def handle(number: int, _: FrameType | None) -> None:
        put(signal.Signals(number))

    taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Launcher:
    """The loop and its state."""

    options: RunOptions
    printer: Printer
    inbox: SimpleQueue[Item]
    node: ClusterNode | None
    watch: RunWatch

    def __post_init__(self) -> None:
        options, me = self.options, ALONE if self.node is None else self.node.peer_id
        self._host = platform.node()
        self._agreement = Agreement(me, ticket_of(options), options.node_range, self._open_place, options.run_name)
        self._topic = topic_of(options.run_name)
        self._names: dict[str, str] = {}
        self._listener: socket.socket | None = None
        self._is_over = False
        self._look_at = inf
        self._prepare()

    def _prepare(self) -> None:
        """Get ready for the first attempt, or for another one."""
        self._ranks = MachineRanks(self._host, self.options, self.watch.logs)
        self._is_done = False
        self.watch.traces.clear()
        self._deadline = time.monotonic() + self.options.timeout

    def run(self) -> int:
        """Run until the end, and return the exit code."""
        agreement = self._agreement
        try:
            self._begin()
            while not self._is_over:
                self.watch.tick()
                self.printer.show(self._ranks.poll())
                while not self.inbox.empty():
                    self._take(self.inbox.get())
                self._do(agreement.tick(time.monotonic()))
                self._do(agreement.remind(time.monotonic()))
                if agreement.has_started:
                    self._watch_ranks()
                elif not agreement.failures:
                    self._wait()
                if agreement.failures and self._ranks.children.is_over:
                    self._end_attempt()
        finally:
            self._close_listener()
            self._ranks.children.close()
            self.printer.finish()
        if not agreement.failures:
            return 0
        failure = first(agreement.failures)
        self.printer.say(summary(failure, self._host, self._ranks.stopped))
        return failure.status

    def _begin(self) -> None:
        if self.node is None:
            alone = Epoch(1, ALONE, (Member(ALONE, slots=self.options.local),))
            self._do(self._agreement.epoch_started(time.monotonic(), alone))
        else:
            self._look_at = time.monotonic() + LOOK_SECONDS
            self.printer.say(
                f"waiting for {self._wanted()}; type the same command on each of them. "
                f"This is {self._host} at {', '.join(self.node.addresses)}"
            )

    def _wanted(self) -> str:
        fewest, most = self.options.node_range
        return f"{fewest} machines" if fewest == most else f"{fewest} to {most} machines"

    def _wait(self) -> None:
        """Wait for the other machines."""
        now = time.monotonic()
        if now >= self._deadline:
            raise self._too_late()
        if now >= self._look_at:
            self._look_at = inf
            self._say_other_runs()

    def _say_other_runs(self) -> None:
        """Report machines that wait in this cluster for another run: another script may have been typed there."""
        assert self.node is not None
        mine = self.options.run_name
        others = sorted({(view.name, view.run) for view in self.node.snapshot() if view.run not in ("", mine)})
        if others:
            seen = ", ".join(f"{name} ({run!r})" for name, run in others)
            self.printer.say(
                f"machines of other runs are here too: {seen}. To join this run, start them with --name {mine!r}"
            )

    def _end_attempt(self) -> None:
        """All ranks of this machine have ended after a failure."""
        agreement = self._agreement
        if not agreement.may_start_again:
            self._is_over = True
            return
        then = f"starting again, {agreement.attempt + 1} of {self.options.max_restarts}"
        self.printer.say(summary(first(agreement.failures), self._host, self._ranks.stopped, then))
        self._ranks.children.close()
        self._prepare()
        self._do(agreement.again(time.monotonic()))

    # --- events -----------------------------------------------------------------------------------------------------

    def _take(self, item: Item) -> None:
        agreement = self._agreement
        is_waiting = not agreement.has_started and not agreement.failures
        match item:
            case signal.Signals():
                self._interrupt(item)
            case events.EpochStarted(epoch=epoch):
                self._do(agreement.epoch_started(time.monotonic(), epoch))
            case events.EpochEnded(why=why):
                self._do(agreement.epoch_ended(time.monotonic(), why))
            case events.PeerLost(peer=peer, why=why):
                name = self._names.pop(peer, peer)
                self._do(agreement.lost(peer, name, why))
                if is_waiting:
                    self.printer.say(f"{name} is gone: {why}")
            case events.Noted(peer=peer, topic=topic, body=body) if topic == self._topic:
                try:
                    self._do(agreement.received(time.monotonic(), peer, decode(body)))
                except ProtocolError as exc:
                    self.printer.say(f"{self._names.get(peer, peer)}: {exc}")
            case events.PeerJoined(peer=peer, name=name):
                if not agreement.has_started and peer not in self._names:  # not for a second link to the same peer
                    self.printer.say(str(item))
                    if differ(own_version(), item.version):
                        self.printer.say("; ".join(upgrade_advice(own_version(), name or peer, item.version)))
                self._names[peer] = name or peer
                self._do(agreement.joined(time.monotonic(), peer))
            case events.CloneFound() | events.Misbehaved():
                self.printer.say(str(item))
            case events.Waiting(why=why) if why.endswith(TOO_FEW):
                pass  # said at the start
            case events.OtherClusters() | events.Waiting() if is_waiting:
                self.printer.say(str(item))
            case _:
                pass

    def _interrupt(self, signum: signal.Signals) -> None:
        """Pass the first signal on to the ranks; kill them at the second."""
        agreement = self._agreement
        failure = Failure(self._host, -signum, why=f"{signum.name} on {self._host}", is_final=True)
        if not agreement.has_started and not agreement.attempt:
            agreement.failures.append(failure)  # the other machines continue to wait
        elif any(failure.is_final for failure in agreement.failures):
            self._ranks.children.signal(signal.SIGKILL)
        else:
            # Python ignores SIGPIPE, so it would not end the ranks.
            self._ranks.stop(signal.SIGTERM if signum == signal.SIGPIPE else signum)
            if signum == signal.SIGINT:
                self.printer.say("stopping; press Ctrl-C again to kill the ranks that are slow")
            self._do(agreement.failed(failure))

    def _watch_ranks(self) -> None:
        agreement, children = self._agreement, self._ranks.children
        if self.printer.is_broken and not agreement.failures:
            self._interrupt(signal.SIGPIPE)
        failure = self._ranks.failure()
        if failure is not None and not agreement.failures:
            self._do(agreement.failed(failure))
        if not (agreement.failures or self._is_done) and children.is_over and not children.failed:
            self._is_done = True
            self._do(agreement.done())

    # --- instructions -----------------------------------------------------------------------------------------------

    def _do(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Tell(message=message, peer=peer):
                    if self.node is not None:
                        self.node.tell(self._topic, encode(message), peer)
                case Hold(holding=holding):
                    if self.node is not None:
                        self.node.hold(holding)
                case Start(assignment=assignment, warnings=warnings):
                    for warning in warnings:
                        self.printer.say(warning)
                    self._start(assignment)
                case Stop():
                    if self._ranks.stopped is None:
                        self._ranks.stop()
                case Finish():
                    self._is_over = True

    def _open_place(self, epoch: Epoch) -> Place:
        self._close_listener()  # of an epoch that ended before the start
        self._listener, place = open_place(epoch, self.node)
        return place

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _start(self, assignment: Assignment) -> None:
        self.printer.set_world(assignment.world_size)
        if self.node is not None:
            last = assignment.first_rank + assignment.local_world_size - 1
            ranks = f"rank {last}" if last == assignment.first_rank else f"ranks {assignment.first_rank} to {last}"
            restart = f" (restart {assignment.restarts} of {self.options.max_restarts})" if assignment.restarts else ""
            self.printer.say(
                f"starting {assignment.world_size} ranks on {assignment.group_world_size} machines; "
                f"this machine, {self._host}, has {ranks}{restart}"
            )
        listener = self._listener if assignment.first_rank == 0 else None
        interface = interface_towards(assignment.place.host)
        self._ranks.start(assignment, self.options, interface, listener, self.watch.traces.variables)
        self._close_listener()

    def _too_late(self) -> RendezvousTimeoutError:
        """The error, with the state of the launchers that did not answer, or else with the node's diagnosis."""
        agreement, node = self._agreement, self.node
        assert node is not None
        state = node.why_alone()
        if agreement.silent:
            names = ", ".join(sorted(self._names.get(peer, peer) for peer in agreement.silent))
            state = f"{names} came but did not start: run `ringfort run` with the same program there too"
        return RendezvousTimeoutError(f"waiting for {self._wanted()}", self.options.timeout, state=state)
