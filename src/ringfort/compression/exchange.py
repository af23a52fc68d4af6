"""How compressed arrays become their sum at every rank, over any group.

`reduce` is for codecs whose bytes are of neighbouring elements. Each rank owns a part of the array. All send their
elements of that part to the owner, encoded; the owner adds them up, encodes the sum, and that goes round the ring to
everybody. The bytes are those of a ring. But an element is rounded twice however many ranks there are, where a ring
that rounds at every hop does it n times; and each rounding is known to one rank, which keeps its error. So at all times
what the ranks were given is what they have got and what they keep. The owner, too, decodes the bytes that it sends: all
ranks end with the same bits.

`gather` is for the rest: every rank's message at every rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from ringfort.backends.group import Group
from ringfort.collectives import algorithms
from ringfort.collectives.algorithms import Span
from ringfort.collectives.steps import PartMemory, run_ring
from ringfort.compression.codec import CHUNK, ChunkCodec, Codec, mix
from ringfort.compression.compressor import Draft
from ringfort.compression.encoded import SIZE, Head
from ringfort.compression.strategy import CompressionStrategy
from ringfort.errors import NonFiniteError
from ringfort.telemetry.metrics import DistributedMetrics
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array

MESSAGE_BYTES: Final = 512 * 1024
"""About how long a message is: so long that its fixed cost vanishes even on a fast wire."""
MAX_SEGMENT: Final = 32 * CHUNK
"""Elements of a part that are under way at once: scratch of 4 MiB, whatever the array."""


def segment_of(codec: ChunkCodec) -> int:
    """How many elements of a part are under way at once with `codec`."""
    return min(MAX_SEGMENT, CHUNK * max(1, MESSAGE_BYTES // codec.nbytes(CHUNK)))


class BasisError(Exception):
    """The ranks' messages cannot be added: what they rest on differs. Every rank raises it."""


@dataclass
class Exchange:
    """One collective under way: its messages, and what they cost."""

    group: Group
    envelope: Envelope
    strategy: CompressionStrategy
    draft: Draft
    sent: int = 0
    """Bytes that left this rank."""
    codec_seconds: float = 0.0

    def reduce(
        self, work: Array, out: Array, codec: ChunkCodec, *, keep_error: bool, divisor: int = 1, basis: int = 0
    ) -> None:
        """`out` becomes the sum of all ranks' `work`, divided by `divisor`. With `keep_error`, `work` becomes what is
        missing in the sum for this rank to make up; else the two may be the same memory.

        Raises `NonFiniteError` and `BasisError` at every rank, if at any.
        """
        rank, n, seed = self.group.rank, self.group.world_size, self.draft.seed
        parts = algorithms.split(work.size, n)
        longest = parts[0][1] - parts[0][0]
        segment = min(segment_of(codec), max(longest, 1))
        total = np.empty(segment, np.float32)
        rows = np.empty((n, SIZE + codec.nbytes(segment)), np.uint8)
        head = self._head(0, basis=basis)
        for turn, offset in enumerate(range(0, max(longest, 1), segment)):
            spans = [(min(a + offset, b), min(a + offset + segment, b)) for a, b in parts]
            own = slice(*spans[rank])
            added = total[: own.stop - own.start]
            added[...] = work[own]
            self._reduce(work, spans, added, codec, head, mix(seed, turn), keep_error=keep_error)
            sizes = [SIZE + codec.nbytes(b - a) for a, b in spans]
            mine = rows[rank, : sizes[rank]]
            here = head._replace(elements=added.size)
            self._encode(added, mine, codec, here, mix(seed, turn, n), keep_error=keep_error)
            if keep_error:
                work[own] = added
            self._round(rows, sizes)
            for peer, (start, stop) in enumerate(spans):
                message = rows[peer, : sizes[peer]]
                Head.read(message).check(head._replace(elements=stop - start), peer)
                self._decode(message, out[start:stop], codec)
                if divisor != 1:
                    out[start:stop] /= np.float32(divisor)

    def reduce_part(self, out: Array, codec: ChunkCodec, divisor: int) -> None:
        """The draft has a part for each rank; `out` becomes the sum of this rank's parts, divided by `divisor`. With
        error feedback, the draft becomes what the owners have not got; zero in this rank's own part, of which nothing
        is lost."""
        rank, n, draft = self.group.rank, self.group.world_size, self.draft
        size = draft.work.size // n
        spans = [(part * size, (part + 1) * size) for part in range(n)]
        own = slice(*spans[rank])
        out[...] = draft.work[own]
        self._reduce(draft.work, spans, out, codec, self._head(0), draft.seed, keep_error=draft.keeps)
        if draft.keeps:
            draft.work[own] = 0
        if divisor != 1:
            out /= np.float32(divisor)

    def gather(self, codec: Codec, kept: int = 0) -> list[Array]:
        """The draft of every rank as `codec` encodes it, in the order of the ranks. `kept` is how many elements that
        sends, if it is not always the same number. Raises `NonFiniteError`."""
        rank, n, draft = self.group.rank, self.group.world_size, self.draft
        head = self._head(draft.work.size, rows=kept)
        size = SIZE + codec.nbytes(draft.work.size)
        messages = np.empty((n, size), np.uint8)
        self._encode(draft.work, messages[rank], codec, head, draft.seed, keep_error=draft.keeps)
        self._round(messages, [size] * n)
        heads = [Head.read(message) for message in messages]
        for peer, there in enumerate(heads):
            there.check(head, peer)
        found = {peer: there.nonfinite for peer, there in enumerate(heads) if there.nonfinite}
        if found:
            raise NonFiniteError(draft.name, found)
        return [message[SIZE:] for message in messages]

    def report(self, metrics: DistributedMetrics | None, nbytes: int) -> None:
        """Count the collective, which would have sent `nbytes` without compression."""
        draft = self.draft
        if metrics is not None:
            residual = float(np.sqrt(np.dot(draft.work, draft.work))) if draft.keeps else 0.0
            metrics.record_compression(
                str(self.strategy),
                nbytes=nbytes,
                sent=self.sent,
                codec_seconds=self.codec_seconds,
                residual=residual,
                nonfinite=draft.nonfinite,
            )

    def _head(self, elements: int, *, rows: int = 0, basis: int = 0) -> Head:
        how = self.strategy
        return Head(how.method, how.values, elements, how.rank, rows, self.draft.refused, basis)

    def _reduce(
        self, work: Array, spans: list[Span], added: Array, codec: ChunkCodec, head: Head, seed: int, keep_error: bool
    ) -> None:
        """Sends the elements of every other rank's span to it, and adds what all others send of this rank's."""
        rank, n = self.group.rank, self.group.world_size
        most = max(b - a for a, b in spans)
        outgoing, incoming = np.empty((2, SIZE + codec.nbytes(most)), np.uint8)
        found = {rank: head.nonfinite} if head.nonfinite else {}
        same = True
        for dst, src in algorithms.exchange_order(rank, n):
            start, stop = spans[dst]
            message = outgoing[: SIZE + codec.nbytes(stop - start)]
            arriving = incoming[: SIZE + codec.nbytes(added.size)]
            here = head._replace(elements=stop - start)
            self._encode(work[start:stop], message, codec, here, mix(seed, dst), keep_error=keep_error)
            self.group.exchange(message, dst, arriving, src, self.envelope)
            self.sent += message.size
            there = Head.read(arriving)
            there.check(head._replace(elements=added.size), src)
            same = same and there.basis == head.basis
            if there.nonfinite:
                found[src] = there.nonfinite
            elif not found and same:
                self._decode(arriving, added, codec, add=True)
        # All ranks hear of all others in each of these rounds, so all stop here, at the first.
        if found:
            raise NonFiniteError(self.draft.name, found)
        if not same:
            raise BasisError

    def _round(self, rows: Array, sizes: list[int]) -> None:
        """Each rank's row to every rank, round the ring."""
        group = self.group
        steps = algorithms.ring_all_gather(group.rank, group.world_size, group.ring)
        memory = PartMemory([row[:size] for row, size in zip(rows, sizes, strict=True)], (0, rows.shape[1]))
        run_ring(group, steps, memory, self.envelope)
        self.sent += sum(sizes[step.out[0]] for step in steps if step.out is not None)

    def _encode(self, values: Array, message: Array, codec: Codec, head: Head, seed: int, *, keep_error: bool) -> None:
        start = time.perf_counter()
        head.write(message)
        if head.nonfinite:
            message[SIZE:] = 0  # nobody reads it, and nobody should
        else:
            codec.encode(values, message[SIZE:], seed, keep_error=keep_error)
        self.codec_seconds += time.perf_counter() - start

    def _decode(self, message: Array, out: Array, codec: Codec, *, add: bool = False) -> None:
        start = time.perf_counter()
        codec.decode(message[SIZE:], out, add=add)
        self.codec_seconds += time.perf_counter() - start
