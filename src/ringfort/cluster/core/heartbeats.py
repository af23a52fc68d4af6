"""`Heartbeats`: sends this peer's heartbeats and judges those of the others. Pure.

They tell which peers are lost, never which are dead: the rules of membership depend on no clock (see membership.py).
"""

from __future__ import annotations

from typing import Final

from ringfort.cluster.core.contacts import Contact
from ringfort.cluster.core.health import HealthStatus
from ringfort.cluster.core.peer_links import Links
from ringfort.cluster.core.peer_messages import Beat
from ringfort.cluster.core.state import PeerState

HELLO_WITHIN: Final = 2.0
"""Seconds within which the other side of a link must send its hello."""


class Heartbeats:
    """The part of a core that sends and receives heartbeats."""

    def __init__(self, state: PeerState, links: Links) -> None:
        self.next_at = 0.0
        """When the next heartbeats are due, in the state's `time`."""
        self._state = state
        self._links = links

    def received(self, contact: Contact, beat: Beat) -> bool:
        """Take a heartbeat. Return True if nothing else can follow from it."""
        state = self._state
        if beat.echo > state.now or 0 < beat.echo < contact.asked:
            self._links.refuse(contact, "it echoes a time that was never sent")
            return False
        if state.contacts.get(contact.peer) is not contact:
            return True
        contact.their_time, contact.their_time_came, contact.step = beat.sent, state.now, beat.step
        was_busy = state.health.is_busy(contact.peer)
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
                self._links.close(contact, f"silent for {event.silence:.1f} s")
        for contact in state.contacts.without_hello(state.time - HELLO_WITHIN):
            self._links.close(contact, "it did not say who it is")

    def beat_all(self) -> None:
        """Send a heartbeat to every peer if it is due."""
        state = self._state
        if state.time >= self.next_at:
            self.next_at = state.time + state.config.health.interval
            for contact in state.contacts:
                self.beat(contact)

    def beat(self, contact: Contact) -> None:
        """Send a heartbeat, which echoes the other side's latest."""
        now = self._state.now
        held = now - contact.their_time_came if contact.their_time else 0.0
        self._state.send(contact.link, Beat(now, contact.their_time, held, self._state.busy, self._state.step))
