"""`Links`: a peer's links from hello to loss. Who may be on one, who is introduced to whom, who is refused. Pure."""

from __future__ import annotations

import msgspec

from ringfort.cluster.contacts import BAN, Contact, node_of
from ringfort.cluster.events import CloneFound, Misbehaved, PeerLost
from ringfort.cluster.instructions import Close, Learn
from ringfort.cluster.membership import FRESH
from ringfort.cluster.messages import Hangup, Hello, Introduce, Member, Witness
from ringfort.cluster.state import PeerState


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
        state.health.watch(member.peer, state.time)
        if surplus is not None:
            # It is the same process: what it said on the other link holds until it reports on this one, and so does its
            # epoch. What changed here since this link was opened was told on the other.
            contact.report = surplus.report
            state.send(contact.link, state.own_report())
        return True

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
            state.out.append(Learn(about, addresses))
        elif about == contact.peer and contact.hello is not None:
            member = Member(about, contact.hello.member.host, contact.hello.member.slots, addresses)
            contact.hello = msgspec.structs.replace(contact.hello, member=member)

    def refuse(self, contact: Contact, why: str) -> None:
        """It misbehaves: its link is closed, and it is ignored for a while."""
        who = contact.peer or contact.node or "a peer"
        self._state.notify(Misbehaved(who, why))
        if contact.peer:
            self._state.contacts.ban(contact.peer, self._state.time + BAN)
        self.close(contact, why)

    def close(self, contact: Contact, why: str) -> None:
        """Ends a link in words, so that it is not taken for a death."""
        _, was_last = self._state.contacts.ended(contact.link)
        self._state.send(contact.link, Hangup(why[:256]))
        self._state.out.append(Close(contact.link, why))
        if was_last:
            self.lose(contact, why, by_kernel=False)

    def lose(self, contact: Contact, why: str, *, by_kernel: bool) -> None:
        """The last link with a peer has ended."""
        state, peer, report = self._state, contact.peer, contact.report
        state.health.forget(peer)
        state.forget(peer)
        if report is None or not state.counts(contact):
            return
        # The law: a death counts only where the peer had just answered. See membership.py.
        is_fresh = by_kernel and state.now - contact.asked <= FRESH
        is_alive = contact.hung_up or state.contacts.may_have_another(contact)
        died = peer in state.departed or (is_fresh and not is_alive)
        if died and peer not in state.departed:
            state.witnessed[peer] = Witness(peer, report.standing)
        state.notify(PeerLost(peer, why, died))
