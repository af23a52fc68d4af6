"""`LinkedStore`: torch's key-value store over encrypted links. Torch's own store sends plaintext.

One process owns the contents, and the others send it requests; cluster_store.py and rpc_store.py differ in the links. A
store is made together with the links of a process group: the group takes those when torch makes it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from ringfort.backends.base import Backend
from ringfort.errors import InvalidArgumentError
from ringfort.torch.key_value import Answer, Verb
from ringfort.torch.names import dist
from ringfort.transport.finalisers import WeakKeys

DEFAULT_TIMEOUT: Final = 300.0
"""Seconds to wait for a key by default, as torch's own stores do."""


class LinkedStore(dist.Store):
    """A store that comes with the links of a process group."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch's
        self.backend: Backend | None = None
        """The links, until a process group takes them."""
        self._seconds = DEFAULT_TIMEOUT

    @abstractmethod
    def _request(self, verb: Verb, keys: Sequence[str], *, seconds: float | None = None, **more: Any) -> Answer:
        """Send a request to the owner and wait for the answer, by default for as long as keys are waited for."""

    @abstractmethod
    def close(self) -> None:
        """Stop to send and answer requests."""

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of `key`."""
        self._request("set", [key], value=_bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for `key` and return its value."""
        return self._request("get", [key]).value

    def add(self, key: str, amount: int) -> int:
        """Add to the number under `key`, by default 0, and return the sum."""
        answer = self._request("add", [key], amount=amount)
        if answer.refusal:
            raise InvalidArgumentError("key", key, answer.refusal)
        return answer.amount

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set the value of `key` to `desired` if it is `expected`; return the value that it has then."""
        return self._request("swap", [key], value=_bytes(expected), other=_bytes(desired)).value

    def delete_key(self, key: str) -> bool:
        """Delete `key`; return whether it was there."""
        return bool(self._request("delete", [key]).amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` are there."""
        return bool(self._request("check", keys).amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` are there."""
        self._request("wait", keys, seconds=None if timeout is None else timeout.total_seconds())

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return self._request("count", []).amount

    getNumKeys = num_keys  # noqa: N815  # torch's C++ calls it by this name

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long keys are waited for."""
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long keys are waited for."""
        return timedelta(seconds=self._seconds)

    def clone(self) -> LinkedStore:
        """Return the store itself: it may be used from any thread."""
        return self


_stores: Final[WeakKeys[Backend, LinkedStore]] = WeakKeys()
"""Torch keeps only the C++ half of a store; without a reference here, the Python half would be collected. A store lives
as long as its links, which it holds itself until a process group takes them."""


def keep(store: LinkedStore, backend: Backend) -> None:
    """Let `store` live as long as `backend`, the links that a process group will take from it."""
    _stores[backend], store.backend = store, backend


def forget(backend: Backend) -> None:
    """Close the store of a group that has ended, if it has one of ours."""
    store = _stores.get(backend)
    if store is not None:
        del _stores[backend]
        store.close()


def links_of(store: Any) -> Backend | None:
    """Return the links that were made with `store`, which torch has wrapped; None if there are none, or in use."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, LinkedStore):
        return None
    backend, store.backend = store.backend, None
    return backend


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
