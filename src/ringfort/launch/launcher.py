"""A launcher: forms the cluster, starts this machine's ranks when all launchers agree, and sees them to their end.

One loop in one thread: it waits for the ranks' output, for signals and for events of the cluster, asks `Agreement` what
follows, and does it.
"""

from __future__ import annotations

import platform
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from math import inf
from typing import TYPE_CHECKING, Final

from ringfort.cluster.core.events import (
    CloneFound,
    EpochEnded,
    EpochStarted,
    Misbehaved,
    Noted,
    OtherClusters,
    PeerJoined,
    PeerLost,
    Waiting,
)
from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.cluster.core.proposer import TOO_FEW
from ringfort.cluster.core.versions import differ, upgrade_advice
from ringfort.cluster.net.profile import own_version
from ringfort.config import AutoDiscoveryConfig, HealthConfig
from ringfort.errors import ProtocolError, RendezvousTimeoutError
from ringfort.launch.agreement import Agreement, Assignment, Finish, Hold, Instruction, Start, Stop, Tell
from ringfort.launch.agreement_messages import Place, decode, encode, topic_of
from ringfort.launch.failure_report import Failure, first
from ringfort.launch.inbox import Inbox, Item, Signalled, signals_to
from ringfort.launch.machine_ranks import MachineRanks, Program
from ringfort.launch.place import interface_towards, open_place
from ringfort.launch.printer import Printer, summary
from ringfort.launch.processes import Children
from ringfort.launch.run_options import RunOptions
from ringfort.launch.ticket import ticket_of
from ringfort.telemetry.steps import StepFile

if TYPE_CHECKING:
    from ringfort.cluster.node import ClusterNode

LOOK_SECONDS: Final = 3.0
"""After which it is said who else is here: a machine that types the same is found sooner."""
ALONE: Final = "this.machine"
"""The peer id of a launcher that needs no cluster."""


def run_job(options: RunOptions, printer: Printer | None = None) -> int:
    """Run a program on this machine and those it forms a cluster with. Returns the exit code for a shell.

    Raises `RendezvousTimeoutError` if too few machines came, and what `ClusterNode` raises.
    """
    printer = printer or Printer()
    with ExitStack() as stack:
        inbox = stack.enter_context(closing(Inbox()))
        stack.enter_context(signals_to(inbox))
        node: ClusterNode | None = None
        step_file: StepFile | None = None
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
            step_file = stack.enter_context(closing(StepFile()))
            node = ClusterNode(config, slots=options.local, steps_done=step_file.read)
            stack.callback(node.subscribe(inbox.put))
            stack.enter_context(node)
        return _Launcher(options, printer, inbox, node, step_file).run()


class _Launcher:
    """The loop, and what it knows."""

    def __init__(
        self,
        options: RunOptions,
        printer: Printer,
        inbox: Inbox,
        node: ClusterNode | None,
        step_file: StepFile | None = None,
    ) -> None:
        self._options = options
        self._printer = printer
        self._inbox = inbox
        self._node = node
        self._step_file = step_file
        self._host = platform.node()
        self._program = Program(
            options.command,
            options.run_name,
            options.patience_seconds,
            options.max_restarts,
            None if step_file is None else step_file.path,
        )
        self._agreement = Agreement(
            ALONE if node is None else node.peer_id,
            ticket_of(options),
            options.node_range,
            self._open_place,
            options.run_name,
        )
        self._topic = topic_of(options.run_name)
        self._names: dict[str, str] = {}
        self._listener: socket.socket | None = None
        self._is_over = False
        self._look_at = inf
        self._prepare()

    def _prepare(self) -> None:
        """For the first attempt, or for another."""
        self._children = Children()
        self._children.watch(self._inbox.reader)
        self._ranks = MachineRanks(self._children, self._host)
        self._is_done = False
        self._stopped = 0
        if self._step_file is not None:
            self._step_file.clear()
        self._deadline = time.monotonic() + self._options.timeout

    def run(self) -> int:
        """Until the end. Returns the exit code."""
        agreement = self._agreement
        try:
            self._begin()
            while not self._is_over:
                self._printer.show(self._ranks.poll())
                for item in self._inbox.items():
                    self._take(item)
                self._do(agreement.tick(time.monotonic()))
                self._do(agreement.remind(time.monotonic()))
                if agreement.has_started:
                    self._watch_ranks()
                elif not agreement.failures:
                    self._wait()
                if agreement.failures and self._ranks.is_over:
                    self._end_attempt()
        finally:
            if self._listener is not None:
                self._listener.close()
            self._children.close()
            self._printer.finish()
        return self._sum_up()

    def _begin(self) -> None:
        if self._node is None:
            alone = Epoch(1, ALONE, (Member(ALONE, slots=self._options.local),))
            self._do(self._agreement.epoch_started(time.monotonic(), alone))
        else:
            self._look_at = time.monotonic() + LOOK_SECONDS
            self._say(
                f"waiting for {self._wanted()}; type the same on each of them. "
                f"This is {self._host} at {', '.join(self._node.addresses)}"
            )

    def _wanted(self) -> str:
        fewest, most = self._options.node_range
        return f"{fewest} machines" if fewest == most else f"{fewest} to {most} machines"

    def _wait(self) -> None:
        """For the machines that are to come."""
        now = time.monotonic()
        if now >= self._deadline:
            raise self._too_late()
        if now >= self._look_at:
            self._look_at = inf
            others = self._other_runs()
            if others:
                self._say(others)

    def _other_runs(self) -> str:
        """Machines that wait in this cluster for another run: perhaps another script was typed there by mistake."""
        assert self._node is not None
        mine = self._options.run_name
        others = sorted({(view.name, view.run) for view in self._node.snapshot() if view.run not in ("", mine)})
        if not others:
            return ""
        seen = ", ".join(f"{name} ({run!r})" for name, run in others)
        return f"machines of other runs are here too: {seen}. To join this run they need its name, --name {mine!r}"

    def _end_attempt(self) -> None:
        """All ranks of this machine have ended after a failure."""
        agreement = self._agreement
        if not agreement.may_start_again:
            self._is_over = True
            return
        count = f"{agreement.attempt + 1} of {self._options.max_restarts}"
        self._printer.say(summary(first(agreement.failures), self._host, self._stopped, f"starting again, {count}"))
        self._children.close()
        self._prepare()
        self._do(agreement.again(time.monotonic()))

    # --- what happens -----------------------------------------------------------------------------------------------

    def _take(self, item: Item) -> None:
        agreement = self._agreement
        match item:
            case Signalled():
                self._interrupt(item)
            case EpochStarted(epoch=epoch):
                self._do(agreement.epoch_started(time.monotonic(), epoch))
            case EpochEnded(why=why):
                self._do(agreement.epoch_ended(time.monotonic(), why))
            case PeerLost(peer=peer, why=why):
                name = self._names.get(peer, peer)
                self._do(agreement.lost(peer, name, why))
                if not agreement.has_started and not agreement.failures:
                    self._say(f"{name} is gone: {why}")
                self._names.pop(peer, None)
            case Noted(peer=peer, topic=topic, body=body) if topic == self._topic:
                try:
                    self._do(agreement.received(time.monotonic(), peer, decode(body)))
                except ProtocolError as exc:
                    self._say(f"{self._names.get(peer, peer)}: {exc}")
            case PeerJoined(peer=peer, name=name):
                if not agreement.has_started and peer not in self._names:  # a second link with it is no news
                    self._say(str(item))
                    if differ(own_version(), item.version):
                        self._say("; ".join(upgrade_advice(own_version(), name or peer, item.version)))
                self._names[peer] = name or peer
                self._do(agreement.joined(time.monotonic(), peer))
            case CloneFound() | Misbehaved():
                self._say(str(item))
            case Waiting(why=why) if why.endswith(TOO_FEW):
                pass  # as was said at the start
            case OtherClusters() | Waiting() if not agreement.has_started and not agreement.failures:
                self._say(str(item))
            case _:
                pass

    def _interrupt(self, signalled: Signalled) -> None:
        """The first signal is passed on; a second one is impatience."""
        why = f"{signalled.name} on {self._host}"
        failure = Failure(self._host, -signalled.number, why=why, is_final=True)
        if not self._agreement.has_started and not self._agreement.attempt:
            self._agreement.failures.append(failure)  # the others go on waiting
        elif any(failure.is_final for failure in self._agreement.failures):
            self._ranks.kill()
        else:
            # Python ignores SIGPIPE, so ranks would not end by it.
            self._stop(signal.SIGTERM if signalled.number == signal.SIGPIPE else signalled.number)
            if signalled.number == signal.SIGINT:
                self._say("stopping; Ctrl-C again to kill what is slow")
            self._do(self._agreement.failed(failure))

    def _watch_ranks(self) -> None:
        agreement = self._agreement
        if self._printer.is_broken and not agreement.failures:
            self._interrupt(Signalled(signal.SIGPIPE))
        failure = self._ranks.failure()
        if failure is not None and not agreement.failures:
            self._do(agreement.failed(failure))
        if not agreement.failures and not self._is_done and self._ranks.ended_well:
            self._is_done = True
            self._do(agreement.done())

    # --- what follows -----------------------------------------------------------------------------------------------

    def _do(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Tell(message=message, peer=peer):
                    if self._node is not None:
                        self._node.tell(self._topic, encode(message), peer)
                case Hold(holding=holding):
                    if self._node is not None:
                        self._node.hold(holding)
                case Start(assignment=assignment, warnings=warnings):
                    for words in warnings:
                        self._say(words)
                    self._start(assignment)
                case Stop():
                    if not self._ranks.was_stopped:
                        self._stop(signal.SIGTERM)
                case Finish():
                    self._is_over = True

    def _stop(self, signum: int) -> None:
        self._stopped = self._ranks.running
        self._ranks.stop(signum)

    def _open_place(self, epoch: Epoch) -> Place:
        if self._listener is not None:
            self._listener.close()  # of an epoch that ended before the start
        self._listener, place = open_place(epoch, self._node)
        return place

    def _start(self, assignment: Assignment) -> None:
        self._printer.set_world(assignment.world_size)
        if self._node is not None:
            last = assignment.first_rank + assignment.local_world_size - 1
            ranks = f"rank {last}" if last == assignment.first_rank else f"ranks {assignment.first_rank} to {last}"
            self._say(
                f"starting {assignment.world_size} ranks on {assignment.group_world_size} machines; "
                f"this one, {self._host}, has {ranks}"
                + (f" (restart {assignment.restarts} of {self._options.max_restarts})" if assignment.restarts else "")
            )
        listener = self._listener if assignment.first_rank == 0 else None
        self._ranks.start(assignment, self._program, interface_towards(assignment.place.host), listener)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _too_late(self) -> RendezvousTimeoutError:
        """In the node's words, which knows who was seen and who was refused; or in ours, where some did not answer."""
        agreement, node = self._agreement, self._node
        assert node is not None
        what = f"waiting for {self._wanted()}"
        if agreement.silent:
            names = ", ".join(sorted(self._names.get(peer, peer) for peer in agreement.silent))
            state = f"{names} came but did not start: it must be `ringfort run` of the same program there too"
        else:
            state = node.why_alone()
        return RendezvousTimeoutError(what, self._options.timeout, state=state)

    def _sum_up(self) -> int:
        failures = self._agreement.failures
        if not failures:
            return 0
        failure = first(failures)
        self._printer.say(summary(failure, self._host, self._stopped))
        return failure.status

    def _say(self, words: str) -> None:
        self._printer.say(f"ringfort run: {words}")
