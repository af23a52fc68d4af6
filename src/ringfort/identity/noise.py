"""The handshake `Noise_XXpsk3_25519_AESGCM_SHA256`, without I/O: messages in, messages out.

noise_states.py is the framework; this adds what the framework leaves to the application: it keeps the turns, allows no
payload that a stranger could read or write, ends at the first fault, and knows one error only.
"""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfort.errors import HandshakeError, InvalidKeyError
from ringfort.identity.noise_states import KEY_BYTES, PROTOCOL_NAME, TAG_BYTES, HandshakeState, nonce_bytes, rekey

__all__ = [
    "KEY_BYTES",
    "MAX_MESSAGE_BYTES",
    "MESSAGE_1_BYTES",
    "MESSAGE_2_BYTES",
    "MESSAGE_3_OVERHEAD",
    "PROTOCOL_NAME",
    "TAG_BYTES",
    "NoiseHandshake",
    "nonce_bytes",
    "rekey",
]

MAX_MESSAGE_BYTES: Final = 65535
"""Noise's own limit for one message, section 3."""
MESSAGE_1_BYTES: Final = KEY_BYTES + TAG_BYTES
"""An ephemeral key and an empty payload. (With a pre-shared key the payload has a tag from the first message on.)"""
MESSAGE_2_BYTES: Final = KEY_BYTES + KEY_BYTES + TAG_BYTES + TAG_BYTES
"""An ephemeral key, a sealed static key and an empty payload."""
MESSAGE_3_OVERHEAD: Final = KEY_BYTES + TAG_BYTES + TAG_BYTES
"""What the third message adds to its payload: a sealed static key and the payload's tag."""


class NoiseHandshake:
    """One side of one handshake: three messages, of which the initiator writes the first and the third.

    Only the third may have a payload: before it the pre-shared key has played no part, so a stranger could read or
    write it. Every fault raises `HandshakeError`, and after one nothing works any more.
    """

    def __init__(
        self,
        *,
        initiator: bool,
        static: X25519PrivateKey,
        psk: bytes,
        prologue: bytes,
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        """`ephemeral` is for tests that need known bytes. Raises `InvalidKeyError` for a `psk` of a wrong length."""
        if len(psk) != KEY_BYTES:
            raise InvalidKeyError("psk", f"must have {KEY_BYTES} bytes, and has {len(psk)}")
        self._state = HandshakeState(
            PROTOCOL_NAME, initiator=initiator, static=static, psk=psk, prologue=prologue, ephemeral=ephemeral
        )
        self._initiator = initiator
        self._done = 0
        self._failed = False
        self._binding: bytes | None = None

    def write(self, payload: bytes = b"") -> bytes:
        """The next message. Raises `HandshakeError` out of turn, or for a payload that may not be here."""
        self._begin(writing=True)
        if payload and self._done < 2:
            raise self._fail("a payload may only be in the third message")
        if len(payload) > MAX_MESSAGE_BYTES - MESSAGE_3_OVERHEAD:
            raise self._fail(f"a payload of {len(payload)} bytes does not fit a message")
        try:
            message = self._state.write_message(bytes(payload))
        except (InvalidTag, ValueError) as exc:
            raise self._fail("the other side's key cannot be used") from exc
        self._end()
        return message

    def read(self, message: bytes) -> bytes:
        """The payload of the other side's message. Raises `HandshakeError` for anything that is not that message."""
        self._begin(writing=False)
        expected = (MESSAGE_1_BYTES, MESSAGE_2_BYTES, None)[self._done]
        if (expected is not None and len(message) != expected) or len(message) > MAX_MESSAGE_BYTES:
            raise self._fail(f"message {self._done + 1} cannot have {len(message)} bytes")
        try:
            payload = self._state.read_message(bytes(message))
        except InvalidTag as exc:
            raise self._fail(
                "the other side does not know this cluster's secret, or the message was changed on the way"
            ) from exc
        except ValueError as exc:
            raise self._fail(f"message {self._done + 1} cannot be read: {exc}") from exc
        self._end()
        return payload

    @property
    def is_finished(self) -> bool:
        """All three messages have passed, and the other side has proved that it knows the pre-shared key.

        To the initiator this proof comes one step later: with the first record that opens under `keys`.
        """
        return self._done == 3 and not self._failed

    @property
    def remote_static(self) -> bytes:
        """The other side's Noise key. Raises `HandshakeError` before the message that brings it."""
        if self._failed or not self._state.remote_static:
            raise HandshakeError("the other side's key is not known yet")
        return self._state.remote_static

    @property
    def binding(self) -> bytes:
        """The hash after message 2, the same on both sides and in no other handshake: what identity proofs sign.

        It covers the prologue, both ephemeral keys and the responder's static key; a proof adds its maker's own.
        """
        if self._failed or self._binding is None:
            raise HandshakeError("the handshake has not come to its third message")
        return self._binding

    @property
    def handshake_hash(self) -> bytes:
        """The hash of the whole handshake: equal on both sides exactly if both saw the same one."""
        self._check_finished()
        return self._state.symmetric.hash

    def keys(self) -> tuple[bytes, bytes]:
        """The AES-256 keys to send and to receive with. Raises `HandshakeError` before the end."""
        self._check_finished()
        first, second = self._state.symmetric.split()
        return (first, second) if self._initiator else (second, first)

    def _begin(self, *, writing: bool) -> None:
        if self._failed or self._done == 3:
            raise self._fail("the handshake is over")
        if writing is not (self._initiator is (self._done % 2 == 0)):
            raise self._fail(f"message {self._done + 1} is {'the other' if writing else 'this'} side's to write")

    def _end(self) -> None:
        self._done += 1
        if self._done == 2:
            self._binding = self._state.symmetric.hash

    def _fail(self, why: str) -> HandshakeError:
        self._failed = True
        return HandshakeError(why)

    def _check_finished(self) -> None:
        if not self.is_finished:
            raise HandshakeError("the handshake is not finished")
