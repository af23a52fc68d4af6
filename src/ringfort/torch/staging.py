"""`Stage`: collectives of tensors on one GPU, through pinned memory of the host, chunk by chunk.

While chunk k is on the network, the next ones are copied down and chunk k - 1 up, on two streams beside the caller's.
They wait for what the caller's stream had before the call, and the caller's stream waits for them.

The law of this module: **nothing in a stream ever waits for the host.** A copy up is put into its stream when the
network has done that chunk, so who waits for a call waits on the host for the network, and only then lets the stream
wait for the copies. A stream that waited for the network by itself could hold up any call of the driver that waits for
the device (a copy to the host, a `cudaMalloc`), and with it the very thread that serves the network.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ringfort.collectives.operation import Operation
from ringfort.collectives.work import Work
from ringfort.context import DistributedContext

CHUNK_BYTES: Final = 8 << 20
"""Of a chunk: its copies take 0.2 ms each at PCIe's speed, far longer than starting them; the first and the last of
them overlap with nothing."""
BUFFERS: Final = 4
"""Chunks on their way at once: two down, one on the network, one up. With their size, what a group pins."""
_AHEAD: Final = BUFFERS - 2
"""Chunks that are on their way down while one is on the network."""
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
    """Some elements of all tensors of a transfer, and the buffer that they pass through."""

    def __init__(self, stage: Stage, transfer: Transfer, buffer: Buffer, span: Span) -> None:
        self._stage, self._transfer, self._buffer = stage, transfer, buffer
        self._span = slice(*span) if transfer.sizes is None else slice(None)
        dtype = transfer.example.dtype
        self.parts = [buffer.memory[start:stop].view(dtype) for start, stop in transfer.layout(span)]
        self._landed: Any = None

    def down(self) -> None:
        """Copies to the host, once the buffer is free."""
        stage = self._stage
        if self._buffer.free is not None:
            stage.down.wait_event(self._buffer.free)
        for flat, part in self._transfer.reads:
            stage.device.copy(stage.down, self.parts[part], flat[self._span])
        self._landed = stage.device.record(stage.down)

    def wait(self) -> None:
        """Until it is in the host's memory."""
        self._landed.synchronize()

    def up(self) -> None:
        """Copies to the device."""
        stage = self._stage
        for flat, part in self._transfer.writes:
            stage.device.copy(stage.up, flat[self._span], self.parts[part])
        self._buffer.free = stage.device.record(stage.up)


class Call:
    """One collective, from when it was issued until its last copy is in the streams."""

    def __init__(self, stage: Stage, transfer: Transfer, seconds: float) -> None:
        """Raises what is wrong with the call; nothing is begun yet."""
        device = stage.device
        device.check()
        self._stage, self._transfer, self._seconds = stage, transfer, seconds
        transfer.make([transfer.example.new_empty(0, device="cpu")] * transfer.shares, seconds)
        self._begun = device.record(device.current())
        for stream in (stage.down, stage.up):
            for tensor in transfer.tensors:
                device.keep(tensor, stream)
        self.ended: Any = None
        """The event after which nothing touches the caller's tensors any more, once this has run or failed."""

    def run(self) -> None:
        """All of it, copies and network. The calls of a group run one at a time, in the order in which they were
        issued."""
        stage, transfer = self._stage, self._transfer
        # Now and not when it was issued: what the caller did before this call is nothing to the copies of the last one.
        for stream in (stage.down, stage.up):
            stream.wait_event(self._begun)
        try:
            self._pass_through()
            for into, source in transfer.finish:
                stage.device.copy(stage.up, into, source)
        finally:
            self.ended = stage.device.record(stage.up)

    def _pass_through(self) -> None:
        transfer, deadline = self._transfer, time.monotonic() + self._seconds
        spans = self._stage.spans(transfer)
        coming = deque(self._down(index, span) for index, span in enumerate(spans[:_AHEAD]))
        if len(spans) > 1:
            transfer.agree(transfer.example.numel(), self._seconds)
        for index in range(_AHEAD, _AHEAD + len(spans)):
            if index < len(spans):
                coming.append(self._down(index, spans[index]))
            chunk = coming.popleft()
            operation = transfer.make(chunk.parts, max(_LEAST, deadline - time.monotonic()))
            chunk.wait()
            operation.run()
            chunk.up()

    def _down(self, index: int, span: Span) -> _Chunk:
        buffer = self._stage.buffer(index, self._transfer, span)
        chunk = _Chunk(self._stage, self._transfer, buffer, span)
        chunk.down()
        return chunk


class Stage:
    """What one group does with tensors of one GPU. With `is_whole`, a tensor is one chunk, as it is to ranks that have
    it in the host's memory."""

    def __init__(self, context: DistributedContext, device: Any, *, is_whole: bool = False) -> None:
        self.device = device
        self.down, self.up = device.stream(), device.stream()
        self._context = context
        self._is_whole = is_whole
        self._ring: list[Buffer] = []

    def issue(self, transfer: Transfer, seconds: float) -> tuple[Work, Call]:
        """Begins a collective; raises what is wrong with it."""
        call = Call(self, transfer, seconds)
        return self._context.issue(Operation(transfer.name, transfer.nbytes, call.run), True), call

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
