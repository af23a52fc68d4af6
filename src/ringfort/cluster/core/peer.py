"""`PeerCore`: everything that a peer decides, as one state machine. Pure: events in, instructions out.

The node around it owns sockets, threads and the clock. It calls one method for each thing that happens, carries out the
instructions in the order given, and calls `tick` when `deadline` has come. Every method takes `now` first.

    what happens                        call
    a link is open, both sides proved   connected(now, link, node, initiated=...)
    a message came                      received(now, link, message)         decoded by talk.decode
    bytes came that are no message      garbled(now, link, why)
    a link ended                        closed(now, link, why)
    `deadline` has come                 tick(now)
    this process wants to go            leave(now, why, died=...)
    the program starts or ends what     hold(now, True), hold(now, False)
      newcomers must not interrupt
    a process of this node is dead      vouch(now, peer_id, votes)        from the file it left behind
    earlier processes of this machine   recall(now, all_votes)               once, before anything else happens
      were in groups
    the program holds its interpreter   set_busy(now, True), set_busy(now, False)
      lock, or does no longer
    a promise is on the disk, or        persisted(now, votes, why)
      cannot be written
    our addresses changed               set_addresses(now, addresses)
    a person wants another leader       force_election(now), step_down(now)

    instruction                         what the node does
    Send(link, message)                 queues talk.encode(message) on the link, in order
    Close(link, why)                    closes the link once what was queued has left or a second has passed; no
                                        closed() is expected for it
    Learn(peer, addresses)              may dial these: hints that prove nothing (for the address directory)
    Persist(votes)                  writes it to this instance's file (durable_votes.py), in the background, and calls
                                        persisted() when it is on the disk or cannot be: only then does it take effect
    Notify(event)                       gives the event to the program (events, ElectionEvent, HealthEvent)

`now` is seconds of a clock that never goes back and runs on while the machine sleeps (CLOCK_BOOTTIME on Linux): after a
sleep, what was heard before it is old. `link` is any number the node has not used before.

However a link ends (end of file, a reset, no route, silence), its peer is lost and not dead: only a machine's own word
(`Departed`) says that one of its processes has ended.

The node dials whatever peer it has addresses of and no link to. Two links between the same two peers are the rule when
both dial at once: the core closes one of them, the same on both sides.

A peer id is `node.instance`: the short id of the node's key, which the handshake proves, and a random name for the
process. So several processes of a node are peers of their own, a process that starts again is a new peer, and one key
on two machines (`host` differs) is a clone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from msgspec.structs import replace

from ringfort.cluster.core.contacts import Contact, Contacts, node_of
from ringfort.cluster.core.election import ElectionManager
from ringfort.cluster.core.epochs import Epochs
from ringfort.cluster.core.health import HealthMonitor, HealthSummary
from ringfort.cluster.core.heartbeats import Heartbeats
from ringfort.cluster.core.instructions import Close, Instruction, Persist
from ringfort.cluster.core.membership import Voter
from ringfort.cluster.core.peer_links import Links
from ringfort.cluster.core.peer_messages import (
    MAX_NUMBER,
    Accept,
    AnyMessage,
    Beat,
    Campaign,
    Commit,
    Departed,
    ElectionVote,
    Epoch,
    Hangup,
    Hello,
    Introduce,
    Lead,
    Member,
    Propose,
    Reject,
    Report,
    Retire,
    Votes,
)
from ringfort.cluster.core.proposer import RingOrder
from ringfort.cluster.core.reports import Reports
from ringfort.cluster.core.state import LEAP, PeerState
from ringfort.config import CLUSTER_PATIENCE, AutoDiscoveryConfig
from ringfort.errors import InvalidArgumentError

GRAIN: Final = 0.001
"""Seconds between two ticks at least: sums of times are rounded, and one must not wait for a rounding error."""


class PeerCore:
    """One peer's part in its cluster."""

    def __init__(
        self,
        me: Member,
        config: AutoDiscoveryConfig,
        now: float,
        *,
        name: str = "",
        version: str = "",
        ring_order: RingOrder | None = None,
        work_done: Callable[[], int] | None = None,
    ) -> None:
        """`me.peer` is this peer's id; `name` and `version` are for people. `work_done` is asked when an epoch ends."""
        if not node_of(me.peer):
            raise InvalidArgumentError("me.peer", me.peer, "must be node.instance")
        self.is_over = False
        self.is_released = False
        """It has left, and everybody who was in a group with it was there to hear it: what it promised does not bind
        the next process of this machine."""
        self._state = PeerState(me, config, now, work_done or (lambda: 0))
        self._links = Links(self._state)
        self._beats = Heartbeats(self._state, self._links)
        self._epochs = Epochs(self._state, self._links, ring_order)
        self._reports = Reports(self._state, self._links, self._epochs)
        self._hello = Hello(me, name, version, config.run)
        self._deadline = now

    # --- questions --------------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """When `tick` is to be called next."""
        return self._deadline

    @property
    def me(self) -> Member:
        """This peer, as it introduces itself."""
        return self._state.me

    @property
    def contacts(self) -> Contacts:
        """Its links."""
        return self._state.contacts

    @property
    def health(self) -> HealthMonitor:
        """What it thinks of the others."""
        return self._state.health

    @property
    def election(self) -> ElectionManager:
        """Its part in elections."""
        return self._state.election

    @property
    def voter(self) -> Voter:
        """What it has promised."""
        return self._state.voter

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that this peer is in now."""
        return self.voter.current

    def epoch_of(self, peer: str) -> Epoch | None:
        """The epoch that `peer`, this one or one in sight, is in now; there may be one for each run."""
        if peer == self.me.peer or (self.epoch is not None and peer in self.epoch.peers):
            return self.epoch
        contact = self.contacts.get(peer)
        report = None if contact is None else contact.report
        return report.votes.formed if report is not None and report.current else None

    @property
    def leader(self) -> str | None:
        """The leader that this peer follows, or itself."""
        return self.election.leader

    @property
    def sees(self) -> tuple[str, ...]:
        """The peers it has a sound link with."""
        return self._state.sees

    def health_summary(self) -> HealthSummary:
        """All peers in a few numbers, as of the last call."""
        return self.health.summary(self._state.time)

    # --- what happens -----------------------------------------------------------------------------------------------

    def connected(self, now: float, link: int, node: str, *, initiated: bool) -> list[Instruction]:
        """`node` is what the handshake proved (`peer_id_of` its key), or "" where encryption is off. `initiated`:
        this side dialled."""
        if self._begin(now):
            state = self._state
            state.contacts.opened(Contact(link, node, initiated, state.time))
            state.send(link, self._hello)
            state.send(link, state.own_report())
        return self._end()

    def received(self, now: float, link: int, message: AnyMessage) -> list[Instruction]:
        """`message` came on `link`."""
        contact = self.contacts.by_link(link)
        if not self._begin(now) or contact is None:
            return self._end()
        if contact.is_flooding(now):
            self._links.refuse(contact, "it floods this peer with messages")
        elif contact.hello is None and not isinstance(message, Hangup):
            if not isinstance(message, Hello):
                self._links.refuse(contact, "it did not say who it is")
            elif self._links.meet(contact, message):
                self._beats.beat(contact)
        elif isinstance(message, Hangup):
            contact.hung_up = message.why or "it said so"
        elif isinstance(message, Beat):
            if self._beats.came(contact, message):
                return self._end()
        elif self.contacts.get(contact.peer) is contact or isinstance(
            message, Departed
        ):  # a last word is not said again
            self._take(contact, message)
        self._refresh()
        return self._end()

    def garbled(self, now: float, link: int, why: str) -> list[Instruction]:
        """Something came on `link` that is no message."""
        contact = self.contacts.by_link(link)
        if self._begin(now) and contact is not None:
            self._links.refuse(contact, why)
            self._refresh()
        return self._end()

    def closed(self, now: float, link: int, why: str = "the link was closed") -> list[Instruction]:
        """`link` has ended."""
        if not self._begin(now):
            return self._end()
        contact, was_last = self.contacts.ended(link)
        if contact is not None and was_last:
            self._links.lose(contact, why)
        self._refresh()
        return self._end()

    def tick(self, now: float) -> list[Instruction]:
        """`deadline` has come; harmless at any other time."""
        if self._begin(now):
            self._refresh()
        return self._end()

    def leave(self, now: float, why: str = "", *, died: bool = False) -> list[Instruction]:
        """Says goodbye to all. The core is finished: every later call returns nothing. `died`: the program did not
        want to go. `is_released` says what that means for the next process."""
        if self._begin(now):
            state = self._state
            self.is_released = not died and all(map(self._is_here, state.voter.companions() - state.dead))
            state.end_epoch(state.voter.leave(), why or "this peer leaves")
            for contact in state.contacts:
                state.send(contact.link, Departed(state.me.peer, state.voter.votes, why, died))
                state.out.append(Close(contact.link, why or "this peer leaves"))
            self.is_over = True
        self._deadline = inf
        return self._end()

    def hold(self, now: float, holding: bool) -> list[Instruction]:
        """While any member of an epoch holds, newcomers wait; the epoch still shrinks when members are lost."""
        if self._begin(now):
            self._state.holds = holding
            self._refresh()
        return self._end()

    def set_busy(self, now: float, busy: bool) -> list[Instruction]:
        """The program of this peer runs but does not respond, or does again. The heartbeats say so."""
        if self._state.busy != busy and self._begin(now):
            self._state.busy = busy
        return self._end()

    def set_step(self, step: int) -> None:
        """The program of this peer has done so many steps of training. The next heartbeats say so."""
        self._state.step = min(step, MAX_NUMBER - 1)

    def vouch(self, now: float, peer: str, votes: Votes) -> list[Instruction]:
        """`peer`, an earlier process of this node, has ended, and `votes` is the last it wrote down."""
        if node_of(peer) != node_of(self.me.peer) or peer == self.me.peer:
            raise InvalidArgumentError("peer", peer, "one vouches for other processes of one's own node alone")
        if self._begin(now):
            state = self._state
            state.departed[peer] = votes
            state.vouched[peer] = Departed(peer, votes, "its process has ended", died=True)
            state.tell_all(state.vouched[peer])
            self._refresh()
        return self._end()

    def recall(self, now: float, all_votes: Sequence[Votes]) -> list[Instruction]:
        """`all_votes` are the last that earlier processes of this machine promised, without those that were released:
        what they were in, this peer does not found a new group beside. To be called before anything else happens."""
        if self._begin(now) and self.me.slots:
            state = self._state
            state.recall(all_votes)
            if state.voter.votes != Votes():
                state.out.append(Persist(state.voter.votes))
            self._refresh()
        return self._end()

    def persisted(self, now: float, votes: Votes, why: str = "") -> list[Instruction]:
        """`votes`, of a `Persist`, is on the disk; or it could not be written, for the reason `why`."""
        if self._begin(now):
            self._epochs.written(votes, why)
            self._refresh()
        return self._end()

    def set_addresses(self, now: float, addresses: Sequence[str]) -> list[Instruction]:
        """This peer's addresses are now these."""
        if self._begin(now):
            state, me = self._state, self.me
            state.me = replace(me, addresses=tuple(addresses))
            self._hello = replace(self._hello, member=state.me)
            state.tell_all(Introduce(me.peer, state.me.addresses))
        return self._end()

    def force_election(self, now: float) -> list[Instruction]:
        """Stands for election now; see `ElectionManager.force`. An observer cannot."""
        if not self.me.slots:
            raise InvalidArgumentError("slots", 0, "an observer cannot lead")
        if self._begin(now):
            self.election.force(self._state.time)
            self._state.tell_election()
            self._refresh()
        return self._end()

    def step_down(self, now: float) -> list[Instruction]:
        """Leads no more, if this peer does, and not again before the others had their turn."""
        if self._begin(now):
            self._state.yields = self.leader == self.me.peer
            self.election.step_down(self._state.time)
            self._state.tell_election()
            self._refresh()
        return self._end()

    def _is_here(self, peer: str) -> bool:
        """Whether `peer` is in sight, and answered not long ago."""
        contact, now = self.contacts.get(peer), self._state.now
        return contact is not None and now - contact.asked <= (self._state.config.health.patience or CLUSTER_PATIENCE)

    # --- what follows -------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> bool:
        if not self.is_over:
            self._state.advance(now)
        return not self.is_over

    def _end(self) -> list[Instruction]:
        out, self._state.out = self._state.out, []
        return out

    def _take(self, contact: Contact, message: AnyMessage) -> None:
        state, peer = self._state, contact.peer
        match message:
            case Report():
                self._reports.came(contact, message)
            case Campaign() | ElectionVote() | Lead() | Retire():
                if peer in state.reports:
                    state.election.received(state.time, peer, message)
                    state.tell_election()
            case Propose():
                self._epochs.consider(contact, message)
            case Accept(number=number):
                self._epochs.accepted(peer, number)
            case Reject(number=number, why=why):
                self._epochs.rejected(peer, number, why)
            case Commit(number=number):
                self._epochs.committed(contact, number)
            case Introduce(peer=about, addresses=addresses):
                self._links.introduced(contact, about, addresses)
            case Departed():
                self._reports.bury(contact, message)
            case _:
                self._links.refuse(contact, f"it sent {type(message).__name__} a second time")

    def _refresh(self) -> None:
        """Everything that may follow from a change or from time."""
        state = self._state
        self._beats.drop_the_silent()
        if state.me.slots:
            self._epochs.judge()
            state.election.observe(state.time, state.own_claim(), state.claims)
            state.tell_election()
            state.yields = state.yields and self.leader is None
            self._epochs.lead()
        state.tell_report()
        self._beats.beat_all()
        waiting = (
            self._beats.next_at,
            state.election.deadline if state.me.slots else inf,
            self._epochs.deadline,
            state.time + LEAP / 2,
        )
        self._deadline = state.now + max(GRAIN, min(waiting) - state.time)
