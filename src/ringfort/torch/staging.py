"""`Stage`: collectives of tensors on one GPU, through pinned memory of the host, chunk by chunk.

While chunk k is on the network, chunk k + 1 is copied down and chunk k - 1 up, on two streams beside the caller's. They
wait for what the caller's stream had before the call, and the caller's stream waits for them.

**Held** (the default): all copies of a call are put into the streams at once, each copy up behind a gate that the
group's thread opens when the network has done that chunk. So the host waits for nothing. **By the host**: the copies
are put into the streams as the network goes on, and who waits for the work waits until the last of them is there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ringfort.collectives.operation import Operation
from ringfort.collectives.work import Work
from ringfort.context import DistributedContext

CHUNK_BYTES: Final = 8 << 20
"""Of a chunk: its copies take 0.2 ms each at PCIe's speed, far longer than starting them; the first and the last of
them overlap with nothing."""
BUFFERS: Final = 4
"""Chunks on their way at once: down, on the network, up, and one to spare. With their size, what a group pins."""
_PER_LOT: Final = 64
"""Chunks that are put into the streams together; a larger tensor goes in several such lots. The driver's queues hold
about a thousand entries, and whoever adds to a full one blocks."""
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
    """Some elements of all tensors of a transfer, and the buffer that they pass through."""

    def __init__(self, stage: Stage, transfer: Transfer, buffer: Buffer, span: Span) -> None:
        self._stage, self._transfer, self.buffer = stage, transfer, buffer
        self._span = slice(*span) if transfer.sizes is None else slice(None)
        layout, dtype = transfer.layout(span), transfer.example.dtype
        self.parts = [buffer.memory[start:stop].view(dtype) for start, stop in layout]
        self.nbytes = sum(stop - start for start, stop in layout)
        self.landed: Any = None

    def down(self) -> None:
        """Copies to the host, once the buffer is free."""
        stage = self._stage
        if self.buffer.free is not None:
            stage.down.wait_event(self.buffer.free)
        for flat, part in self._transfer.reads:
            stage.device.copy(stage.down, self.parts[part], flat[self._span])
        self.landed = stage.device.record(stage.down)

    def up(self) -> None:
        """Copies to the device."""
        stage = self._stage
        for flat, part in self._transfer.writes:
            stage.device.copy(stage.up, flat[self._span], self.parts[part])
        self.buffer.free = stage.device.record(stage.up)


class _Lot:
    """The chunks of a call, or of a large one some, that are put into the streams together."""

    def __init__(self, stage: Stage, transfer: Transfer, spans: Sequence[Span], seconds: float) -> None:
        """Raises what is wrong with the call; nothing is begun yet."""
        self._stage, self._transfer, self._seconds = stage, transfer, seconds
        self.chunks = [_Chunk(stage, transfer, stage.buffer(transfer, span), span) for span in spans]
        self._first: Operation | None = transfer.make(self.chunks[0].parts, seconds)
        self._deadline = 0.0
        self.agrees = False
        """The ranks make sure first that they are in the same call."""
        self.ends = False
        """It is the last, with which the call ends."""
        self.ended: Any = None
        """The event of that, once it is in the stream."""

    def enqueue(self) -> None:
        """Puts all copies into the streams, those up behind the gate."""
        shut = 0
        try:
            for chunk in self.chunks:
                chunk.down()
                self._stage.hold()
                shut += 1
                chunk.up()
            self._end()
        except BaseException as exc:
            self._stage.failure = exc
            self._stage.open_later(shut)
            raise

    def run_held(self) -> None:
        """The network's part of what was enqueued."""
        waiting = deque(self.chunks)
        try:
            self._begin()
            while waiting:
                self._run(waiting[0])
                waiting.popleft()
                self._stage.open()
        except BaseException as exc:
            self._stage.failure = exc
            for chunk in waiting:
                # What never came must not look like a result: all bits set is NaN in every floating-point type.
                with suppress(RuntimeError):
                    chunk.landed.synchronize()
                    chunk.buffer.memory.fill_(255)
                self._stage.open()
            raise

    def run_by_host(self) -> None:
        """All of it, copies and network."""
        try:
            self.chunks[0].down()
            self._begin()
            for chunk, following in zip(self.chunks, (*self.chunks[1:], None), strict=True):
                if following is not None:
                    following.down()
                self._run(chunk)
                chunk.up()
            self._end()
        except BaseException as exc:
            self._stage.failure = exc
            raise

    def _begin(self) -> None:
        self._deadline = time.monotonic() + self._seconds
        if self.agrees:
            self._transfer.agree(self._transfer.example.numel(), self._seconds)

    def _run(self, chunk: _Chunk) -> None:
        operation, self._first = self._first, None
        if operation is None:
            operation = self._transfer.make(chunk.parts, max(_LEAST, self._deadline - time.monotonic()))
        chunk.landed.synchronize()
        operation.run()

    def _end(self) -> None:
        if self.ends:
            for into, source in self._transfer.finish:
                self._stage.device.copy(self._stage.up, into, source)
            self.ended = self._stage.device.record(self._stage.up)


class Stage:
    """What one group does with tensors of one GPU. `is_held` says whether streams wait at gates, or the host; with
    `is_whole`, a tensor is one chunk, as it is to ranks that have it in the host's memory."""

    def __init__(
        self, context: DistributedContext, device: Any, *, is_held: bool = True, is_whole: bool = False
    ) -> None:
        self.context, self.device = context, device
        self.is_held = is_held and device.can_hold
        self._gate = device.gate() if self.is_held else None
        self._is_whole = is_whole
        self.down, self.up = device.stream(), device.stream()
        self._ring: list[Buffer] = []
        self._next = 0
        # Chunks take their buffers, and calls their turns, in one and the same order.
        self._lock = threading.Lock()
        self._under_way: deque[tuple[Work, int]] = deque()
        self.failure: BaseException | None = None
        """What a call has failed with; after that there is no other."""

    def issue(self, transfer: Transfer, seconds: float) -> tuple[Sequence[Work], Callable[[], Any]]:
        """Begins a collective. Returns its works, and what gives the event after which the result is there: at once if
        held, else when they are done. Raises what a call before it has failed with."""
        device = self.device
        device.check()
        with self._lock:
            if self.failure is not None:
                raise self.failure
            begun = device.record(device.current())
            for stream in (self.down, self.up):
                stream.wait_event(begun)
                for tensor in transfer.tensors:
                    device.keep(tensor, stream)
            spans = self._spans(transfer)
            lots: list[_Lot] = []
            works: list[Work] = []
            for start in range(0, len(spans), _PER_LOT):
                self._make_room()
                lot = _Lot(self, transfer, spans[start : start + _PER_LOT], seconds)
                lot.agrees, lot.ends = start == 0 and len(spans) > 1, start + _PER_LOT >= len(spans)
                lots.append(lot)
                works.append(self._begin(transfer, lot))
            return works, lambda: lots[-1].ended

    def _begin(self, transfer: Transfer, lot: _Lot) -> Work:
        if self.is_held:
            lot.enqueue()
        run = lot.run_held if self.is_held else lot.run_by_host
        work = self.context.issue(Operation(transfer.name, sum(chunk.nbytes for chunk in lot.chunks), run), True)
        self._under_way.append((work, len(lot.chunks)))
        return work

    def close(self) -> None:
        """Gives the streams back."""
        self.device.give_back(self.down, self.up)

    def hold(self) -> None:
        """What comes into the stream up from here on waits at the gate."""
        self.device.hold(self.up, self._gate)

    def open(self) -> None:
        """Lets the next chunk up that waits at the gate: the stream has them in the order of their turns."""
        assert self._gate is not None  # there is one where anything is held
        self._gate.open()

    def open_later(self, times: int) -> None:
        """Opens the gate for what was given up, in its turn: now it would let something else through."""

        def run() -> None:
            for _ in range(times):
                self.open()

        self.context.issue(Operation("given up", 0, run), True)

    def _make_room(self) -> None:
        """Waits, if the streams are full of earlier calls."""
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        while sum(count for _, count in self._under_way) > _PER_LOT:
            self._under_way.popleft()[0].wait()

    def _spans(self, transfer: Transfer) -> list[Span]:
        """The elements of each chunk; one of none where there are none."""
        example = transfer.example
        count = example.numel()
        if self._is_whole or transfer.sizes is not None:
            return [(0, count)]
        room = max(_ALIGNED, CHUNK_BYTES // transfer.shares // _ALIGNED * _ALIGNED) // example.element_size()
        return [(start, min(start + room, count)) for start in range(0, max(count, 1), room)]

    def buffer(self, transfer: Transfer, span: Span) -> Buffer:
        """The next in turn; for a chunk that is larger than those, one of its own."""
        size = max(stop for _, stop in transfer.layout(span))
        if size > CHUNK_BYTES:
            return Buffer(self.device, size)  # torch keeps pinned memory for the next who asks
        if not self._ring:  # all of them at once: to pin memory the driver may wait for the device, and so for a gate
            self._ring = [Buffer(self.device, CHUNK_BYTES) for _ in range(BUFFERS)]
        self._next = (self._next + 1) % len(self._ring)
        return self._ring[self._next]
