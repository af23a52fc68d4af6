"""Hellos: whatever is said is read as it was said, and anything else is a typed error."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given, strategies as st

from ringfort.errors import InvalidArgumentError, ProtocolError, RankTakenError, RefusedError, WorldSizeMismatchError
from ringfort.transport import hello
from ringfort.transport.hello import (
    Hello,
    Join,
    Meet,
    OpenStream,
    Ready,
    Refused,
    Share,
    Shared,
    Welcome,
    decode,
    encode,
    to_error,
)
from ringfort.transport.machine import Machine
from ringfort.transport.segment import Offer

number = st.integers(0, 1 << 40)
text = st.text(max_size=40)
machines = st.builds(Machine, st.binary(max_size=16), st.booleans())
hellos = st.one_of(
    st.builds(Join, number, number, text, number, machines),
    st.builds(Welcome, st.binary(max_size=32), st.lists(st.tuples(text, number), max_size=20), machines),
    st.builds(Meet, number, number, st.binary(max_size=32), machines),
    st.builds(Ready, machines),
    st.builds(Share, st.one_of(st.none(), st.builds(Offer, text, number, st.binary(max_size=32)))),
    st.builds(OpenStream, text, text, text),
    st.builds(Shared, st.booleans()),
    st.builds(Refused, st.sampled_from([*hello.REFUSALS, "group"]), text),
)


@given(hellos)
def test_what_is_said_is_what_is_heard(said: Hello) -> None:
    assert decode(encode(said)) == said


@given(hellos, st.data())
def test_half_a_hello_is_a_protocol_error(said: Hello, data: st.DataObject) -> None:
    whole = encode(said)
    with pytest.raises(ProtocolError, match="Malformed hello"):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.binary(max_size=100))
@example(b"")
@example(b"\xc1")
@example(b"\x81\xa4type\xa4\xff\xff\xff\xff")  # no UTF-8
@example(encode(Join(1, 2, "here", 3)).replace(b"join", b"jump"))
def test_garbage_is_a_protocol_error_or_a_hello(data: bytes) -> None:
    with suppress(ProtocolError):
        assert isinstance(decode(data), Hello)


def test_a_hello_that_would_be_too_long_is_not_sent() -> None:
    with pytest.raises(InvalidArgumentError, match="world_size"):
        encode(Welcome(b"", [("a" * 100, 1)] * 1000))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("world_size", WorldSizeMismatchError),
        ("rank_taken", RankTakenError),
        ("rank_range", RefusedError),
        ("of a later version", RefusedError),
    ],
)
def test_a_refusal_is_an_error_of_its_kind_that_says_who_and_why(code: str, kind: type[RefusedError]) -> None:
    error = to_error(Refused(code, "because"), "rank 0 at host:1")
    assert type(error) is kind
    assert error.peer == "rank 0 at host:1"
    assert "Refused by rank 0 at host:1: because" in str(error)
