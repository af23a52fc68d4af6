"""The identity of a node: one Ed25519 key, in a file that only its owner can read; and the short ids of such keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ringfort.config import Environment
from ringfort.errors import HandshakeError, IdentityError
from ringfort.identity import base32, files, hosts

PUBLIC_KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
KEY_FILE: Final = "node_keypair"

MAX_KNOWN: Final = 4096
"""Keys to remember. Only members get here; the key that was not seen for longest is replaced."""

_HEADER = "ringfort-node-key-1"
_PEER_ID_BYTES = 10
"""80 bits, 16 letters. See `peer_id_of`."""


def key_path(home: Path, *, make: bool = True) -> Path:
    """Return the key file of this machine in `home`; with `make`, create its folder. Raises `IdentityError`."""
    return hosts.key_folder(home, make=make) / KEY_FILE


def peer_id_of(public_key: bytes) -> str:
    """Return the short id of a public key, such as `k7qf-3m2x-9rte-w0aj`: 80 bits of its hash, for people.

    Among a million nodes two have the same id with a probability of 10^-12. Making a key with a given id takes 2^80
    tries, making two of one's own with the same id 2^40. So people compare ids, and programs compare whole keys.
    """
    digest = hashlib.sha256(b"ringfort peer id 1\0" + public_key).digest()
    return base32.grouped(base32.to_text(base32.to_symbols(digest[:_PEER_ID_BYTES])))


class NodeIdentity:
    """The Ed25519 identity of a machine.

    The private key is in no `repr` and is never pickled.

    Examples:
        >>> identity = NodeIdentity.load_or_generate()
        >>> signature = identity.sign(b"data")
        >>> NodeIdentity.verify(identity.public_key, signature, b"data")
        True
    """

    __slots__ = ("_key", "public_key")

    public_key: bytes
    """The 32 bytes that identify this node to others."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes_raw()

    @classmethod
    def load_or_generate(cls, path: str | Path | None = None) -> NodeIdentity:
        """Return the identity in the file `path`, by default this user's own, or create it.

        If several processes do so at once, all get the same. Raises `IdentityError`, with the command that fixes it,
        if other users can read the file, if it is damaged, or if it cannot be created.
        """
        place = key_path(Environment.from_mapping().home_folder) if path is None else Path(path).expanduser()
        data = files.load_or_create(place, lambda: _encode(cls.ephemeral().private_bytes()))
        return cls(_decode(data, place))

    @classmethod
    def ephemeral(cls) -> NodeIdentity:
        """Create an identity that is not stored."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_private_bytes(cls, secret: bytes) -> NodeIdentity:
        """Recreate an identity from `private_bytes`, in another process of the same user."""
        return cls(Ed25519PrivateKey.from_private_bytes(secret))

    def private_bytes(self) -> bytes:
        """Return the private key. A secret: only for the control process of the same user."""
        return self._key.private_bytes_raw()

    @property
    def peer_id(self) -> str:
        """The short id for people; see `peer_id_of`."""
        return peer_id_of(self.public_key)

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`, 64 bytes."""
        return self._key.sign(data)

    @staticmethod
    def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
        """Return whether `signature` is that of `public_key` for `data`. False for an invalid key or signature."""
        if _without_sign(public_key) in _SMALL_ORDER:
            return False
        try:
            Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
        except (InvalidSignature, ValueError):
            return False
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeIdentity) and other.public_key == self.public_key

    def __hash__(self) -> int:
        return hash(self.public_key)

    def __repr__(self) -> str:
        return f"NodeIdentity({self.peer_id})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A NodeIdentity contains a private key and cannot be pickled; load it in each process")


class KnownKeys:
    """Binds each short id to one public key.

    Epochs and control messages name a peer by its short id, 80 bits of a hash. A second key with the same id is refused
    for as long as the process lives.
    """

    def __init__(self, most: int = MAX_KNOWN, id_of: Callable[[bytes], str] = peer_id_of) -> None:
        self._most, self._id_of = most, id_of
        self._keys: dict[str, bytes] = {}

    def name(self, key: bytes) -> str:
        """Return the short id of `key`. Raises `HandshakeError` if another key has shown the same id before."""
        name = self._id_of(key)
        known = self._keys.pop(name, key)
        self._keys[name] = known  # moved to the end: the last to be forgotten
        if len(self._keys) > self._most:
            del self._keys[next(iter(self._keys))]
        if known != key:
            raise HandshakeError(f"Peer id {name} belongs to another key, which was seen first")
        return name


_P = 2**255 - 19
_SMALL_ORDER = frozenset(
    (
        *(number.to_bytes(32, "little") for number in (0, 1, _P - 1, _P, _P + 1)),
        bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
        bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
    )
)
"""Public keys for which anybody can make signatures: points of small order, as libsodium lists them. OpenSSL accepts
them, so they would be identities without an owner."""


def _without_sign(public_key: bytes) -> bytes:
    return public_key[:31] + bytes([public_key[31] & 0x7F]) if len(public_key) == 32 else b""


def _encode(secret: bytes) -> bytes:
    # A checksum for damaged files. It reveals nothing about the secret, whose 256 bits nobody can try.
    digest = hashlib.sha256(_HEADER.encode() + secret).hexdigest()[:8]
    return f"{_HEADER} {secret.hex()} {digest}\n".encode("ascii")


def _decode(data: bytes, path: Path) -> Ed25519PrivateKey:
    """Raises `IdentityError` for a damaged file. Its content is in no error, not even as a cause."""
    with suppress(ValueError):
        _, text, _ = data.decode("ascii").split(" ")
        secret = bytes.fromhex(text)
        if data == _encode(secret):
            return Ed25519PrivateKey.from_private_bytes(secret)
    raise IdentityError(
        path,
        "is damaged" if data else "is empty",
        f"rm {files.quoted(path)} (this machine then gets a new identity)",
    )
