"""The open control links, and how much gossip each may carry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.contacts import Contact
from ringfort.cluster.core.gossip import Note, encode
from ringfort.cluster.net.control_link import GOSSIP_BURST, GOSSIP_RATE, ControlLink, ControlLinks
from ringfort.cluster.net.host import clock


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_closed = False
        self.ended = self

    def is_set(self) -> bool:
        return False

    def send(self, body: bytes) -> None:
        self.sent.append(body)

    def close(self) -> None:
        self.is_closed = True


def table(count: int) -> tuple[ControlLinks, list[Any]]:
    links, made = ControlLinks(), [FakeLink() for _ in range(count)]
    for link in made:
        links.add(cast("ControlLink", link))
    return links, made


def test_a_message_reaches_its_link_or_those_of_the_contacts() -> None:
    links, (one, two, three) = table(3)
    links.send(1, Note("a"))
    links.send(99, Note("b"))  # it has ended
    links.broadcast([Contact(2, "", True, 0.0), Contact(3, "", True, 0.0)], Note("c"))
    assert (one.sent, two.sent, three.sent) == ([encode(Note("a"))], [encode(Note("c"))], [encode(Note("c"))])


def test_a_closed_link_is_followed_to_its_end_but_carries_nothing_more() -> None:
    links, (one, two) = table(2)
    closed = links.close(1)
    assert closed is one
    assert links.close(1) is None
    assert (one.is_closed, len(links.open), list(links)) == (True, 1, [one, two])
    links.send(1, Note("a"))
    assert one.sent == []


def test_a_peer_that_sends_too_much_gossip_floods_and_may_go_on_later() -> None:
    link, now = ControlLink(cast("Connection", SimpleNamespace(opener=None)), print, print), clock()
    assert not any(link.is_flooding(now) for _ in range(int(GOSSIP_BURST)))
    assert link.is_flooding(now)
    assert not link.is_flooding(now + 5 / GOSSIP_RATE)
