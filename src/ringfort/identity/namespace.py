"""A cluster: its name and its secret, and the two keys that are made of them."""

from __future__ import annotations

import hmac
import secrets
import unicodedata
from typing import Final, NoReturn

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from ringfort.errors import InvalidKeyError
from ringfort.identity import codes
from ringfort.identity.noise import KEY_BYTES, PROTOCOL_NAME

NETWORK_ID_BYTES: Final = 16
"""Public and for telling clusters apart: no two meet by chance, and it fits a discovery record."""
MIN_PASSPHRASE: Final = 15
"""Characters, as NIST SP 800-63B has it for a password that stands alone. Whoever sees the public network id can try
passphrases without asking us, and only their number and scrypt's cost stand against that."""

# OWASP's first choice for scrypt: 128 MiB and some 0.4 s a try, once a start for us, each time for whoever guesses.
_SCRYPT_N = 2**17
_SCRYPT_R = 8
_SCRYPT_P = 1

# One label a purpose, so that no key tells anything about another. The name is bound in, so that a secret that was
# copied to another name is another cluster.
_NETWORK_ID_LABEL = b"ringfort 1 network id"
_HANDSHAKE_LABEL = b"ringfort 1 handshake key " + PROTOCOL_NAME.encode()
_PASSPHRASE_LABEL = b"ringfort 1 passphrase"


class NetworkNamespace:
    """A cluster that this process belongs to. Its secret is in no `repr` and is not pickled; `join_code` shows it."""

    __slots__ = ("_secret", "handshake_key", "name", "network_id")

    name: str
    network_id: bytes
    """16 bytes that anyone may see: in discovery records and at the start of a connection."""
    handshake_key: bytes
    """The 32-byte pre-shared key of the handshake."""

    def __init__(self, name: str, secret: bytes) -> None:
        """Raises `InvalidArgumentError` for a name and `InvalidKeyError` for a secret that is none."""
        if len(secret) != codes.SECRET_BYTES:
            raise InvalidKeyError("secret", f"must have {codes.SECRET_BYTES} bytes, and has {len(secret)}")
        self.name = codes.check_name(name)
        self._secret = secret
        self.network_id = _derive(secret, _NETWORK_ID_LABEL, name, NETWORK_ID_BYTES)
        self.handshake_key = _derive(secret, _HANDSHAKE_LABEL, name, KEY_BYTES)

    @classmethod
    def generate(cls, name: str = "default") -> NetworkNamespace:
        """A new cluster with a random secret."""
        return cls(name, secrets.token_bytes(codes.SECRET_BYTES))

    @classmethod
    def from_join_code(cls, text: str) -> NetworkNamespace:
        """The cluster of a join code. Raises `JoinCodeError` with the place of the likely error."""
        return cls(*codes.decode(text))

    @classmethod
    def from_passphrase(cls, name: str, passphrase: str) -> NetworkNamespace:
        """The cluster of all who typed the same name and passphrase. Takes about half a second, on purpose.

        Raises `InvalidKeyError` for a passphrase that is too short.
        """
        codes.check_name(name)
        # One keyboard sends an accent as one character, another as two.
        typed = unicodedata.normalize("NFKC", passphrase)
        if len(typed) < MIN_PASSPHRASE:
            raise InvalidKeyError("passphrase", f"must have at least {MIN_PASSPHRASE} characters, and has {len(typed)}")
        stretch = Scrypt(
            salt=_PASSPHRASE_LABEL + b"\0" + name.encode(),
            length=codes.SECRET_BYTES,
            n=_SCRYPT_N,
            r=_SCRYPT_R,
            p=_SCRYPT_P,
        )
        return cls(name, stretch.derive(typed.encode()))

    def matches(self, network_id: bytes) -> bool:
        """Whether `network_id` is this cluster's; in constant time."""
        return hmac.compare_digest(self.network_id, network_id)

    def join_code(self) -> str:
        """The code that lets another machine in. A secret: show it to nobody else."""
        return codes.encode(self.name, self._secret)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, NetworkNamespace)
            and other.name == self.name
            and hmac.compare_digest(other._secret, self._secret)
        )

    def __hash__(self) -> int:
        return hash(self.network_id)

    def __repr__(self) -> str:
        return f"NetworkNamespace({self.name!r}, network_id={self.network_id.hex()})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a NetworkNamespace holds a secret and is not pickled; load it where it is needed")


def _derive(secret: bytes, label: bytes, name: str, length: int) -> bytes:
    return HKDF(algorithm=SHA256(), length=length, salt=None, info=label + b"\0" + name.encode()).derive(secret)
