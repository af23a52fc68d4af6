"""Records: what goes over an encrypted connection. Pure.

    length (4 bytes, little-endian) · body sealed with the link's cipher (ciphers.py), its tag at the end

The length is authenticated with the body. Each direction has its own key and counts its records; the count is the nonce
and is not sent, so a record that was changed, left out, repeated, moved or sent back does not open. The key is
replaced, one way, every `ROLL_OVER` records, long before the count or the cipher's limits would matter.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

import msgspec
from cryptography.exceptions import InvalidTag

from ringfort.config import MIB
from ringfort.errors import TamperedError
from ringfort.identity.noise import rekey
from ringfort.transport.ciphers import CIPHERS, LARGEST_TAG, AesGcm, Cipher

if TYPE_CHECKING:
    from typing_extensions import Self

LENGTH = Struct("<I")
MAX_PLAIN = MIB
"""Bytes sealed at once: a whole frame's payload. With 256 KiB, which would stay in the cache, 16 and 64 MiB took 1.3 to
1.8 times as long, even where many were sealed and sent in one go: twice the time in the kernel, where the two sides get
into each other's way. Cutting only the last frame of a message, so that one record is opened while the next is sealed,
once made 1 MiB take 0.7 of the time; since the ciphers are faster, 1.04 to 1.11."""
MAX_OVERHEAD = LENGTH.size + LARGEST_TAG
MAX_RECORD = MAX_PLAIN + MAX_OVERHEAD
ROLL_OVER = 1 << 18
"""Records a key: at most 256 GiB. Both ciphers are sound far beyond; a stolen key opens no more than that."""


class RecordState(msgspec.Struct, frozen=True):
    """One direction of a connection, for another process of this machine that takes it over. Holds a key."""

    cipher: str
    key: bytes
    count: int


class _Half:
    """A key and its count."""

    def __init__(self, key: bytes, cipher: type[Cipher] = AesGcm, *, roll_over: int = ROLL_OVER) -> None:
        self.overhead = LENGTH.size + cipher.tag_bytes
        """Bytes that a record has more than what it holds."""
        self.cipher = cipher
        self._key = key
        self._cipher = cipher(key)
        self._count = 0
        self._roll_over = roll_over

    def _next_count(self) -> int:
        if self._count == self._roll_over:
            self._key = rekey(self._key)
            self._cipher = self.cipher(self._key)
            self._count = 0
        count = self._count
        self._count += 1
        return count

    @property
    def state(self) -> RecordState:
        """What another process needs to continue from here. This one must not continue then."""
        return RecordState(self.cipher.name, self._key, self._count)

    @classmethod
    def resume(cls, state: RecordState) -> Self:
        """Continue where `state` was taken."""
        half = cls(state.key, next(cipher for cipher in CIPHERS.values() if cipher.name == state.cipher))
        half._count = state.count
        return half

    def with_cipher(self, cipher: type[Cipher]) -> Self:
        """Return the same direction with the cipher that the sides agreed on."""
        return self if cipher is self.cipher else type(self)(self._key, cipher, roll_over=self._roll_over)


class Sealer(_Half):
    """Makes the records of one direction."""

    def seal(self, data: memoryview | bytes, out: memoryview) -> int:
        """Write the record of `data`, at most `MAX_PLAIN` bytes of it, to the start of `out`; return its size."""
        count = self._next_count()  # first: it may replace the cipher
        end = len(data) + self.overhead
        LENGTH.pack_into(out, 0, end - LENGTH.size)
        self._cipher.seal(count, data, out[:end], LENGTH.size)
        return end


class Opener(_Half):
    """Reads the records of one direction."""

    def body_length(self, head: memoryview | bytes, at: int = 0) -> int:
        """Return the length that the first bytes of a record, at `at` in `head`, claim. Raises `TamperedError` for an
        invalid length."""
        (length,) = LENGTH.unpack_from(head, at)
        least = self.overhead - LENGTH.size
        if not least <= length <= least + MAX_PLAIN:
            raise TamperedError(f"a record claims {length} bytes; the limits are {least} and {least + MAX_PLAIN}")
        return length

    def open(self, record: memoryview | bytes, into: memoryview) -> None:
        """Open a whole record into `into`, which has exactly the size of what was sealed. Raises `TamperedError`."""
        if len(record) != len(into) + self.overhead:
            raise TamperedError(f"a record of {len(record)} bytes does not contain the {len(into)} that it claims")
        count = self._next_count()  # first: it may replace the cipher
        try:
            self._cipher.open(count, record, LENGTH.size, into)
        except InvalidTag as exc:
            into[:] = bytes(len(into))  # the cipher has written there what is not authenticated
            raise TamperedError("a record was changed, dropped, repeated or reordered on its way") from exc
