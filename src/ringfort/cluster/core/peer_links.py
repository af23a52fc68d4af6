"""`Links`: the peers at the other ends of links. It accepts and refuses them, checks what they report, exchanges
heartbeats and notices losses. Pure.

Heartbeats tell which peers are lost, never which are dead: the rules of membership depend on no clock (see
membership.py).
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from ringfort.cluster.core.contacts import BAN, Contact, node_of
from ringfort.cluster.core.events import CloneFound, Close, Learn, Misbehaved, PeerJoined, PeerLost
from ringfort.cluster.core.health import HealthStatus
from ringfort.cluster.core.peer_messages import Beat, Departed, Epoch, Hangup, Hello, Introduce, Report, Votes
from ringfort.cluster.core.state import PeerState

HELLO_WITHIN: Final = 2.0
"""Seconds within which the other side of a link must send its hello."""
MAX_DEPARTED: Final = 1024
"""Departed peers that are remembered, with their last votes."""


class Links:
    """The part of a core that gains and loses peers."""

    def __init__(self, state: PeerState) -> None:
        self.next_beat = 0.0
        """When the next heartbeats are due, in the state's `time`."""
        self._state = state

    # --- hello and goodbye --------------------------------------------------------------------------------------------

    def meet(self, contact: Contact, hello: Hello) -> None:
        """Take the hello of a link, and use the link unless the peer is refused."""
        state, member = self._state, hello.member
        other_host = state.contacts.clone_host(member)
        if contact.node and node_of(member.peer) != contact.node:
            self.refuse(contact, f"it claims to be {member.peer}, but the handshake proved {contact.node}")
        elif member.peer == state.me.peer:
            self.close(contact, "this link leads to this peer itself")
        elif state.contacts.is_banned(member.peer, state.time):
            self.close(contact, "it was refused before")
        elif other_host is not None:
            state.notify(CloneFound(member.peer, other_host, member.host))
            state.contacts.ban(member.peer, state.time + BAN)
            self.close(contact, "its key is in use on another machine")
        else:
            self._use(contact, hello)

    def _use(self, contact: Contact, hello: Hello) -> None:
        """Use a link, or the other one that there is with the same peer, and close the surplus one."""
        state, peer = self._state, hello.member.peer
        surplus = state.contacts.introduce(contact, hello)
        if surplus is not None:
            self.close(surplus, "there is a second link")
        if surplus is contact:
            return
        state.health.watch(peer, state.time)
        if surplus is None:
            state.forget(peer)
        else:  # the same peer on another link: its report and the epoch with it stay valid
            contact.report = surplus.report
            # Messages on the other link, in either direction, may have been lost.
            state.election.unheard(peer)
            state.send(contact.link, state.own_report())
            self.brief(contact)
        self.beat(contact)

    def brief(self, contact: Contact) -> None:
        """Send a peer what it needs besides the report: that this peer leads, if so, and the processes it vouches
        for."""
        self._state.election.met(contact.peer)
        self._state.tell_election()
        for vouched in self._state.vouched.values():
            self._state.send(contact.link, vouched)

    def introduce_all(self, contact: Contact) -> None:
        """Introduce a peer and all others to each other, which is enough for networks without multicast."""
        assert contact.hello is not None
        for other in self._state.contacts:
            if other is not contact and other.hello is not None:
                for one, about in ((contact, other.hello.member), (other, contact.hello.member)):
                    if about.addresses:
                        self._state.send(one.link, Introduce(about.peer, about.addresses))

    def introduced(self, contact: Contact, about: str, addresses: tuple[str, ...]) -> None:
        """Take the addresses of `about`, possibly itself, from the peer of `contact`."""
        state = self._state
        if about != state.me.peer and state.contacts.get(about) is None:
            state.out.append(Learn(about, addresses, contact.peer))
        elif about == contact.peer and contact.hello is not None:
            member = replace(contact.hello.member, addresses=addresses)
            contact.hello = replace(contact.hello, member=member)

    def refuse(self, contact: Contact, why: str) -> None:
        """Close the link of a misbehaving peer and refuse it for a while."""
        who = contact.peer or contact.node or "a peer"
        self._state.notify(Misbehaved(who, why))
        if contact.peer:
            self._state.contacts.ban(contact.peer, self._state.time + BAN)
        self.close(contact, why)

    def close(self, contact: Contact, why: str) -> None:
        """Close a link and tell the other side why."""
        _, was_last = self._state.contacts.ended(contact.link)
        self._state.send(contact.link, Hangup(why[:256]))
        self._state.out.append(Close(contact.link, why))
        if was_last:
            self.lose(contact, why)

    def lose(self, contact: Contact, why: str) -> None:
        """The last link with a peer has ended. It is lost, so nobody waits for it, but not dead."""
        state, peer = self._state, contact.peer
        state.health.forget(peer)
        state.forget(peer)
        if contact.report is not None and state.concerns(contact):
            why = f"it closed the link: {contact.hung_up}" if contact.hung_up else why
            state.notify(PeerLost(peer, why, peer in state.departed, contact.has_left))

    # --- reports ------------------------------------------------------------------------------------------------------

    def reported(self, contact: Contact, report: Report) -> Epoch | None:
        """Take a report. With its first report, a peer has joined. Return an epoch that it shows to be committed."""
        state = self._state
        lie = self._lie_in(contact.peer, report)
        if lie:
            self.refuse(contact, lie)
            return None
        is_first = contact.report is None
        contact.report = report
        if is_first and state.concerns(contact):
            assert contact.hello is not None
            state.notify(PeerJoined(contact.peer, contact.hello.name, contact.hello.version))
        if is_first:
            self.introduce_all(contact)
        if not state.counts(contact):
            return None
        state.note(contact.peer, report)
        state.voter.hear(contact.peer, report.votes)
        if is_first:
            self.brief(contact)
        return self._committed(report.votes)

    def _committed(self, votes: Votes) -> Epoch | None:
        """Return the epoch that a member's votes show to be committed, if it is in doubt here: then its leader died
        before it could tell all members."""
        formed = votes.formed
        return formed if formed is not None and formed in self._state.voter.votes.doubts else None

    def _lie_in(self, peer: str, report: Report) -> str:
        ours = {record.key: record for record in self._state.voter.votes.records}
        for record in report.votes.records:
            # A doubt may also be an epoch of an earlier process of its machine, or one that it has copied the state of.
            is_other = record is not report.votes.formed and (
                report.state is not None or node_of(peer) in map(node_of, record.peers)
            )
            if not (peer in record.peers or is_other) or record.number > report.votes.highest:
                return f"its report contradicts itself about epoch {record.number}"
            if record.key in ours and ours[record.key] != record:
                return f"its epoch {record.number} differs from the one that was agreed on"
        formed = report.votes.formed
        if report.current and (formed is None or formed.number != report.current):
            return f"it claims to be in epoch {report.current}, but its votes do not show that"
        return ""

    def departed(self, contact: Contact, said: Departed) -> Epoch | None:
        """The peer of `contact` leaves, or reports that an earlier process of its node has ended. Return an epoch that
        its last votes show to be committed. If nobody else knows, a learner that it seated as the only holder of the
        state would wait for it forever."""
        state, about = self._state, said.peer
        if node_of(about) != node_of(contact.peer):
            self.refuse(contact, f"it reports the end of {about}, a peer of another node")
            return None
        if about == state.me.peer:
            self.refuse(contact, "it reports that this peer has ended")
            return None
        state.departed.pop(about, None)
        state.departed[about] = said.votes
        while len(state.departed) > MAX_DEPARTED:
            del state.departed[next(iter(state.departed))]
        state.find_restart_without()
        gone = state.contacts.get(about)
        if gone is not None:
            gone.has_left = not said.died
            self.close(gone, said.why or "it left")
        return self._committed(said.votes)

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    def beat_arrived(self, contact: Contact, beat: Beat) -> bool:
        """Take a heartbeat. Return True if nothing else can follow from it."""
        state = self._state
        if beat.echo > state.now or 0 < beat.echo < contact.asked:
            self.refuse(contact, "it echoes a time that was never sent")
            return False
        if state.contacts.get(contact.peer) is not contact:
            return True
        was_busy = contact.beat.busy
        contact.beat, contact.beat_came = beat, state.now
        state.health.heard(contact.peer, state.time, busy=beat.busy)
        if beat.echo > contact.asked:
            contact.asked = beat.echo
            state.health.answered(contact.peer, max(0.0, state.now - beat.echo - beat.held))
        return state.health.status(contact.peer) is HealthStatus.HEALTHY and beat.busy == was_busy

    def drop_silent_peers(self) -> None:
        """Close the links of peers that are lost, and links without a hello."""
        state = self._state
        for event in state.health.check(state.time):
            state.notify(event)
            contact = state.contacts.get(event.peer)
            if event.status is HealthStatus.UNHEALTHY and contact is not None:
                self.close(contact, f"silent for {event.silence:.1f} s")
        for contact in list(state.contacts.links.values()):
            if contact.hello is None and contact.opened < state.time - HELLO_WITHIN:
                self.close(contact, "it did not say who it is")

    def beat_all(self) -> None:
        """Send a heartbeat to every peer if it is due."""
        state = self._state
        if state.time >= self.next_beat:
            self.next_beat = state.time + state.config.health.interval
            for contact in state.contacts:
                self.beat(contact)

    def beat(self, contact: Contact) -> None:
        """Send a heartbeat, which echoes the other side's latest."""
        state, echo = self._state, contact.beat.sent
        held = state.now - contact.beat_came if echo else 0.0
        state.send(contact.link, Beat(state.now, echo, held, state.busy, state.step))
