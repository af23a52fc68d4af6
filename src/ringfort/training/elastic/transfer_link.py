"""`TransferLink`: messages between a donor and a learner, over a stream between their peers (`open_stream`).

    learner                     donor
    AskImage              ->
                          <-    Described and a `Description`, or NotYet
    AskBlock(index)       ->
                          <-    BlockFollows(index) and the block
    AskResult(after)      ->
                          <-    Sealed and the arrays, NotYet, or Gone

A message is its length (4 bytes), msgpack, and the bytes that it announces, all sealed as on every other connection.
Several requests may be under way; the answers come in their order. Nothing is pickled, and whoever receives checks a
size before it takes memory.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from struct import Struct
from typing import Annotated, Final, TypeVar

import msgspec

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.peer_messages import Epoch
from ringfort.errors import DistributedError, PeerLostError, ProtocolError
from ringfort.training.elastic.local_sum import Layout
from ringfort.training.elastic.protocol import Mark
from ringfort.training.elastic.state_tree import Manifest
from ringfort.transport.tcp import sleep_on

PURPOSE: Final = "elastic state"
"""The purpose of the streams that carry these messages."""
CHUNK: Final = 256 * 1024
"""Bytes that are sealed and given to the kernel at once, so that other traffic never waits for more."""
MAX_HEAD: Final = 64 * 1024
"""Bytes of a message without what follows it."""
MAX_DESCRIPTION: Final = 64 * 1024 * 1024
"""Bytes of a description. That of a million arrays is smaller."""
MAX_WAIT: Final = 1.0
"""Seconds for which a donor keeps a request for what does not exist yet."""
_LENGTH: Final = Struct("<I")
_UNSENT: Final = 128 * 1024
"""Bytes that the kernel may hold unsent: what the training's own messages may wait behind."""
_CS1: Final = 0x20
"""Differentiated services "low-priority data" (RFC 8325: the background queue of Wi-Fi)."""
_FILLER: Final = 1
"""Linux: TC_PRIO_FILLER, which the default queues send last."""
_Wait = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT)]
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class AskImage(_Message, frozen=True, tag="image?"):
    """Describe the image that you offer; wait for one for so many seconds. The hashes are not needed if it is of the
    mark `known`: another donor has sent them."""

    wait: _Wait = 0.0
    known: Mark | None = None


class AskBlock(_Message, frozen=True, tag="block?"):
    """Send this block of the image that you described last."""

    index: _Size


class AskResult(_Message, frozen=True, tag="result?"):
    """Send the sealed result that follows `after`; wait for it for so many seconds."""

    after: Mark
    wait: _Wait = 0.0
    wants_seat: bool = True
    """Whether the learner takes part once it has all results; otherwise it only follows."""


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image that a donor offers."""

    mark: Mark
    epoch: Epoch
    layout: Layout | None
    """The gradients of a step; None if the donor does not know them yet."""
    manifest: Manifest


class Described(_Message, frozen=True, tag="described"):
    """A `Description` of so many bytes follows."""

    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_DESCRIPTION)]


class BlockFollows(_Message, frozen=True, tag="block"):
    """This block follows."""

    index: _Size
    nbytes: _Size


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One array of a result."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    kind: Annotated[str, msgspec.Meta(max_length=16)]
    size: _Size
    """Elements."""


class Sealed(_Message, frozen=True, tag="sealed"):
    """The arrays of a result follow, in the order of `parts`."""

    before: Mark
    """The mark of a member that has not applied it."""
    branch: str
    step: int
    cursor: int
    digest: int
    sums: tuple[float, ...]
    """The sums of all members' tokens."""
    is_finite: bool
    behind: _Size
    """Results that the donor has beyond this one."""
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=64)]


class NotYet(_Message, frozen=True, tag="not yet"):
    """There is no such image or result yet; ask again."""


class Gone(_Message, frozen=True, tag="gone"):
    """The donor does not have this any more, and will not have it again."""

    why: Annotated[str, msgspec.Meta(max_length=256)]


Request = AskImage | AskBlock | AskResult
Answer = Described | BlockFollows | Sealed | NotYet | Gone
T = TypeVar("T")
_requests: Final = msgspec.msgpack.Decoder[Request](Request)
_answers: Final = msgspec.msgpack.Decoder[Answer](Answer)
_descriptions: Final = msgspec.msgpack.Decoder(Description)


class TransferLink:
    """One end of a connection, for one thread at a time; only `end` is for other threads. All waits are limited: the
    other side is lost when nothing has moved for `timeout` seconds."""

    def __init__(self, connection: Connection, peer: str, timeout: float) -> None:
        """Take over `connection`. Raise `PeerLostError` if it has ended."""
        self.peer = peer
        self._sock = connection.sock
        self._timeout = timeout
        try:
            with self._translated():
                self._stream = connection.stream()
        except BaseException:
            connection.close()
            raise
        _into_background(connection.sock)

    def request(self, message: Request) -> None:
        """Send a request."""
        self._send_head(msgspec.msgpack.encode(message))

    def answer(self, message: Answer, bodies: Sequence[memoryview] = ()) -> None:
        """Send an answer and the bytes that it announces."""
        self._send_head(msgspec.msgpack.encode(message))
        for body in bodies:
            self._send(body)

    def next_request(self, timeout: float) -> Request:
        """Receive a request, which may begin within `timeout` seconds."""
        return self._decoded(_requests, self._receive_head(timeout))

    def next_answer(self) -> Answer:
        """Receive an answer, without the bytes that it announces."""
        return self._decoded(_answers, self._receive_head(self._timeout + MAX_WAIT))

    def describe(self, description: Description) -> None:
        """Answer with a description."""
        body = msgspec.msgpack.encode(description)
        if len(body) > MAX_DESCRIPTION:
            self.answer(Gone(f"the description of the state has {len(body)} bytes; the limit is {MAX_DESCRIPTION}"))
        else:
            self.answer(Described(len(body)), [memoryview(body)])

    def description(self, announced: Described) -> Description:
        """Receive a description."""
        body = bytearray(announced.nbytes)
        self.fill(memoryview(body))
        return self._decoded(_descriptions, body)

    def fill(self, buffer: memoryview) -> None:
        """Receive bytes until `buffer` is full."""
        self._fill(buffer, self._timeout)

    def end(self) -> None:
        """Make the thread that uses this end lose its connection. May be called from any thread."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _send_head(self, body: bytes) -> None:
        if len(body) > MAX_HEAD:
            raise ProtocolError(f"Message of {len(body)} bytes to {self.peer}; the limit is {MAX_HEAD}", peer=self.peer)
        self._send(memoryview(_LENGTH.pack(len(body)) + body))

    def _receive_head(self, timeout: float) -> bytearray:
        length = bytearray(_LENGTH.size)
        self._fill(memoryview(length), timeout)
        (size,) = _LENGTH.unpack(length)
        if size > MAX_HEAD:
            raise ProtocolError(
                f"Invalid message of {self.peer}: {size} bytes; the limit is {MAX_HEAD}", peer=self.peer
            )
        body = bytearray(size)
        self.fill(memoryview(body))
        return body

    def _decoded(self, decoder: msgspec.msgpack.Decoder[T], body: bytearray) -> T:
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise ProtocolError(f"Invalid message of {self.peer}: {exc}", peer=self.peer) from exc

    def _send(self, data: memoryview) -> None:
        with self._translated():
            while data:
                try:
                    count = self._stream.send(data[:CHUNK])
                except BlockingIOError:  # a sealed record that has begun goes on with the same bytes
                    sleep_on(self._sock, select.POLLOUT, time.monotonic() + self._timeout)
                else:
                    data = data[count:]

    def _fill(self, buffer: memoryview, timeout: float) -> None:
        with self._translated():
            while buffer:
                try:
                    count = self._stream.recv_into(buffer)
                except BlockingIOError:
                    sleep_on(self._sock, select.POLLIN, time.monotonic() + timeout)
                    continue
                if not count:
                    raise PeerLostError(self.peer, "it closed the connection")
                buffer = buffer[count:]

    @contextmanager
    def _translated(self) -> Generator[None, None, None]:
        try:
            yield
        except DistributedError:
            raise
        except TimeoutError as exc:
            raise PeerLostError(self.peer, "nothing has come or gone on its connection for too long") from exc
        except OSError as exc:
            raise PeerLostError(self.peer, exc.strerror or str(exc)) from exc


def _into_background(sock: socket.socket) -> None:
    """Let the machine and its network send everything else first, as far as they can."""
    options = [(socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", _UNSENT), (socket.SOL_SOCKET, "SO_PRIORITY", _FILLER)]
    if sock.family == socket.AF_INET6:
        options.insert(0, (socket.IPPROTO_IPV6, "IPV6_TCLASS", _CS1))
    else:
        options.insert(0, (socket.IPPROTO_IP, "IP_TOS", _CS1))  # first: it sets a priority of its own
    for level, name, value in options:
        option = getattr(socket, name, None)
        if option is not None:
            with suppress(OSError):  # not allowed or not known here: it is slower for others, and not wrong
                sock.setsockopt(level, option, value)
