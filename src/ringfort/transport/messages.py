"""A message on its way: its `Envelope`, the `Send` and `Receive` that callers wait for, and the other places where
arriving bytes can go. Pure: memory in, memory out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ringfort.config import KIB
from ringfort.errors import DistributedError
from ringfort.transport.frames import NO_CALL, Header, Key
from ringfort.transport.locks import Signal
from ringfort.transport.reducer import Array, Reducer

if TYPE_CHECKING:
    from ringfort.transport.links import Link

CHUNK = 256 * KIB
"""Bytes received at once for reducing, where a stream does not ask for more (`Stream.chunk`): they stay in the cache
until they are added. Whole slices received first and added later were measured 2 to 8 times slower on large arrays.
What is not reduced goes straight to its place."""

LEAST_FORWARDED = 64 * KIB
"""Bytes that are worth a frame of their own, when a message is passed on while it arrives."""

_SLACK = 16
"""Bytes of room in the scratch for the part of an element that an earlier read left over; complex128 is largest."""


_NO_ARRAY: Array = np.empty(0)


T = TypeVar("T")


def take_first(queues: dict[Key, deque[T]], key: Key) -> T | None:
    """Take the first item off the queue of `key`; None if there is none."""
    queue = queues.get(key)
    if queue is None:
        return None
    item = queue.popleft()
    if not queue:
        del queues[key]
    return item


def discard(queues: dict[Key, deque[T]], key: Key, item: T) -> None:
    """Take `item` out of the queue of `key`."""
    queue = queues[key]
    queue.remove(item)
    if not queue:
        del queues[key]


MakeError = Callable[[], DistributedError]
"""Makes a new error for each call that it ends: a raised exception keeps its traceback."""


class Envelope(NamedTuple):
    """Which conversation a message belongs to.

    A plain tag is a message between two ranks of the outermost group. Sub-groups have a communicator of their own, and
    collectives add what they are part of, so that ranks which disagree find out at the first message.
    """

    comm_id: int
    tag: int
    operation: int = 0
    call: bytes = NO_CALL
    members: frozenset[int] | None = None
    """For a collective: all its ranks, so that the loss of any of them ends it."""
    sync: bool = False
    """The send ends only when the receiver has begun to receive it: for ranks that would otherwise never hear from the
    others."""
    timeout: float = 0.0
    deadline: float | None = None
    """For a collective: seconds that all its messages together may take, and until when."""


class Scratch:
    """One buffer that stays warm in the cache, seen as bytes and as arrays. An engine has one."""

    def __init__(self, chunk: int = CHUNK) -> None:
        raw = np.empty(chunk + _SLACK, np.uint8)
        self.chunk = chunk
        self.bytes = memoryview(raw)
        self._raw = raw
        self._views: dict[np.dtype[Any], Array] = {}

    def typed(self, dtype: np.dtype[Any]) -> Array:
        """Return the scratch as an array of `dtype`."""
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self._raw[: self._raw.size // dtype.itemsize * dtype.itemsize].view(dtype)
        return view


class Send:
    """A message to be sent. Done when its memory may be used again and, in the rendezvous protocol, the clear-to-send
    has come."""

    needs_link = True

    def __init__(
        self, data: memoryview, envelope: Envelope, *, is_rendezvous: bool, source: Receive | None = None
    ) -> None:
        self.data = data
        self.size = len(data)
        self.envelope = envelope
        self.key: Key = envelope[:2]
        self.is_rendezvous = is_rendezvous
        self.serial = envelope.operation
        """What a clear-to-send names: the collective's number, or the link's count of plain messages."""
        self.begun = False
        self.sent = 0
        self.is_clear = not is_rendezvous
        self.source = source
        """The receive that still writes into this memory: only bytes that it has finished may be sent."""
        self.done = False
        self.error: DistributedError | None = None

    @property
    def ready(self) -> int:
        """Bytes, from the beginning, that may be sent."""
        source = self.source
        if source is None:
            return self.size
        if source.done and source.error is None:
            self.source = None
            return self.size
        ready = source.settled
        return ready if ready - self.sent >= LEAST_FORWARDED else self.sent


class Sink:
    """Where a message's bytes go. `seen` counts them towards `total`."""

    __slots__ = ("seen", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.seen = 0

    def space(self, limit: int, scratch: Scratch) -> memoryview:
        """Return where to put the next bytes, at most `limit` of them."""
        return scratch.bytes[: min(limit, scratch.chunk)]

    def filled(self, count: int, scratch: Scratch) -> None:
        """`count` bytes were put into what `space` gave."""
        self.seen += count

    def absorb(self, data: memoryview, scratch: Scratch) -> None:
        """Take bytes that were read together with a header."""
        while data:
            space = self.space(len(data), scratch)
            count = min(len(space), len(data))
            space[:count] = data[:count]
            self.filled(count, scratch)
            data = data[count:]


class Discard(Sink):
    """For a message that nobody wants, or that has another size than `refused` expected. `refused` fails when the whole
    message has come, because the sender may still cancel it."""

    __slots__ = ("refused",)

    def __init__(self, total: int, seen: int = 0, refused: Receive | None = None) -> None:
        super().__init__(total)
        self.seen = seen
        self.refused = refused


class Stored(Sink):
    """A message that came before its receive. Memory is taken as bytes arrive, not as the header claims."""

    __slots__ = ("data", "header")

    def __init__(self, header: Header) -> None:
        super().__init__(header.total)
        self.header = header
        self.data = bytearray()

    def filled(self, count: int, scratch: Scratch) -> None:
        self.seen += count
        self.data += scratch.bytes[:count]


class Receive(Sink):
    """A receive that a caller waits for. Bytes go straight into `into`, or through the scratch and the reduction."""

    __slots__ = ("array", "carry", "done", "envelope", "error", "into", "key", "reduced", "reducer")

    needs_link = True

    def __init__(self, into: memoryview, envelope: Envelope, reducer: Reducer | None) -> None:
        super().__init__(len(into))
        self.into = into
        self.envelope = envelope
        self.key: Key = envelope[:2]
        self.reducer = reducer
        self.array: Array = _NO_ARRAY if reducer is None else np.frombuffer(into, reducer.dtype)
        self.reduced = 0
        self.carry = b""
        self.done = False
        self.error: DistributedError | None = None

    @property
    def settled(self) -> int:
        """Bytes of `into`, from the beginning, that will not change any more."""
        return self.seen if self.reducer is None else self.reduced * self.reducer.dtype.itemsize

    def take(self, data: memoryview) -> None:
        """Take the whole message at once."""
        self.seen = self.total
        if self.reducer is None:
            self.into[:] = data
        elif self.total:
            self._reduce(self.array, np.frombuffer(data, self.reducer.dtype))

    def space(self, limit: int, scratch: Scratch) -> memoryview:
        if self.reducer is None:
            return self.into[self.seen : self.seen + limit]
        count = min(limit, scratch.chunk)
        held = len(self.carry)
        if held:
            scratch.bytes[:held] = self.carry
        return scratch.bytes[held : held + count]

    def filled(self, count: int, scratch: Scratch) -> None:
        self.seen += count
        if self.reducer is None:
            return
        # A read may end inside an element; its bytes wait in `carry` for the next one.
        have = len(self.carry) + count
        dtype = self.reducer.dtype
        whole = have // dtype.itemsize
        if whole:
            start = self.reduced
            self.reduced = start + whole
            self._reduce(self.array[start : self.reduced], scratch.typed(dtype)[:whole])
        rest = have - whole * dtype.itemsize
        self.carry = bytes(scratch.bytes[have - rest : have]) if rest else b""

    def _reduce(self, into: Array, span: Array) -> None:
        assert self.reducer is not None
        _, apply, ufunc = self.reducer
        if ufunc is None:
            apply(into, span)
            return
        with np.errstate(all="ignore"):  # integers wrap and floats follow IEEE 754, both silently
            ufunc(into, span, out=into)


class Watch(Receive):
    """A caller waits for a peer, but not for a message: done when `is_ready()` says so."""

    __slots__ = ("_is_over", "_is_ready", "needs_link")

    def __init__(self, envelope: Envelope, is_ready: Callable[[], bool], *, needs_link: bool = True) -> None:
        self._is_ready = is_ready
        self.needs_link = needs_link
        """Whether it ends with the link: not where what is waited for comes another way, and the peer may have left
        when it has come."""
        super().__init__(memoryview(b""), envelope, None)

    @property
    def done(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._is_over or self._is_ready()

    @done.setter
    def done(self, value: bool) -> None:
        self._is_over = value


@dataclass(eq=False, slots=True)
class Job:
    """What one caller waits for: a message to send, one to receive, or both; and until when."""

    what: str
    timeout: float
    deadline: float
    send: Send | None = None
    send_link: Link | None = None
    receive: Receive | None = None
    receive_link: Link | None = None
    before: tuple[tuple[Send | Receive, Link], ...] = ()
    """Of a pipelined ring: the messages before these two, on the same links, which so are done before them."""
    is_posted: bool = False
    say_at: float | None = None
    """When to tell the peer that we wait for it; never again after that."""
    turn: Signal | None = None
    """Of a caller that sleeps: sent when its job is done, or when the caller should lead."""

    @property
    def is_done(self) -> bool:
        return (self.send is None or self.send.done) and (self.receive is None or self.receive.done)

    def halves(self) -> Iterator[tuple[Send | Receive, Link]]:
        """The messages and their links, in their order."""
        yield from self.before
        if self.send is not None and self.send_link is not None:
            yield self.send, self.send_link
        if self.receive is not None and self.receive_link is not None:
            yield self.receive, self.receive_link

    def waits_on(self, link: Link) -> list[Send | Receive]:
        """What is not done and needs `link`."""
        return [half for half, other in self.halves() if other is link and not half.done and half.needs_link]

    def is_on(self, comm_id: int) -> bool:
        """Whether this is part of a collective on `comm_id`."""
        return any(half.envelope.comm_id == comm_id and half.envelope.members is not None for half, _ in self.halves())

    def fail(self, error: MakeError) -> None:
        """Ends the halves that are not done, and takes them off their links."""
        for half, link in self.halves():
            if not half.done:
                if isinstance(half, Send):
                    link.outbound.withdraw(half)
                else:
                    link.inbound.withdraw(half)
                half.error, half.done = error(), True
