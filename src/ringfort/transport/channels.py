"""`Channel`: a connection to the next rank of a ring and one from the rank before, each with a thread of its own.

One thread that reads, opens, adds, seals and writes keeps one core busy and the others idle. Here the sending thread
seals and writes while the receiving one reads, opens and adds, by calls that block and release the interpreter lock. So
there are few lines of Python between calls of 100 us and more. A token for each chunk that has been received tells the
sending thread that it may pass that chunk on.

A channel knows no deadlines, aborts or groups. The links have all that: whoever starts a `Transfer` waits in the engine
meanwhile, so deaths, aborts, timeouts and mismatches end that wait as they end every other; and then `stop` shuts the
sockets down, which ends what blocks in them.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from queue import SimpleQueue
from struct import Struct
from typing import Final, NamedTuple

import numpy as np

from ringfort.errors import TamperedError
from ringfort.transport.locks import Event, Signal, Thread
from ringfort.transport.records import MAX_OVERHEAD, Opener, Sealer
from ringfort.transport.reducer import Array, Reducer

HEAD: Final = Struct("<Q16s")
"""What comes first in each collective: its number and call, so that ranks which disagree move nothing."""
_MORE: Final[int] = getattr(socket, "MSG_MORE", 0)
"""Says that more follows at once: on Linux, both leave together and wake the other side once. If nothing followed, the
kernel would wait for 200 ms."""
_LOOK_AGAIN: Final = 1.0
"""Seconds that a call blocks at most, in case an interrupt of the caller has lost the shutdown that ends it."""
_GRACE: Final = 1.0
"""Seconds after the end of a connection in which the links tell why; then its peer is lost."""
_ENDING: Final = 10.0
"""Seconds that `stop` waits for the threads: they only finish a call in C."""
_WITHOUT_END: Final = "its process died or closed a connection in the middle of a collective"

Move = tuple[int, int, bool, Reducer | None]
"""The first and last byte of a chunk. Of one to send: whether it is passed on, and so has to be received first. Of one
to receive: whether it is passed on afterwards, and how it is reduced."""


@dataclass(frozen=True)
class Share:
    """What one channel moves in a collective, in order."""

    sends: list[Move] = field(default_factory=list[Move])
    receives: list[Move] = field(default_factory=list[Move])

    @cached_property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that it sends and receives."""
        sent, received = (sum(stop - start for start, stop, *_ in half) for half in (self.sends, self.receives))
        return sent, received


class DisagreedError(Exception):
    """The rank before is in another collective."""

    def __init__(self, operation: int, call: bytes) -> None:
        super().__init__(operation, call)
        self.operation, self.call = operation, call


class _StoppedError(Exception):
    """The collective has ended."""


class Wire(NamedTuple):
    """A connection that is used in one direction, by calls that block."""

    peer: int
    """The rank at its other end, as the engine numbers it."""
    sock: socket.socket
    sealer: Sealer | None
    opener: Opener | None

    @classmethod
    def over(cls, peer: int, sock: socket.socket, sealer: Sealer | None, opener: Opener | None) -> Wire:
        """Take a connected socket. From here on its calls block, but not for ever."""
        sock.setblocking(True)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, Struct("@ll").pack(int(_LOOK_AGAIN), 0))
        return cls(peer, sock, sealer, opener)


class Transfer:
    """One collective over some channels, as the thread that waits for it sees it."""

    def __init__(
        self,
        data: memoryview,
        source: memoryview,
        head: bytes,
        wake: Callable[[], None],
        lose: Callable[[int, str], None],
        halves: int,
    ) -> None:
        """What is sent first and what is reduced comes from `source`, which may be `data`; results go to `data`. `wake`
        is called when `is_ready` has changed, and `lose` when the connection to a peer has ended and nobody has stopped
        the transfer soon after."""
        self.data, self.source, self.head = data, source, head
        self.failures: deque[tuple[int, BaseException]] = deque()
        """Why it cannot continue, other than the end of a connection, and the peer whose connection that concerns."""
        self._wake, self._lose = wake, lose
        self._is_short = False  # a thread has ended before all its bytes were moved
        self._halves = halves
        self._begun: deque[None] = deque()  # one for each thread that uses the memory, or has
        self._ended: deque[None] = deque()  # one for each thread that is done with the memory
        self._all_ended = Signal()
        self._over = Event()

    @property
    def is_ready(self) -> bool:
        """All bytes are in place, or something has failed."""
        return bool(self.failures) or (len(self._ended) >= self._halves and not self._is_short)

    def begin_half(self) -> None:
        """One of the threads begins to use the memory."""
        self._begun.append(None)

    def end_half(self, failure: BaseException | None, peer: int) -> None:
        """One of the threads is done with the memory. If its connection has ended, wait for the reason."""
        is_cut = isinstance(failure, OSError) and not isinstance(failure, TamperedError)
        if is_cut or isinstance(failure, _StoppedError):  # never ready: whoever has stopped it ends the wait with why
            self._is_short = True
        elif failure is not None:
            self.failures.append((peer, failure))
        self._ended.append(None)
        if len(self._ended) >= self._halves:
            self._all_ended.send()
            self._wake()
        elif failure is not None:
            self._wake()
        if is_cut and not self._over.wait(_GRACE):
            assert isinstance(failure, OSError)
            self._lose(peer, failure.strerror or str(failure) or _WITHOUT_END)

    def finish(self) -> None:
        """The wait for it is over."""
        self._over.set()

    def wait_for_threads(self) -> None:
        """Return when no thread uses the memory any more. Those that begin after a `stop` find that out by their first
        bytes, before they use it; and an interrupt may have come before all were told to begin."""
        until = time.monotonic() + _ENDING
        while len(self._ended) < len(self._begun) and time.monotonic() < until:
            self._all_ended.wait(0.05)


class Channel:
    """Two wires and their threads, for one transfer at a time."""

    def __init__(self, out: Wire, into: Wire, chunk: int) -> None:
        """`chunk` is the most that is moved at once."""
        self._out, self._into = out, into
        self.behind, self.before = out.peer, into.peer
        # np.empty takes no memory until it is written to.
        self._sealed = memoryview(np.empty(chunk + MAX_OVERHEAD, np.uint8)) if out.sealer else memoryview(b"")
        self._record = memoryview(np.empty(chunk + MAX_OVERHEAD, np.uint8)) if into.opener else memoryview(b"")
        self._scratch = np.empty(chunk, np.uint8)
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._to_send: SimpleQueue[tuple[Transfer, Share] | None] = SimpleQueue()
        self._to_receive: SimpleQueue[tuple[Transfer, Share] | None] = SimpleQueue()
        self._is_over = False
        self.threads: list[Thread] = []

    def begin(self) -> None:
        """Start the threads, which sleep until there is something to move."""
        for queue, move, wire, name in (
            (self._to_send, self._send, self._out, "out"),
            (self._to_receive, self._receive, self._into, "in"),
        ):
            thread = Thread(_loop, (queue, move, wire), name=f"ringfort-channel-{name}")
            thread.start()
            self.threads.append(thread)

    def move(self, transfer: Transfer, share: Share) -> None:
        """Have the threads do their parts of `transfer`."""
        self._to_send.put((transfer, share))
        self._to_receive.put((transfer, share))

    def stop(self) -> None:
        """End what is under way, now and later. May be called twice, from any thread."""
        self._is_over = True
        self._tokens.put(False)
        for wire in (self._out, self._into):
            with suppress(OSError):  # it has ended already
                wire.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """`stop`, and end the threads."""
        self.stop()
        self._to_send.put(None)
        self._to_receive.put(None)

    def _send(self, transfer: Transfer, share: Share) -> None:
        has_more = bool(share.sends) and not share.sends[0][2]  # a chunk that is passed on has to come first
        self._write(memoryview(transfer.head), _MORE if has_more else 0)
        data, source, write, pop = transfer.data, transfer.source, self._write, self._tokens.get
        for start, stop, is_passed_on, _ in share.sends:
            if not is_passed_on:
                write(source[start:stop])
            elif pop():
                write(data[start:stop])
            else:
                raise _StoppedError

    def _write(self, data: memoryview, flags: int = 0) -> None:
        _, sock, sealer, _ = self._out
        if sealer is not None:
            data = self._sealed[: sealer.seal(data, self._sealed)]
        while data:
            try:
                data = data[sock.send(data, flags) :]
            except BlockingIOError:  # the rank behind is slow
                if self._is_over:
                    raise _StoppedError from None

    def _receive(self, transfer: Transfer, share: Share) -> None:
        head = memoryview(bytearray(HEAD.size))
        self._read(head)
        if bytes(head) != transfer.head:
            raise DisagreedError(*HEAD.unpack(head))
        data, source, read, tell = transfer.data, transfer.source, self._read, self._tokens.put
        arrived = memoryview(self._scratch)
        with np.errstate(all="ignore"):  # integers wrap and floats follow IEEE 754, both silently
            for start, stop, is_passed_on, reducer in share.receives:
                if reducer is None:
                    read(data[start:stop])
                else:
                    read(arrived[: stop - start])
                    _reduce(reducer, data[start:stop], source[start:stop], self._scratch[: stop - start])
                if is_passed_on:
                    tell(True)

    def _read(self, into: memoryview) -> None:
        """Fill `into` with what the next record holds."""
        _, sock, _, opener = self._into
        whole = data = into if opener is None else self._record[: len(into) + opener.overhead]
        while data:
            try:
                count = sock.recv_into(data, 0, socket.MSG_WAITALL)
            except BlockingIOError:  # the rank before is slow
                count = -1
            if self._is_over:
                raise _StoppedError
            if not count:
                raise ConnectionResetError(0, _WITHOUT_END)
            data = data[max(count, 0) :]
        if opener is not None:
            opener.open(whole, into)


def _reduce(reducer: Reducer, into: memoryview, source: memoryview, arrived: Array) -> None:
    dtype, apply, ufunc = reducer
    result, own, other = np.frombuffer(into, dtype), np.frombuffer(source, dtype), arrived.view(dtype)
    if ufunc is not None:
        ufunc(own, other, out=result)
        return
    if source.obj is not into.obj:
        result[...] = own
    apply(result, other)


def _loop(
    queue: SimpleQueue[tuple[Transfer, Share] | None], move: Callable[[Transfer, Share], None], wire: Wire
) -> None:
    """What a thread does: one half of each transfer, until it is told to end."""
    while (work := queue.get()) is not None:
        transfer, share = work
        failure: BaseException | None = None
        transfer.begin_half()
        try:
            move(transfer, share)
        except BaseException as exc:  # raised by whoever waits
            failure = exc.with_traceback(None)
        transfer.end_half(failure, wire.peer)
        del work, transfer, share, failure  # the arrays are the caller's: not kept while this sleeps
    wire.sock.close()


class Channels:
    """The channels of one group, which end when nobody holds this any more."""

    def __init__(self, channels: Sequence[Channel], chunk: int) -> None:
        self.all = tuple(channels)
        self.chunk = chunk
        self.is_over = False
        self.is_busy = False
        try:
            for channel in channels:
                channel.begin()
        except BaseException:  # no more threads, or Ctrl-C
            self.close()
            raise

    def stop(self) -> None:
        """End what is under way, for good."""
        self.is_over = True
        for channel in self.all:
            channel.stop()

    def close(self) -> None:
        """`stop`, and end the threads; wait for nothing."""
        self.is_over = True
        for channel in self.all:
            channel.close()

    def join(self, seconds: float) -> None:
        """Wait for the threads to end, `seconds` at most."""
        until = time.monotonic() + seconds
        for channel in self.all:
            for thread in channel.threads:
                thread.join(max(0.0, until - time.monotonic()))
