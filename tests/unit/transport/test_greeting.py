"""Greetings: read in any pieces, and strangers are known by their first bytes."""

from __future__ import annotations

from struct import pack

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringfort.errors import (
    InvalidArgumentError,
    ProtocolError,
    RankTakenError,
    RefusedError,
    VersionMismatchError,
    WorldSizeMismatchError,
)
from ringfort.transport import greeting
from ringfort.transport.frames import PROTOCOL_VERSION
from ringfort.transport.greeting import (
    MAGIC,
    MAX_GREETING,
    Greeting,
    GreetingReader,
    Join,
    Meet,
    Ready,
    Refused,
    Welcome,
    encode,
    to_error,
)

number = st.integers(0, 1 << 40)
text = st.text(max_size=40)
greetings = st.one_of(
    st.builds(Join, number, number, text, number),
    st.builds(Welcome, st.binary(max_size=32), st.lists(st.tuples(text, number), max_size=20)),
    st.builds(Meet, number, number, st.binary(max_size=32)),
    st.just(Ready()),
    st.builds(Refused, st.sampled_from(list(greeting.REFUSALS)), text),
)


@given(greetings, st.lists(st.integers(1, 30), min_size=1))
def test_a_greeting_is_read_from_any_pieces_and_not_a_byte_more(said: Greeting, sizes: list[int]) -> None:
    data = encode(said)
    reader = GreetingReader()
    at, turn = 0, 0
    while True:
        assert reader.wants > 0
        piece = data[at : at + min(sizes[turn % len(sizes)], reader.wants)]
        at, turn = at + len(piece), turn + 1
        heard = reader.feed(piece)
        if at == len(data):
            break
        assert heard is None
    assert heard == said


@given(st.binary(max_size=100), st.integers(1, 100))
@example(b"GET / HTTP/1.1\r\n", 100)
@example(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 1)  # TLS
@example(b"SSH-2.0-OpenSSH_9.6\r\n", 3)
@example(MAGIC + b"\x01\x00\x05\x00hello", 100)
@example(MAGIC + b"\x01\x00\x00\x00", 100)
@example(MAGIC + b"\x01\x00\xff\xff", 100)
@example(b"RGFX", 1)
def test_garbage_is_a_typed_error_or_waits_for_more(data: bytes, cut: int) -> None:
    reader = GreetingReader()
    try:
        for start in range(0, len(data), cut):
            piece = data[start : start + cut][: reader.wants]
            if reader.feed(piece) is not None:
                return
            assert 0 < reader.wants <= 8 + MAX_GREETING
    except (ProtocolError, VersionMismatchError):
        pass


@given(st.binary(max_size=50), st.sampled_from([b"", MAGIC]))
def test_a_stranger_is_known_by_the_first_byte_that_is_wrong(data: bytes, start: bytes) -> None:
    reader = GreetingReader()
    for byte in start[:3]:
        assert reader.feed(bytes([byte])) is None
    with pytest.raises(ProtocolError, match="not Ringfort"):
        reader.feed(b"?" + data)


def test_a_length_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match=str(MAX_GREETING + 1)):
        GreetingReader().feed(pack("<4sHH", MAGIC, PROTOCOL_VERSION, MAX_GREETING + 1))


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 65535])
def test_another_version_is_told_apart_from_a_stranger_whatever_its_words_are(version: int) -> None:
    data = pack("<4sHH", MAGIC, version, 5) + b"\xc1new?"
    with pytest.raises(VersionMismatchError, match=f"version {version}, this side {PROTOCOL_VERSION}"):
        GreetingReader().feed(data)


def test_a_greeting_that_would_be_too_long_is_not_sent() -> None:
    with pytest.raises(InvalidArgumentError, match="world_size"):
        encode(Welcome(b"", [("a" * 100, 1)] * 1000))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("version", VersionMismatchError),
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
    assert "refused by rank 0 at host:1: because" in str(error)
