"""Messages between two ranks of a process group: in order within a direction, a peer and a tag, and in the background
until somebody waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from ringfort.backends.any_source import wait_for_any
from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.work import Runner, Work
from ringfort.context import DistributedContext
from ringfort.errors import ChannelClosedError, OperationTimeoutError, SizeMismatchError
from ringfort.transport.reducer import Array

_Lane = tuple[str, int, int]


class Messages:
    """The messages of one rank. Each direction, peer and tag has a lane, which runs what it is given in order."""

    def __init__(self, context: DistributedContext) -> None:
        self._backend = context.backend
        self._lanes: dict[_Lane, Runner] = {}
        self._lock = threading.Lock()
        self._own: dict[int, SimpleQueue[Array | None]] = {}

    def send(self, x: Any, dst: int, tag: int, timeout: float, *, before: Callable[[], object] = lambda: None) -> Work:
        """Sends `x`, once `before` has returned: which waits until `x` is what it should be."""
        view, backend = as_view(x, "tensor"), self._backend
        if dst == backend.rank:
            before()
            self._own_queue(tag).put(view.flat.copy())
            return _done("send")
        backend.check_peer(dst, "dst")
        backend.check_tag(tag)

        def run() -> None:
            before()
            backend.send(view.flat, dst, tag=tag, timeout=timeout)

        return self._lane("send", dst, tag).submit("send", run)

    def recv(self, into: Any, src: int, tag: int, timeout: float) -> Work:
        """Receives into `into`."""
        view, backend = as_view(into, "tensor", writable=True), self._backend
        if src == backend.rank:
            return self._lane("recv", src, tag).submit("recv", lambda: self._take_own(view, tag, timeout))
        backend.check_peer(src, "src")
        backend.check_tag(tag)

        def run() -> None:
            backend.recv(view.flat, src, tag=tag, timeout=timeout)
            view.finish()

        return self._lane("recv", src, tag).submit("recv", run)

    def recv_any(self, into: Any, tag: int, timeout: float) -> Work:
        """Receives into `into` from whoever sends first; the work's result is who that was."""
        view, backend = as_view(into, "tensor", writable=True), self._backend
        backend.check_tag(tag)

        def run() -> int:
            src = wait_for_any(backend, tag, timeout)
            backend.recv(view.flat, src, tag=tag, timeout=timeout)
            view.finish()
            return src

        return self._lane("recv any", -1, tag).submit("recv from any rank", run)

    def _own_queue(self, tag: int) -> SimpleQueue[Array | None]:
        with self._lock:
            return self._own.setdefault(tag, SimpleQueue())

    def _take_own(self, view: ArrayView, tag: int, timeout: float) -> None:
        try:
            data = self._own_queue(tag).get(timeout=timeout)
        except Empty:
            raise OperationTimeoutError(
                "recv, waiting for this rank itself", timeout, peer=self._backend.rank
            ) from None
        if data is None:
            raise ChannelClosedError("this rank's process group is closed")
        if data.nbytes != view.flat.nbytes:
            raise SizeMismatchError(view.flat.nbytes, data.nbytes, peer=self._backend.rank)
        view.flat[...] = data
        view.finish()

    def _lane(self, direction: str, peer: int, tag: int) -> Runner:
        key = (direction, peer, tag)
        with self._lock:
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = Runner(f"ringfort-{direction}-{peer}")
            return lane

    def close(self) -> None:
        """Lets the lanes end."""
        with self._lock:
            lanes = list(self._lanes.values())
            self._lanes.clear()
            for queue in self._own.values():
                queue.put(None)
        for lane in lanes:
            lane.close(wait=False)


def _done(what: str) -> Work:
    work = Work(what)
    work.run(lambda: None)
    return work
