"""Point-to-point messages of a process group: in order within a direction, a peer and a tag, and in the background
until somebody waits for them. And a barrier of such messages, which names the ranks that did not come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final

from ringfort.backends.any_source import wait_for_any
from ringfort.backends.group import Group
from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.work import Runner, Work
from ringfort.context import DistributedContext
from ringfort.errors import ChannelClosedError, DistributedError, OperationTimeoutError, SizeMismatchError
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array

_BARRIER_TAG: Final = 1 << 62
"""Above all tags that a caller may use, below that of the collectives."""


class Messages:
    """The messages of one rank. Each direction, peer and tag has a `Runner`: a message may have to wait for its peer
    while the others go on."""

    def __init__(self, context: DistributedContext) -> None:
        self._backend = context.backend
        self._lock = threading.Lock()
        self._runners: dict[tuple[str, int, int], Runner] = {}
        self._to_self: dict[int, SimpleQueue[Array | None]] = {}
        """The messages that this rank has sent to itself, by tag; None at the end."""

    def send(self, x: Any, dst: int, tag: int, timeout: float, *, before: Callable[[], object] | None = None) -> Work:
        """Send `x` as it is once `before` has returned."""
        view, group = as_view(x, "tensor"), self._backend.group
        to_self = self._check(dst, "dst", tag, timeout)

        def run() -> None:
            if before is not None:
                before()
            if to_self is None:
                group.send(view.flat, dst, group.tagged(tag, timeout))
            else:
                to_self.put(view.flat.copy())

        return self._runner("send", dst, tag).submit("send", run)

    def recv(self, into: Any, src: int, tag: int, timeout: float) -> Work:
        """Receive into `into`."""
        view, group = as_view(into, "tensor", writable=True), self._backend.group
        to_self = self._check(src, "src", tag, timeout)

        def run() -> None:
            if to_self is None:
                group.recv(view.flat, src, group.tagged(tag, timeout))
            else:
                view.flat[...] = self._take(to_self, view, timeout)
            view.finish()

        return self._runner("recv", src, tag).submit("recv", run)

    def recv_any(self, into: Any, tag: int, timeout: float) -> Work:
        """Receive into `into` from the rank that sends first; the work's result is that rank."""
        view, group = as_view(into, "tensor", writable=True), self._backend.group
        group.tagged(tag, timeout)

        def run() -> int:
            src = wait_for_any(group, tag, timeout)
            group.recv(view.flat, src, group.tagged(tag, timeout))
            view.finish()
            return src

        return self._runner("recv any", -1, tag).submit("recv from any rank", run)

    def _take(self, queue: SimpleQueue[Array | None], view: ArrayView, timeout: float) -> Array:
        rank = self._backend.rank
        try:
            data = queue.get(timeout=timeout)
        except Empty:
            raise OperationTimeoutError("recv, waiting for this rank itself", timeout, peer=rank) from None
        if data is None:
            raise ChannelClosedError("This rank has closed its process group")
        if data.nbytes != view.flat.nbytes:
            raise SizeMismatchError(view.flat.nbytes, data.nbytes, peer=rank)
        return data

    def _check(self, peer: int, name: str, tag: int, timeout: float) -> SimpleQueue[Array | None] | None:
        """Raise what is wrong with a message. Return the queue that it passes through if `peer` is this rank itself."""
        group = self._backend.group
        if peer == group.rank:
            with self._lock:
                return self._to_self.setdefault(tag, SimpleQueue())
        group.check_peer(peer, name)
        group.tagged(tag, timeout)
        return None

    def _runner(self, direction: str, peer: int, tag: int) -> Runner:
        with self._lock:
            key = (direction, peer, tag)
            if key not in self._runners:
                self._runners[key] = Runner(f"ringfort-{direction}-{peer}")
            return self._runners[key]

    def close(self) -> None:
        """End the threads; messages that are still expected from this rank itself fail."""
        with self._lock:
            runners = list(self._runners.values())
            self._runners.clear()
            for queue in self._to_self.values():
                queue.put(None)
        for runner in runners:
            runner.close(wait=False)


def monitored_barrier(group: Group, timeout: float, *, wait_all_ranks: bool = False) -> None:
    """Return when every rank has called it.

    Raises `OperationTimeoutError`, at rank 0 with the first rank that did not come, or with `wait_all_ranks` all of
    them. If ranks failed and none is merely late, rank 0 raises the error of the first.
    """
    deadline = group.now() + timeout

    def envelope(seconds: float) -> Envelope:
        return Envelope(group.comm_id, _BARRIER_TAG, timeout=seconds, deadline=group.now() + seconds)

    if group.rank != 0:
        group.send(b"", 0, envelope(timeout))
        group.recv(bytearray(), 0, envelope(timeout))
        return
    missing: dict[int, DistributedError] = {}
    for peer in range(1, group.world_size):
        try:
            group.recv(bytearray(), peer, envelope(max(0.001, deadline - group.now())))
        except DistributedError as exc:
            missing[peer] = exc
            if not wait_all_ranks:
                break
    late = [peer for peer, exc in missing.items() if isinstance(exc, OperationTimeoutError)]
    if late:
        state = "; ".join(f"rank {peer} did not come" if peer in late else str(exc) for peer, exc in missing.items())
        raise OperationTimeoutError("monitored_barrier", timeout, peer=late[0], state=state)
    for exc in missing.values():
        raise exc
    for peer in range(1, group.world_size):
        group.send(b"", peer, envelope(timeout))
