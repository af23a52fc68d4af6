"""The handshake `Noise_XXpsk3_25519_AESGCM_SHA256`, without I/O: messages in, messages out.

The three state classes follow revision 34 of the Noise Protocol Framework (noiseprotocol.org), and have the names of
its section 5, so that the two can be read side by side:

    CipherState     a key and a counter: seals and opens
    SymmetricState  what both sides have derived and hashed so far
    HandshakeState  processes the message patterns

`NoiseHandshake` adds what the framework leaves to the application: it keeps the turns, allows no payload that a
stranger could read or write, ends at the first error, and raises only `HandshakeError`.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import InitVar, dataclass, field
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ringfort.errors import HandshakeError, InvalidKeyError

PROTOCOL_NAME: Final = "Noise_XXpsk3_25519_AESGCM_SHA256"
KEY_BYTES: Final = 32
"""The length of every key: X25519 (public and private), AES-256, the pre-shared key, and a SHA-256 hash."""
TAG_BYTES: Final = 16

MAX_MESSAGE_BYTES: Final = 65535
"""The limit of Noise for one message, section 3."""
MESSAGE_1_BYTES: Final = KEY_BYTES + TAG_BYTES
"""An ephemeral key and an empty payload. (With a pre-shared key every payload has a tag.)"""
MESSAGE_2_BYTES: Final = KEY_BYTES + KEY_BYTES + TAG_BYTES + TAG_BYTES
"""An ephemeral key, a sealed static key and an empty payload."""
MESSAGE_3_OVERHEAD: Final = KEY_BYTES + TAG_BYTES + TAG_BYTES
"""What the third message adds to its payload: a sealed static key and the tag of the payload."""

PATTERN: Final = (("e",), ("e", "ee", "s", "es"), ("s", "se", "psk"))
"""The tokens of the three messages, sections 7.5 and 9.4."""

_MAX_NONCE = 2**64 - 1
"""Reserved by Noise for the rekey; no message may use it."""


def nonce_bytes(counter: int) -> bytes:
    """The 96-bit nonce of AES-GCM for a counter: 32 zero bits, then 64 bits, big-endian (section 12.4)."""
    return counter.to_bytes(12, "big")


def rekey(key: bytes) -> bytes:
    """The key that follows `key` (section 4.2). One way: the new key does not give the old one back."""
    return AESGCM(key).encrypt(nonce_bytes(_MAX_NONCE), bytes(KEY_BYTES), b"")[:KEY_BYTES]


def _hkdf(chaining_key: bytes, material: bytes, outputs: int) -> list[bytes]:
    """Section 4.3: derive two or three keys."""
    secret = hmac.digest(chaining_key, material, "sha256")
    found = [b""]
    for index in range(1, outputs + 1):
        found.append(hmac.digest(secret, found[-1] + bytes([index]), "sha256"))
    return found[1:]


class CipherState:
    """A key and the counter of its next message. Keys of a handshake have a few messages each, and the first that does
    not open ends it, so the counter neither runs out nor goes back."""

    def __init__(self, key: bytes) -> None:
        self.nonce = 0
        self._cipher = AESGCM(key)

    def encrypt_with_ad(self, associated: bytes, plaintext: bytes) -> bytes:
        return self._cipher.encrypt(self._next_nonce(), plaintext, associated)

    def decrypt_with_ad(self, associated: bytes, ciphertext: bytes) -> bytes:
        """Raises `InvalidTag`."""
        return self._cipher.decrypt(self._next_nonce(), ciphertext, associated)

    def _next_nonce(self) -> bytes:
        self.nonce += 1
        return nonce_bytes(self.nonce - 1)


class SymmetricState:
    """The chaining key, the hash of all messages, and the cipher derived from them."""

    cipher: CipherState
    """There is one from the first token on: with a pre-shared key, a public ephemeral key is mixed in as a key."""

    def __init__(self) -> None:
        # The name is as long as a hash; section 5.2 would hash a longer one.
        self.chaining_key = self.hash = PROTOCOL_NAME.encode()

    def mix_key(self, material: bytes) -> None:
        self.chaining_key, key = _hkdf(self.chaining_key, material, 2)
        self.cipher = CipherState(key)

    def mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def mix_key_and_hash(self, material: bytes) -> None:
        self.chaining_key, digest, key = _hkdf(self.chaining_key, material, 3)
        self.mix_hash(digest)
        self.cipher = CipherState(key)

    def encrypt_and_hash(self, plaintext: bytes) -> bytes:
        ciphertext = self.cipher.encrypt_with_ad(self.hash, plaintext)
        self.mix_hash(ciphertext)
        return ciphertext

    def decrypt_and_hash(self, ciphertext: bytes) -> bytes:
        plaintext = self.cipher.decrypt_with_ad(self.hash, ciphertext)
        self.mix_hash(ciphertext)
        return plaintext

    def split(self) -> tuple[bytes, bytes]:
        """The keys after the handshake: the initiator seals with the first, the responder with the second."""
        first, second = _hkdf(self.chaining_key, b"", 2)
        return first, second


@dataclass(kw_only=True, eq=False, repr=False)  # no repr: it would show the secrets
class HandshakeState:
    """One side of a handshake. Raises `InvalidTag` and `ValueError`, and `InvalidKeyError` for a `psk` of the wrong
    length; does not check the turns."""

    initiator: bool
    static: X25519PrivateKey
    psk: bytes
    prologue: InitVar[bytes]
    ephemeral: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    """New for every handshake, which makes recorded traffic useless to anyone who steals a key later. Only tests with
    known bytes pass one."""

    def __post_init__(self, prologue: bytes) -> None:
        if len(self.psk) != KEY_BYTES:
            raise InvalidKeyError("psk", f"must have {KEY_BYTES} bytes, not {len(self.psk)}")
        self.pending = list(PATTERN)
        self.symmetric = SymmetricState()
        self.symmetric.mix_hash(prologue)
        self._remote_static = self._remote_ephemeral = b""

    def write_message(self, payload: bytes) -> bytes:
        message = b""
        for token in self.pending.pop(0):
            if token == "e":
                public = self.ephemeral.public_key().public_bytes_raw()
                self._mix_ephemeral(public)
                message += public
            elif token == "s":
                message += self.symmetric.encrypt_and_hash(self.static.public_key().public_bytes_raw())
            else:
                self._mix_token(token)
        return message + self.symmetric.encrypt_and_hash(payload)

    def read_message(self, message: bytes) -> bytes:
        for token in self.pending.pop(0):
            if token == "e":
                self._remote_ephemeral, message = _cut(message, KEY_BYTES)
                self._mix_ephemeral(self._remote_ephemeral)
            elif token == "s":
                sealed, message = _cut(message, KEY_BYTES + TAG_BYTES)
                self._remote_static = self.symmetric.decrypt_and_hash(sealed)
            else:
                self._mix_token(token)
        return self.symmetric.decrypt_and_hash(message)

    def _mix_ephemeral(self, public: bytes) -> None:
        self.symmetric.mix_hash(public)
        self.symmetric.mix_key(public)  # section 9.2: keys derived from the pre-shared key are never the same twice

    def _mix_token(self, token: str) -> None:
        """Mix in a key agreement, named by the two keys (the initiator's first), or the pre-shared key."""
        if token == "psk":
            self.symmetric.mix_key_and_hash(self.psk)
            return
        ours, theirs = token if self.initiator else token[::-1]
        private = self.ephemeral if ours == "e" else self.static
        public = self._remote_ephemeral if theirs == "e" else self._remote_static
        # Raises ValueError for points of low order, which make the result zero whatever our key is.
        self.symmetric.mix_key(private.exchange(X25519PublicKey.from_public_bytes(public)))


def _cut(message: bytes, size: int) -> tuple[bytes, bytes]:
    if len(message) < size:
        raise ValueError(f"{size - len(message)} bytes are missing")
    return message[:size], message[size:]


class NoiseHandshake(HandshakeState):
    """One side of one handshake: three messages, of which the initiator writes the first and the third.

    Only the third may have a payload: before it the pre-shared key is not used, so a stranger could read or write it.
    Every error is a `HandshakeError`, and ends the handshake.
    """

    _failed = False
    _binding = b""

    def write(self, payload: bytes = b"") -> bytes:
        """Return the next message. Raises `HandshakeError` out of turn, or for a payload that is not allowed."""
        number = self._begin(writing=True)
        if payload and number < 3:
            raise self._fail("Only the third message may have a payload")
        if len(payload) > MAX_MESSAGE_BYTES - MESSAGE_3_OVERHEAD:
            raise self._fail(f"A payload of {len(payload)} bytes does not fit in a message")
        try:
            message = self.write_message(bytes(payload))
        except ValueError as exc:
            raise self._fail("The key of the other side is invalid") from exc
        if number == 2:
            self._binding = self.symmetric.hash
        return message

    def read(self, message: bytes) -> bytes:
        """Return the payload of the other side's message. Raises `HandshakeError` for any other bytes."""
        number = self._begin(writing=False)
        expected = (MESSAGE_1_BYTES, MESSAGE_2_BYTES, len(message))[number - 1]
        if len(message) != expected or len(message) > MAX_MESSAGE_BYTES:
            raise self._fail(f"Invalid message {number}: {len(message)} bytes")
        try:
            payload = self.read_message(bytes(message))
        except InvalidTag as exc:
            raise self._fail(
                "The other side does not know the secret of this cluster, or the message was changed on its way"
            ) from exc
        except ValueError as exc:
            raise self._fail(f"Invalid message {number}: {exc}") from exc
        if number == 2:
            self._binding = self.symmetric.hash
        return payload

    @property
    def is_finished(self) -> bool:
        """Whether all three messages have passed, and the other side has proved that it knows the pre-shared key.

        For the initiator the proof comes one step later: with the first record that opens under `keys`.
        """
        return not self.pending and not self._failed

    @property
    def remote_static(self) -> bytes:
        """The Noise key of the other side. Raises `HandshakeError` before the message that contains it."""
        if self._failed or not self._remote_static:
            raise HandshakeError("The key of the other side is not known yet")
        return self._remote_static

    @property
    def binding(self) -> bytes:
        """The hash after message 2, the same on both sides and in no other handshake. Identity proofs sign it.

        It covers the prologue, both ephemeral keys and the responder's static key; a proof adds its signer's own.
        """
        if self._failed or not self._binding:
            raise HandshakeError("The handshake has not reached its third message")
        return self._binding

    def keys(self) -> tuple[bytes, bytes]:
        """Return the keys to send and to receive with. Raises `HandshakeError` before the end."""
        if not self.is_finished:
            raise HandshakeError("The handshake is not finished")
        first, second = self.symmetric.split()
        return (first, second) if self.initiator else (second, first)

    def _begin(self, *, writing: bool) -> int:
        """Return the number of the next message."""
        if self._failed or not self.pending:
            raise self._fail("The handshake is over")
        number = len(PATTERN) - len(self.pending) + 1
        if writing is not (self.initiator is (number != 2)):
            raise self._fail(f"Message {number} must be written by {'the other' if writing else 'this'} side")
        return number

    def _fail(self, why: str) -> HandshakeError:
        self._failed = True
        return HandshakeError(why)
