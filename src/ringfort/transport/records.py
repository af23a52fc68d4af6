"""Records: what goes over an encrypted connection. Pure.

    length (4 bytes, little-endian) · body sealed with the link's cipher, its tag at the end

The length is authenticated with the body. Each direction has its own key and counts its records; the count is the nonce
and is not sent, so a record that was changed, left out, repeated, moved or sent back does not open. The key is
replaced, one way, every `ROLL_OVER` records, long before the count or the cipher's limits would matter.

AES-256-GCM is what every side can do. AEGIS (draft-irtf-cfrg-aegis-aead) is made of the same AES rounds of the
processor without GCM's multiplications. AEGIS-128L (in libsodium) made 13 GB/s a core where AES-256-GCM made 3.5 (AMD
Zen 3); AEGIS-128X2 and -128X4 (in libaegis), two or four of it side by side in wide registers, 28 and 35 where it made
16 (AMD Zen 4, 1 MiB at a time).
Both sides of a link must be able to do it; they agree inside the handshake (handshake.py).
"""

from __future__ import annotations

from functools import cache
from struct import Struct
from timeit import repeat
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from ringfort.config import KIB, MIB
from ringfort.errors import TamperedError
from ringfort.identity.noise import TAG_BYTES, nonce_bytes, rekey

if TYPE_CHECKING:
    from typing_extensions import Self

# The packages' own functions return new bytes objects or take twice as long over a small record; the ones below them
# write to where we want it, as AESGCM's do. Where one is missing, the next best cipher is used.
try:
    from nacl import _sodium as _nacl  # pyright: ignore[reportMissingTypeStubs,reportAttributeAccessIssue,reportUnknownVariableType]
    from nacl.bindings import sodium_init

    _sodium: Any = cast("Any", _nacl)
    sodium_init()  # chooses the code for this processor; without it AEGIS is a hundred times slower
except ImportError:
    _sodium = None
try:
    from aeg import _loader as _aeg  # pyright: ignore[reportMissingTypeStubs]; chooses the code for this processor

    _libaegis: Any = cast("Any", _aeg)
except ImportError:
    _libaegis = None


class AesGcm:
    """AES-256-GCM with one key, by `cryptography`. The other ciphers have the same methods.

    `count` is the nonce: the caller never uses one twice.
    """

    name = "AES-256-GCM"
    tag_bytes = TAG_BYTES

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def seal(self, count: int, data: memoryview | bytes, record: memoryview, head: int) -> None:
        """Writes `data` sealed, and the tag, behind the first `head` bytes of `record`, and fills it. Those first bytes
        are authenticated too."""
        self._cipher.encrypt_into(nonce_bytes(count), data, record[:head], record[head:])

    def open(self, count: int, record: memoryview | bytes, head: int, into: memoryview) -> None:
        """The reverse. Raises `InvalidTag`; what is in `into` is then not authenticated."""
        self._cipher.decrypt_into(nonce_bytes(count), record[head:], record[:head], into)


def _aegis_key(name: str, key: bytes) -> bytes:
    """The key for another cipher than the one that the link began with."""
    return HKDFExpand(SHA256(), 16, b"ringfort records " + name.encode()).derive(key)


class Aegis128L:
    """AEGIS-128L with a tag of 32 bytes, by libsodium."""

    name = "AEGIS-128L"
    tag_bytes = 32

    def __init__(self, key: bytes) -> None:
        lib, ffi = _sodium.lib, _sodium.ffi
        self._key = _aegis_key(self.name, key)
        self._encrypt, self._decrypt = lib.crypto_aead_aegis128l_encrypt, lib.crypto_aead_aegis128l_decrypt
        self._at, self._null = ffi.from_buffer, ffi.NULL

    def seal(self, count: int, data: memoryview | bytes, record: memoryview, head: int) -> None:
        at, null, nonce = self._at, self._null, count.to_bytes(16, "little")
        start = at(record)
        self._encrypt(start + head, null, at(data), len(data), start, head, null, nonce, self._key)

    def open(self, count: int, record: memoryview | bytes, head: int, into: memoryview) -> None:
        at, null, nonce = self._at, self._null, count.to_bytes(16, "little")
        start = at(record)
        if self._decrypt(at(into), null, null, start + head, len(record) - head, start, head, nonce, self._key):
            raise InvalidTag


class Aegis128X2:
    """AEGIS-128X2 with a tag of 32 bytes, by libaegis."""

    name = "AEGIS-128X2"
    tag_bytes = 32

    def __init__(self, key: bytes) -> None:
        lib, function = _libaegis.lib, self.name.lower().replace("-", "")
        self._key = _aegis_key(self.name, key)
        self._encrypt, self._decrypt = getattr(lib, f"{function}_encrypt"), getattr(lib, f"{function}_decrypt")
        self._at = _libaegis.ffi.from_buffer

    def seal(self, count: int, data: memoryview | bytes, record: memoryview, head: int) -> None:
        at, nonce = self._at, count.to_bytes(16, "little")
        start = at(record)
        self._encrypt(start + head, self.tag_bytes, at(data), len(data), start, head, nonce, self._key)

    def open(self, count: int, record: memoryview | bytes, head: int, into: memoryview) -> None:
        at, nonce = self._at, count.to_bytes(16, "little")
        start = at(record)
        if self._decrypt(at(into), start + head, len(record) - head, self.tag_bytes, start, head, nonce, self._key):
            raise InvalidTag


class Aegis128X4(Aegis128X2):
    """AEGIS-128X4, likewise."""

    name = "AEGIS-128X4"


Cipher = AesGcm | Aegis128L | Aegis128X2
CIPHERS: Final[dict[int, type[Cipher]]] = {1: AesGcm, 2: Aegis128L, 3: Aegis128X2, 4: Aegis128X4}
"""By their numbers on the wire."""
LARGEST_TAG: Final = 32


@cache
def preferred() -> tuple[int, ...]:
    """The numbers of the ciphers that this machine has, the fastest first."""
    # libsodium offers AES-GCM only where the processor has AES rounds. AEGIS without them would be slow, and its time
    # would depend on the key.
    if _sodium is None or not _sodium.lib.crypto_aead_aes256gcm_is_available():
        return (1,)
    return (*sorted((2,) if _libaegis is None else (2, 3, 4), key=_seconds), 1)


def _seconds(number: int) -> float:
    """How long this machine takes to seal. Several of AEGIS-128L side by side are slower than one where the processor
    has no instruction for several."""
    cipher, data = CIPHERS[number](bytes(32)), bytes(64 * KIB)
    record = memoryview(bytearray(len(data) + cipher.tag_bytes))
    return min(repeat(lambda: cipher.seal(0, data, record, 0), number=1, repeat=20))


def agree(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """The cipher of a link: of those that both sides have, the one with the best places in both lists; else the one
    that every side has."""
    both = [number for number in ours if number in theirs]
    return min(both, key=lambda number: (ours.index(number) + theirs.index(number), -number), default=1)


# --- records ----------------------------------------------------------------------------------------------------------

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
