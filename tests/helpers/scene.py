"""One rank with a real engine, in virtual time, against peers that follow a script."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ringfort.backends.mesh import MeshBackend
from ringfort.config import MIB, DistributedConfig
from ringfort.errors import DistributedError
from ringfort.testing import VirtualClock
from ringfort.transport.frames import DATA, HEADER_BYTES, NO_CALL, RENDEZVOUS, Header, pack, parse
from ringfort.transport.links import LinkTable
from ringfort.transport.memory import MemoryPoller, MemoryStream, Pipe
from ringfort.transport.messages import Envelope, Job, Receive
from tests.helpers.background import Background

CONFIG = DistributedConfig(inbox_bytes=MIB)

FOREVER = 1e9
"""Seconds: more than passes while a test lets time run."""


class Peer:
    """The other end of a link, without an engine: writes and reads frames as the test says."""

    def __init__(self, stream: MemoryStream) -> None:
        self._stream = stream
        self._unread = b""

    def write(self, *pieces: bytes) -> None:
        data = memoryview(b"".join(pieces))
        assert self._stream.send(data) == len(data), "the pipe is full"

    def say(self, data: bytes, *, tag: int = 0, is_rendezvous: bool = False) -> None:
        """A whole message in one frame."""
        size = len(data)
        self.write(pack(DATA, tag=tag, length=size, total=size, flags=RENDEZVOUS if is_rendezvous else 0), data)

    def frames(self) -> list[tuple[Header, bytes]]:
        """All whole frames that have come since the last call."""
        buffer = bytearray(1 << 20)
        try:
            while count := self._stream.recv_into(memoryview(buffer)):
                self._unread += buffer[:count]
        except BlockingIOError:
            pass
        found: list[tuple[Header, bytes]] = []
        while len(self._unread) >= HEADER_BYTES:
            header = parse(self._unread)
            end = HEADER_BYTES + header.length
            if len(self._unread) < end:
                break
            found.append((header, self._unread[HEADER_BYTES:end]))
            self._unread = self._unread[end:]
        return found

    def kinds(self) -> list[int]:
        return [header.kind for header, _ in self.frames()]

    def end(self) -> None:
        self._stream.close()


def linked(clock: VirtualClock, peers: int) -> tuple[MemoryPoller, dict[int, Peer]]:
    """A poller with a stream to each of the ranks 1 to `peers`, and the other ends."""
    poller = MemoryPoller(clock)
    found: dict[int, Peer] = {}
    for rank in range(1, peers + 1):
        there = Pipe(wake_reader=lambda: None, wake_writer=poller.notify)
        back = Pipe(wake_reader=poller.notify, wake_writer=lambda: None)
        poller.streams[rank] = MemoryStream(incoming=back, outgoing=there)
        found[rank] = Peer(MemoryStream(incoming=there, outgoing=back))
    return poller, found


class Scene:
    """Rank 0 with an engine, and scripted peers from rank 1 on."""

    def __init__(self, peers: int) -> None:
        self.clock = VirtualClock()
        poller, self.peers = linked(self.clock, peers)
        self.me = MeshBackend(0, peers + 1, CONFIG, dict(poller.streams), poller)

    def recv(
        self, size: int, src: int = 1, *, tag: int = 0, timeout: float = 60, is_asleep: bool = True
    ) -> Background[bytes]:
        """A receive in a thread of its own, asleep when this returns."""

        def call() -> bytes:
            into = bytearray(size)
            self.me.recv(into, src, tag=tag, timeout=timeout)
            return bytes(into)

        return self.asleep(Background(call)) if is_asleep else Background(call)

    def asleep(self, call: Background[bytes]) -> Background[bytes]:
        """`call`, once its message is posted and the leader sleeps."""
        self.clock.wait_for_sleepers(1)
        engine = self.me.group.engine
        while engine._arrivals:
            self.clock.wait_for_sleepers(1)
        return call

    def close(self) -> None:
        for peer in self.peers.values():
            peer.end()
        self.me.close()


@contextmanager
def scene_with(peers: int) -> Generator[Scene, None, None]:
    scene = Scene(peers)
    try:
        yield scene
    finally:
        scene.close()


class TableScene:
    """A table of links without an engine: the test is the leader."""

    def __init__(self, peers: int) -> None:
        self.clock = VirtualClock()
        poller, self.peers = linked(self.clock, peers)
        self.table = LinkTable(0, dict(poller.streams), poller, inbox_bytes=MIB)

    def receive(
        self,
        src: int,
        size: int = 1,
        *,
        comm_id: int = 0,
        operation: int = 1,
        call: bytes = NO_CALL,
        timeout: float = 5,
    ) -> Job:
        """A posted job that receives from `src`; with a `call`, as part of a collective of all ranks."""
        members = None if call == NO_CALL else frozenset((0, *self.peers))
        envelope = Envelope(comm_id, 0, operation, call, members)
        job = Job("recv", timeout, self.clock.now() + timeout)
        job.receive, job.receive_link = Receive(memoryview(bytearray(size)), envelope, None), self.table.links[src]
        self.table.post(job)
        return job


def error_of(job: Job) -> DistributedError | None:
    """What the message that `job` receives has failed with."""
    assert job.receive is not None
    return job.receive.error
