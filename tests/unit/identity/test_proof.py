"""The identity proof: it holds for one key, one role and one handshake."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from ringfort.errors import HandshakeError
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.proof import MAX_PROOF_BYTES, check_proof, make_proof

STATIC = bytes(range(32))
BINDING = bytes(range(32, 64))
IDENTITY = NodeIdentity.ephemeral()


def proof() -> bytes:
    return make_proof(IDENTITY, STATIC, initiator=True, binding=BINDING)


def test_a_proof_gives_the_identity_that_made_it() -> None:
    assert check_proof(proof(), STATIC, initiator=True, binding=BINDING) == IDENTITY.public_key
    assert len(proof()) <= MAX_PROOF_BYTES


@pytest.mark.parametrize(
    ("static", "initiator", "binding"),
    [(bytes(32), True, BINDING), (STATIC, False, BINDING), (STATIC, True, bytes(32)), (BINDING, True, STATIC)],
    ids=["another key", "another role", "another handshake", "parts exchanged"],
)
def test_a_proof_for_something_else_is_refused(static: bytes, initiator: bool, binding: bytes) -> None:
    with pytest.raises(HandshakeError, match="not made for this connection"):
        check_proof(proof(), static, initiator=initiator, binding=binding)


def test_a_signature_under_somebody_elses_name_is_refused() -> None:
    fields = msgspec.msgpack.decode(proof())
    fields["identity"] = NodeIdentity.ephemeral().public_key
    with pytest.raises(HandshakeError, match="not made for this connection"):
        check_proof(msgspec.msgpack.encode(fields), STATIC, initiator=True, binding=BINDING)


@pytest.mark.parametrize(
    "fields",
    [
        {"identity": IDENTITY.public_key},
        {"identity": IDENTITY.public_key, "signature": bytes(63)},
        {"identity": IDENTITY.public_key[:31], "signature": bytes(64)},
        {"identity": IDENTITY.public_key, "signature": bytes(64), "more": 1},
        {"identity": "text", "signature": bytes(64)},
        [],
        None,
    ],
    ids=["no signature", "short signature", "short key", "more fields", "text for a key", "a list", "nothing"],
)
def test_what_has_another_form_is_refused(fields: object) -> None:
    with pytest.raises(HandshakeError, match="Malformed identity proof"):
        check_proof(msgspec.msgpack.encode(fields), STATIC, initiator=True, binding=BINDING)


def test_what_is_too_long_is_refused_unread() -> None:
    with pytest.raises(HandshakeError, match="the limit is"):
        check_proof(bytes(MAX_PROOF_BYTES + 1), STATIC, initiator=True, binding=BINDING)


@given(data=st.binary(max_size=MAX_PROOF_BYTES + 10))
def test_any_bytes_are_refused_with_a_handshake_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(HandshakeError):
        check_proof(data, STATIC, initiator=True, binding=BINDING)


@given(place=st.integers(0, 120), value=st.integers(1, 255))
def test_a_changed_proof_is_refused(place: int, value: int) -> None:
    data = bytearray(proof())
    data[place % len(data)] ^= value
    with pytest.raises(HandshakeError):
        check_proof(bytes(data), STATIC, initiator=True, binding=BINDING)
