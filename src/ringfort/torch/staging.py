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

from ringfort.config import Environment
from ringfort.context import DistributedContext
from ringfort.torch.future_waits import future_waits
from ringfort.torch.operations import Call, Operation, meet
from ringfort.torch.tensors import flatten, is_plain, to_array

_log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 8 << 20
"""Size of a chunk of ranks that share memory. Each copy takes 0.2 ms over PCIe, far longer than it takes to start it;
the first copy down and the last copy up overlap with nothing."""
NETWORK_CHUNK_BYTES: Final = 32 << 20
"""Size of a chunk otherwise: several connections take a while to fill. Beside an H200, steps of DistributedDataParallel
over encrypted TCP were 1.62 and 1.88 times as fast as over Gloo (25 and 101 million parameters, 2 ranks), with 16 MiB
1.42 and 1.68 times, and with 8 MiB 1.20 and 1.41 times."""
BUFFERS: Final = 4
"""Chunks under way at once: two copied down, one on the network, one copied up. A group pins so many chunks: 128 MiB
for each GPU at most. That does not follow the machine's memory, because all ranks have to cut a tensor alike: a small
machine would make all others slow, and of 8 GiB it is 1.6%. Larger chunks were not measured."""
_AHEAD: Final = BUFFERS - 2
"""Chunks that are copied down while one is on the network."""
_ALIGNMENT: Final = 256
"""Bytes. Every part of a chunk starts at a multiple."""
_MIN_SECONDS: Final = 0.001
"""The least timeout of a chunk: a call that is out of time must fail with a timeout, not with an invalid argument."""

Span = tuple[int, int]


class _Buffer:
    """Pinned memory that one chunk of a call at a time passes through: copied down, exchanged, copied up."""

    parts: list[Any]
    """The part of each tensor of the chunk that is in the buffer."""
    elements: slice
    """The elements of each tensor that are in the buffer."""
    copied: Any
    """The event after which the chunk is in host memory."""

    def __init__(self, device: Any, size: int) -> None:
        self.memory = device.pinned(size)
        self.free: Any = None
        """The event of the last copy from it to the device."""


class StagedCall:
    """One call on tensors of a GPU, from when it was issued until its last copy is in a stream.

    A chunk of it is a span of elements of every tensor; each tensor has one part of the buffer that the chunk passes
    through.
    """

    def __init__(self, stage: Stage, call: Call, seconds: float, *, is_alone: bool) -> None:
        """Raise what is wrong with the call; nothing is begun yet.

        `is_alone`: the caller waits for it at once. Then a single chunk is copied in the caller's own stream, for there
        is nothing to overlap with.
        """
        group, device, kind = stage.context.group, stage.device, call.kind
        call.check(group)
        device.check()
        self._stage, self._device, self._call, self._group, self._seconds = stage, device, call, group, seconds
        flats = {id(one): flatten(one, reduces=kind.reduces) for one in (*call.inputs, *call.outputs)}
        self._parts, inputs, outputs = kind.parts(group.rank, group.world_size)
        self._reads = [(flats[id(one)], part) for one, part in zip(call.inputs, inputs, strict=False)]
        self._writes = [(flats[id(one)], part) for one, part in zip(call.outputs, outputs, strict=False)]
        """Flat tensors on the device, each with its part of a buffer."""
        used = [flat for flat, _ in (*self._reads, *self._writes)]
        self._dtype, self._count = used[0].dtype, used[0].numel()
        self._sizes = [flat.numel() for flat in used] if kind.has_any_sizes else None
        """Elements of each part. Ranks do not know each other's, so such a call is a single chunk."""
        copied_back = [
            (one.detach(), flats[id(one)].view(one.dtype).view(one.shape)) for one in call.outputs if not is_plain(one)
        ]
        self._copies = [*copied_back, *((into.detach(), source) for into, source in call.copies)]
        """What is copied on the device in the end: into which tensor, from which."""
        self._spans = self._cut(stage.chunk_bytes)
        self.ended: Any = None
        """Once the call has run or failed, the event after which nothing touches the caller's tensors any more. None if
        everything was done in the caller's own stream."""
        self.ready_at: float | None = None
        """When the kernels before the call had run, and the first chunk was in host memory."""
        self._issued: Any = None
        current = device.current()
        if call.before is not None:
            call.before()
        if is_alone and len(self._spans) == 1:
            self._down = self._up = current
            return
        if not kind.is_whole:
            self._operation([used[0].new_empty(0, device="cpu")] * self._parts, seconds)  # raises what is wrong
        self._down, self._up = stage.down, stage.up
        self._issued = device.record(current)
        for stream in (self._down, self._up):
            for tensor in (*used, *(one for pair in self._copies for one in pair)):
                device.keep(tensor, stream)

    def _cut(self, chunk_bytes: int) -> list[Span]:
        """Return the elements of each chunk, at least one chunk."""
        if self._sizes is not None or not chunk_bytes or self._call.kind.is_whole:
            return [(0, self._count)]
        length = max(_ALIGNMENT, chunk_bytes // self._parts // _ALIGNMENT * _ALIGNMENT) // self._dtype.itemsize
        return [(start, min(start + length, self._count)) for start in range(0, max(self._count, 1), length)]

    def _layout(self, span: Span) -> list[Span]:
        """Return where the parts of a chunk are in its buffer, in bytes."""
        places: list[Span] = []
        start = 0
        for count in self._sizes or [span[1] - span[0]] * self._parts:
            stop = start + count * self._dtype.itemsize
            places.append((start, stop))
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return places

    def _operation(self, parts: list[Any], seconds: float) -> Operation:
        """Prepare the collective on one chunk in host memory."""
        inputs = [to_array(parts[part]) for _, part in self._reads]
        outputs = [to_array(parts[part]) for _, part in self._writes]
        return self._call.kind.make(self._group, self._call, inputs, outputs, seconds)

    @property
    def whole(self) -> Operation:
        """The whole call, as an operation of the group."""
        nbytes = sum(stop - start for start, stop in self._layout((0, self._count)))
        return Operation(self._call.kind.collective.name.lower(), nbytes, self._run)

    def _run(self) -> None:
        """Do all of it, copies and network. The calls of a group run one at a time, in the order of their issue."""
        # Not when the call was issued: kernels that the caller issued before this call must not delay the copies of the
        # call before it.
        if self._issued is not None:
            self._down.wait_event(self._issued)
            self._up.wait_event(self._issued)
        try:
            self._run_chunks()
            for into, source in self._copies:
                self._device.copy(self._up, into, source)
        finally:
            if self._issued is not None:
                self.ended = self._device.record(self._up)

    def _run_chunks(self) -> None:
        deadline = time.monotonic() + self._seconds
        count = len(self._spans)
        ahead = deque(self._copy_down(index) for index in range(min(_AHEAD, count)))
        if count > 1:
            # All ranks must be in this call: chunks alone could make a large tensor pass for two small ones.
            meet(self._group, self._call, self._dtype, self._count, self._seconds)
        for index in range(count):
            if index + _AHEAD < count:
                ahead.append(self._copy_down(index + _AHEAD))
            chunk = ahead.popleft()
            # A single chunk keeps the group's usual timeout, for which operations are cached.
            left = self._seconds if count == 1 else max(_MIN_SECONDS, deadline - time.monotonic())
            operation = self._operation(chunk.parts, left)
            chunk.copied.synchronize()
            if index == 0:  # its own kernels have run until now: to wait for them is no exchange
                self.ready_at = time.perf_counter()
                future_waits.ready()
            operation.run()
            for flat, part in self._writes:
                self._device.copy(self._up, flat[chunk.elements], chunk.parts[part])
            chunk.free = self._device.record(self._up)

    def _copy_down(self, index: int) -> _Buffer:
        """Begin to copy a chunk to the host, once its buffer is free."""
        span = self._spans[index]
        layout = self._layout(span)
        chunk = self._stage.buffer(index, max(stop for _, stop in layout))
        chunk.elements = slice(*span) if self._sizes is None else slice(None)
        chunk.parts = [chunk.memory[start:stop].view(self._dtype) for start, stop in layout]
        if chunk.free is not None:
            self._down.wait_event(chunk.free)
        for flat, part in self._reads:
            self._device.copy(self._down, chunk.parts[part], flat[chunk.elements])
        chunk.copied = self._device.record(self._down)
        return chunk


class Stage:
    """One GPU of a group: its streams and its pinned memory."""

    def __init__(self, context: DistributedContext, device: Any, *, chunk_bytes: int | None = None) -> None:
        """With `chunk_bytes` 0 a tensor is one chunk, as it is to ranks that have it in host memory."""
        warn_about_stream_wait()
        if chunk_bytes is None:
            chunk_bytes = CHUNK_BYTES if context.group.shares_memory else NETWORK_CHUNK_BYTES
        self.context, self.device, self.chunk_bytes = context, device, chunk_bytes
        self.down, self.up = device.stream(), device.stream()
        self.sending, self.receiving = device.stream(), device.stream()
        """Streams of point-to-point messages. Behind the copies of a collective, a message would wait for the kernels
        that the caller issued before that collective."""
        self._buffers: list[_Buffer] = []

    def buffer(self, index: int, size: int) -> _Buffer:
        """Return the buffer for chunk number `index` of a call; a new one for a chunk that is larger than usual."""
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
