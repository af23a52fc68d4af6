"""When launchers start their ranks, and when the run is over. Pure: events in, instructions out.

The first member of the epoch leads. When the epoch has the machines that were asked for, it offers a place to meet; the
others hold the epoch and say that they are ready; when all are, it says go. If the epoch ends before, all begin again
with the next. From go on the list is fixed: the run ends when every member is done, or when one fails or is lost.

    what happens                          call
    an epoch has started, or ended        epoch_started(now, epoch), epoch_ended(now, why)
    another peer is gone                  lost(peer, name, why)
    a note came                           received(now, peer, message)
    the ranks of this machine ended well  done()
    something failed here                 failed(failure)
    time has passed                       tick(now)

    instruction                           what the launcher does
    Tell(message, peer)                   sends it to the peer, or to all members
    Hold(holding)                         keeps newcomers out, or lets them in again
    Start(assignment)                     starts the ranks
    Stop(failure)                         stops them: the run has failed
    Finish()                              all machines are done
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from ringfort.cluster.messages import Epoch
from ringfort.launch.blame import Failure
from ringfort.launch.messages import Done, Failed, Go, LauncherMessage, Offer, Place, Ready

SETTLE_SECONDS: Final = 3.0
"""How long an epoch that has MIN machines, but not MAX, waits for more: a person who has typed the command on one
machine is typing it on the next, and every newcomer starts the time again."""
EXPLAIN_SECONDS: Final = 1.0
"""How long after the end of an epoch a launcher waits to hear, or to see for itself, who was lost."""


@dataclass(frozen=True)
class Assignment:
    """The place of this machine's ranks among all."""

    first_rank: int
    local_world_size: int
    world_size: int
    group_rank: int
    group_world_size: int
    place: Place

    @classmethod
    def of(cls, epoch: Epoch, peer: str, place: Place) -> Assignment:
        """From an agreed epoch."""
        index = epoch.peers.index(peer)
        slots = epoch.members[index].slots
        return cls(epoch.first_rank(peer), slots, epoch.world_size, index, len(epoch.members), place)


@dataclass(frozen=True)
class Tell:
    """Send `message` to `peer`, or to all members."""

    message: LauncherMessage
    peer: str | None = None


@dataclass(frozen=True)
class Hold:
    """Let newcomers wait, or no longer."""

    holding: bool


@dataclass(frozen=True)
class Start:
    """Start the ranks."""

    assignment: Assignment


@dataclass(frozen=True)
class Stop:
    """The run has failed: stop the ranks."""

    failure: Failure


@dataclass(frozen=True)
class Finish:
    """All machines are done."""


Instruction = Tell | Hold | Start | Stop | Finish


@dataclass
class Agreement:
    """One launcher's part in a run."""

    me: str
    title: str
    nodes: tuple[int, int]
    """The fewest and the most machines."""
    open_place: Callable[[Epoch], Place]
    """Called where this launcher is the first: opens what the ranks will meet at."""
    failures: list[Failure] = field(default_factory=list[Failure])
    """What has gone wrong, in the order it was heard of."""
    epoch: Epoch | None = None
    """The one that is there; from `has_started` on, the one of the run."""
    has_started: bool = False
    silent: set[str] = field(default_factory=set[str])
    """On the first: who was offered to start and has not answered."""
    _offer: Offer | None = None
    _offer_at: float = inf
    _end_at: float = inf
    """After the start: when the end of the epoch ends the run, if nobody has said why."""
    _end_why: str = ""
    _done: set[str] = field(default_factory=set[str])
    """Whose ranks have ended well. A quick one may be done before a slow one has heard Go."""

    def epoch_started(self, now: float, epoch: Epoch) -> Sequence[Instruction]:
        """All members have agreed on `epoch`."""
        if self.has_started or self.failures:
            return ()
        self.epoch, self._offer, self.silent, self._done = epoch, None, set(), set()
        fewest, most = self.nodes
        if len(epoch.members) < fewest or epoch.peers[0] != self.me:
            self._offer_at = inf
        else:
            self._offer_at = now if len(epoch.members) >= most else now + SETTLE_SECONDS
        return self.tick(now)

    def epoch_ended(self, now: float, why: str) -> Sequence[Instruction]:
        """The epoch is over. Before the start that means to begin again. After it, contact was lost somewhere, maybe
        between two others; unless one who was done has gone, which is as it should be."""
        if self.epoch is None:
            return ()
        if self.has_started:
            if not self._done:
                self._end_at, self._end_why = now + EXPLAIN_SECONDS, f"the machines have lost each other: {why}"
            return ()
        self.epoch, self._offer, self.silent, self._offer_at = None, None, set(), inf
        return (Hold(False),)

    def tick(self, now: float) -> Sequence[Instruction]:
        """Makes the offer when its time has come; ends a run whose epoch has ended."""
        if now >= self._end_at and not self.failures:
            return self.failed(Failure("", 1, why=self._end_why))
        if now < self._offer_at or self.epoch is None:
            return ()
        self._offer_at = inf
        self._offer = Offer(self.epoch.key, self.title, self.open_place(self.epoch))
        self.silent = set(self.epoch.peers) - {self.me}
        return (Hold(True), Tell(self._offer), *self._go_if_all_are_ready())

    def received(self, peer: str, message: LauncherMessage) -> Sequence[Instruction]:
        """What another launcher says. What is not of this epoch, or not from where it should come, is ignored."""
        if self.epoch is None or peer not in self.epoch.peers:
            return ()
        match message:
            case Failed(failure=failure):
                return self._stop(failure)
            case _ if message.epoch != self.epoch.key:
                return ()
            case Done():
                self._done.add(peer)
                return self._finish_if_all_are_done()
            case _ if self.has_started:
                return ()
            case Offer() if peer == self.epoch.peers[0]:
                return self._answer(peer, message)
            case Ready(title=self.title) if peer in self.silent:
                self.silent.discard(peer)
                return self._go_if_all_are_ready()
            case Go() if peer == self.epoch.peers[0] and self._offer is not None:
                return self._start(self._offer)
            case _:
                return ()

    def _answer(self, peer: str, offer: Offer) -> Sequence[Instruction]:
        if offer.title != self.title:
            why = f"the machines do not run the same: {offer.title} on the first, {self.title} on this one"
            return self.failed(Failure("", 1, why=why))
        self._offer = offer
        return (Hold(True), Tell(Ready(offer.epoch, self.title), peer))

    def _go_if_all_are_ready(self) -> Sequence[Instruction]:
        if self.silent or self._offer is None:
            return ()
        return (Tell(Go(self._offer.epoch)), *self._start(self._offer))

    def _start(self, offer: Offer) -> Sequence[Instruction]:
        assert self.epoch is not None
        self.has_started = True
        return (Start(Assignment.of(self.epoch, self.me, offer.place)),)

    def lost(self, peer: str, name: str, why: str) -> Sequence[Instruction]:
        """`peer` is gone. One that was done may go, and after a failure all do."""
        if not self.has_started or self.failures or self.epoch is None:
            return ()
        if peer not in self.epoch.peers or peer in self._done:
            return ()
        return self.failed(Failure(name, 1, why=f"{name} is gone: {why}"))

    def done(self) -> Sequence[Instruction]:
        """All ranks of this machine have ended well."""
        assert self.epoch is not None
        self._done.add(self.me)
        return (Tell(Done(self.epoch.key)), *self._finish_if_all_are_done())

    def _finish_if_all_are_done(self) -> Sequence[Instruction]:
        assert self.epoch is not None
        return (Finish(),) if self._done.issuperset(self.epoch.peers) and not self.failures else ()

    def failed(self, failure: Failure) -> Sequence[Instruction]:
        """Something failed on this machine."""
        return (Tell(Failed(failure)), *self._stop(failure))

    def _stop(self, failure: Failure) -> Sequence[Instruction]:
        self.failures.append(failure)
        return (Stop(failure),) if len(self.failures) == 1 else ()
