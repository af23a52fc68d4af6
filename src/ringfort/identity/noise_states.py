"""The part of the Noise Protocol Framework that the handshake is made of, without I/O.

It follows revision 34 (noiseprotocol.org). The three state classes and their methods have the names of its section 5,
so that the two can be read side by side:

    CipherState     a key and a counter: seals and opens
    SymmetricState  what both sides have derived and hashed so far
    HandshakeState  walks the message patterns
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PROTOCOL_NAME: Final = "Noise_XXpsk3_25519_AESGCM_SHA256"
KEY_BYTES: Final = 32
"""Of every key here: X25519 (public and private), AES-256, the pre-shared key, and a SHA-256 hash."""
TAG_BYTES: Final = 16

# Section 7.5 and 9.4. XX alone is here for the published vectors: it proves no membership, and nothing else uses it.
_XX = (("e",), ("e", "ee", "s", "es"), ("s", "se"))
PATTERNS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "Noise_XX_25519_AESGCM_SHA256": _XX,
    PROTOCOL_NAME: (*_XX[:2], (*_XX[2], "psk")),
}

_MAX_NONCE = 2**64 - 1
"""Reserved by Noise for the rekey; a counter that came this far would have to stop."""


def nonce_bytes(counter: int) -> bytes:
    """The 96-bit nonce of AES-GCM for a counter: 32 zero bits, then 64 bits, big-endian (section 12.4)."""
    return counter.to_bytes(12, "big")


def rekey(key: bytes) -> bytes:
    """The key that follows `key` (section 4.2). One way: the new key does not give the old one back."""
    return AESGCM(key).encrypt(nonce_bytes(_MAX_NONCE), bytes(KEY_BYTES), b"")[:KEY_BYTES]


def _hkdf(chaining_key: bytes, material: bytes, outputs: int) -> list[bytes]:
    """Section 4.3: two or three keys out of what was known and what is new."""
    secret = hmac.digest(chaining_key, material, "sha256")
    found = [b""]
    for index in range(1, outputs + 1):
        found.append(hmac.digest(secret, found[-1] + bytes([index]), "sha256"))
    return found[1:]


class CipherState:
    """A key and the counter of its next message. Without a key it passes data through."""

    def __init__(self, key: bytes | None = None) -> None:
        self.key = key
        self.nonce = 0
        self._cipher = None if key is None else AESGCM(key)

    def encrypt_with_ad(self, associated: bytes, plaintext: bytes) -> bytes:
        if self._cipher is None:
            return plaintext
        return self._cipher.encrypt(self._next_nonce(), plaintext, associated)

    def decrypt_with_ad(self, associated: bytes, ciphertext: bytes) -> bytes:
        """Raises `InvalidTag`; the counter then stays, as section 5.1 has it."""
        if self._cipher is None:
            return ciphertext
        nonce = self._next_nonce()
        try:
            return self._cipher.decrypt(nonce, ciphertext, associated)
        except InvalidTag:
            self.nonce -= 1
            raise

    def _next_nonce(self) -> bytes:
        if self.nonce >= _MAX_NONCE:
            raise ValueError("the counter of this key has run out")
        self.nonce += 1
        return nonce_bytes(self.nonce - 1)


class SymmetricState:
    """The chaining key, the hash of all that was said, and the cipher that both give."""

    def __init__(self, protocol: str) -> None:
        name = protocol.encode()
        self.hash = name.ljust(32, b"\0") if len(name) <= 32 else hashlib.sha256(name).digest()
        self.chaining_key = self.hash
        self.cipher = CipherState()

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
        """The keys for what comes after: the initiator seals with the first, the responder with the second."""
        first, second = _hkdf(self.chaining_key, b"", 2)
        return first, second


class HandshakeState:
    """One side of a handshake of the patterns above. Raises `InvalidTag` and `ValueError`; checks no turns."""

    def __init__(
        self,
        protocol: str,
        *,
        initiator: bool,
        static: X25519PrivateKey,
        psk: bytes = b"",
        prologue: bytes,
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        self.initiator = initiator
        self.pending = list(PATTERNS[protocol])
        self.symmetric = SymmetricState(protocol)
        self.symmetric.mix_hash(prologue)
        self._static = static
        # Fresh for every handshake: this is what makes recorded traffic useless to whoever steals a key later.
        self._ephemeral = ephemeral or X25519PrivateKey.generate()
        self._psk = psk
        self.remote_static = b""
        self._remote_ephemeral = b""

    def write_message(self, payload: bytes) -> bytes:
        message = b""
        for token in self.pending.pop(0):
            if token == "e":
                public = self._ephemeral.public_key().public_bytes_raw()
                self._mix_ephemeral(public)
                message += public
            elif token == "s":
                message += self.symmetric.encrypt_and_hash(self._static.public_key().public_bytes_raw())
            else:
                self._mix_token(token)
        return message + self.symmetric.encrypt_and_hash(payload)

    def read_message(self, message: bytes) -> bytes:
        for token in self.pending.pop(0):
            if token == "e":
                self._remote_ephemeral, message = _cut(message, KEY_BYTES)
                self._mix_ephemeral(self._remote_ephemeral)
            elif token == "s":
                # In both patterns a key is there by now, so the static key travels sealed.
                sealed, message = _cut(message, KEY_BYTES + TAG_BYTES)
                self.remote_static = self.symmetric.decrypt_and_hash(sealed)
            else:
                self._mix_token(token)
        return self.symmetric.decrypt_and_hash(message)

    def _mix_ephemeral(self, public: bytes) -> None:
        self.symmetric.mix_hash(public)
        if self._psk:  # section 9.2: keys from the pre-shared key are never the same twice
            self.symmetric.mix_key(public)

    def _mix_token(self, token: str) -> None:
        """A key agreement, named by whose keys meet (the initiator's first), or the pre-shared key."""
        if token == "psk":
            self.symmetric.mix_key_and_hash(self._psk)
            return
        ours, theirs = token if self.initiator else token[::-1]
        private = self._ephemeral if ours == "e" else self._static
        public = self._remote_ephemeral if theirs == "e" else self.remote_static
        # Refuses, with a ValueError, the points of low order that make the outcome zero whatever our key is.
        self.symmetric.mix_key(private.exchange(X25519PublicKey.from_public_bytes(public)))


def _cut(message: bytes, size: int) -> tuple[bytes, bytes]:
    if len(message) < size:
        raise ValueError(f"the message is {size - len(message)} bytes too short")
    return message[:size], message[size:]
