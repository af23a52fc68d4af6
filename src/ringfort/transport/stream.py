"""What the engine needs from outside: a `Stream` to each peer, and a `Poller` with a clock to sleep on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol


class Stream(Protocol):
    """Two-way, ordered bytes that never block: the part of a non-blocking socket that is used.

    Each raises `BlockingIOError` when nothing can move and another `OSError` when the connection is gone; `recv_into`
    returns 0 at the end.
    """

    @property
    def chunk(self) -> int:
        """Bytes that should be asked for at once, where they are reduced."""
        ...

    @property
    def has_pending(self) -> bool:
        """There is something to receive that the poller does not know of."""
        ...

    def recv_into(self, buffer: memoryview, /) -> int: ...
    def send(self, data: memoryview, /) -> int: ...
    def sendmsg(self, buffers: Iterable[memoryview], /) -> int: ...
    def shut_down(self) -> None:
        """End our direction; the other continues."""
        ...

    def close(self) -> None: ...


class Ready(NamedTuple):
    """A stream that can move: `peer` is the rank it leads to."""

    peer: int
    readable: bool
    writable: bool


class Movable(Protocol):
    """A stream that can be asked without a system call."""

    @property
    def is_readable(self) -> bool: ...
    @property
    def is_writable(self) -> bool: ...


def ready_streams(watched: Mapping[int, tuple[bool, bool]], streams: Mapping[int, Movable]) -> list[Ready]:
    """Those of `streams` that can move as `watched` asks: by peer, whether reading and whether writing."""
    found = (
        Ready(peer, read and streams[peer].is_readable, write and streams[peer].is_writable)
        for peer, (read, write) in watched.items()
    )
    return [ready for ready in found if ready.readable or ready.writable]


class WatchedPoller:
    """What pollers have in common that ask `ready_streams`. Their peers are never silent: no machine is looked at."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[bool, bool]] = {}

    def watch(self, peer: int, *, read: bool, write: bool) -> None:
        self._watched[peer] = (read, write)

    def forget(self, peer: int) -> None:
        self._watched.pop(peer, None)

    def silent(self) -> list[tuple[int, float]]:
        return []


class Poller(Protocol):
    """Sleeps until a stream can move, somebody calls `wake`, or time is up. Only `wake` is for other threads."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    def watch(self, peer: int, *, read: bool, write: bool) -> None:
        """Say what `wait` should look for on the stream to `peer` from now on. A hang-up is always reported, as
        readable, where the system can."""
        ...

    def forget(self, peer: int) -> None:
        """The stream to `peer` is about to be closed."""
        ...

    def wait(self, deadline: float) -> list[Ready]:
        """Return what can move; may be empty when woken, when `deadline` has passed, or for no reason."""
        ...

    def silent(self) -> list[tuple[int, float]]:
        """Peers whose machine has left something unanswered for longer than the group's patience, with the seconds.
        Cheap; asked whenever nothing moves."""
        ...

    def wake(self) -> None:
        """Make the present or the next `wait` return at once."""
        ...

    def close(self) -> None: ...
