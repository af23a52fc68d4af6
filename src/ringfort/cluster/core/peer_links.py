"""`Links`: a peer's links from hello to loss. Who may be on one, who is introduced to whom, who is refused. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from ringfort.cluster.core.contacts import BAN, Contact, node_of
from ringfort.cluster.core.events import CloneFound, Misbehaved, PeerLost
from ringfort.cluster.core.instructions import Close, Learn
from ringfort.cluster.core.peer_messages import Hangup, Hello, Introduce
from ringfort.cluster.core.state import PeerState


class Links:
    """The part of a core that meets and loses others."""

    def __init__(self, state: PeerState) -> None:
        self._state = state

    def meet(self, contact: Contact, hello: Hello) -> bool:
        """The other side says who it is. False where the link is not used: it was refused, or is one too many."""
        state, member = self._state, hello.member
        if contact.node and node_of(member.peer) != contact.node:
            self.refuse(contact, f"it claims to be {member.peer} and proved to be {contact.node}")
            return False
        if member.peer == state.me.peer or state.contacts.is_banned(member.peer, state.time):
            self.close(contact, "this is me" if member.peer == state.me.peer else "it was refused")
            return False
        other_host = state.contacts.clone_host(member)
        if other_host is not None:
            state.notify(CloneFound(member.peer, other_host, member.host))
            state.contacts.ban(member.peer, state.time + BAN)
            self.close(contact, "its key is in use on another machine")
            return False
        surplus = state.contacts.introduce(contact, hello)
        if surplus is not None:
            self.close(surplus, "there are two links")
        if surplus is contact:
            return False
        if surplus is None:
            state.forget(member.peer)
        else:  # the same peer by another way: what it said of itself still holds, and so does the epoch with it
            contact.report = surplus.report
        state.health.watch(member.peer, state.time)
        if surplus is not None:  # what was said on the other, either way, may have come too late to be heard
            state.election.unheard(member.peer)
            state.send(contact.link, state.own_report())
            self.brief(contact)
        return True

    def brief(self, contact: Contact) -> None:
        """Tells a peer what it must know beside our report: who leads, if we do, and for whom we vouch."""
        self._state.election.met(contact.peer)
        self._state.tell_election()
        for vouched in self._state.vouched.values():
            self._state.send(contact.link, vouched)

    def introduce_all(self, contact: Contact) -> None:
        """Whoever knows two peers introduces them: a network that blocks multicast needs no more."""
        assert contact.hello is not None
        for other in self._state.contacts:
            if other is not contact and other.hello is not None:
                for one, about in ((contact, other.hello.member), (other, contact.hello.member)):
                    if about.addresses:
                        self._state.send(one.link, Introduce(about.peer, about.addresses))

    def introduced(self, contact: Contact, about: str, addresses: tuple[str, ...]) -> None:
        """The peer of `contact` says where `about`, which may be itself, is found."""
        state = self._state
        if about != state.me.peer and state.contacts.get(about) is None:
            state.out.append(Learn(about, addresses, contact.peer))
        elif about == contact.peer and contact.hello is not None:
            member = replace(contact.hello.member, addresses=addresses)
            contact.hello = replace(contact.hello, member=member)

    def refuse(self, contact: Contact, why: str) -> None:
        """It misbehaves: its link is closed, and it is ignored for a while."""
        who = contact.peer or contact.node or "a peer"
        self._state.notify(Misbehaved(who, why))
        if contact.peer:
            self._state.contacts.ban(contact.peer, self._state.time + BAN)
        self.close(contact, why)

    def close(self, contact: Contact, why: str) -> None:
        """Ends a link in words."""
        _, was_last = self._state.contacts.ended(contact.link)
        self._state.send(contact.link, Hangup(why[:256]))
        self._state.out.append(Close(contact.link, why))
        if was_last:
            self.lose(contact, why)

    def lose(self, contact: Contact, why: str) -> None:
        """The last link with a peer has ended: whoever needs it need not wait. It is not dead for that."""
        state, peer = self._state, contact.peer
        state.health.forget(peer)
        state.forget(peer)
        if contact.report is not None and state.counts(contact):
            why = f"it closed the link: {contact.hung_up}" if contact.hung_up else why
            state.notify(PeerLost(peer, why, peer in state.departed, contact.has_left))
