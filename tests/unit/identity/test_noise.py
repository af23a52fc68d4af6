"""The handshake: the published vectors, an independent implementation, and everything a stranger might send."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, strategies as st
from noise.connection import Keypair, NoiseConnection

from ringfort.errors import HandshakeError, InvalidKeyError
from ringfort.identity.noise import (
    MAX_MESSAGE_BYTES,
    MESSAGE_1_BYTES,
    MESSAGE_2_BYTES,
    MESSAGE_3_OVERHEAD,
    PROTOCOL_NAME,
    CipherState,
    HandshakeState,
    NoiseHandshake,
    nonce_bytes,
    rekey,
)
from tests.helpers.source import ROOT

VECTORS = ROOT / "tests" / "vectors" / "noise.txt"
"""Published by flynn/noise; tests/vectors/README.md has source and licence."""
MORE_VECTORS = ROOT.parent / "shared" / "vectors" / "noise.json"
"""Those of cacophony and snow, which are not in the repository."""
PSK = bytes(range(32))
PROLOGUE = b"ringfort version 1, some network"
LOW_ORDER = [
    bytes(32),
    b"\1" + bytes(31),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),  # p - 1
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
]
"""Public keys whose agreement with any private key is zero: cr.yp.to/ecdh.html."""


def side(*, initiator: bool, psk: bytes = PSK, prologue: bytes = PROLOGUE) -> NoiseHandshake:
    return NoiseHandshake(initiator=initiator, static=X25519PrivateKey.generate(), psk=psk, prologue=prologue)


def pair(psk: bytes = PSK, prologue: bytes = PROLOGUE) -> tuple[NoiseHandshake, NoiseHandshake]:
    """An initiator, and a responder that may differ from it in what it knows."""
    return side(initiator=True), side(initiator=False, psk=psk, prologue=prologue)


def unchanged(number: int, message: bytes) -> bytes:
    return message


def finish(
    initiator: NoiseHandshake,
    responder: NoiseHandshake,
    payload: bytes = b"",
    between: Callable[[int, bytes], bytes] = unchanged,
) -> bytes:
    """All three messages, each through the hands of `between`."""
    responder.read(between(1, initiator.write()))
    initiator.read(between(2, responder.write()))
    return responder.read(between(3, initiator.write(payload)))


# --- published vectors ------------------------------------------------------------------------------------------------


def vectors() -> list[dict[str, Any]]:
    """The vectors of our protocol: those of the repository, and those of another file where a developer has it."""
    others = json.loads(MORE_VECTORS.read_text(encoding="utf-8"))["vectors"] if MORE_VECTORS.is_file() else []
    return [*own_vectors(), *(vector for vector in others if vector["protocol_name"] == PROTOCOL_NAME)]


def own_vectors() -> list[dict[str, Any]]:
    """The vectors of the repository: blocks of `name=hexadecimal` lines, in the words of the other file."""
    found: list[dict[str, Any]] = []
    for number, block in enumerate(VECTORS.read_text(encoding="utf-8").strip().split("\n\n")):
        values = dict(line.split("=", 1) for line in block.splitlines())
        messages = sum(name.endswith("_payload") for name in values)
        found.append(
            {
                "source": f"flynn-{number}",
                "protocol_name": values["handshake"],
                **{f"{which}_prologue": values.get("prologue", "") for which in ("init", "resp")},
                **{f"{which}_psks": [values["preshared_key"]] for which in ("init", "resp")},
                **{f"{which}_static": values[f"{which}_static"] for which in ("init", "resp")},
                **{f"{which}_ephemeral": values[f"gen_{which}_ephemeral"] for which in ("init", "resp")},
                "messages": [
                    {"payload": values[f"msg_{turn}_payload"], "ciphertext": values[f"msg_{turn}_ciphertext"]}
                    for turn in range(messages)
                ],
            }
        )
    return found


def test_the_published_vectors_are_here_and_have_our_protocol() -> None:
    assert [vector["protocol_name"] for vector in own_vectors()] == [PROTOCOL_NAME] * 4
    assert {vector["init_prologue"] for vector in own_vectors()} == {"", b"notsecret".hex()}


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: f"{vector['source']} {vector['protocol_name']}")
def test_every_message_of_a_published_vector_comes_out_to_the_byte(vector: dict[str, Any]) -> None:
    def state(which: str) -> HandshakeState:
        return HandshakeState(
            initiator=which == "init",
            static=X25519PrivateKey.from_private_bytes(bytes.fromhex(vector[f"{which}_static"])),
            ephemeral=X25519PrivateKey.from_private_bytes(bytes.fromhex(vector[f"{which}_ephemeral"])),
            psk=bytes.fromhex(vector[f"{which}_psks"][0]),
            prologue=bytes.fromhex(vector[f"{which}_prologue"]),
        )

    sides = [state("init"), state("resp")]
    messages = [(bytes.fromhex(item["payload"]), bytes.fromhex(item["ciphertext"])) for item in vector["messages"]]
    for turn, (payload, ciphertext) in enumerate(messages[:3]):
        assert sides[turn % 2].write_message(payload) == ciphertext
        assert sides[1 - turn % 2].read_message(ciphertext) == payload
    hashes = {item.symmetric.hash.hex() for item in sides}
    assert hashes == {vector.get("handshake_hash", hashes.copy().pop())}
    assert sides[0].symmetric.split() == sides[1].symmetric.split()
    first, second = sides[0].symmetric.split()
    ciphers = [CipherState(second), CipherState(first)]  # message 4 is the responder's, except where flynn begins again
    if vector["source"].startswith("flynn"):
        ciphers.reverse()
    for turn, (payload, ciphertext) in enumerate(messages[3:]):
        assert ciphers[turn % 2].encrypt_with_ad(b"", payload) == ciphertext
    assert len(messages) > 4


def test_the_handshake_that_is_used_gives_the_bytes_of_the_framework() -> None:
    static, ephemeral = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    ours = NoiseHandshake(initiator=True, static=static, psk=PSK, prologue=PROLOGUE, ephemeral=ephemeral)
    plain = HandshakeState(initiator=True, static=static, psk=PSK, prologue=PROLOGUE, ephemeral=ephemeral)
    assert ours.write() == plain.write_message(b"")


# --- an independent implementation ------------------------------------------------------------------------------------


def other_side(*, initiator: bool, static: bytes | None = None) -> Any:
    other = NoiseConnection.from_name(PROTOCOL_NAME.encode())
    other.set_psks(PSK)
    other.set_prologue(PROLOGUE)
    (other.set_as_initiator if initiator else other.set_as_responder)()
    other.set_keypair_from_private_bytes(Keypair.STATIC, static or X25519PrivateKey.generate().private_bytes_raw())
    other.start_handshake()
    return other


def check_transport(ours: NoiseHandshake, other: Any) -> None:
    """Records both ways, also after both have changed keys."""
    send, receive = ours.keys()
    for counter in range(3):
        assert other.decrypt(AESGCM(send).encrypt(nonce_bytes(counter), b"from us", b"")) == b"from us"
        assert AESGCM(receive).decrypt(nonce_bytes(counter), bytes(other.encrypt(b"from it")), b"") == b"from it"
    other.rekey_inbound_cipher()
    other.rekey_outbound_cipher()
    send, receive = rekey(send), rekey(receive)
    # Noise's rekey leaves the counter as it is.
    assert other.decrypt(AESGCM(send).encrypt(nonce_bytes(3), b"from us", b"")) == b"from us"
    assert AESGCM(receive).decrypt(nonce_bytes(3), bytes(other.encrypt(b"from it")), b"") == b"from it"


def test_an_independent_implementation_accepts_ours_as_initiator() -> None:
    static = X25519PrivateKey.generate()
    ours, other = side(initiator=True), other_side(initiator=False, static=static.private_bytes_raw())
    other.read_message(ours.write())
    assert ours.read(bytes(other.write_message(b""))) == b""
    assert other.read_message(ours.write(b"who I am")) == b"who I am"
    assert ours.symmetric.hash == other.get_handshake_hash()
    assert ours.remote_static == static.public_key().public_bytes_raw()
    check_transport(ours, other)


def test_an_independent_implementation_accepts_ours_as_responder() -> None:
    static = X25519PrivateKey.generate()
    ours, other = side(initiator=False), other_side(initiator=True, static=static.private_bytes_raw())
    ours.read(bytes(other.write_message(b"")))
    other.read_message(ours.write())
    assert ours.read(bytes(other.write_message(b"who it is"))) == b"who it is"
    assert ours.symmetric.hash == other.get_handshake_hash()
    assert ours.remote_static == static.public_key().public_bytes_raw()
    check_transport(ours, other)


# --- what both sides end with -----------------------------------------------------------------------------------------


def test_both_sides_end_with_the_same_keys_crosswise() -> None:
    initiator, responder = pair()
    assert finish(initiator, responder, b"payload") == b"payload"
    assert initiator.is_finished
    assert responder.is_finished
    assert initiator.keys() == responder.keys()[::-1]
    assert len({*initiator.keys(), PSK}) == 3
    assert initiator.symmetric.hash == responder.symmetric.hash
    assert initiator.binding == responder.binding != initiator.symmetric.hash


def test_each_side_learns_the_others_static_key() -> None:
    keys = [X25519PrivateKey.generate() for _ in range(2)]
    initiator, responder = (
        NoiseHandshake(initiator=first, static=key, psk=PSK, prologue=PROLOGUE)
        for first, key in zip((True, False), keys, strict=True)
    )
    finish(initiator, responder)
    assert initiator.remote_static == keys[1].public_key().public_bytes_raw()
    assert responder.remote_static == keys[0].public_key().public_bytes_raw()


def test_two_handshakes_of_the_same_processes_have_nothing_in_common() -> None:
    statics = [X25519PrivateKey.generate() for _ in range(2)]
    seen: list[set[bytes]] = []
    for _ in range(2):
        initiator, responder = (
            NoiseHandshake(initiator=first, static=key, psk=PSK, prologue=PROLOGUE)
            for first, key in zip((True, False), statics, strict=True)
        )
        messages = [initiator.write()]
        responder.read(messages[0])
        messages.append(responder.write())
        initiator.read(messages[1])
        messages.append(initiator.write(b"the same payload"))
        responder.read(messages[2])
        seen.append({*messages, *initiator.keys(), initiator.symmetric.hash, initiator.binding})
    assert not seen[0] & seen[1]


def test_the_first_two_messages_have_fixed_sizes_and_the_third_a_fixed_overhead() -> None:
    initiator, responder = pair()
    first = initiator.write()
    responder.read(first)
    second = responder.write()
    initiator.read(second)
    assert (len(first), len(second), len(initiator.write(b"12345"))) == (
        MESSAGE_1_BYTES,
        MESSAGE_2_BYTES,
        MESSAGE_3_OVERHEAD + 5,
    )


def test_the_largest_payload_fits_and_one_byte_more_does_not() -> None:
    initiator, responder = pair()
    largest = bytes(MAX_MESSAGE_BYTES - MESSAGE_3_OVERHEAD)
    assert finish(initiator, responder, largest) == largest
    initiator, responder = pair()
    with pytest.raises(HandshakeError, match="does not fit"):
        finish(initiator, responder, largest + b"\0")


def test_a_rekey_goes_one_way_and_differs_for_each_key() -> None:
    keys = [PSK]
    for _ in range(3):
        keys.append(rekey(keys[-1]))
    assert len(set(keys)) == 4
    assert all(len(key) == 32 for key in keys)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "differing", [{"psk": bytes(32)}, {"prologue": b"ringfort version 2, some network"}], ids=["psk", "prologue"]
)
def test_two_that_do_not_know_the_same_do_not_finish(differing: dict[str, bytes]) -> None:
    initiator, responder = pair(**differing)
    with pytest.raises(HandshakeError, match="does not know the secret of this cluster"):
        finish(initiator, responder)
    assert not responder.is_finished


def test_a_responder_without_the_secret_cannot_read_the_payload_nor_get_the_keys() -> None:
    initiator, stranger = pair(psk=bytes(32))
    stranger.read(initiator.write())
    initiator.read(stranger.write())
    message = initiator.write(b"who I am")
    assert b"who I am" not in message
    with pytest.raises(HandshakeError):
        stranger.read(message)
    with pytest.raises(HandshakeError):
        stranger.keys()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_message_with_any_one_byte_changed_is_refused_at_once_or_by_the_end(number: int) -> None:
    size = (MESSAGE_1_BYTES, MESSAGE_2_BYTES, MESSAGE_3_OVERHEAD + 4)[number - 1]
    for place in range(size):
        initiator, responder = pair()

        def flip(turn: int, message: bytes, place: int = place) -> bytes:
            if turn != number:
                return message
            return message[:place] + bytes([message[place] ^ 0x40]) + message[place + 1 :]

        with pytest.raises(HandshakeError):
            finish(initiator, responder, b"data", flip)
        assert not responder.is_finished


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("cut", [1, 16, 31, 47])
def test_a_truncated_message_is_refused(number: int, cut: int) -> None:
    initiator, responder = pair()
    with pytest.raises(HandshakeError):
        finish(initiator, responder, b"data", lambda turn, message: message[:-cut] if turn == number else message)


@pytest.mark.parametrize("low", LOW_ORDER, ids=lambda key: key.hex()[:8])
def test_a_key_that_makes_the_agreement_zero_is_refused(low: bytes) -> None:
    _, responder = pair()
    # A stranger seals its own first message rightly: the payload's key comes from the ephemeral key alone.
    stranger = HandshakeState(initiator=True, static=X25519PrivateKey.generate(), psk=PSK, prologue=PROLOGUE)
    stranger._mix_ephemeral(low)
    responder.read(low + stranger.symmetric.encrypt_and_hash(b""))
    with pytest.raises(HandshakeError, match="key of the other side is invalid"):
        responder.write()


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    initiator, responder = pair()
    first = initiator.write()
    responder.read(first)
    initiator.read(responder.write())
    third = initiator.write(b"who I am")
    again = side(initiator=False)
    again.read(first)
    again.write()
    with pytest.raises(HandshakeError):
        again.read(third)


def test_a_message_that_is_sent_back_to_its_sender_is_refused() -> None:
    initiator, _ = pair()
    with pytest.raises(HandshakeError):
        initiator.read(initiator.write())


def test_messages_out_of_order_are_refused() -> None:
    initiator, responder = pair()
    with pytest.raises(HandshakeError, match="Invalid message 1: 96 bytes"):
        responder.read(bytes(MESSAGE_2_BYTES))
    with pytest.raises(HandshakeError, match="Message 1 must be written by this side"):
        initiator.read(bytes(MESSAGE_2_BYTES))
    with pytest.raises(HandshakeError, match="Message 1 must be written by the other side"):
        side(initiator=False).write()


@pytest.mark.parametrize("size", [MAX_MESSAGE_BYTES + 1, 1 << 24])
def test_an_oversized_message_is_refused_unread(size: int) -> None:
    for done in range(2):
        initiator, responder = pair()
        if done:
            responder.read(initiator.write())
            responder.write()
        with pytest.raises(HandshakeError, match=f"Invalid message [13]: {size} bytes"):
            responder.read(bytes(size))


@pytest.mark.parametrize("number", [1, 2])
def test_a_payload_that_a_stranger_could_read_is_refused(number: int) -> None:
    initiator, responder = pair()
    if number == 2:
        responder.read(initiator.write())
    with pytest.raises(HandshakeError, match="Only the third message may have a payload"):
        (initiator if number == 1 else responder).write(b"x")


def test_after_a_fault_nothing_works_any_more() -> None:
    initiator, responder = pair()
    good = initiator.write()
    with pytest.raises(HandshakeError):
        responder.read(bytes(MESSAGE_1_BYTES))
    for call in (lambda: responder.read(good), responder.write):
        with pytest.raises(HandshakeError, match="over"):
            call()
    with pytest.raises(HandshakeError):
        responder.keys()
    for name in ("remote_static", "binding"):
        with pytest.raises(HandshakeError):
            getattr(responder, name)
    assert not responder.is_finished


def test_what_was_known_before_a_fault_is_not_given_out_after_it() -> None:
    initiator, responder = pair()
    responder.read(initiator.write())
    initiator.read(responder.write())
    assert initiator.binding == responder.binding
    with pytest.raises(HandshakeError):
        responder.read(bytes(MESSAGE_3_OVERHEAD))
    initiator.write()
    with pytest.raises(HandshakeError):
        initiator.write()
    for handshake in (initiator, responder):
        for name in ("remote_static", "binding"):
            with pytest.raises(HandshakeError):
                getattr(handshake, name)


def test_nothing_is_given_out_before_its_time() -> None:
    initiator, responder = pair()
    for handshake in (initiator, responder):
        for name in ("remote_static", "binding"):
            with pytest.raises(HandshakeError):
                getattr(handshake, name)
        with pytest.raises(HandshakeError):
            handshake.keys()
    assert finish(initiator, responder, b"it did no harm to ask") == b"it did no harm to ask"


def test_a_fourth_message_is_refused() -> None:
    initiator, responder = pair()
    finish(initiator, responder)
    with pytest.raises(HandshakeError, match="over"):
        responder.write()
    with pytest.raises(HandshakeError, match="over"):
        initiator.read(bytes(64))


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_pre_shared_key_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(InvalidKeyError, match=f"psk: must have 32 bytes, not {size}"):
        side(initiator=True, psk=bytes(size))


# --- anything at all --------------------------------------------------------------------------------------------------


def after(done: int) -> NoiseHandshake:
    """A side that expects message `done` + 1."""
    initiator, responder = pair()
    if done == 0:
        return responder
    first = initiator.write()
    if done == 1:
        return initiator
    responder.read(first)
    responder.write()
    return responder


SIZES = [MESSAGE_1_BYTES, MESSAGE_2_BYTES, MESSAGE_3_OVERHEAD]


@given(
    done=st.integers(0, 2),
    message=st.one_of(st.binary(max_size=300), *(st.binary(min_size=size, max_size=size) for size in SIZES)),
)
def test_any_bytes_are_refused_with_a_handshake_error_and_nothing_else(done: int, message: bytes) -> None:
    with pytest.raises(HandshakeError):
        after(done).read(message)


@given(
    number=st.integers(1, 3),
    start=st.integers(0, 100),
    removed=st.integers(0, 40),
    added=st.binary(max_size=40),
)
def test_any_edit_of_a_real_message_never_finishes_a_handshake(
    number: int, start: int, removed: int, added: bytes
) -> None:
    initiator, responder = pair()
    changed = False

    def edit(turn: int, message: bytes) -> bytes:
        nonlocal changed
        edited = message[:start] + added + message[start + removed :] if turn == number else message
        changed = changed or edited != message
        return edited

    try:
        finish(initiator, responder, b"payload", edit)
    except HandshakeError:
        assert changed
        assert not responder.is_finished
    else:
        assert not changed


def test_the_vectors_of_cacophony_and_snow_stay_outside_of_the_repository() -> None:
    assert ROOT not in MORE_VECTORS.parents
    assert not list(Path(ROOT / "tests").rglob("noise.json"))
