"""Handshakes: members get in and learn each other's names; everybody else gets an error, and learns nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import msgspec
import pytest
from hypothesis import example, given, settings, strategies as st

from ringfort.errors import (
    DistributedError,
    EncryptionMismatchError,
    HandshakeError,
    NamespaceMismatchError,
    ProtocolError,
    TamperedError,
    VersionMismatchError,
)
from ringfort.identity.noise import MESSAGE_1_BYTES, MESSAGE_2_BYTES, NoiseHandshake
from ringfort.identity.proof import MAX_PROOF_BYTES
from ringfort.transport import hello
from ringfort.transport.frames import PROTOCOL_VERSION
from ringfort.transport.handshake import MAGIC, NOISE, PLAIN, PREAMBLE, Handshake, RecordReader, sealed
from ringfort.transport.hello import MAX_PURPOSE, Hello, Join, Meet, Ready, Refused
from ringfort.transport.records import CIPHERS, LENGTH, MAX_OVERHEAD, preferred
from tests.helpers.handshakes import CLUSTER, PURPOSE, Side, converse, flipped, handshake_of, impostor, member, opened

ALICE, BOB = member(), member()
MOST_WANTED = MAX_PURPOSE + MAX_PROOF_BYTES + 200
"""Bytes: more than anything that may be waited for before somebody has proved who they are."""

purposes = st.one_of(
    st.builds(Join, st.integers(0, 99), st.integers(0, 99), st.text(max_size=60), st.integers(0, 65535)),
    st.builds(Meet, st.integers(0, 99), st.integers(0, 99), st.binary(max_size=40)),
    st.just(Ready()),
    st.builds(Refused, st.text(max_size=9), st.text(max_size=2000)),
)
sizes = st.lists(st.integers(1, 80), min_size=1, max_size=20)


def overheard() -> tuple[bytes, bytes]:
    """All that is said in a handshake, a direction each."""
    initiator, responder = opened(ALICE, BOB)
    return initiator.said, responder.said


# --- members ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(purposes, sizes, sizes)
@example(PURPOSE, [1], [1])
def test_members_open_whatever_the_pieces(purpose: Hello, first: list[int], second: list[int]) -> None:
    initiator = Side(Handshake(ALICE, purpose), sizes=cycle(first))
    responder = Side(Handshake(BOB), sizes=cycle(second))
    converse(initiator, responder)
    assert initiator.handshake.is_open
    assert responder.handshake.is_open
    assert responder.handshake.purpose == purpose
    assert initiator.handshake.identity == BOB.identity.public_key
    assert responder.handshake.identity == ALICE.identity.public_key
    assert initiator.unread == responder.unread == b""


@pytest.mark.parametrize("speaks", ["initiator", "responder"])
def test_what_follows_goes_through_records_in_both_directions(speaks: str) -> None:
    sides = [side.handshake for side in opened()]
    one, other = sides if speaks == "initiator" else sides[::-1]
    for words in (b"one", b"another"):
        record = sealed(one.sealer, words)
        assert words not in record
        into = bytearray(len(words))
        assert other.opener is not None
        other.opener.open(record, memoryview(into))
        assert into == words


@settings(max_examples=60)
@given(purposes, sizes, sizes)
def test_with_encryption_off_on_both_sides_there_is_only_the_purpose(
    purpose: Hello, first: list[int], second: list[int]
) -> None:
    initiator, responder = (
        Side(Handshake(None, purpose), sizes=cycle(first)),
        Side(Handshake(None), sizes=cycle(second)),
    )
    converse(initiator, responder)
    assert initiator.handshake.is_open
    assert responder.handshake.is_open
    assert responder.handshake.purpose == purpose
    assert responder.handshake.sealer is responder.handshake.opener is initiator.handshake.sealer is None
    assert initiator.handshake.identity == responder.handshake.identity == b""


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ((4, 3, 2, 1), (4, 3, 2, 1), 4),
        ((3, 2, 1), (3, 4, 2, 1), 3),
        ((3, 2, 1), (2, 1), 2),
        ((2, 1), (3, 2, 1), 2),
        ((1,), (3, 2, 1), 1),
        ((1,), (1,), 1),
    ],
)
def test_the_sides_use_the_best_cipher_that_both_have(
    first: tuple[int, ...], second: tuple[int, ...], both: int
) -> None:
    if both not in preferred():
        pytest.skip("AEGIS needs a processor with AES instructions, and the packages pynacl and aeg")
    initiator, responder = Side(Handshake(ALICE, PURPOSE, ciphers=first)), Side(Handshake(BOB, ciphers=second))
    converse(initiator, responder)
    halves = [half for side in (initiator, responder) for half in (side.handshake.sealer, side.handshake.opener)]
    assert [half.cipher for half in halves if half] == [CIPHERS[both]] * 4


def test_a_cipher_that_was_not_offered_is_no_choice() -> None:
    initiator, responder = Side(Handshake(ALICE, PURPOSE, ciphers=(2,))), Side(Handshake(BOB, ciphers=(1,)))
    converse(initiator, responder)
    assert isinstance(initiator.error, HandshakeError)
    assert initiator.handshake.sealer is None


@pytest.mark.parametrize("liar", ["initiator", "responder"])
def test_a_member_that_claims_the_identity_of_another_is_refused(liar: str) -> None:
    thief = member()
    thief.identity.public_key = member().identity.public_key
    initiator = Side(Handshake(thief if liar == "initiator" else ALICE, PURPOSE))
    responder = Side(Handshake(thief if liar == "responder" else BOB))
    converse(initiator, responder)
    honest = responder if liar == "initiator" else initiator
    assert isinstance(honest.error, HandshakeError)
    assert not honest.handshake.is_open
    assert honest.handshake.identity == b""


def test_the_handshake_is_bound_to_what_was_said_in_the_clear() -> None:
    preamble = bytes(Handshake(ALICE, PURPOSE).outgoing[: PREAMBLE.size])
    for prologue, fits in ((preamble, True), (b"", False), (preamble[:-1], False)):
        noise = NoiseHandshake(initiator=True, static=ALICE.static, psk=CLUSTER.handshake_key, prologue=prologue)
        responder = Side(Handshake(BOB))
        responder.listen(preamble + noise.write())
        assert (responder.error is None) is fits


# --- those who differ -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("initiator", "responder", "kind"),
    [
        (lambda: handshake_of(PROTOCOL_VERSION + 1, ALICE, PURPOSE), lambda: Handshake(BOB), VersionMismatchError),
        (lambda: handshake_of(0, ALICE, PURPOSE), lambda: handshake_of(65535, BOB), VersionMismatchError),
        (lambda: Handshake(None, PURPOSE), lambda: Handshake(BOB), EncryptionMismatchError),
        (lambda: Handshake(ALICE, PURPOSE), lambda: Handshake(None), EncryptionMismatchError),
        (lambda: Handshake(member(CLUSTER.generate("lab")), PURPOSE), lambda: Handshake(BOB), NamespaceMismatchError),
        (lambda: Handshake(ALICE, PURPOSE), lambda: Handshake(member(CLUSTER.generate())), NamespaceMismatchError),
        # A later version may have other modes: the version is what differs then.
        (lambda: handshake_of(9, None, PURPOSE), lambda: Handshake(BOB), VersionMismatchError),
    ],
    ids=["version", "no common version", "plain to noise", "noise to plain", "secret", "name", "version before mode"],
)
def test_a_difference_has_its_name_on_both_sides(
    initiator: Callable[[], Handshake], responder: Callable[[], Handshake], kind: type[DistributedError]
) -> None:
    one, other = Side(initiator()), Side(responder())
    converse(one, other)
    assert type(one.error) is kind
    assert type(other.error) is kind
    assert not one.handshake.is_open
    assert not other.handshake.is_open


def test_who_forges_the_network_id_and_does_not_know_the_secret_is_not_let_in() -> None:
    initiator, responder = opened(impostor(), BOB)
    assert isinstance(responder.error, HandshakeError)
    assert not responder.handshake.is_open
    assert not initiator.handshake.is_open
    assert responder.handshake.purpose is None


def test_who_listens_with_a_forged_network_id_is_not_believed_and_hears_no_name() -> None:
    initiator, responder = opened(ALICE, impostor())
    assert isinstance(responder.error, HandshakeError)
    assert not initiator.handshake.is_open
    # It goes on as if it could read message 3, and makes up the record that would follow.
    initiator.listen(LENGTH.pack(140) + bytes(140))
    assert isinstance(initiator.error, TamperedError)
    assert not initiator.handshake.is_open
    assert ALICE.identity.public_key not in initiator.said


# --- somebody in between ----------------------------------------------------------------------------------------------


def outcome_of_flip(direction: int, place: int, mask: int) -> tuple[Side, Side]:
    change = flipped(place, mask)
    initiator = Side(Handshake(ALICE, PURPOSE), change) if direction == 0 else Side(Handshake(ALICE, PURPOSE))
    responder = Side(Handshake(BOB), change) if direction == 1 else Side(Handshake(BOB))
    converse(initiator, responder)
    return initiator, responder


def check_flip(direction: int, place: int, mask: int) -> None:
    """Changed bytes never lead to two open sides, and whoever has read them whole says so with an error."""
    initiator, responder = outcome_of_flip(direction, place, mask)
    words = f"byte {place} of direction {direction} with {mask:#x}"
    assert not (initiator.handshake.is_open and responder.handshake.is_open), words
    reader = responder if direction == 0 else initiator
    assert not reader.handshake.is_open, words
    # A length that grew makes its reader wait: the listener's deadline ends that.
    assert reader.error is not None or 0 < reader.handshake.wants <= MOST_WANTED, words


@pytest.mark.parametrize("direction", [0, 1])
def test_a_flipped_bit_in_any_byte_opens_nothing(direction: int) -> None:
    for place in range(len(overheard()[direction])):
        check_flip(direction, place, 1 << (place % 8))


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("place", range(PREAMBLE.size))
def test_every_flipped_bit_of_a_preamble_opens_nothing(direction: int, place: int) -> None:
    for bit in range(8):
        check_flip(direction, place, 1 << bit)


def test_a_forged_mode_cannot_talk_two_members_out_of_encryption() -> None:
    """Both have it on; somebody tells each that the other has it off."""
    for direction in (0, 1):
        initiator, responder = outcome_of_flip(direction, 6, PLAIN ^ NOISE)
        assert isinstance((responder, initiator)[direction].error, EncryptionMismatchError)
        assert not initiator.handshake.is_open
        assert not responder.handshake.is_open


def test_a_recorded_initiator_does_not_get_in_again() -> None:
    said, _ = overheard()
    responder = Side(Handshake(BOB))
    responder.listen(said)
    assert isinstance(responder.error, HandshakeError)
    assert not responder.handshake.is_open
    assert BOB.identity.public_key not in responder.speak()


def test_a_recorded_responder_does_not_convince_again() -> None:
    _, said = overheard()
    initiator = Side(Handshake(ALICE, PURPOSE))
    initiator.listen(said)
    assert isinstance(initiator.error, HandshakeError)
    assert not initiator.handshake.is_open


def test_a_last_record_of_another_handshake_does_not_convince() -> None:
    _, other = overheard()
    initiator, responder = Side(Handshake(ALICE, PURPOSE)), Side(Handshake(BOB))
    responder.listen(initiator.speak())
    initiator.listen(responder.speak())
    responder.listen(initiator.speak())
    initiator.listen(other[PREAMBLE.size + MESSAGE_2_BYTES :])
    assert isinstance(initiator.error, TamperedError)
    assert not initiator.handshake.is_open


def test_an_handshake_that_is_told_its_own_words_fails() -> None:
    initiator = Side(Handshake(ALICE, PURPOSE))
    initiator.listen(initiator.speak() + bytes(MESSAGE_2_BYTES))
    assert isinstance(initiator.error, HandshakeError)


# --- what can be overheard --------------------------------------------------------------------------------------------


def test_the_responder_says_nothing_lasting_before_the_initiator_has_proved_itself() -> None:
    client, responder = Side(Handshake(impostor(), PURPOSE)), Side(Handshake(BOB))
    converse(client, responder)
    assert len(responder.said) == PREAMBLE.size + MESSAGE_2_BYTES
    assert BOB.identity.public_key not in responder.said
    assert BOB.static_public not in responder.said


def test_two_handshakes_of_the_same_sides_have_nothing_but_the_preamble_in_common() -> None:
    for first, second in zip(overheard(), overheard(), strict=True):
        assert first[: PREAMBLE.size] == second[: PREAMBLE.size]
        windows = {first[place : place + 8] for place in range(PREAMBLE.size, len(first) - 7)}
        assert not any(second[place : place + 8] in windows for place in range(PREAMBLE.size, len(second) - 7))


def test_purpose_names_and_keys_travel_only_inside() -> None:
    said = b"".join(overheard())
    for words in (
        b"join",
        b"a-host-name-that-shows",
        hello.encode(PURPOSE),
        ALICE.identity.public_key,
        BOB.identity.public_key,
        ALICE.static_public,
        BOB.static_public,
        CLUSTER.handshake_key,
        CLUSTER.name.encode(),
        CLUSTER._secret,
    ):
        assert words not in said
    assert said.count(CLUSTER.network_id) == 2


# --- other clients ----------------------------------------------------------------------------------------------------

preambles = st.builds(
    PREAMBLE.pack,
    st.sampled_from([MAGIC, MAGIC, MAGIC, b"RGFX"]),
    st.sampled_from([PROTOCOL_VERSION, PROTOCOL_VERSION, PROTOCOL_VERSION, 0, PROTOCOL_VERSION + 1]),
    st.sampled_from([PLAIN, NOISE, NOISE, 2, 255]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([CLUSTER.network_id, CLUSTER.network_id, bytes(16)]),
)
lengths = st.builds(LENGTH.pack, st.one_of(st.integers(0, 200), st.integers(0, 2**32 - 1)))
pieces = st.lists(st.one_of(st.binary(max_size=200), preambles, lengths), max_size=5).map(b"".join)
handshakes = st.sampled_from(
    [
        lambda: Handshake(ALICE, PURPOSE),
        lambda: Handshake(ALICE),
        lambda: Handshake(None, PURPOSE),
        lambda: Handshake(None),
    ]
)


@settings(max_examples=300)
@given(handshakes, st.one_of(pieces, st.tuples(preambles, pieces).map(b"".join)), st.integers(1, 300))
@example(lambda: Handshake(ALICE), b"GET / HTTP/1.1\r\n", 100)
@example(lambda: Handshake(ALICE), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 1)  # TLS
@example(lambda: Handshake(None), MAGIC + bytes((PROTOCOL_VERSION, 0, 0, 0)) + bytes(16) + b"\xff\xff\xff\xff", 100)
def test_garbage_is_a_typed_error_or_waits_for_a_little_more(
    make: Callable[[], Handshake], data: bytes, cut: int
) -> None:
    side = Side(make(), sizes=cycle([cut]))
    side.listen(data)  # which lets nothing out but typed errors
    assert 0 <= side.handshake.wants <= MOST_WANTED
    assert not (side.handshake.is_open and side.handshake.sealer)


@given(st.binary(max_size=50), st.integers(0, 3))
def test_a_client_that_is_not_ringfort_is_known_by_the_first_byte_that_is_wrong(rest: bytes, right: int) -> None:
    for purpose in (None, PURPOSE):
        handshake = Handshake(ALICE, purpose)
        for byte in MAGIC[:right]:
            handshake.feed(bytes([byte]))
        with pytest.raises(ProtocolError, match="not Ringfort"):
            handshake.feed(b"?" + rest[: handshake.wants - 1])


@pytest.mark.parametrize("length", [0, 1, 63, MOST_WANTED, 2**32 - 1])
def test_a_third_message_that_cannot_be_is_refused_before_it_is_read(length: int) -> None:
    responder = Side(Handshake(BOB))
    initiator = Side(Handshake(ALICE, PURPOSE))
    responder.listen(initiator.speak())
    responder.listen(LENGTH.pack(length))
    assert isinstance(responder.error, ProtocolError)


@pytest.mark.parametrize("length", [MAX_PURPOSE + 1, 2**32 - 1])
def test_a_plain_purpose_that_is_too_long_is_refused_before_it_is_read(length: int) -> None:
    responder = Side(Handshake(None))
    responder.listen(Handshake(None, PURPOSE).outgoing + LENGTH.pack(length))
    assert isinstance(responder.error, ProtocolError)


@pytest.mark.parametrize("length", [MAX_PROOF_BYTES + MAX_OVERHEAD + 1, 1 << 20])
def test_a_proof_that_is_too_long_is_refused_before_it_is_read(length: int) -> None:
    initiator, responder = Side(Handshake(ALICE, PURPOSE)), Side(Handshake(BOB))
    responder.listen(initiator.speak())
    initiator.listen(responder.speak())
    initiator.listen(LENGTH.pack(length))
    assert isinstance(initiator.error, ProtocolError)


@pytest.mark.parametrize("purpose", [b"", b"\xc1", msgspec.msgpack.encode({"type": "join", "rank": "one"})])
def test_a_member_whose_purpose_makes_no_sense_is_refused(purpose: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    initiator = Side(Handshake(ALICE, PURPOSE))
    monkeypatch.setattr(hello, "encode", lambda _: purpose)
    responder = Side(Handshake(BOB))
    converse(initiator, responder)
    assert isinstance(responder.error, ProtocolError)
    assert not responder.handshake.is_open


def test_the_first_message_needs_few_bytes() -> None:
    """What an unauthenticated client can make the responder hold before it must have computed something."""
    responder = Handshake(BOB)
    assert responder.wants == PREAMBLE.size
    responder.feed(bytes(Handshake(ALICE, PURPOSE).outgoing[: PREAMBLE.size]))
    assert responder.wants == MESSAGE_1_BYTES


# --- messages after it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_messages_are_read_whole_however_they_are_cut(is_sealed: bool, piece: int) -> None:
    initiator, responder = (side.handshake for side in opened()) if is_sealed else (None, None)
    sealer, opener = (initiator.sealer, responder.opener) if initiator and responder else (None, None)
    messages = [b"a", b"bc" * 100, b"d" * 1000]
    data = b"".join(sealed(sealer, message) for message in messages)
    reader, read = RecordReader(opener, 1000), []
    for place in range(0, len(data), piece):
        reader.feed(data[place : place + piece])
        while (message := reader.next()) is not None:
            read.append(message)
    assert read == messages


def test_a_reader_wants_no_byte_behind_the_current_message() -> None:
    data, reader = sealed(None, b"one") + b"behind", RecordReader(None, 100)
    while (message := reader.next()) is None:
        wanted = reader.wants
        reader.feed(data[:wanted])
        data = data[wanted:]
    assert (message, data) == (b"one", b"behind")


@pytest.mark.parametrize("length", [1000 + MAX_OVERHEAD + 1, 0xFFFFFFFF])
def test_a_message_that_is_too_long_is_refused_before_it_is_read(length: int) -> None:
    reader = RecordReader(None, 1000)
    reader.feed(LENGTH.pack(length))
    with pytest.raises(ProtocolError, match=f"Invalid message: {length} bytes; the limit is 1000"):
        reader.next()
