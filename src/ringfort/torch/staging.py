"""`Stage`: collectives of tensors on one GPU, through pinned memory of the host, chunk by chunk.

While chunk k is on the network, the next ones are copied down and chunk k - 1 up, on two streams beside the caller's.
They wait for what the caller's stream had before the call, and the caller's stream waits for them. Who waits for the
network is a setting:

**The host** (`Call`): a copy up is put into its stream when the network has done that chunk, by whoever runs the call.
The law: nothing in a stream ever waits for the host. So no call of the driver waits for the network.

**The stream** (`HeldCall`): all copies are put into the streams by the caller, at once, each copy up behind a gate that
is opened when the network has done that chunk. `gates.py` has the laws. A gate is opened by Python: who waits for the
device and keeps the interpreter's lock (`torch.compile` launches kernels so) keeps it shut. So this is not the default.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from ringfort.collectives.operation import Operation
from ringfort.collectives.work import Work
from ringfort.context import DistributedContext

_log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 8 << 20
"""Of a chunk: its copies take 0.2 ms each at PCIe's speed, far longer than starting them; the first and the last of
them overlap with nothing."""
BUFFERS: Final = 4
"""Chunks on their way at once: two down, one on the network, one up. With their size, what a group pins."""
_AHEAD: Final = BUFFERS - 2
"""Chunks that are on their way down while one is on the network."""
_SPOILT: Final = 255
"""The bytes of what never came: NaN in every floating-point type."""
_ALIGNED: Final = 256
"""Bytes: every part of a chunk begins at a multiple."""
_LEAST: Final = 0.001
"""Seconds that a chunk is given at the least, so that what fails is the network and not an argument."""


Span = tuple[int, int]


class Share(NamedTuple):
    """A tensor on the device, flat and contiguous, and which part of each chunk it is."""

    flat: Any
    part: int


@dataclass
class Transfer:
    """One collective: which tensors are read and written, and how the network does a chunk of it."""

    name: str
    shares: int
    """Parts of a chunk: each has the same elements of another tensor."""
    reads: Sequence[Share]
    writes: Sequence[Share]
    make: Callable[[list[Any], float], Operation]
    """The operation on one chunk, given its parts in the host's memory and the seconds it has."""
    agree: Callable[[int, float], None]
    """Makes sure that all ranks are in this call, with so many elements in a part: where it goes in several chunks."""
    result: Sequence[Any] = ()
    """The caller's tensors that are written to."""
    finish: Sequence[tuple[Any, Any]] = ()
    """What is copied on the device in the end: into the caller's tensor, from a contiguous one."""
    sizes: Sequence[int] | None = None
    """Elements of each part, where they differ: then all goes in one chunk."""

    @property
    def example(self) -> Any:
        """One of the tensors; all have its element type and size."""
        return (*self.reads, *self.writes)[0].flat

    def layout(self, span: Span) -> list[Span]:
        """Where the parts of a chunk with these elements are in a buffer, in bytes."""
        sizes = self.sizes or [span[1] - span[0]] * self.shares
        places: list[Span] = []
        start = 0
        for count in sizes:
            size = count * self.example.element_size()
            places.append((start, start + size))
            start += -(-size // _ALIGNED) * _ALIGNED
        return places

    @property
    def nbytes(self) -> int:
        """What passes through the host's memory."""
        return sum(stop - start for start, stop in self.layout((0, self.example.numel())))

    @property
    def tensors(self) -> list[Any]:
        """All memory of the device that is used."""
        used = [share.flat for share in (*self.reads, *self.writes)]
        return [*used, *(tensor for pair in self.finish for tensor in pair)]


class Buffer:
    """Pinned memory for one chunk at a time."""

    def __init__(self, device: Any, size: int) -> None:
        self.memory = device.pinned(size)
        self.free: Any = None
        """The event of its last copy up."""


class _Chunk:
    """Some elements of all tensors of a transfer, the buffer that they pass through, and the streams down and up."""

    def __init__(self, device: Any, streams: tuple[Any, Any], transfer: Transfer, buffer: Buffer, span: Span) -> None:
        self._device, self._transfer, self._buffer = device, transfer, buffer
        self._down, self._up = streams
        self._span = slice(*span) if transfer.sizes is None else slice(None)
        dtype = transfer.example.dtype
        self.parts = [buffer.memory[start:stop].view(dtype) for start, stop in transfer.layout(span)]
        self._landed: Any = None

    def down(self) -> None:
        """Copies to the host, once the buffer is free."""
        if self._buffer.free is not None:
            self._down.wait_event(self._buffer.free)
        for flat, part in self._transfer.reads:
            self._device.copy(self._down, self.parts[part], flat[self._span])
        self._landed = self._device.record(self._down)

    def wait(self) -> None:
        """Until it is in the host's memory."""
        self._landed.synchronize()

    def spoil(self) -> None:
        """Makes it something that cannot be taken for a result."""
        with suppress(RuntimeError):  # of a device that has failed
            self.wait()
            self._buffer.memory.fill_(_SPOILT)

    def up(self) -> None:
        """Copies to the device."""
        for flat, part in self._transfer.writes:
            self._device.copy(self._up, flat[self._span], self.parts[part])
        self._buffer.free = self._device.record(self._up)


class Call:
    """One collective, from when it was issued until its last copy is in the streams. The host waits."""

    def __init__(self, stage: Stage, transfer: Transfer, seconds: float, *, is_alone: bool = False) -> None:
        """Raises what is wrong with the call; nothing is begun yet. `is_alone` if the caller does nothing before it has
        ended: then a single chunk is copied in its own stream, for there is nothing to overlap with."""
        device = stage.device
        device.check()
        self._stage, self._transfer, self._seconds = stage, transfer, seconds
        self._spans = stage.spans(transfer)
        self.ended: Any = None
        """The event after which nothing touches the caller's tensors any more, once this has run or failed. None if all
        was done in the caller's own stream."""
        current = device.current()
        self._begun: Any = None
        self._streams = (current, current)
        if is_alone and len(self._spans) == 1:
            return
        transfer.make([transfer.example.new_empty(0, device="cpu")] * transfer.shares, seconds)
        self._streams = (stage.down, stage.up)
        self._begun = device.record(current)
        for stream in self._streams:
            for tensor in transfer.tensors:
                device.keep(tensor, stream)

    def run(self) -> None:
        """All of it, copies and network. The calls of a group run one at a time, in the order in which they were
        issued."""
        # Now and not when it was issued: what the caller did before this call is nothing to the copies of the last one.
        self._begin()
        try:
            self._pass_through()
            self._finish()
        finally:
            if self._begun is not None:
                self.ended = self._stage.device.record(self._streams[1])

    def _begin(self) -> None:
        if self._begun is not None:
            for stream in self._streams:
                stream.wait_event(self._begun)

    def _pass_through(self) -> None:
        deadline = time.monotonic() + self._seconds
        coming = deque(self._down(index) for index in range(min(_AHEAD, len(self._spans))))
        self._agree()
        for index in range(_AHEAD, _AHEAD + len(self._spans)):
            if index < len(self._spans):
                coming.append(self._down(index))
            chunk = coming.popleft()
            self._exchange(chunk, deadline)
            chunk.up()

    def _agree(self) -> None:
        if len(self._spans) > 1:
            self._transfer.agree(self._transfer.example.numel(), self._seconds)

    def _exchange(self, chunk: _Chunk, deadline: float) -> None:
        # One that is alone has all the time: the usual timeout, if it is that, for which things are kept ready.
        left = self._seconds if len(self._spans) == 1 else max(_LEAST, deadline - time.monotonic())
        operation = self._transfer.make(chunk.parts, left)
        chunk.wait()
        operation.run()

    def _finish(self) -> None:
        for into, source in self._transfer.finish:
            self._stage.device.copy(self._streams[1], into, source)

    def _down(self, index: int) -> _Chunk:
        span = self._spans[index]
        buffer = self._stage.buffer(index, self._transfer, span)
        chunk = _Chunk(self._stage.device, self._streams, self._transfer, buffer, span)
        chunk.down()
        return chunk


class HeldCall(Call):
    """One collective for which the stream waits: `enqueue` is the caller's part, `run` the network's."""

    def __init__(self, stage: Stage, transfer: Transfer, seconds: float) -> None:
        super().__init__(stage, transfer, seconds)
        self._chunks: list[_Chunk] = []
        self._coming: SimpleQueue[_Chunk | None] = SimpleQueue()

    def enqueue(self, gate: Any, issue: Callable[[Callable[[], None]], Work]) -> Work:
        """Puts all copies into the streams; `issue` begins the network's part. That is before the first gate: another
        thread may wait for the device at any moment, and with it this one until the gates that are there open."""
        self._begin()
        for index in range(min(BUFFERS, len(self._spans))):
            self._come(index)
        work = issue(self.run)
        try:
            for index, chunk in enumerate(self._chunks):  # to which `_come` adds
                gate.hold(self._streams[1])
                chunk.up()
                if index + BUFFERS < len(self._spans):
                    self._come(index + BUFFERS)
            self._finish()
            self.ended = self._stage.device.record(self._streams[1])
        except BaseException as exc:
            self._stage.failure = exc
            self._coming.put(None)
            raise
        return work

    def run(self) -> None:
        """The network's part, without a call of the driver. Every gate is opened, whatever happens."""
        stage, deadline = self._stage, time.monotonic() + self._seconds
        agreed = False
        for _ in self._spans:
            chunk = self._coming.get()
            if chunk is None:
                break
            try:
                if stage.failure is None:
                    if not agreed:
                        self._agree()
                        agreed = True
                    self._exchange(chunk, deadline)
            except BaseException as exc:  # belongs to whoever asks next
                stage.failure = exc
            if stage.failure is not None:
                chunk.spoil()
            stage.open()
        if stage.failure is not None:
            raise stage.failure

    def forget(self) -> None:
        """Lets go of what is on the device, in a thread that may call the driver: to free an event or a tensor can be a
        call of it."""
        self._chunks.clear()
        del self._transfer

    def _come(self, index: int) -> None:
        chunk = self._down(index)
        self._chunks.append(chunk)
        self._coming.put(chunk)


class Stage:
    """What one group does with tensors of one GPU. With `is_held` the stream waits and not the host, where the device
    can do that. With `is_whole`, a tensor is one chunk, as it is to ranks that have it in the host's memory."""

    def __init__(
        self, context: DistributedContext, device: Any, *, is_held: bool = False, is_whole: bool = False
    ) -> None:
        self.device = device
        gated = device.gated() if is_held else None
        self.down, self.up, self._gate = gated or (device.stream(), device.stream(), None)
        self._context = context
        self._is_whole = is_whole
        self._ring: list[Buffer] = []
        # Copies are in the streams, and calls take their turns, in one and the same order.
        self._lock = threading.Lock()
        self._under_way: deque[tuple[Work, HeldCall]] = deque()
        self.failure: BaseException | None = None
        """What a held call has failed with; after that there is no other."""
        self._is_told = False

    @property
    def is_held(self) -> bool:
        """Whether the stream waits, and not the host."""
        return self._gate is not None

    def issue(self, transfer: Transfer, seconds: float) -> tuple[Work, Call]:
        """Begins a collective; raises what is wrong with it, and what a held one before it has failed with."""

        def begin(run: Callable[[], None]) -> Work:
            return self._context.issue(Operation(transfer.name, transfer.nbytes, run), True)

        if self._gate is None:
            call = Call(self, transfer, seconds)
            return begin(call.run), call
        self.check()
        with self._lock:
            held = HeldCall(self, transfer, seconds)
            work = held.enqueue(self._gate, begin)
            self._under_way.append((work, held))
        return work, held

    def run(self, transfer: Transfer, seconds: float) -> None:
        """A collective for which the host waits, in the caller's thread unless others are under way."""
        call = Call(self, transfer, seconds, is_alone=True)
        try:
            self._context.issue(Operation(transfer.name, transfer.nbytes, call.run), False)
        finally:
            if call.ended is not None:
                self.device.current().wait_event(call.ended)

    def check(self) -> None:
        """Raises what a held call has failed with; and lets go of those that are over."""
        while self._under_way and self._under_way[0][0].is_completed():
            with suppress(IndexError):  # another thread was first
                self._under_way.popleft()[1].forget()
        if self.failure is not None:
            self._is_told = True
            raise self.failure

    def open(self) -> None:
        """Lets the next chunk up: the stream has them in the order of their turns."""
        assert self._gate is not None  # there is one where anything is held
        self._gate.open()

    def close(self) -> None:
        """Gives the streams back, and warns of what failed and nobody was told: who leaves must not be kept."""
        if self._gate is not None:
            self.device.give_back(self.down, self.up)
        if self.failure is not None and not self._is_told:
            _log.warning("a collective of CUDA tensors has failed and its result is not valid: %s", self.failure)

    def spans(self, transfer: Transfer) -> list[Span]:
        """The elements of each chunk; one of none where there are none."""
        example = transfer.example
        count = example.numel()
        if self._is_whole or transfer.sizes is not None:
            return [(0, count)]
        room = max(_ALIGNED, CHUNK_BYTES // transfer.shares // _ALIGNED * _ALIGNED) // example.element_size()
        return [(start, min(start + room, count)) for start in range(0, max(count, 1), room)]

    def buffer(self, index: int, transfer: Transfer, span: Span) -> Buffer:
        """That of the chunk with this number in its call; for one that is larger than those, one of its own."""
        size = max(stop for _, stop in transfer.layout(span))
        if size > CHUNK_BYTES:
            return Buffer(self.device, size)  # torch keeps pinned memory for the next who asks
        while len(self._ring) <= index % BUFFERS:
            self._ring.append(Buffer(self.device, CHUNK_BYTES))
        return self._ring[index % BUFFERS]
