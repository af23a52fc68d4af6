"""`Heartbeats`: a peer's beats, those of the others, and the lease that keeps some unanswered. Pure.

The lease is a rule of membership.py: before a peer goes on without another that may be alive, it has not answered that
one's heartbeats for `LEASE` seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import Final

from ringfort.cluster.contacts import Contact
from ringfort.cluster.health import HealthStatus
from ringfort.cluster.links import Links
from ringfort.cluster.membership import LEASE
from ringfort.cluster.messages import Beat
from ringfort.cluster.state import PeerState

HELLO_WITHIN: Final = 2.0
"""Seconds within which the other side of a link must say who it is."""


class Heartbeats:
    """The part of a core that is heard and listens."""

    def __init__(self, state: PeerState, links: Links) -> None:
        self.next_at = 0.0
        """When the next round of beats is due, in the state's `time`."""
        self._state = state
        self._links = links
        self._answered: dict[str, float] = {}
        self._muted: frozenset[str] = frozenset()

    def came(self, contact: Contact, beat: Beat) -> bool:
        """True where nothing else can follow from it."""
        state = self._state
        if beat.echo > state.now or 0 < beat.echo < contact.asked:
            self._links.refuse(contact, "it echoes a time that was never sent")
            return False
        if state.contacts.get(contact.peer) is not contact:
            return True
        if contact.peer not in self._muted:
            contact.their_time, contact.their_time_came = beat.sent, state.now
            self._answered[contact.peer] = state.time
        was_busy = state.health.is_busy(contact.peer)
        state.health.heard(contact.peer, state.time, busy=beat.busy)
        if beat.echo > contact.asked:
            contact.asked = beat.echo
            state.health.answered(contact.peer, max(0.0, state.now - beat.echo - beat.held))
        return state.health.status(contact.peer) is HealthStatus.HEALTHY and beat.busy == was_busy

    def drop_the_silent(self) -> None:
        """Closes the links of those who are lost, and of those who never said who they are."""
        state = self._state
        for event in state.health.check(state.time):
            state.notify(event)
            contact = state.contacts.get(event.peer)
            if event.status is HealthStatus.UNHEALTHY and contact is not None:
                self._links.close(contact, f"silent for {event.silence:.1f} s")
        for contact in state.contacts.without_hello(state.time - HELLO_WITHIN):
            self._links.close(contact, "it did not say who it is")

    def beat_all(self) -> None:
        """If it is time for it."""
        state = self._state
        if state.time >= self.next_at:
            self.next_at = state.time + state.config.health.interval
            for contact in state.contacts:
                self.beat(contact)

    def beat(self, contact: Contact) -> None:
        """One heartbeat, which answers the other's latest."""
        now = self._state.now
        held = now - contact.their_time_came if contact.their_time else 0.0
        self._state.send(contact.link, Beat(now, contact.their_time, held, self._state.busy))

    # --- the lease ----------------------------------------------------------------------------------------------------

    def lease_over(self, peers: Collection[str]) -> float:
        """When the lease that is owed to all of `peers` is over, if none of them is answered any more."""
        return max((self._answered.get(peer, -inf) for peer in peers), default=-inf) + LEASE

    def mute(self, peers: Collection[str]) -> None:
        """Answers none of `peers` until further notice, and everybody else again."""
        self._muted = frozenset(peers)

    def forget_all_but(self, peers: Collection[str]) -> None:
        """Nothing is owed to others, unless there is a link with them."""
        contacts = self._state.contacts
        self._answered = {peer: at for peer, at in self._answered.items() if peer in peers or contacts.get(peer)}
