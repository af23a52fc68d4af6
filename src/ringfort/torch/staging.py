"""`Stage`: collectives on tensors of one GPU, through pinned host memory, chunk by chunk.

While chunk k is on the network, the next chunks are copied down and chunk k - 1 is copied up, on two streams beside the
caller's. These wait for what the caller's stream had before the call, and the caller's stream waits for them.

A copy up is put into its stream only when the network has done that chunk. So nothing in a stream ever waits for the
host, and no call of the CUDA driver waits for the network.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from functools import cache
from typing import Any, Final

from ringfort.backends.group import Group
from ringfort.collectives.work import Work
from ringfort.config import Environment
from ringfort.context import DistributedContext
from ringfort.torch.operations import Call, Operation, meet
from ringfort.torch.tensors import flatten, is_plain, to_array

_log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 8 << 20
"""Size of a chunk. Each copy takes 0.2 ms over PCIe, far longer than it takes to start it; the first copy down and the
last copy up overlap with nothing."""
BUFFERS: Final = 4
"""Chunks under way at once: two copied down, one on the network, one copied up. A group pins so many chunks."""
_AHEAD: Final = BUFFERS - 2
"""Chunks that are copied down while one is on the network."""
_ALIGNMENT: Final = 256
"""Bytes. Every part of a chunk starts at a multiple."""
_MIN_SECONDS: Final = 0.001
"""The least timeout of a chunk: a call that is out of time must fail with a timeout, not with an invalid argument."""

Span = tuple[int, int]


class Transfer:
    """A call whose tensors are on a GPU. A chunk of it is a span of elements of every tensor; each tensor has one part
    of the buffer that the chunk passes through."""

    def __init__(self, call: Call, group: Group) -> None:
        """Raises `InvalidArgumentError`."""
        call.check(group)
        self.call, self._group = call, group
        kind = call.kind
        flats = {id(one): flatten(one, reduces=kind.reduces) for one in (*call.inputs, *call.outputs)}
        self._parts, inputs, outputs = kind.parts(group.rank, group.world_size)
        self.reads = [(flats[id(one)], part) for one, part in zip(call.inputs, inputs, strict=False)]
        self.writes = [(flats[id(one)], part) for one, part in zip(call.outputs, outputs, strict=False)]
        """Flat tensors on the device, each with its part of a buffer."""
        self._example, _ = (*self.reads, *self.writes)[0]
        self.dtype, self.count = self._example.dtype, self._example.numel()
        self._sizes = [flat.numel() for flat, _ in (*self.reads, *self.writes)] if kind.has_any_sizes else None
        """Elements of each part. Ranks do not know each other's, so such a call is a single chunk."""
        copied_back = [
            (one.detach(), flats[id(one)].view(one.dtype).view(one.shape)) for one in call.outputs if not is_plain(one)
        ]
        self.copies = [*copied_back, *((into.detach(), source) for into, source in call.copies)]
        """What is copied on the device in the end: into which tensor, from which."""

    def spans(self, chunk_bytes: int) -> list[Span]:
        """Return the elements of each chunk, at least one chunk."""
        if self._sizes is not None or not chunk_bytes:
            return [(0, self.count)]
        length = max(_ALIGNMENT, chunk_bytes // self._parts // _ALIGNMENT * _ALIGNMENT) // self.dtype.itemsize
        return [(start, min(start + length, self.count)) for start in range(0, max(self.count, 1), length)]

    def layout(self, span: Span) -> list[Span]:
        """Return where the parts of a chunk are in its buffer, in bytes."""
        places: list[Span] = []
        start = 0
        for count in self._sizes or [span[1] - span[0]] * self._parts:
            stop = start + count * self.dtype.itemsize
            places.append((start, stop))
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return places

    def operation(self, parts: list[Any], seconds: float) -> Operation:
        """Prepare the collective on one chunk in host memory."""
        inputs = [to_array(parts[part]) for _, part in self.reads]
        outputs = [to_array(parts[part]) for _, part in self.writes]
        return self.call.kind.make(self._group, self.call, inputs, outputs, seconds)

    def check(self, seconds: float) -> None:
        """Raise what is wrong with the call, before anything moves."""
        self.operation([self._example.new_empty(0, device="cpu")] * self._parts, seconds)

    def meet(self, seconds: float) -> None:
        """Make sure that all ranks are in this call. Chunks alone could make a large tensor pass for two small ones."""
        meet(self._group, self.call, self.dtype, self.count, seconds)

    @property
    def nbytes(self) -> int:
        """Return how much passes through host memory."""
        return sum(stop - start for start, stop in self.layout((0, self.count)))

    @property
    def tensors(self) -> list[Any]:
        """Return all tensors whose memory on the device is used."""
        return [*(flat for flat, _ in (*self.reads, *self.writes)), *(one for pair in self.copies for one in pair)]


class _Buffer:
    """Pinned memory that one chunk of a transfer at a time passes through: copied down, exchanged, copied up."""

    def __init__(self, device: Any, size: int) -> None:
        self._device, self._memory = device, device.pinned(size)
        self._free: Any = None
        """The event of the last copy from it to the device."""

    def copy_down(self, transfer: Transfer, span: Span, down: Any) -> None:
        """Begin to copy a chunk to the host in the stream `down`, once the buffer is free."""
        self._elements = slice(None) if transfer.call.kind.has_any_sizes else slice(*span)
        self.parts = [self._memory[start:stop].view(transfer.dtype) for start, stop in transfer.layout(span)]
        if self._free is not None:
            down.wait_event(self._free)
        for flat, part in transfer.reads:
            self._device.copy(down, self.parts[part], flat[self._elements])
        self.copied = self._device.record(down)
        """The event after which the chunk is in host memory."""

    def copy_up(self, transfer: Transfer, up: Any) -> None:
        """Begin to copy the chunk to the device in the stream `up`."""
        for flat, part in transfer.writes:
            self._device.copy(up, flat[self._elements], self.parts[part])
        self._free = self._device.record(up)


class StagedCall:
    """One call, from when it was issued until its last copy is in a stream."""

    def __init__(self, stage: Stage, transfer: Transfer, seconds: float, *, is_alone: bool = False) -> None:
        """Raise what is wrong with the call; nothing is begun yet.

        `is_alone`: the caller waits for it at once. Then a single chunk is copied in the caller's own stream, for there
        is nothing to overlap with.
        """
        device = stage.device
        device.check()
        self._stage, self._transfer, self._seconds = stage, transfer, seconds
        self._spans = transfer.spans(stage.chunk_bytes)
        self.ended: Any = None
        """Once the call has run or failed, the event after which nothing touches the caller's tensors any more. None if
        everything was done in the caller's own stream."""
        current = device.current()
        if transfer.call.before is not None:
            transfer.call.before()
        self._issued: Any = None
        self._streams = (current, current)
        if is_alone and len(self._spans) == 1:
            return
        transfer.check(seconds)
        self._streams = (stage.down, stage.up)
        self._issued = device.record(current)
        for stream in self._streams:
            for tensor in transfer.tensors:
                device.keep(tensor, stream)

    def run(self) -> None:
        """Do all of it, copies and network. The calls of a group run one at a time, in the order of their issue."""
        # Not when the call was issued: kernels that the caller issued before this call must not delay the copies of the
        # call before it.
        if self._issued is not None:
            for stream in self._streams:
                stream.wait_event(self._issued)
        try:
            self._run_chunks()
            for into, source in self._transfer.copies:
                self._stage.device.copy(self._streams[1], into, source)
        finally:
            if self._issued is not None:
                self.ended = self._stage.device.record(self._streams[1])

    def _run_chunks(self) -> None:
        deadline = time.monotonic() + self._seconds
        count = len(self._spans)
        ahead = deque(self._start(index) for index in range(min(_AHEAD, count)))
        if count > 1:
            self._transfer.meet(self._seconds)
        for index in range(count):
            if index + _AHEAD < count:
                ahead.append(self._start(index + _AHEAD))
            chunk = ahead.popleft()
            # A single chunk keeps the group's usual timeout, for which operations are cached.
            left = self._seconds if count == 1 else max(_MIN_SECONDS, deadline - time.monotonic())
            operation = self._transfer.operation(chunk.parts, left)
            chunk.copied.synchronize()
            operation.run()
            chunk.copy_up(self._transfer, self._streams[1])

    def _start(self, index: int) -> _Buffer:
        span = self._spans[index]
        buffer = self._stage.buffer(index, max(stop for _, stop in self._transfer.layout(span)))
        buffer.copy_down(self._transfer, span, self._streams[0])
        return buffer


class Stage:
    """Runs the collectives of one group on tensors of one GPU."""

    def __init__(self, context: DistributedContext, device: Any, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """With `chunk_bytes` 0 a tensor is one chunk, as it is to ranks that have it in host memory."""
        warn_about_stream_wait()
        self.device = device
        self.down, self.up = device.stream(), device.stream()
        self.chunk_bytes = chunk_bytes
        self._context = context
        self._buffers: list[_Buffer] = []

    def issue(self, call: Call, seconds: float) -> tuple[Work, StagedCall]:
        """Begin a collective. Raises what is wrong with it."""
        staged, operation = self._prepare(call, seconds)
        return self._context.issue(operation, True), staged

    def run(self, call: Call, seconds: float) -> None:
        """Run a collective and block the host until the network has done it; in the caller's thread if possible."""
        staged, operation = self._prepare(call, seconds, is_alone=True)
        try:
            self._context.issue(operation, False)
        finally:
            if staged.ended is not None:
                self.device.current().wait_event(staged.ended)

    def _prepare(self, call: Call, seconds: float, *, is_alone: bool = False) -> tuple[StagedCall, Operation]:
        transfer = Transfer(call, self._context.group)
        staged = StagedCall(self, transfer, seconds, is_alone=is_alone)
        return staged, Operation(call.kind.collective.name.lower(), transfer.nbytes, staged.run)

    def buffer(self, index: int, size: int) -> _Buffer:
        """Return the buffer for chunk number `index` of a call; a new one for a chunk of more than `CHUNK_BYTES`."""
        usual = self.chunk_bytes or CHUNK_BYTES
        if size > usual:
            return _Buffer(self.device, size)  # torch caches pinned memory
        while len(self._buffers) <= index % BUFFERS:
            self._buffers.append(_Buffer(self.device, usual))
        return self._buffers[index % BUFFERS]


@cache
def warn_about_stream_wait() -> None:
    """Warn, once per process, that `RINGFORT_CUDA_WAIT=stream` means `host` now."""
    if Environment.from_mapping().cuda_wait == "stream":
        _log.warning(
            "RINGFORT_CUDA_WAIT=stream is ignored: the host waits for collectives on CUDA tensors, as with "
            "RINGFORT_CUDA_WAIT=host. Streams that waited for the network could deadlock with torch.compile and other "
            "code that launches kernels while it holds the interpreter lock. Unset the variable."
        )
