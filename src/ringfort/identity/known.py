"""`KnownKeys`: the public key behind each short peer id that this process has seen. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ringfort.errors import HandshakeError
from ringfort.identity.keypair import peer_id_of

MAX_KNOWN: Final = 4096
"""Keys to remember. Only members get here; the key that was not seen for longest is replaced."""


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
