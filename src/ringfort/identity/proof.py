"""The proof that a peer has an identity: its Ed25519 key signs its Noise key for one handshake. Pure.

Noise keys are new for each process, so that a stranger who starts a handshake learns nothing permanent. The proof is
sent where only members can read it: the initiator's in the payload of message 3, the responder's in its first record.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ringfort.errors import HandshakeError
from ringfort.identity.keypair import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, NodeIdentity
from ringfort.identity.noise import PROTOCOL_NAME

MAX_PROOF_BYTES = 160
"""A proof has 96 bytes of key and signature and some 25 bytes of msgpack."""

_LABEL = b"ringfort identity proof 1 " + PROTOCOL_NAME.encode()


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The identity and its signature."""

    identity: Annotated[bytes, msgspec.Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


_decoder = msgspec.msgpack.Decoder(Proof)


def make_proof(identity: NodeIdentity, static: bytes, *, initiator: bool, binding: bytes) -> bytes:
    """Sign this side's own Noise key `static`; `binding` is `NoiseHandshake.binding`."""
    signature = identity.sign(_statement(static, initiator=initiator, binding=binding))
    return msgspec.msgpack.encode(Proof(identity.public_key, signature))


def check_proof(data: bytes, static: bytes, *, initiator: bool, binding: bytes) -> bytes:
    """Return the public key of the identity that `data` proves for the other side's Noise key `static`.

    `initiator` says which side made the proof. Raises `HandshakeError` for an invalid proof.
    """
    if len(data) > MAX_PROOF_BYTES:
        raise HandshakeError(f"Invalid identity proof: {len(data)} bytes; the limit is {MAX_PROOF_BYTES}")
    try:
        proof = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise HandshakeError(f"Malformed identity proof: {exc}") from exc
    if not NodeIdentity.verify(
        proof.identity, proof.signature, _statement(static, initiator=initiator, binding=binding)
    ):
        raise HandshakeError("Invalid identity proof: it was not made for this connection")
    return proof.identity


def _statement(static: bytes, *, initiator: bool, binding: bytes) -> bytes:
    """What is signed. Every part has a fixed length, so different statements have different bytes."""
    return b"\0".join((_LABEL, b"initiator" if initiator else b"responder", static, binding))
