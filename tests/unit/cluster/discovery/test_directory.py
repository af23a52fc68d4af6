"""Which address of whom is tried when, and what a flood of them can do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.discovery.directory import (
    FIRST_PAUSE,
    FORGET_AFTER,
    LONGEST_PAUSE,
    MAX_ADDRESSES,
    MAX_DIALLING,
    MAX_PER_INTRODUCER,
    MAX_PER_PEER,
    MEASURE_AGAIN,
    STAGGER,
    AddressDirectory,
    Source,
)
from ringfort.cluster.discovery.interfaces import Interface, choose

ETHER, RADIO = "10.0.0.2:1", "10.0.1.2:1"


def heard(*addresses: str, claim: str = "b", source: Source = Source.MDNS) -> AddressDirectory:
    made = AddressDirectory()
    made.learn(addresses, source, 0.0, claim=claim)
    return made


def test_what_is_heard_is_dialled_at_once_and_once() -> None:
    book = heard(ETHER)
    assert book.deadline <= 0.0
    assert book.due(0.0) == [ETHER]
    assert book.due(100.0) == []
    assert book.deadline == float("inf")


def test_the_next_address_of_a_peer_is_tried_when_the_first_does_not_answer_soon() -> None:
    book = heard("1:1", "2:1", "3:1")
    assert book.due(0.0) == ["1:1"]
    assert book.deadline == STAGGER
    assert book.due(STAGGER / 2) == []
    assert book.due(STAGGER) == ["2:1"]
    book.answered("2:1", "b", STAGGER)
    book.linked("b", "2:1")
    assert book.due(STAGGER) == ["3:1"]  # only to be measured now
    assert book.deadline == float("inf")


def test_addresses_of_different_peers_are_dialled_together_up_to_a_limit() -> None:
    book = AddressDirectory()
    for number in range(2 * MAX_DIALLING):
        book.learn([f"{number}:1"], Source.MDNS, 0.0, claim=f"p{number}")
    assert len(book.due(0.0)) == MAX_DIALLING
    assert book.due(0.0) == []
    assert book.deadline == float("inf")
    book.failed("0:1", 0.0, "refused")
    assert len(book.due(0.0)) == 1


def test_an_address_that_fails_is_tried_again_ever_later_and_never_given_up_while_it_is_announced() -> None:
    book = heard(ETHER)
    now, pauses = 0.0, []
    for _ in range(12):
        assert book.due(now) == [ETHER]
        book.failed(ETHER, now, "no route")
        assert book.due(now) == []
        pauses.append(book.deadline - now)
        now = book.deadline
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    assert book.troubles() == [(ETHER, "no route")]


def test_an_announcement_shortens_a_long_pause_and_hearsay_does_not() -> None:
    book = heard(ETHER)
    for _ in range(10):
        book.failed(ETHER, 100.0, "no route")
    book.learn([ETHER], Source.EXCHANGE, 100.0, claim="b", introducer="c")
    assert book.deadline == 100.0 + LONGEST_PAUSE
    book.learn([ETHER], Source.MDNS, 100.0, claim="b")
    assert book.deadline == 100.0 + FIRST_PAUSE


def test_a_process_that_takes_the_place_of_a_dead_one_is_tried_at_once() -> None:
    book = heard(ETHER)
    book.answered(ETHER, "b", 0.0)
    for _ in range(10):
        book.failed(ETHER, 100.0, "no route")
    book.learn([ETHER], Source.MDNS, 100.0, claim="d")
    assert book.due(100.0) == [ETHER]


def test_the_order_of_first_tries_follows_our_interfaces() -> None:
    card = Interface(name="e", addresses=("10.0.0.1",), prefixes=(24,), kind=LinkKind.ETHERNET)
    radio = Interface(name="w", addresses=("10.0.1.1",), prefixes=(24,), kind=LinkKind.WIFI)
    book = AddressDirectory(choose([radio, card]))
    book.learn(["172.17.0.1:1", "odd", RADIO, ETHER], Source.MDNS, 0.0, claim="b")
    assert book.addresses("b")[:2] == [ETHER, RADIO]
    assert book.due(0.0) == [ETHER]


def test_the_faster_address_comes_first_whichever_was_linked_first() -> None:
    book = heard(ETHER, RADIO)
    book.answered(RADIO, "b", 0.0, round_trip=0.001)
    book.linked("b", RADIO)
    book.answered(RADIO, "b", 0.0, bandwidth=6e6)
    assert book.due(0.0) == [ETHER]  # to measure it
    book.answered(ETHER, "b", 0.0, round_trip=0.005, bandwidth=117e6)
    assert book.addresses("b") == [ETHER, RADIO]


def test_when_a_link_ends_the_other_address_is_tried_first_and_at_once() -> None:
    book = heard(ETHER, RADIO)
    for address in book.addresses("b"):
        book.answered(address, "b", 0.0, round_trip=0.001 if address == ETHER else 0.01)
    book.linked("b", ETHER)
    assert book.due(10.0) == []
    book.unlinked("b", 10.0)
    assert book.due(10.0) == [RADIO]
    assert book.due(10.0 + FIRST_PAUSE) == [ETHER]


def test_other_addresses_of_a_linked_peer_are_measured_now_and_then() -> None:
    book = heard(ETHER, RADIO)
    book.answered(ETHER, "b", 0.0)
    book.linked("b", ETHER)
    assert book.due(0.0) == [RADIO]
    book.failed(RADIO, 0.0, "no route")
    assert book.deadline == MEASURE_AGAIN


def test_an_address_that_leads_the_same_way_is_passed_over_for_a_while() -> None:
    book = heard(ETHER, RADIO)
    book.answered(ETHER, "b", 0.0)
    book.linked("b", ETHER)
    assert book.due(0.0) == [RADIO]
    book.skip(RADIO, 0.0)
    assert book.deadline == MEASURE_AGAIN
    assert book.troubles() == []


def test_a_peer_that_dialled_us_is_not_dialled() -> None:
    book = heard(ETHER, RADIO)
    book.linked("b")
    assert book.due(0.0) == []
    assert book.deadline == float("inf")
    book.unlinked("b", 5.0)
    assert len(book.due(5.0)) == 1


def test_a_peer_that_was_here_and_has_ended_is_not_one_without_an_answer() -> None:
    book = AddressDirectory()
    book.learn([ETHER, RADIO], Source.MDNS, 0.0, claim="peer")
    book.answered(ETHER, "peer", 0.0)
    book.linked("peer", ETHER)
    book.unlinked("peer", 1.0)
    for address in (ETHER, RADIO):
        book.failed(address, 2.0, "Connection refused")
        assert book.has_failed(address)
    assert book.troubles() == []
    book.learn(["10.0.0.9:1"], Source.STATIC, 2.0, claim="other")
    book.failed("10.0.0.9:1", 3.0, "no route")
    assert book.troubles() == [("10.0.0.9:1", "no route")]


def test_proof_at_one_address_of_an_announcement_names_the_others() -> None:
    book = heard(ETHER, RADIO, claim="token")
    book.answered(ETHER, "b", 0.0)
    book.linked("b", ETHER)
    assert book.addresses("b") == [ETHER, RADIO]
    assert book.addresses("token") == []


def test_after_a_change_of_network_everything_is_tried_and_measured_again() -> None:
    book = heard(ETHER)
    for _ in range(10):
        book.failed(ETHER, 50.0, "no route")
    book.network_changed(51.0)
    assert book.due(51.0) == [ETHER]


def test_our_own_addresses_are_never_dialled() -> None:
    book = heard(ETHER, RADIO)
    book.is_own([ETHER])
    book.learn([ETHER], Source.MDNS, 1.0, claim="b")
    assert book.due(1.0) == [RADIO]


def test_what_is_taken_back_goes_unless_it_is_known_otherwise() -> None:
    book = heard(ETHER, RADIO, "9:9")
    book.learn([RADIO], Source.STATIC, 0.0)
    book.answered("9:9", "b", 0.0)
    book.learn(["5:5"], Source.MDNS, 0.0, claim="c")
    book.withdraw("b")
    assert (ETHER in book._entries, RADIO in book._entries, "9:9" in book._entries, "5:5" in book._entries) == (
        False,
        True,
        True,
        True,
    )


def test_what_nobody_mentions_is_forgotten_and_what_a_person_named_is_not() -> None:
    book = heard(ETHER)
    book.learn([RADIO], Source.STATIC, 0.0)
    book.forget(FORGET_AFTER)
    assert len(book._entries) == 2
    book.forget(FORGET_AFTER + 1)
    assert (ETHER in book._entries, RADIO in book._entries) == (False, True)


def test_the_address_in_use_is_not_forgotten() -> None:
    book = heard(ETHER)
    book.answered(ETHER, "b", 0.0)
    book.linked("b", ETHER)
    book.forget(10 * FORGET_AFTER)
    assert ETHER in book._entries


# --- floods and lies -------------------------------------------------------------------------------------------------


def test_a_peer_that_introduces_without_end_fills_only_its_share() -> None:
    book = AddressDirectory()
    for number in range(2 * MAX_ADDRESSES):
        book.learn([f"{number}:1"], Source.EXCHANGE, float(number), claim=f"p{number}", introducer="liar")
    assert len(book._entries) == MAX_PER_INTRODUCER
    book.learn(["true:1"], Source.EXCHANGE, 0.0, claim="b", introducer="honest")
    assert "true:1" in book._entries


def test_lies_about_a_peer_take_no_room_from_its_true_addresses() -> None:
    book = AddressDirectory()
    book.learn([f"{number}:1" for number in range(100)], Source.EXCHANGE, 0.0, claim="b", introducer="liar")
    assert len(book._entries) == MAX_PER_PEER
    book.learn([ETHER], Source.EXCHANGE, 0.0, claim="b", introducer="honest")
    book.learn([RADIO], Source.MDNS, 0.0, claim="b")
    assert ETHER in book._entries
    assert RADIO in book._entries


@pytest.mark.parametrize("source", list(Source)[:3])
def test_a_flood_pushes_out_nothing_that_works(source: Source) -> None:
    book = AddressDirectory()
    book.learn(["static:1"], Source.STATIC, 0.0)
    book.learn(["proved:1", "other:1"], Source.MDNS, 0.0, claim="b")
    book.answered("proved:1", "b", 0.0)
    for number in range(MAX_ADDRESSES + 100):
        book.learn([f"{number}:1"], source, 1.0, claim=f"p{number}", introducer=f"i{number % 50}")
    assert len(book._entries) <= MAX_ADDRESSES
    assert "static:1" in book._entries
    assert "proved:1" in book._entries
    assert source is Source.OBSERVED or "other:1" in book._entries


def test_a_full_directory_makes_room_for_the_new_by_dropping_what_fails() -> None:
    book = AddressDirectory()
    for number in range(MAX_ADDRESSES):
        book.learn([f"{number}:1"], Source.MDNS, 0.0, claim=f"p{number}")
    book.learn([ETHER], Source.MDNS, 1.0, claim="b")
    assert ETHER not in book._entries
    book.failed("7:1", 1.0, "refused")
    book.learn([ETHER], Source.MDNS, 2.0, claim="b")
    assert ETHER in book._entries
    assert "7:1" not in book._entries


ADDRESSES = st.sampled_from([f"{number}:1" for number in range(12)])
PEERS = st.sampled_from(["", "a", "b", "c"])
STEPS = st.one_of(
    st.tuples(st.just("learn"), st.lists(ADDRESSES, max_size=4), st.sampled_from(Source), PEERS, PEERS),
    st.tuples(st.just("withdraw"), PEERS, st.lists(ADDRESSES, max_size=4)),
    st.tuples(st.just("own"), ADDRESSES),
    st.tuples(st.just("answered"), ADDRESSES, st.sampled_from(["a", "b", "c"])),
    st.tuples(st.just("failed"), ADDRESSES),
    st.tuples(st.just("unlinked"), PEERS),
    st.tuples(st.just("linked"), st.sampled_from(["a", "b", "c"])),
    st.tuples(st.just("changed")),
    st.tuples(st.just("forget")),
    st.tuples(st.just("wait"), st.floats(0, 100)),
)


@given(st.lists(STEPS, max_size=40))
@settings(max_examples=100)
def test_in_any_history_nothing_is_dialled_twice_at_once_and_time_moves_on(steps: list[tuple[object, ...]]) -> None:
    book, now, dialling = AddressDirectory(), 0.0, set[str]()
    for step in steps:
        match step:
            case ("learn", list(addresses), Source() as source, str(claim), str(introducer)):
                book.learn(addresses, source, now, claim=claim, introducer=introducer)
            case ("withdraw", str(claim), list(addresses)):
                book.withdraw(claim, addresses)
                dialling = {address for address in dialling if address in book._entries}
            case ("own", str(address)):
                book.is_own([address])
                dialling.discard(address)
            case ("answered", str(address), str(peer)):
                book.answered(address, peer, now, round_trip=0.001)
                book.linked(peer, address)
                dialling.discard(address)
            case ("failed", str(address)):
                book.failed(address, now, "no")
                dialling.discard(address)
            case ("unlinked", str(peer)):
                book.unlinked(peer, now)
            case ("linked", str(peer)):
                book.linked(peer)
            case ("wait", float(pause)):
                now += pause
            case ("forget",):
                book.forget(now)
            case _:
                book.network_changed(now)
        wanted = book.deadline
        chosen = book.due(now)
        assert (wanted <= now) == bool(chosen)
        assert not dialling & set(chosen)
        dialling |= set(chosen)
        assert book.deadline > now  # the node never spins
