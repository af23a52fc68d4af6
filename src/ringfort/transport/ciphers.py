"""The two ciphers that records are sealed with, into and out of the caller's memory. Pure.

AES-256-GCM is what every side can do. AEGIS-128L (draft-irtf-cfrg-aegis-aead, in libsodium) is made of the same AES
rounds of the processor without GCM's multiplications: 13 GB/s a core where AES-256-GCM made 3.5 (256 KiB at a time, AMD
Zen 3). Both sides of a link must prefer it; they agree inside the handshake (opening.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, Protocol, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from ringfort.identity.noise import TAG_BYTES, nonce_bytes

try:
    # PyNaCl's own functions return new bytes objects; the ones below it write to where we want it, as AESGCM's do.
    from nacl import _sodium as _nacl  # pyright: ignore[reportMissingTypeStubs,reportAttributeAccessIssue,reportUnknownVariableType]
    from nacl.bindings import sodium_init
except ImportError:  # no wheel for this machine, or a PyNaCl of another make: AES-256-GCM does
    _sodium: Any = None
    _ffi: Any = None
else:
    _sodium, _ffi = cast("Any", _nacl).lib, cast("Any", _nacl).ffi
    sodium_init()  # chooses the code for this processor; without it AEGIS is a hundred times slower


class Cipher(Protocol):
    """One key. `count` is the nonce: the caller never uses one twice."""

    name: str
    tag_bytes: int

    def __init__(self, key: bytes) -> None: ...
    def seal(self, count: int, data: memoryview | bytes, head: memoryview, out: memoryview) -> None:
        """Writes `data` sealed, and the tag, to `out`; `head` is vouched for as well."""
        ...

    def open(self, count: int, body: memoryview | bytes, head: memoryview | bytes, into: memoryview) -> None:
        """The reverse. Raises `InvalidTag`; what is in `into` then is nobody's."""
        ...


class AesGcm:
    """AES-256-GCM, by `cryptography`."""

    name = "AES-256-GCM"
    tag_bytes = TAG_BYTES

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def seal(self, count: int, data: memoryview | bytes, head: memoryview, out: memoryview) -> None:
        self._cipher.encrypt_into(nonce_bytes(count), data, head, out)

    def open(self, count: int, body: memoryview | bytes, head: memoryview | bytes, into: memoryview) -> None:
        self._cipher.decrypt_into(nonce_bytes(count), body, head, into)


class Aegis:
    """AEGIS-128L with a tag of 32 bytes, by libsodium. Its key comes from the link's by HKDF: another cipher, another
    key."""

    name = "AEGIS-128L"
    tag_bytes = 32

    def __init__(self, key: bytes) -> None:
        self._key = HKDFExpand(SHA256(), 16, b"ringfort records AEGIS-128L").derive(key)
        self._encrypt, self._decrypt = _sodium.crypto_aead_aegis128l_encrypt, _sodium.crypto_aead_aegis128l_decrypt
        self._at, self._null = _ffi.from_buffer, _ffi.NULL

    def seal(self, count: int, data: memoryview | bytes, head: memoryview, out: memoryview) -> None:
        at, null, nonce = self._at, self._null, count.to_bytes(16, "little")
        self._encrypt(at(out), null, at(data), len(data), at(head), len(head), null, nonce, self._key)

    def open(self, count: int, body: memoryview | bytes, head: memoryview | bytes, into: memoryview) -> None:
        at, null, nonce = self._at, self._null, count.to_bytes(16, "little")
        if self._decrypt(at(into), null, null, at(body), len(body), at(head), len(head), nonce, self._key):
            raise InvalidTag


CIPHERS: Final[dict[int, type[Cipher]]] = {1: AesGcm, 2: Aegis}
"""By the number that the wire has for each."""
LARGEST_TAG: Final = 32


@cache
def preferred() -> tuple[int, ...]:
    """The numbers of the ciphers that this machine can do, the one it likes best first."""
    # libsodium offers AES-GCM only where the processor has AES rounds, which is where AEGIS is fast.
    if _sodium is not None and _sodium.crypto_aead_aes256gcm_is_available():
        return (2, 1)
    return (1,)


def agree(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """The cipher of a link: the one that both sides like best, or else the one that every side can do."""
    return ours[0] if ours[:1] == theirs[:1] else 1
