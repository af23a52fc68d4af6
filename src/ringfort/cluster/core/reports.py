"""`Reports`: checks and keeps what other peers report about themselves and about processes that have ended. Pure."""

from __future__ import annotations

from typing import Final

from ringfort.cluster.core.contacts import Contact, node_of
from ringfort.cluster.core.epochs import Epochs
from ringfort.cluster.core.events import PeerJoined
from ringfort.cluster.core.membership import records_of
from ringfort.cluster.core.peer_links import Links
from ringfort.cluster.core.peer_messages import Departed, Epoch, Report
from ringfort.cluster.core.state import PeerState

MAX_DEPARTED: Final = 1024
"""Departed peers that are remembered, with their last votes."""


class Reports:
    """The part of a core that believes other peers, or refuses them."""

    def __init__(self, state: PeerState, links: Links, epochs: Epochs) -> None:
        self._state = state
        self._links = links
        self._epochs = epochs

    def received(self, contact: Contact, report: Report) -> None:
        """Take a report. With its first report, a peer has joined."""
        state = self._state
        lie = self._lie_in(contact.peer, report)
        if lie:
            self._links.refuse(contact, lie)
            return
        is_first = contact.report is None
        contact.report = report
        if not state.counts(contact):
            if is_first:
                self._links.introduce_all(contact)
            return
        state.note(contact.peer, report)
        if is_first:
            self._welcome(contact)
        formed = report.votes.formed
        if formed is not None and formed in state.voter.votes.doubts:
            self._epochs.start(formed.key)  # the leader died before it could tell all members

    def _welcome(self, contact: Contact) -> None:
        state = self._state
        assert contact.hello is not None
        state.notify(PeerJoined(contact.peer, contact.hello.name, contact.hello.version))
        self._links.introduce_all(contact)
        self._links.brief(contact)

    def _lie_in(self, peer: str, report: Report) -> str:
        ours = {record.key: record for record in records_of(self._state.voter.votes)}
        for record in records_of(report.votes):
            # A doubt may also be an epoch of an earlier process of its machine.
            mine = peer in record.peers if record is report.votes.formed else _names_node_of(peer, record)
            if not mine or record.number > report.votes.highest:
                return f"its report contradicts itself about epoch {record.number}"
            if record.key in ours and ours[record.key] != record:
                return f"its epoch {record.number} differs from the one that was agreed on"
        formed = report.votes.formed
        if report.current and (formed is None or formed.number != report.current):
            return f"it claims to be in epoch {report.current}, but its votes do not show that"
        return ""

    def departed(self, contact: Contact, said: Departed) -> None:
        """The peer of `contact` leaves, or reports that an earlier process of its node has ended."""
        state, about = self._state, said.peer
        if node_of(about) != node_of(contact.peer):
            self._links.refuse(contact, f"it reports the end of {about}, a peer of another node")
            return
        if about == state.me.peer:
            self._links.refuse(contact, "it reports that this peer has ended")
            return
        state.departed.pop(about, None)
        state.departed[about] = said.votes
        while len(state.departed) > MAX_DEPARTED:
            del state.departed[next(iter(state.departed))]
        state.find_restart_without()
        gone = state.contacts.get(about)
        if gone is not None:
            gone.has_left = not said.died
            self._links.close(gone, said.why or "it left")


def _names_node_of(peer: str, epoch: Epoch) -> bool:
    return any(node_of(member) == node_of(peer) for member in epoch.peers)
