"""Control messages: what is written is read again, and nothing else is."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, strategies as st

from ringfort.cluster.core.gossip import decode, encode
from ringfort.cluster.core.peer_messages import (
    MAX_MEMBERS,
    MAX_MESSAGE_BYTES,
    MAX_NUMBER,
    Accept,
    AnyMessage,
    Beat,
    Departed,
    ElectionVote,
    Epoch,
    Hello,
    Introduce,
    Member,
    Propose,
    Report,
    Term,
    Votes,
)
from ringfort.errors import ProtocolError

EPOCH = Epoch(
    7, "a.1", (Member("a.1", "host", 4, ("10.0.0.1:5",), 3, "workstation"), Member("b.1")), (1, 0), ("a.1#3",)
)
VOTES = Votes(9, EPOCH, (Epoch(9, "b.1", EPOCH.members, (), EPOCH.lineages),))


@pytest.mark.parametrize(
    "message",
    [
        Hello(EPOCH.members[0], "workstation", "1.0"),
        Beat(12.5, 11.0, 0.25),
        Report(VOTES, 7, ("b.1",), ("c.1", "d.1"), 5, True, True),
        ElectionVote(Term(3, "a.1"), False, "b.1"),
        Propose(Term(3, "a.1"), EPOCH, (EPOCH,), VOTES.doubts, ("c.1",), ("d.1",)),
        Accept(9),
        Introduce("b.1", ("[fe80::1]:5",)),
        Departed("a.1", VOTES, "lid closed"),
    ],
)
def test_a_message_is_read_as_it_was_written(message: AnyMessage) -> None:
    assert decode(encode(message)) == message


def test_the_largest_epoch_fits_a_message_with_all_it_rests_on() -> None:
    members = tuple(
        Member(f"{i:019}.{'f' * 16}", "h" * 32, 8, ("192.168.100.100:65535",) * 2, name="n" * 32)
        for i in range(MAX_MEMBERS)
    )
    epoch = Epoch(1, members[0].peer, members, tuple(range(MAX_MEMBERS)), ("x#1",))
    assert decode(encode(Propose(Term(), epoch, (epoch, epoch), (epoch,))))


def raw(kind: str, **fields: object) -> bytes:
    return msgspec.msgpack.encode({"type": kind, **fields})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        raw("surprise"),
        raw("accept"),
        raw("accept", number="1"),
        raw("accept", number=-1),
        raw("accept", number=MAX_NUMBER),
        raw("commit", number=1, extra=1),
        raw("beat", sent=float("nan")),
        raw("introduce", peer="", addresses=[]),
        raw("introduce", peer="a.1", addresses=["x"] * 17),
        raw("introduce", peer="a.1", addresses=["x" * 129]),
        raw("reject", number=1, why="x" * 257),
        b"\x91" * 5000,
        b"\0" * (MAX_MESSAGE_BYTES + 1),
    ],
)
def test_what_is_no_message_or_breaks_a_limit_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_decode_or_raise(data: bytes) -> None:
    with suppress(ProtocolError):
        decode(data)


@given(st.data())
def test_a_damaged_message_does_nothing_but_decode_or_raise(data: st.DataObject) -> None:
    good = bytearray(encode(Propose(Term(3, "a.1"), EPOCH, (EPOCH,), VOTES.doubts)))
    good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        decode(bytes(good))


def test_ranks_are_the_members_slots_in_order() -> None:
    assert (EPOCH.world_size, EPOCH.first_rank("a.1"), EPOCH.first_rank("b.1")) == (5, 0, 4)
