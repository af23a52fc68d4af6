"""`Agreement`: when launchers start their ranks, and when the run is over. Pure: events in, instructions out.

Launchers of one run tell each other what they were asked to run (`Ticket`), and stop if that differs. The first member
of the epoch leads. When the epoch has enough machines, the leader offers a place to meet; the others hold the epoch and
answer that they are ready; when all are, the leader says go. If the epoch ends before that, all begin again with the
next one. After go the list of members is fixed: the attempt ends when every member is done, or when one fails or is
lost. After a failure all stop their ranks. If restarts are left, each launcher then says that it is ready for the next
attempt, which begins like the first.

    event                                 call
    an epoch has started, or ended        epoch_started(now, epoch), epoch_ended(now, why)
    another peer has joined               joined(now, peer)
    another peer was lost                 lost(peer, name, why)
    a message has arrived                 received(now, peer, message)
    all ranks of this machine succeeded   done()
    something failed here                 failed(failure)
    all ranks have ended after a failure  again(now), if `may_start_again`
    time has passed                       tick(now), remind(now)

    instruction                           what the launcher does
    Tell(message, peer)                   sends it to the peer, or to all members
    Hold(holding)                         keeps newcomers out, or lets them in again
    Start(assignment, warnings)           starts the ranks
    Stop(failure)                         stops them: the attempt has failed
    Finish()                              ends: all machines are done
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

import msgspec

from ringfort.cluster.core.peer_messages import Epoch
from ringfort.launch import differences
from ringfort.launch.agreement_messages import Done, Failed, Go, LauncherMessage, Offer, Place, Ready, Running, Ticket
from ringfort.launch.failure_report import Failure

SETTLE_SECONDS: Final = 3.0
"""How long an epoch that has MIN machines, but not MAX, waits for more: the user types the command on one machine after
the other. Every newcomer starts the time again."""
EXPLAIN_SECONDS: Final = 1.0
"""How long after the end of an epoch a launcher waits to learn which peer was lost."""
REMIND_SECONDS: Final = 2.0
"""Between two tickets of a launcher that waits."""
COMPARE_SECONDS: Final = 1.0
"""How long machines with different commands wait for another one before they stop: a third shows which one is wrong."""
NO_EPOCH: Final = Epoch(0, "", ())
"""Between two epochs: it has no members."""


class Assignment(msgspec.Struct, frozen=True):
    """Which ranks this machine has."""

    first_rank: int
    local_world_size: int
    world_size: int
    group_rank: int
    group_world_size: int
    place: Place
    restarts: int = 0
    """How often the run was restarted."""

    @classmethod
    def of(cls, epoch: Epoch, peer: str, place: Place, restarts: int = 0) -> Assignment:
        """The assignment of `peer` in `epoch`."""
        index = epoch.peers.index(peer)
        slots = epoch.members[index].slots
        return cls(epoch.first_rank(peer), slots, epoch.world_size, index, len(epoch.members), place, restarts)


class Tell(msgspec.Struct, frozen=True):
    """Send `message` to `peer`, or to all members."""

    message: LauncherMessage
    peer: str | None = None


class Hold(msgspec.Struct, frozen=True):
    """Keep newcomers out, or let them in again."""

    holding: bool


class Start(msgspec.Struct, frozen=True):
    """Start the ranks."""

    assignment: Assignment
    warnings: tuple[str, ...] = ()
    """In what the machines differ."""


class Stop(msgspec.Struct, frozen=True):
    """The attempt has failed: stop the ranks."""

    failure: Failure


class Finish(msgspec.Struct, frozen=True):
    """All machines are done."""


Instruction = Tell | Hold | Start | Stop | Finish


@dataclass
class Agreement:
    """One launcher's view of a run."""

    me: str
    ticket: Ticket
    """What this launcher was asked to run."""
    nodes: tuple[int, int]
    """The fewest and the most machines."""
    open_place: Callable[[Epoch], Place]
    """Opens the place where the ranks will meet; called on the leader."""
    run: str = ""
    """The name of the run, for messages."""
    time_of_day: Callable[[], float] = time.time
    """For messages."""
    failures: list[Failure] = field(default_factory=list[Failure])
    """The failures of this attempt, in the order in which they became known."""
    epoch: Epoch = NO_EPOCH
    """The current epoch; once `has_started`, that of the attempt."""
    has_started: bool = False
    silent: set[str] = field(default_factory=set[str])
    """On the leader: the peers that have not answered its offer."""
    attempt: int = 0
    """How often the run was restarted."""
    tickets: dict[str, Ticket] = field(default_factory=dict[str, Ticket])
    """The tickets of the other launchers of this run."""
    _latest: Epoch = NO_EPOCH
    """The epoch that the node is in, also while an attempt ends."""
    _started_at: float = 0.0
    _compare_at: float = inf
    _remind_at: float = 0.0
    _offer: Offer | None = None
    _offer_at: float = inf
    _end_at: float = inf
    """When the end of the epoch ends an attempt that has started, unless a reason arrives before."""
    _end_why: str = ""
    _done: set[str] = field(default_factory=set[str])
    """The peers whose ranks have succeeded. A fast peer may be done before a slow one has received Go."""

    # --- before the start -------------------------------------------------------------------------------------------

    def epoch_started(self, now: float, epoch: Epoch) -> Sequence[Instruction]:
        """All members have agreed on `epoch`."""
        self._latest = epoch
        if self.has_started or self.failures:
            return ()
        self._enter(epoch)
        fewest, most = self.nodes
        if len(epoch.members) >= fewest and epoch.peers[0] == self.me:
            self._offer_at = now if len(epoch.members) >= most else now + SETTLE_SECONDS
        return self.tick(now)

    def _enter(self, epoch: Epoch) -> None:
        self.epoch, self._offer, self._offer_at, self.silent, self._done = epoch, None, inf, set(), set()

    def epoch_ended(self, now: float, why: str) -> Sequence[Instruction]:
        """The epoch is over. Before the start, begin again. Afterwards, two peers have lost each other, unless a peer
        that was done has left, which is normal."""
        self._latest = NO_EPOCH
        if not self.epoch.members:
            return ()
        if self.has_started:
            if not self._done:
                self._end_at, self._end_why = now + EXPLAIN_SECONDS, f"the machines lost contact: {why}"
            return ()
        self._enter(NO_EPOCH)
        return (Hold(False),)

    def joined(self, now: float, peer: str) -> Sequence[Instruction]:
        """`peer`, of the same run, has joined."""
        return (*self._tell_if_late(now, peer), Tell(self._own_ticket(), peer))

    def remind(self, now: float) -> Sequence[Instruction]:
        """Before the start, send the ticket again from time to time: a message is lost if a second link replaces the
        link that carries it. The leader answers with the messages that may have been lost too."""
        if self.has_started or self.failures or now < self._remind_at:
            return ()
        self._remind_at = now + REMIND_SECONDS
        return (Tell(self._own_ticket()),)

    def _own_ticket(self) -> Ticket:
        return msgspec.structs.replace(self.ticket, restarts=self.attempt)

    def _tell_if_late(self, now: float, peer: str) -> Sequence[Instruction]:
        if not self.has_started or self.failures or peer in self.epoch.peers:
            return ()
        hosts = [self.ticket.host, *(self.tickets[p].host for p in self.epoch.peers if p in self.tickets)]
        return (Tell(Running(max(0.0, now - self._started_at), tuple(sorted(set(hosts)))), peer),)

    def tick(self, now: float) -> Sequence[Instruction]:
        """Compare the tickets; make the offer when it is due; end an attempt whose epoch has ended."""
        if self.failures:
            return ()
        if now >= self._end_at:
            return self.failed(Failure("", 1, why=self._end_why))
        if self.has_started:
            return ()
        mistake = self._mistake(now)
        if mistake is not None:
            return self.failed(mistake)
        if now < self._offer_at:
            return ()
        missing = set(self.epoch.peers) - self.tickets.keys() - {self.me}
        if missing:
            self.silent = missing
            return ()
        self._offer_at = inf
        members = {self.me: self.ticket, **{peer: self.tickets[peer] for peer in self.epoch.peers if peer != self.me}}
        self.attempt = max(self.attempt, *(ticket.restarts for ticket in members.values()))
        self._offer = Offer(self.epoch.key, self.attempt, self.open_place(self.epoch), differences.warnings(members))
        self.silent = set(self.epoch.peers) - {self.me}
        return (Hold(True), Tell(self._offer), *self._go_if_all_are_ready(now))

    def _mistake(self, now: float) -> Failure | None:
        """Compare the tickets once all machines are here, or if no other machine has come for a while."""
        tickets = {self.me: self.ticket, **self.tickets}
        if len(tickets) < max(differences.most_nodes(ticket) for ticket in tickets.values()) and now < self._compare_at:
            return None
        return differences.mistake(tickets)

    # --- messages ---------------------------------------------------------------------------------------------------

    def received(self, now: float, peer: str, message: LauncherMessage) -> Sequence[Instruction]:
        """Handle a message of another launcher. One of another epoch or attempt, or from a wrong sender, is ignored."""
        match message:
            case Ticket():
                return self._take_ticket(now, peer, message)
            case Running():
                return () if self.has_started or self.failures else self._stop(self._too_late(message))
            case Failed(failure=failure, attempt=attempt):
                return self._take_failure(peer, failure, attempt)
            case _:
                pass
        epoch = self.epoch
        if peer not in epoch.peers or message.epoch != epoch.key or message.attempt < self.attempt:
            return ()
        is_first = peer == epoch.peers[0]
        match message:
            case Done() if message.attempt == self.attempt or not self.has_started:
                self._done.add(peer)
                return self._finish_if_all_are_done()
            case _ if self.has_started or self.failures:
                return ()
            case Offer() if is_first:
                self._offer = message
                return (Hold(True), Tell(Ready(message.epoch, message.attempt), peer))
            case Ready() if peer in self.silent and self._offer is not None and message.attempt == self._offer.attempt:
                self.silent.discard(peer)
                return self._go_if_all_are_ready(now)
            case Go() if is_first and self._offer is not None and message.attempt == self._offer.attempt:
                return self._start(now, self._offer)
            case _:
                return ()

    def _take_ticket(self, now: float, peer: str, ticket: Ticket) -> Sequence[Instruction]:
        before, self.tickets[peer] = self.tickets.get(peer), ticket
        leads_it = peer in self.epoch.peers and self.epoch.peers[0] == self.me
        if self.has_started or self.failures:
            if leads_it and not self.failures and ticket.restarts <= self.attempt:
                return (Tell(Go(self.epoch.key, self.attempt), peer),)  # it missed the first one
            return self._tell_if_late(now, peer)
        if ticket != before:
            self._compare_at = now + COMPARE_SECONDS
        if leads_it and self._offer is not None and (ticket != before or peer in self.silent):
            # It may have been stopping its ranks when the offer came, because of a failure that is unknown here.
            self._offer, self._offer_at = None, now
        return self.tick(now)

    def _take_failure(self, peer: str, failure: Failure, attempt: int) -> Sequence[Instruction]:
        if not (peer in self.epoch.peers or (failure.is_final and not self.has_started and peer in self.tickets)):
            return ()
        if attempt < self.attempt and not failure.is_final:
            return ()  # from an attempt that is over here
        if not self.has_started:
            self.attempt = max(self.attempt, attempt)
        return self._stop(failure)

    def _too_late(self, running: Running) -> Failure:
        since = time.strftime("%H:%M:%S", time.localtime(self.time_of_day() - running.seconds))
        late = "" if self.ticket.host in running.hosts else f"; {self.ticket.host} is too late"
        why = (
            f"the run {self.run!r} started at {since} ({running.seconds:.0f} s ago) on "
            f"{differences.listed(running.hosts)}{late}. Wait until it has ended, or start another run with --name"
        )
        return Failure(self.ticket.host, 1, why=why, is_final=True)

    # --- the start, and the end ---------------------------------------------------------------------------------------

    def _go_if_all_are_ready(self, now: float) -> Sequence[Instruction]:
        if self.silent or self._offer is None:
            return ()
        return (Tell(Go(self._offer.epoch, self._offer.attempt)), *self._start(now, self._offer))

    def _start(self, now: float, offer: Offer) -> Sequence[Instruction]:
        self.has_started, self.attempt, self._started_at = True, offer.attempt, now
        late = [item for peer in self.tickets for item in self._tell_if_late(now, peer)]
        return (Start(Assignment.of(self.epoch, self.me, offer.place, offer.attempt), offer.warnings), *late)

    def lost(self, peer: str, name: str, why: str) -> Sequence[Instruction]:
        """`peer` was lost. A peer that was done may leave, and after a failure all do."""
        self.tickets.pop(peer, None)
        if not self.has_started or self.failures or peer not in self.epoch.peers or peer in self._done:
            return ()
        return self.failed(Failure(name, 1, why=f"{name} is gone: {why}"))

    def done(self) -> Sequence[Instruction]:
        """All ranks of this machine have succeeded."""
        self._done.add(self.me)
        return (Tell(Done(self.epoch.key, self.attempt)), *self._finish_if_all_are_done())

    def _finish_if_all_are_done(self) -> Sequence[Instruction]:
        return (Finish(),) if self._done.issuperset(self.epoch.peers) and not self.failures else ()

    def failed(self, failure: Failure) -> Sequence[Instruction]:
        """Something failed on this machine."""
        return (Tell(Failed(failure, self.attempt)), *self._stop(failure))

    def _stop(self, failure: Failure) -> Sequence[Instruction]:
        self.failures.append(failure)
        return (Stop(failure),) if len(self.failures) == 1 else ()

    # --- restarts ---------------------------------------------------------------------------------------------------

    @property
    def may_start_again(self) -> bool:
        """Whether another attempt may follow the failure."""
        is_final = any(failure.is_final for failure in self.failures)
        return bool(self.failures) and not is_final and self.attempt < self.ticket.max_restarts

    def again(self, now: float) -> Sequence[Instruction]:
        """Get ready for the next attempt: no rank of this machine runs any more."""
        self.attempt += 1
        self.failures, self.has_started, self._end_at = [], False, inf
        begun = self.epoch_started(now, self._latest)
        return (Hold(False), Tell(self._own_ticket()), *begun)
