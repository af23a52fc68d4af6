"""Records: what goes over an encrypted connection. Pure.

    length (4 bytes, little-endian) · body sealed with AES-256-GCM, its tag at the end

The length is authenticated with the body. Each direction has its own key and counts its records; the count is the nonce
and is not sent, so a record that was changed, left out, repeated, moved or sent back does not open. The key is
replaced, one way, every `ROLL_OVER` records, long before the count or the cipher's limits would matter.
"""

from __future__ import annotations

from struct import Struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ringfort.config import MIB
from ringfort.errors import TamperedError
from ringfort.identity.noise import TAG_BYTES, nonce_bytes, rekey

LENGTH = Struct("<I")
MAX_PLAIN = MIB
"""Bytes sealed at once: a whole frame's payload. With 256 KiB, which would stay in the cache, the calls around the
cipher cost more than the cache saved: 64 MiB took 1.3 to 1.8 times as long (two rounds on a noisy machine)."""
MAX_BODY = MAX_PLAIN + TAG_BYTES
MAX_RECORD = LENGTH.size + MAX_BODY
OVERHEAD = LENGTH.size + TAG_BYTES
ROLL_OVER = 1 << 18
"""Records a key: at most 256 GiB. AES-GCM with a counter is sound far beyond; a stolen key opens no more than that."""


class _Half:
    """A key and its count."""

    def __init__(self, key: bytes, roll_over: int) -> None:
        self._key = key
        self._cipher = AESGCM(key)
        self._count = 0
        self._roll_over = roll_over

    def _next_nonce(self) -> bytes:
        if self._count == self._roll_over:
            self._key = rekey(self._key)
            self._cipher = AESGCM(self._key)
            self._count = 0
        nonce = nonce_bytes(self._count)
        self._count += 1
        return nonce


class Sealer(_Half):
    """Makes the records of one direction."""

    def __init__(self, key: bytes, *, roll_over: int = ROLL_OVER) -> None:
        super().__init__(key, roll_over)

    def seal(self, data: memoryview | bytes, out: memoryview) -> int:
        """Writes the record of `data`, at most `MAX_PLAIN` bytes of it, to the start of `out`; returns its size."""
        end = len(data) + OVERHEAD
        LENGTH.pack_into(out, 0, len(data) + TAG_BYTES)
        nonce = self._next_nonce()  # first: it may replace the cipher
        self._cipher.encrypt_into(nonce, data, out[: LENGTH.size], out[LENGTH.size : end])
        return end


class Opener(_Half):
    """Reads the records of one direction."""

    def __init__(self, key: bytes, *, roll_over: int = ROLL_OVER) -> None:
        super().__init__(key, roll_over)

    @staticmethod
    def body_length(head: memoryview | bytes) -> int:
        """The length that a record's first bytes claim. Raises `TamperedError` for one that no record has."""
        (length,) = LENGTH.unpack_from(head)
        if not TAG_BYTES <= length <= MAX_BODY:
            raise TamperedError(f"a record claims {length} bytes; they have {TAG_BYTES} to {MAX_BODY}")
        return length

    def open(self, record: memoryview | bytes, into: memoryview) -> None:
        """Opens a whole record into `into`, which has exactly the size of what was sealed. Raises `TamperedError`."""
        if len(record) != len(into) + OVERHEAD:
            raise TamperedError(f"a record of {len(record)} bytes does not hold the {len(into)} that it claims")
        nonce = self._next_nonce()  # first: it may replace the cipher
        try:
            self._cipher.decrypt_into(nonce, record[LENGTH.size :], record[: LENGTH.size], into)
        except InvalidTag as exc:
            into[:] = bytes(len(into))  # the cipher has written there what nobody vouches for
            raise TamperedError("a record was changed, left out, repeated or moved on its way") from exc
