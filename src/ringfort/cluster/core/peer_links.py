"""`Links`: accepts and refuses the peers at the other ends of links, introduces them, and notices losses. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from ringfort.cluster.core.contacts import BAN, Contact, node_of
from ringfort.cluster.core.events import CloneFound, Misbehaved, PeerLost
from ringfort.cluster.core.instructions import Close, Learn
from ringfort.cluster.core.peer_messages import Hangup, Hello, Introduce
from ringfort.cluster.core.state import PeerState


class Links:
    """The part of a core that gains and loses peers."""

    def __init__(self, state: PeerState) -> None:
        self._state = state

    def meet(self, contact: Contact, hello: Hello) -> bool:
        """Take the hello of a link. Return False if the link is not used: the peer is refused, or has another link."""
        state, member = self._state, hello.member
        if contact.node and node_of(member.peer) != contact.node:
            self.refuse(contact, f"it claims to be {member.peer}, but the handshake proved {contact.node}")
            return False
        if member.peer == state.me.peer or state.contacts.is_banned(member.peer, state.time):
            self.close(
                contact,
                "this link leads to this peer itself" if member.peer == state.me.peer else "it was refused before",
            )
            return False
        other_host = state.contacts.clone_host(member)
        if other_host is not None:
            state.notify(CloneFound(member.peer, other_host, member.host))
            state.contacts.ban(member.peer, state.time + BAN)
            self.close(contact, "its key is in use on another machine")
            return False
        surplus = state.contacts.introduce(contact, hello)
        if surplus is not None:
            self.close(surplus, "there is a second link")
        if surplus is contact:
            return False
        if surplus is None:
            state.forget(member.peer)
        else:  # the same peer on another link: its report and the epoch with it stay valid
            contact.report = surplus.report
        state.health.watch(member.peer, state.time)
        if surplus is not None:  # messages on the other link, in either direction, may have been lost
            state.election.unheard(member.peer)
            state.send(contact.link, state.own_report())
            self.brief(contact)
        return True

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
        if contact.report is not None and state.counts(contact):
            why = f"it closed the link: {contact.hung_up}" if contact.hung_up else why
            state.notify(PeerLost(peer, why, peer in state.departed, contact.has_left))
