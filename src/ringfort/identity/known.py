"""`KnownKeys`: the whole key behind each short id that a peer has proved to this process. Pure."""

from __future__ import annotations

from typing import Final

from ringfort.errors import HandshakeError
from ringfort.identity.keypair import peer_id_of

MAX_KNOWN: Final = 4096
"""Keys that are remembered. Only members get here; the key that was not seen for longest makes room for a new one."""


class KnownKeys:
    """Epochs and control messages name a peer by its short id, 80 bits of a hash. This makes the id stand for one
    whole key: a second key with the same id is refused for as long as the process lives."""

    def __init__(self) -> None:
        self._keys: dict[str, bytes] = {}

    def name(self, key: bytes) -> str:
        """Return the short id of `key`. Raises `HandshakeError` if another key has shown the same id before."""
        name = peer_id_of(key)
        known = self._keys.pop(name, key)
        self._keys[name] = known  # the last one seen is the last to be forgotten
        if len(self._keys) > MAX_KNOWN:
            del self._keys[next(iter(self._keys))]
        if known != key:
            raise HandshakeError(f"the id {name} belongs to another key, which was seen first")
        return name
