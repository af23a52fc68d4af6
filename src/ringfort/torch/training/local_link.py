"""How the local ranks of a machine, which is one member of a run, work in step: `Leader` at local rank 0, `Follower` at
the others.

The leader gives orders, one at a time, and each follower answers when it is ready for the next. Not by collectives of
the process group: a follower may have to wait for hours until the run goes on, and must learn at once that the leader
died. Large data goes through shared memory.
"""

from __future__ import annotations

import logging
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from ringfort.errors import LocalRankLostError, OperationTimeoutError, ProtocolError, TransportError
from ringfort.torch.names import dist, torch
from ringfort.torch.training.local_orders import End, Failed, Memory, Order
from ringfort.transport.forks import keep_from_children
from ringfort.transport.locks import Condition, Thread
from ringfort.transport.segment import Segment

_log = logging.getLogger(__name__)

_MEET: Final = 60.0
"""Seconds until all local ranks have connected: they are in the same call."""
_READY: Final = 3600.0
"""Seconds that a follower may take for an order: as long as a member may be aside."""
_PATH: Final = 128
"""Bytes for the path of the socket, which systems limit to about 100."""
_DONE: Final = b"r"
"""The follower is ready for the next order."""
_LEAVE: Final = {b"l": 0, b"t": signal.SIGTERM, b"i": signal.SIGINT}
"""The machine should leave the run: the program of the follower wants that, or the follower was sent a signal."""
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


class Leader:
    """Local rank 0: gives orders to the other local ranks of its machine, if there are any."""

    def __init__(self, links: dict[int, socket.socket]) -> None:
        """`links` are the connections to the followers, by local rank."""
        self.rank, self.size = 0, 1 + len(links)
        self._links = links
        self._changed = Condition()
        self._ready: set[int] = set()
        self.lost: LocalRankLostError | None = None
        """The first follower that died."""
        self._is_closed = False
        self._offered: list[Segment] = []
        """Segments that followers may not have opened yet."""
        self.on_lost: Callable[[LocalRankLostError], None] = lambda _: None
        """Called once when a follower died, in another thread."""
        self.on_leave: Callable[[int], None] = lambda _: None
        """Called when a follower wants to leave, or with the signal that it was sent, in another thread."""
        self._thread: Thread | None = None
        if links:
            self._thread = Thread(self._listen, name="ringfort-local-ranks")
            self._thread.start()

    # --- called by the program's thread -------------------------------------------------------------------------------

    def tell(self, order: Order, memory: Segment | None = None) -> None:
        """Give an order to all followers, once they have done what they were told before. `memory` is what the order
        offers them. Raise `LocalRankLostError` if one died."""
        self.wait()
        if memory is not None:
            self._offered.append(memory)
        with self._changed:
            self._ready.clear()
        self._send(order)

    def wait(self) -> None:
        """Wait until all followers have done what they were told. Raise `LocalRankLostError` if one died."""
        deadline = time.monotonic() + _READY
        with self._changed:
            while len(self._ready) < len(self._links):
                self.check()
                if time.monotonic() > deadline:
                    slow = sorted(self._links.keys() - self._ready)
                    raise OperationTimeoutError(f"waiting for local ranks {slow}", _READY)
                self._changed.wait(1.0)
            self.check()
        self._settle()

    def check(self) -> None:
        """Raise `LocalRankLostError` if a follower died."""
        if self.lost is not None:
            raise self.lost

    def new_memory(self, size: int) -> Segment:
        """Return new memory for the sums, which followers open in the same place of their program."""
        segment = Segment.create(size)
        self._offered.append(segment)
        self._send(Memory(segment.offer, size))
        return segment

    def end(self, number: int | None = None) -> None:
        """Tell the followers that the loop is over, because of this signal or without one."""
        self._say(End(number or 0))

    def fail(self, why: str) -> None:
        """Tell the followers that this rank has left the loop, unless it was over."""
        self._say(Failed(why))

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._is_closed = True
        for link in self._links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        for link in self._links.values():
            link.close()
        self._settle()

    def _settle(self) -> None:
        for segment in self._offered:
            segment.settle()
        self._offered.clear()

    def _say(self, order: Order) -> None:
        """Send a last order, to those that are left."""
        if not self._is_closed:
            with suppress(LocalRankLostError):
                self._send(order)

    def _send(self, order: Order) -> None:
        data = msgspec.msgpack.encode(order)
        frame = len(data).to_bytes(8, "little") + data
        for rank, link in self._links.items():
            try:
                link.sendall(frame)
            except OSError as exc:
                raise LocalRankLostError(rank, exc.strerror or str(exc)) from exc

    # --- in a thread of its own ---------------------------------------------------------------------------------------

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while True:
                for key, _ in selector.select():
                    if not self._hear(key.data, self._links[key.data]):
                        return

    def _hear(self, rank: int, link: socket.socket) -> bool:
        """Take what a follower says. Return whether all are there."""
        try:
            said, why = link.recv(64), "its process has ended or has left the loop"
        except OSError as exc:
            said, why = b"", exc.strerror or str(exc)
        if self._is_closed:
            return False
        if not said:
            lost = LocalRankLostError(rank, why)
            with self._changed:
                self.lost = lost
                self._changed.notify_all()
            self.on_lost(lost)
            return False
        with self._changed:
            if _DONE in said:
                self._ready.add(rank)
                self._changed.notify_all()
        for what, number in _LEAVE.items():
            if what in said:
                self.on_leave(number)
        return True


class Follower:
    """A local rank that does what local rank 0 says."""

    def __init__(self, rank: int, size: int, link: socket.socket) -> None:
        self.rank, self.size = rank, size
        self._link = link

    def next(self) -> Order:
        """Say that this rank has done what it was told, and return the next order. Raise `LocalRankLostError` if local
        rank 0 has died or has left the loop."""
        with suppress(LocalRankLostError):  # its last order may still be there
            self._say(_DONE)
        order = self._receive()
        if isinstance(order, Failed):
            raise LocalRankLostError(0, order.why)
        return order

    def new_memory(self, size: int) -> Segment:
        """Open the memory for the sums that local rank 0 has made in the same place of its program."""
        order = self._receive()
        if not isinstance(order, Memory) or order.size != size:
            raise ProtocolError(f"Local rank 0 sent {type(order).__name__} in place of {size} bytes of memory", peer=0)
        return Segment.open(order.offer, size)

    def ask_to_leave(self, number: int = 0) -> None:
        """Ask local rank 0 to leave the run, because of this signal or because the program wants to."""
        self._say(next(what for what, known in _LEAVE.items() if known == number))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._link.close()

    def _say(self, what: bytes) -> None:
        try:
            self._link.sendall(what)
        except OSError as exc:
            raise LocalRankLostError(0, exc.strerror or str(exc)) from exc

    def _receive(self) -> Order:
        size = int.from_bytes(self._read(8), "little")
        return _orders.decode(self._read(size))

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._link.recv_into(view)
            except OSError as exc:
                raise LocalRankLostError(0, exc.strerror or str(exc)) from exc
            if not count:
                raise LocalRankLostError(0, "its process has ended or has closed the run")
            view = view[count:]
        return bytes(data)


Link = Leader | Follower


def connect() -> Link:
    """Connect the ranks of the default process group, which are all on this machine. Every rank calls it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return Leader({})
    if rank:
        return _connect(rank, size, _broadcast(b""))
    with tempfile.TemporaryDirectory(prefix="ringfort-") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / "local"  # in a folder that only this user can enter
        listener.bind(str(path))
        listener.listen(size)
        _broadcast(bytes(path))
        return Leader(_accept(listener, size))


def _connect(rank: int, size: int, path: bytes) -> Follower:
    link = keep_from_children(socket.socket(socket.AF_UNIX))
    try:
        link.connect(path)
        link.sendall(rank.to_bytes(8, "little"))
    except OSError as exc:
        link.close()
        raise TransportError(f"Local rank {rank} cannot connect to local rank 0: {exc.strerror or exc}") from exc
    return Follower(rank, size, link)


def _accept(listener: socket.socket, size: int) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    listener.settimeout(_MEET)
    try:
        while len(links) < size - 1:
            link = keep_from_children(listener.accept()[0])
            link.settimeout(_MEET)
            rank = int.from_bytes(link.recv(8, socket.MSG_WAITALL), "little")
            link.settimeout(None)
            links[rank] = link
    except OSError as exc:
        for link in links.values():
            link.close()
        why = f"{len(links)} of {size - 1} local ranks have connected to local rank 0: {exc.strerror or exc}"
        raise TransportError(f"Only {why}") from exc
    return dict(sorted(links.items()))


def _broadcast(path: bytes) -> bytes:
    """Send a path from rank 0 to all ranks. As bytes, because torch's object collectives unpickle."""
    device: Any = dist.distributed_c10d._get_object_coll_device()
    told = torch.frombuffer(bytearray(path.ljust(_PATH, b"\0")), dtype=torch.uint8).to(device)
    dist.broadcast(told, 0)
    return bytes(told.tolist()).rstrip(b"\0")
