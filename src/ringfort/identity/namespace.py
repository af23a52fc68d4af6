"""A cluster: its name, its secret, and the two keys derived from them."""

from __future__ import annotations

import hmac
import secrets
import unicodedata
from typing import Final, NoReturn

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from ringfort.errors import InvalidKeyError
from ringfort.identity import join_codes as codes
from ringfort.identity.noise import KEY_BYTES, PROTOCOL_NAME

NETWORK_ID_BYTES: Final = 16
"""Public, to tell clusters apart: no two are equal by chance, and it fits in a discovery record."""
MIN_PASSPHRASE: Final = 15
"""Characters, as NIST SP 800-63B requires for a password that is the only factor. Anyone who sees the public network id
can try passphrases offline; only the number of passphrases and the cost of scrypt prevent that."""

# OWASP's first choice for scrypt: 128 MiB and some 0.4 s per try. We pay it once per start, an attacker per guess.
_SCRYPT_N = 2**17
_SCRYPT_R = 8
_SCRYPT_P = 1

# One label per purpose, so that no key reveals anything about another. The name is included, so that the same secret
# under another name is another cluster.
_NETWORK_ID_LABEL = b"ringfort 1 network id"
_HANDSHAKE_LABEL = b"ringfort 1 handshake key " + PROTOCOL_NAME.encode()
_PASSPHRASE_LABEL = b"ringfort 1 passphrase"


class NetworkNamespace:
    """The name and secret of a cluster.

    The secret is in no `repr` and is never pickled; only `join_code` shows it.

    Examples:
        >>> cluster = NetworkNamespace.generate("lab")
        >>> NetworkNamespace.from_join_code(cluster.join_code()) == cluster  # on another machine
        True
    """

    __slots__ = ("_secret", "handshake_key", "name", "network_id")

    name: str
    network_id: bytes
    """16 public bytes: in discovery records, and at the start of a connection."""
    handshake_key: bytes
    """The 32-byte pre-shared key of the handshake."""

    def __init__(self, name: str, secret: bytes) -> None:
        """Raises `InvalidArgumentError` for an invalid name and `InvalidKeyError` for an invalid secret."""
        if len(secret) != codes.SECRET_BYTES:
            raise InvalidKeyError("secret", f"must have {codes.SECRET_BYTES} bytes, not {len(secret)}")
        self.name = codes.check_name(name)
        self._secret = secret
        self.network_id = _derive(secret, _NETWORK_ID_LABEL, name, NETWORK_ID_BYTES)
        self.handshake_key = _derive(secret, _HANDSHAKE_LABEL, name, KEY_BYTES)

    @classmethod
    def generate(cls, name: str = "default") -> NetworkNamespace:
        """Create a cluster with a random secret."""
        return cls(name, secrets.token_bytes(codes.SECRET_BYTES))

    @classmethod
    def from_join_code(cls, text: str) -> NetworkNamespace:
        """Return the cluster of a join code. Raises `JoinCodeError`, which says where the likely error is."""
        return cls(*codes.decode(text))

    @classmethod
    def from_passphrase(cls, name: str, passphrase: str) -> NetworkNamespace:
        """Return the cluster of everyone who types the same name and passphrase. Takes half a second, on purpose.

        Raises `InvalidKeyError` if the passphrase is too short.
        """
        codes.check_name(name)
        # Some keyboards send an accented letter as one character, others as two.
        typed = unicodedata.normalize("NFKC", passphrase)
        if len(typed) < MIN_PASSPHRASE:
            raise InvalidKeyError("passphrase", f"must have at least {MIN_PASSPHRASE} characters, not {len(typed)}")
        salt = _PASSPHRASE_LABEL + b"\0" + name.encode()
        stretch = Scrypt(salt=salt, length=codes.SECRET_BYTES, n=_SCRYPT_N, r=_SCRYPT_R, p=_SCRYPT_P)
        return cls(name, stretch.derive(typed.encode()))

    def matches(self, network_id: bytes) -> bool:
        """Return whether `network_id` is that of this cluster, in constant time."""
        return hmac.compare_digest(self.network_id, network_id)

    def join_code(self) -> str:
        """Return the code that lets another machine join. It contains the secret."""
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
        raise TypeError("A NetworkNamespace contains a secret and cannot be pickled; load it in each process")


def _derive(secret: bytes, label: bytes, name: str, length: int) -> bytes:
    return HKDF(algorithm=SHA256(), length=length, salt=None, info=label + b"\0" + name.encode()).derive(secret)
