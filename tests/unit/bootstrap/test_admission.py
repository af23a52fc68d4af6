"""Who makes room for a new connection, in virtual time: a flood does not keep a member with a long round trip out."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from ringfort.bootstrap.admission import MAX_WAITING, source_of, who_makes_room, why_not_accepted

MEMBER = "192.168.1.2"


@dataclass(eq=False)
class One:
    """A connection that waits."""

    source: str
    has_begun: bool = False


def makes_room(waiting: list[One], pick: Callable[[list[int]], int] = random.choice) -> One:
    return waiting[who_makes_room([(one.source, one.has_begun) for one in waiting], pick)]


def first(crowd: list[int]) -> int:
    return crowd[0]


def test_the_source_with_most_places_gives_one_up() -> None:
    member, *crowd = One("a"), One("b"), One("b")
    assert makes_room([member, *crowd]) is crowd[0]


def test_among_those_the_oldest_that_has_said_nothing_valid_goes_first() -> None:
    waiting = [One("b", has_begun=True), One("b"), One("b"), One("a")]
    assert makes_room(waiting) is waiting[1]


def test_a_source_that_sends_valid_first_messages_still_pays_for_its_own_flood() -> None:
    waiting = [One("b", has_begun=True), One("b", has_begun=True), One("a")]
    assert makes_room(waiting, first) is waiting[0]


def test_of_sources_with_as_many_places_the_silent_go_first() -> None:
    waiting = [One("a", has_begun=True), One("b"), One("c", has_begun=True)]
    assert makes_room(waiting) is waiting[1]


def test_where_all_are_alike_chance_decides() -> None:
    waiting = [One("a", has_begun=True) for _ in range(4)]
    assert {id(makes_room(waiting, random.Random(seed).choice)) for seed in range(50)} == {*map(id, waiting)}


# --- floods -----------------------------------------------------------------------------------------------------------

Client = Callable[[int], One]
"""The client with this number."""


def gets_in(client: Client, *, rate: float, round_trip: float, source: str = MEMBER, seed: int = 1) -> bool:
    """Whether a member that comes in the middle of a flood still has its place when its proof arrives."""
    pick = random.Random(seed).choice
    waiting: list[One] = []

    def arrives(one: One) -> None:
        if len(waiting) >= MAX_WAITING:
            waiting.remove(makes_room(waiting, pick))
        waiting.append(one)

    for number in range(2 * MAX_WAITING):
        arrives(client(number))
    member = One(source)
    arrives(member)
    member.has_begun = True  # its first message came with the connection
    for number in range(int(rate * round_trip)):
        arrives(client(number))
    return member in waiting


@pytest.mark.parametrize("round_trip", [0.03, 0.3, 3.0])
@pytest.mark.parametrize(
    ("client", "source"),
    [
        (lambda number: One("10.0.0.9"), MEMBER),
        (lambda number: One("10.0.0.9", has_begun=True), MEMBER),
        (lambda number: One(f"10.0.0.{number % 200}"), MEMBER),
        (lambda number: One(MEMBER), MEMBER),
    ],
    ids=["idle, one address", "valid first messages, one address", "idle, 200 addresses", "idle, the member's address"],
)
def test_a_member_gets_in_at_once(client: Client, source: str, round_trip: float) -> None:
    assert gets_in(client, rate=1500, round_trip=round_trip, source=source)


def test_a_flood_of_valid_first_messages_from_the_members_own_address_costs_it_some_tries() -> None:
    """The limit that remains. One in two of the tries at 30 ms, one in eleven at 100 ms; the oldest first would be none
    at all from 43 ms on."""

    def share(round_trip: float) -> float:
        flood = (
            gets_in(lambda _: One(MEMBER, has_begun=True), rate=1500, round_trip=round_trip, seed=seed)
            for seed in range(100)
        )
        return sum(flood) / 100

    assert 0.4 < share(0.03) < 0.6
    assert 0.04 < share(0.1) < 0.16


# --- sources ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("192.168.1.2", "192.168.1.2"),
        ("::ffff:192.168.1.2", "192.168.1.2"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
    ],
)
def test_a_source_is_an_ipv4_address_or_a_64_of_ipv6(host: str, source: str) -> None:
    assert source_of(host) == source


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPERM])
def test_an_error_that_comes_again_at_once_is_told(number: int) -> None:
    words = why_not_accepted(OSError(number, "what the system says"))
    assert words.startswith("what the system says")
    assert ("ulimit -n" in words) == (number == errno.EMFILE)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR, errno.ECONNABORTED])
def test_that_nobody_is_left_is_no_error(number: int) -> None:
    assert why_not_accepted(OSError(number, "")) == ""
