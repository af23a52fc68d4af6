"""`PeerCore`: everything that a peer decides, as one state machine. Pure: events in, instructions out.

The node around it owns sockets, threads and the clock. It calls one method for each event, carries out the returned
instructions in order, and calls `tick` when `deadline` has come. Every method takes the time `now` first.

    event                               call
    a link is open, both sides proved   connected(now, link, node, initiated=...)
    a message arrived                   received(now, link, message)         decoded by gossip.decode
    malformed bytes arrived             garbled(now, link, why)
    a link ended                        closed(now, link, why)
    `deadline` has come                 tick(now)
    this process wants to leave         leave(now, why, died=...)
    the program begins or ends a phase  hold(now, True), hold(now, False)
      that new peers must not interrupt
    a process of this node is dead      vouch(now, peer_id, votes)           votes from the file it left behind
    earlier processes of this machine   recall(now, all_votes)               once, before anything else happens
      were in groups
    the program stops responding, or    set_busy(now, True), set_busy(now, False)
      responds again
    votes are on the disk, or cannot    persisted(now, votes, why)
      be written
    the program of an elastic run is    set_run_state(now, state)
      somewhere else, and idle
    it is fenced                        fenced(now, epoch, state)
    it has copied the state of a run    learned(now, epoch, state)
    it cannot go on in an epoch, though give_up(now, epoch, state, why)
      all members are there
    our addresses changed               set_addresses(now, addresses)
    a person wants another leader       force_election(now), step_down(now)

    instruction                         what the node does
    Send(link, message)                 queues gossip.encode(message) on the link, in order
    Close(link, why)                    closes the link once what was queued has been sent or a second has passed; no
                                        closed() follows
    Learn(peer, addresses, introducer)  may dial these addresses: hints that prove nothing
    Persist(votes)                      writes the votes to this process's file (durable_votes.py), in the background,
                                        and calls persisted() when they are on the disk or cannot be written: only
                                        then do they take effect
    Fence(epoch, ended)                 fences the program of an elastic run and calls fenced() with where it is then
    Notify(event)                       publishes the event to the program

`now` is in seconds of a clock that never goes back and runs on while the machine sleeps (CLOCK_BOOTTIME on Linux), so
after a sleep what was heard before is old. `link` is any number that the node has not used before.

However a link ends (end of file, a reset, no route, silence), its peer is lost and not dead: only a machine's own
statement (`Departed`) says that one of its processes has ended.

The node dials every peer that it has addresses of and no link to. Two peers that dial each other at once get two links;
the core closes one of them, the same one on both sides.

A peer id is `node.instance`: the short id of the node's key, which the handshake proves, and a random name for the
process. So several processes of a node are separate peers, a process that starts again is a new peer, and one key on
two machines (`host` differs) is a clone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import inf
from typing import Concatenate, Final, ParamSpec

from msgspec.structs import replace

from ringfort.cluster.core import peer_messages as messages
from ringfort.cluster.core.contacts import Contact, node_of
from ringfort.cluster.core.epochs import Epochs
from ringfort.cluster.core.events import Close, Instruction, Persist
from ringfort.cluster.core.health import HealthSummary
from ringfort.cluster.core.peer_links import Links
from ringfort.cluster.core.peer_messages import AnyMessage, Departed, Epoch, Member, RunState, Votes
from ringfort.cluster.core.proposer import RingOrder
from ringfort.cluster.core.state import LEAP, PeerState
from ringfort.cluster.core.state_sources import StateSource, state_sources
from ringfort.config import CLUSTER_PATIENCE, AutoDiscoveryConfig
from ringfort.errors import InvalidArgumentError

P = ParamSpec("P")

GRAIN: Final = 0.001
"""The minimum of seconds between two ticks: sums of times are rounded, and a tick must not wait for a rounding
error."""


def _event(
    method: Callable[Concatenate[PeerCore, P], None],
) -> Callable[Concatenate[PeerCore, float, P], list[Instruction]]:
    """Make a method of the core that takes `now` first and returns the instructions that follow. A core that is over
    ignores all events."""

    @wraps(method)
    def handle(self: PeerCore, now: float, *args: P.args, **kwargs: P.kwargs) -> list[Instruction]:
        state = self._state  # pyright: ignore[reportPrivateUsage]
        if self.is_over:
            return []
        state.advance(now)
        method(self, *args, **kwargs)
        out, state.out = state.out, []
        return out

    return handle


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
        """`me.peer` is this peer's id; `name` and `version` are shown to people. `work_done` is called when an epoch
        ends."""
        if not node_of(me.peer):
            raise InvalidArgumentError("me.peer", me.peer, "must be node.instance")
        self.is_over = False
        self.is_released = False
        """It has left, and all peers that share an epoch with it could hear that, so its votes do not bind the next
        process of this machine."""
        self.deadline = now
        """When `tick` is to be called next."""
        self._state = state = PeerState(me, config, now, work_done or (lambda: 0))
        self.contacts = state.contacts
        self.health = state.health
        self.election = state.election
        self.voter = state.voter
        self._links = Links(state)
        self._epochs = Epochs(state, self._links, ring_order)
        self._hello = messages.Hello(me, name, version, config.run)

    # --- queries ----------------------------------------------------------------------------------------------------

    @property
    def me(self) -> Member:
        """This peer, as it introduces itself."""
        return self._state.me

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that this peer is in now."""
        return self.voter.current

    def epoch_of(self, peer: str) -> Epoch | None:
        """Return the epoch that this or a connected peer is in now. Each run has epochs of its own."""
        if peer == self.me.peer or (self.epoch is not None and peer in self.epoch.peers):
            return self.epoch
        contact = self.contacts.get(peer)
        report = None if contact is None else contact.report
        return report.votes.formed if report is not None and report.current else None

    def state_sources(self) -> tuple[StateSource, ...]:
        """Return the members that the program of an elastic run may copy the state from."""
        return state_sources(self.voter, self._state.reports)

    @property
    def leader(self) -> str | None:
        """The leader that this peer follows, or this peer itself."""
        return self.election.leader

    @property
    def sees(self) -> tuple[str, ...]:
        """The peers it has a working link with."""
        return self._state.sees

    def health_summary(self) -> HealthSummary:
        """Return a summary of all peers' health, as of the last event."""
        return self.health.summary(self._state.time)

    # --- links ------------------------------------------------------------------------------------------------------

    @_event
    def connected(self, link: int, node: str, *, initiated: bool) -> None:
        """A link is open. `node` is what the handshake proved (`peer_id_of` its key), or "" with encryption off.
        `initiated`: this side dialled."""
        state = self._state
        state.contacts.links[link] = Contact(link, node, initiated, state.time)
        state.send(link, self._hello)
        state.send(link, state.own_report())

    @_event
    def received(self, link: int, message: AnyMessage) -> None:
        """A message arrived on `link`."""
        contact = self.contacts.links.get(link)
        if contact is None:
            return
        if contact.is_flooding(self._state.now):
            self._links.refuse(contact, "it floods this peer with messages")
        elif isinstance(message, messages.Hangup):
            contact.hung_up = message.why or "it gave no reason"
        elif contact.hello is None:
            if not isinstance(message, messages.Hello):
                self._links.refuse(contact, "it did not say who it is")
            else:
                self._links.meet(contact, message)
        elif isinstance(message, messages.Beat):
            if self._links.beat_arrived(contact, message):
                return
        elif self.contacts.get(contact.peer) is contact or isinstance(message, Departed):  # which is not repeated
            self._take(contact, message)
        self._refresh()

    @_event
    def garbled(self, link: int, why: str) -> None:
        """Something malformed arrived on `link`."""
        contact = self.contacts.links.get(link)
        if contact is not None:
            self._links.refuse(contact, why)
            self._refresh()

    @_event
    def closed(self, link: int, why: str = "the link was closed") -> None:
        """A link has ended."""
        contact, was_last = self.contacts.ended(link)
        if contact is not None and was_last:
            self._links.lose(contact, why)
        self._refresh()

    @_event
    def tick(self) -> None:
        """`deadline` has come; harmless at any other time."""
        self._refresh()

    # --- the program --------------------------------------------------------------------------------------------------

    @_event
    def leave(self, why: str = "", *, died: bool = False) -> None:
        """Say goodbye to all peers. The core is over then: later events have no effect. `died`: the program ended
        without wanting to, or comes back as another peer. `is_released` says what that means for the next process."""
        state = self._state
        companions = state.voter.votes.companions - state.dead - {state.me.peer}
        self.is_released = not died and all(map(self._is_present, companions))
        state.end_epoch(state.voter.leave(), why or "this peer leaves")
        for contact in state.contacts:
            state.send(contact.link, Departed(state.me.peer, state.voter.votes, why, died))
            state.out.append(Close(contact.link, why or "this peer leaves"))
        self.is_over = True
        self.deadline = inf

    @_event
    def hold(self, holding: bool) -> None:
        """While any member of an epoch holds, new peers wait; the epoch still shrinks when members are lost."""
        self._state.holds = holding
        self._refresh()

    @_event
    def set_run_state(self, run_state: RunState) -> None:
        """The program is in an elastic run, and here. Not called for every step, but when others need to know."""
        self._state.run_state = run_state
        self._refresh()

    @_event
    def fenced(self, epoch: int, run_state: RunState) -> None:
        """The program does nothing more in epochs below `epoch`, and is here."""
        self._epochs.fenced(epoch, run_state)
        self._refresh()

    @_event
    def learned(self, epoch: Epoch, run_state: RunState) -> None:
        """The program has copied the state of a member of `epoch`."""
        state = self._state
        state.end_epoch(state.voter.leave(), "this peer has copied the state of a run")
        state.voter.learn(epoch)
        state.run_state = run_state
        state.out.append(Persist(state.voter.votes))
        self._refresh()

    @_event
    def give_up(self, epoch: int, run_state: RunState, why: str) -> None:
        """The program does nothing more in `epoch`, and is here. Another epoch follows, usually of the same members."""
        state = self._state
        state.run_state = run_state
        if state.voter.current is not None and state.voter.current.number == epoch:
            state.end_epoch(state.voter.leave(), why)
        self._refresh()

    @_event
    def set_busy(self, busy: bool) -> None:
        """The program of this peer stops responding, or responds again. Its heartbeats say so."""
        self._state.busy = busy

    def set_step(self, step: int) -> None:
        """Set the number of training steps that the program has done. The next heartbeats say so."""
        self._state.step = min(step, messages.MAX_NUMBER - 1)

    @_event
    def set_addresses(self, addresses: Sequence[str]) -> None:
        """The addresses of this peer have changed."""
        state = self._state
        state.me = replace(self.me, addresses=tuple(addresses))
        self._hello = replace(self._hello, member=state.me)
        state.tell(None, messages.Introduce(self.me.peer, self.me.addresses))

    @_event
    def force_election(self) -> None:
        """Stand for election now; see `ElectionManager.force`. Raise `InvalidArgumentError` for an observer."""
        if not self.me.slots:
            raise InvalidArgumentError("slots", 0, "an observer or a witness cannot lead")
        self.election.force(self._state.time)
        self._state.tell_election()
        self._refresh()

    @_event
    def step_down(self) -> None:
        """Stop leading, if this peer leads, and do not lead again before the others had their turn."""
        self._state.step_down()
        self._refresh()

    # --- votes ------------------------------------------------------------------------------------------------------

    @_event
    def vouch(self, peer: str, votes: Votes) -> None:
        """`peer`, an earlier process of this node, has ended, and `votes` are the last it wrote to the disk."""
        if node_of(peer) != node_of(self.me.peer) or peer == self.me.peer:
            raise InvalidArgumentError("peer", peer, "a peer vouches only for other processes of its own node")
        state = self._state
        state.departed[peer] = votes
        state.vouched[peer] = Departed(peer, votes, "its process has ended", died=True)
        state.tell(None, state.vouched[peer])
        self._refresh()

    @_event
    def recall(self, all_votes: Sequence[Votes]) -> None:
        """Respect the last votes of earlier processes of this machine, except released ones: this peer founds no new
        group beside theirs. To be called before any other event."""
        if self._state.can_vote:
            self._state.recall(all_votes)
            if self.voter.votes != Votes():
                self._state.out.append(Persist(self.voter.votes))
            self._refresh()

    @_event
    def persisted(self, votes: Votes, why: str = "") -> None:
        """The votes of a `Persist` are on the disk; or they could not be written, for the reason `why`."""
        self._epochs.written(votes, why)
        self._refresh()

    # --- what follows -------------------------------------------------------------------------------------------------

    def _is_present(self, peer: str) -> bool:
        """Return whether `peer` is connected and answered not long ago."""
        contact, now = self.contacts.get(peer), self._state.now
        return contact is not None and now - contact.asked <= (self._state.config.health.patience or CLUSTER_PATIENCE)

    def _take(self, contact: Contact, message: AnyMessage) -> None:
        state, peer = self._state, contact.peer
        match message:
            case messages.Report():
                self._heard_of(self._links.reported(contact, message))
            case messages.Campaign() | messages.ElectionVote() | messages.Lead() | messages.Retire():
                if peer in state.reports:
                    state.election.received(state.time, peer, message)
                    state.tell_election()
            case messages.Propose():
                self._epochs.consider(contact, message)
            case messages.Accept() | messages.Reject():
                self._epochs.answered(peer, message)
            case messages.Commit(number=number):
                self._epochs.committed(contact, number)
            case messages.Introduce(peer=about, addresses=addresses):
                self._links.introduced(contact, about, addresses)
            case Departed():
                self._heard_of(self._links.departed(contact, message))
            case _:
                self._links.refuse(contact, f"it sent {type(message).__name__} a second time")

    def _heard_of(self, committed: Epoch | None) -> None:
        """Another peer's votes show an epoch to be committed that is in doubt here."""
        if committed is not None:
            self._epochs.start(committed.key)

    def _refresh(self) -> None:
        """Do everything that may follow from a change or from the passing of time."""
        state = self._state
        self._links.drop_silent_peers()
        if state.can_vote:
            self._epochs.check_current()
            state.election.observe(state.time, state.own_claim(), state.claims)
            state.tell_election()
            self._epochs.lead()
        state.tell_report()
        self._links.beat_all()
        waiting = (
            self._links.next_beat,
            state.election.deadline if state.can_vote else inf,
            self._epochs.deadline,
            state.time + LEAP / 2,
        )
        self.deadline = state.now + max(GRAIN, min(waiting) - state.time)
