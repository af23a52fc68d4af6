"""How compressed arrays become their sum at every rank, over any group.

`reduce` is for codecs whose bytes are of neighbouring elements. Each rank owns a part of the array. All send their
elements of that part to the owner, encoded; the owner adds them up, encodes the sum, and that goes round the ring to
everybody. The bytes are those of a ring. But an element is rounded twice however many ranks there are, where a ring
that rounds at every hop does it n times; and each rounding is known to one rank, which keeps its error. So at all times
what the ranks were given is what they have got and what they keep. The owner, too, decodes the bytes that it sends: all
ranks end with the same bits.

`gather` is for the rest: every rank's message at every rank.

If ranks share hosts (`hosts.py`), those of a host add up first, as they are, and both run between the hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from ringfort.backends.group import Group
from ringfort.collectives import algorithms, reduction
from ringfort.collectives.algorithms import Span
from ringfort.collectives.ops import ReduceOp
from ringfort.collectives.steps import PartMemory, gather_rows, run_ring
from ringfort.compression.aside import Aside
from ringfort.compression.codec import CHUNK, ChunkCodec, Codec, mix
from ringfort.compression.compressor import Draft
from ringfort.compression.encoded import SIZE, Head
from ringfort.compression.hosts import Hosts, hosts_of
from ringfort.compression.strategy import CompressionStrategy, Method
from ringfort.compression.uneven import shares_of
from ringfort.errors import DistributedError, NonFiniteError
from ringfort.telemetry.metrics import DistributedMetrics
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array

MESSAGE_BYTES: Final = 512 * 1024
"""About how long a message is: so long that its fixed cost vanishes even on a fast wire."""
MAX_SEGMENT: Final = 32 * CHUNK
"""Elements of a part that are under way at once: scratch of 4 MiB, whatever the array."""
WORTH_A_THREAD: Final = MESSAGE_BYTES // 4
"""Bytes of a message from which on the next one is encoded in a thread while this one is on the wire."""
_ADD: Final = reduction.reducer(ReduceOp.SUM, reduction.element_type_named("float32"))


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
    """Bytes that this rank has sent to those with which it exchanges compressed data."""
    codec_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._peers = self.group
        """The ranks that exchange compressed data with this one."""
        self._lanes = 1
        """Into how many lanes the data are cut; 0 if this rank has none of them."""

    @contextmanager
    def _together(self) -> Generator[None, None, None]:
        """Abort the group if this rank cannot go on for a reason that the others do not know of."""
        try:
            yield
        except (DistributedError, BasisError):
            raise
        except BaseException as exc:  # Ctrl-C, or no memory
            self.group.abort(str(exc) or type(exc).__name__)
            raise

    def reduce(
        self, work: Array, out: Array, codec: ChunkCodec, *, keep_error: bool, divisor: int = 1, basis: int = 0
    ) -> None:
        """`out` becomes the sum of all ranks' `work`, divided by `divisor`. With `keep_error`, `work` becomes what is
        missing in the sum for this rank to make up; else the two may be the same memory.

        Raises `NonFiniteError` and `BasisError` at every rank, if at any.
        """

        def add_up(work: Array, out: Array, head: Head) -> None:
            self._add_up(work, out, codec, head, keep_error=keep_error, divisor=divisor)

        with self._together():
            self._by_hosts(work, out, self._head(basis), add_up, keep_error=keep_error)

    def gather(self, out: Array, codec_for: Callable[[int], Codec], divisor: int) -> None:
        """`out` becomes the sum of what `codec_for` the number of elements sends of every rank's draft, divided by
        `divisor`. With error feedback, the draft becomes what is missing. Raises `NonFiniteError` at every rank."""

        def add_up(work: Array, out: Array, head: Head) -> None:
            codec = codec_for(work.size)
            messages = self._gathered(work, codec, head)
            start = time.perf_counter()
            out.fill(0)
            for message in messages:  # in the order of the ranks, so that all add alike
                codec.decode(message, out, add=True)
            if divisor != 1:
                out /= np.float32(divisor)
            self.codec_seconds += time.perf_counter() - start

        with self._together():
            self._by_hosts(self.draft.work, out, self._head(), add_up, keep_error=self.draft.keeps)

    def _add_up(
        self, work: Array, out: Array, codec: ChunkCodec, head: Head, *, keep_error: bool, divisor: int
    ) -> None:
        """`reduce` among the ranks that exchange compressed data."""
        n, seed = self._peers.world_size, self.draft.seed
        owned = shares_of(self._peers, self.envelope)
        parts = owned.split(work.size, n)
        longest = max(stop - start for start, stop in parts)
        segment = min(segment_of(codec), max(longest, 1))
        turns = [
            [(min(a + offset, b), min(a + offset + segment, b)) for a, b in parts]
            for offset in range(0, max(longest, 1), segment)
        ]
        total = np.empty(segment, np.float32)
        rows = np.empty((min(len(turns), 2), n, SIZE + codec.nbytes(segment)), np.uint8)

        def encode_sum(turn: int) -> None:
            start, stop = turns[turn][self._peers.rank]
            added = total[: stop - start]
            mine = rows[turn % 2, self._peers.rank, : SIZE + codec.nbytes(added.size)]
            here = head._replace(elements=added.size)
            self._encode(added, mine, codec, here, mix(seed, turn, n), keep_error=keep_error)
            if keep_error:
                work[start:stop] = added

        def decode(turn: int) -> None:
            for row, (start, stop) in zip(rows[turn % 2], turns[turn], strict=True):
                self._decode(row[: SIZE + codec.nbytes(stop - start)], out[start:stop], codec)
                if divisor != 1:
                    out[start:stop] /= np.float32(divisor)

        def hand_round(turn: int) -> None:
            aside.wait(encoded[turn])
            sizes = [SIZE + codec.nbytes(stop - start) for start, stop in turns[turn]]
            self._round(rows[turn % 2], sizes, is_even=not owned.weights)
            for peer, (start, stop) in enumerate(turns[turn]):
                _checked(rows[turn % 2, peer], head._replace(elements=stop - start), self._peers, peer)
            aside.add(partial(decode, turn))

        # The sums of a turn are sent after the parts of the next one: meanwhile they are encoded.
        encoded: list[int] = []
        with self._aside(segment, len(turns), codec) as aside:
            for turn in self._reduce(aside, work, turns, total, codec, head, lambda turn: mix(seed, turn), keep_error):
                encoded.append(aside.add(partial(encode_sum, turn)))
                if turn:
                    hand_round(turn - 1)
            hand_round(len(turns) - 1)

    def reduce_part(self, out: Array, codec: ChunkCodec, divisor: int) -> None:
        """The draft has a part for each rank; `out` becomes the sum of this rank's parts, divided by `divisor`. With
        error feedback, the draft becomes what the owners have not got; zero in this rank's own part, of which nothing
        is lost."""
        with self._together():
            self._reduce_part(out, codec, divisor)

    def _reduce_part(self, out: Array, codec: ChunkCodec, divisor: int) -> None:
        draft, hosts = self.draft, hosts_of(self.group)
        parts = draft.work.reshape(self.group.world_size, -1)
        if hosts is None or not hosts.ranks:
            self._add_up_part(draft.work, out, codec, self._head())
        else:
            # Each rank adds up what its host has for the ranks at its own place on all hosts.
            lanes = [parts[ranks].reshape(-1) for ranks in hosts.ranks]
            own = lanes[hosts.inside.rank]
            head = self._collect(lanes, own, hosts.inside, self._head())
            self._between(hosts, lambda: self._add_up_part(own, out, codec, head))
            if draft.keeps:
                parts[...] = 0
                parts[hosts.ranks[hosts.inside.rank]] = own.reshape(-1, parts.shape[1])
        if draft.keeps:
            parts[self.group.rank] = 0
        if divisor != 1:
            out /= np.float32(divisor)

    def _add_up_part(self, work: Array, out: Array, codec: ChunkCodec, head: Head) -> None:
        """`reduce_part` among the ranks that exchange compressed data."""
        seed, size = self.draft.seed, out.size
        spans = [(part * size, (part + 1) * size) for part in range(self._peers.world_size)]
        with self._aside(size, 1, codec) as aside:
            for _ in self._reduce(aside, work, [spans], out, codec, head, lambda _: seed, self.draft.keeps):
                pass

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

    def ring_bytes(self, nbytes: int) -> int:
        """Return what this rank would have sent to the same ranks of `nbytes` without compression."""
        n = self._peers.world_size
        return 2 * (n - 1) * (nbytes // self._lanes) // n if self._lanes else 0

    def _head(self, basis: int = 0) -> Head:
        how = self.strategy
        return Head(how.method, how.values, 0, how.rank, 0, self.draft.refused, basis)

    # --- inside a host ------------------------------------------------------------------------------------------------

    def _by_hosts(
        self, work: Array, out: Array, head: Head, add_up: Callable[[Array, Array, Head], None], *, keep_error: bool
    ) -> None:
        """Run `add_up`, which takes what this rank has to send, where the sum goes, and the header: among all ranks, or
        for this rank's lane among the hosts. In the latter case, `work` is zero outside of the lane afterwards if
        errors are kept: what it had has been added to the lanes of its neighbours."""
        hosts = hosts_of(self.group)
        if hosts is None:
            add_up(work, out, head)
            return
        inside, spans = hosts.inside, hosts.spans(work.size)
        lane = slice(*spans[inside.rank])
        own = work[lane] if keep_error else work[lane].copy()  # what the caller has must not change before the end
        common = self._collect([work[slice(*span)] for span in spans], own, inside, head)
        self._between(hosts, lambda: add_up(own, out[lane], common))
        if keep_error:
            work[: lane.start] = 0
            work[lane.stop :] = 0
        for dst, src in algorithms.exchange_order(inside.rank, inside.world_size):
            inside.exchange(out[lane], dst, out[slice(*spans[src])], src, self.envelope)

    def _between(self, hosts: Hosts, add_up: Callable[[], None]) -> None:
        """Run `add_up` between the hosts, if this rank has a lane. Raise what it raises at every rank, if at any."""
        refusal: NonFiniteError | BasisError | None = None
        self._lanes = 0
        if hosts.between is not None:
            self._peers, self._lanes = hosts.between, hosts.lanes
            try:
                add_up()
            except (NonFiniteError, BasisError) as error:
                refusal = error
        if hosts.lanes < hosts.inside.world_size:
            refusal = self._tell(hosts.inside, hosts.lanes, refusal)
        if isinstance(refusal, NonFiniteError):  # every rank is here, and knows of hosts but not of their ranks
            counts = gather_rows(self.group, [self.draft.refused], self.envelope)[:, 0]
            raise NonFiniteError(self.draft.name, {rank: int(count) for rank, count in enumerate(counts) if count})
        if refusal is not None:
            raise refusal

    def _collect(self, lanes: Sequence[Array], own: Array, inside: Group, head: Head) -> Head:
        """Add to `own`, what this rank has of its lane, what its neighbours have of it, as they have for all of them in
        `lanes`. Return the header of the host:
        all its elements that are infinite or NaN, and a digest that no other host has if its ranks have different
        ones."""
        outgoing, incoming = np.empty((2, SIZE), np.uint8)
        head.write(outgoing)
        heads = [head]
        for dst, src in algorithms.exchange_order(inside.rank, inside.world_size):
            inside.exchange(outgoing, dst, incoming, src, self.envelope)
            heads.append(_checked(incoming, head, inside, src))
            inside.exchange(lanes[dst], dst, own, src, self.envelope, _ADD)
        bases = {there.basis for there in heads}
        basis = head.basis if len(bases) == 1 else mix(self.group.rank, *sorted(bases))
        return head._replace(nonfinite=sum(there.nonfinite for there in heads), basis=basis)

    def _tell(
        self, inside: Group, lanes: int, refusal: NonFiniteError | BasisError | None
    ) -> NonFiniteError | BasisError | None:
        """Ranks without a lane hear from the first of their host whether the others go on. Return why not."""
        refusals = None, NonFiniteError(self.draft.name, {}), BasisError()
        word = np.array([[type(one) for one in refusals].index(type(refusal))], np.uint8)
        if inside.rank == 0:
            for peer in range(lanes, inside.world_size):
                inside.send(word, peer, self.envelope)
        elif inside.rank >= lanes:
            inside.recv(word, 0, self.envelope)
            return refusals[int(word[0])]
        return refusal

    # --- messages -----------------------------------------------------------------------------------------------------

    def _aside(self, elements: int, turns: int, codec: ChunkCodec) -> Aside:
        """Return what encodes and decodes while messages are on the wire, if they are worth a thread: so many turns
        with messages of so many elements."""
        count = turns * (self._peers.world_size - 1)
        return Aside(is_threaded=count > 1 and codec.nbytes(elements) >= WORTH_A_THREAD)

    def _reduce(
        self,
        aside: Aside,
        work: Array,
        turns: Sequence[list[Span]],
        total: Array,
        codec: ChunkCodec,
        head: Head,
        seed_of: Callable[[int], int],
        keep_error: bool,
    ) -> Iterator[int]:
        """In each of `turns`, which are spans of `work` for all ranks, send the elements of every other rank's span to
        it. Yield the turn when `aside` is about to have what all ranks have of this rank's span in `total`, and may
        overwrite that after all that is added until the next turn."""
        rank, n = self._peers.rank, self._peers.world_size
        messages = [(turn, *pair) for turn in range(len(turns)) for pair in algorithms.exchange_order(rank, n)]
        most = max(stop - start for start, stop in turns[0])
        outgoing, incoming = np.empty((2, 2, SIZE + codec.nbytes(most)), np.uint8)

        def encode(number: int) -> None:
            turn, dst, _ = messages[number]
            start, stop = turns[turn][dst]
            message, here = outgoing[number % 2, : sizes[turn][dst]], head._replace(elements=stop - start)
            self._encode(work[start:stop], message, codec, here, mix(seed_of(turn), dst), keep_error=keep_error)

        def add(number: int) -> None:
            turn = messages[number][0]
            start, stop = turns[turn][rank]
            added = total[: stop - start]
            if number % (n - 1) == 0:
                added[...] = work[start:stop]
            self._decode(incoming[number % 2, : sizes[turn][rank]], added, codec, add=True)

        sizes = [[SIZE + codec.nbytes(stop - start) for start, stop in spans] for spans in turns]
        found = {rank: head.nonfinite} if head.nonfinite else {}
        same = True
        if n == 1:  # a group that has shrunk: all is here
            if found:
                raise NonFiniteError(self.draft.name, found)
            for turn, ((start, stop),) in enumerate(turns):
                total[: stop - start] = work[start:stop]
                yield turn
            return
        ready = aside.add(partial(encode, 0))
        for number, (turn, dst, src) in enumerate(messages):
            aside.wait(ready)
            if number + 1 < len(messages):
                ready = aside.add(partial(encode, number + 1))
            message, arriving = outgoing[number % 2, : sizes[turn][dst]], incoming[number % 2, : sizes[turn][rank]]
            self._peers.exchange(message, dst, arriving, src, self.envelope)
            self.sent += message.size
            start, stop = turns[turn][rank]
            there = _checked(arriving, head._replace(elements=stop - start), self._peers, src)
            same = same and there.basis == head.basis
            if there.nonfinite:
                found[src] = there.nonfinite
            elif not found and same:
                aside.add(partial(add, number))
            if (number + 1) % (n - 1) == 0:
                # All ranks hear of all others in each turn, so all stop here, at the first.
                if found:
                    raise NonFiniteError(self.draft.name, found)
                if not same:
                    raise BasisError
                yield turn

    def _gathered(self, work: Array, codec: Codec, head: Head) -> list[Array]:
        """`work` of every rank as `codec` encodes it, in the order of the ranks."""
        rank, n, draft = self._peers.rank, self._peers.world_size, self.draft
        rows = self.strategy.kept(work.size) if self.strategy.method is Method.TOP_K else 0
        head = head._replace(elements=work.size, rows=rows)
        size = SIZE + codec.nbytes(work.size)
        messages = np.empty((n, size), np.uint8)
        self._encode(work, messages[rank], codec, head, draft.seed, keep_error=draft.keeps)
        self._round(messages, [size] * n)
        heads = [_checked(message, head, self._peers, peer) for peer, message in enumerate(messages)]
        found = {peer: there.nonfinite for peer, there in enumerate(heads) if there.nonfinite}
        if found:
            raise NonFiniteError(draft.name, found)
        return [message[SIZE:] for message in messages]

    def _round(self, rows: Array, sizes: list[int], *, is_even: bool = True) -> None:
        """Each rank's row to every rank: round the ring, or straight, so that none passes on the rows of others."""
        group = self._peers
        if not is_even:
            own = rows[group.rank, : sizes[group.rank]]
            for dst, src in algorithms.exchange_order(group.rank, group.world_size):
                group.exchange(own, dst, rows[src, : sizes[src]], src, self.envelope)
                self.sent += own.size
            return
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


def _checked(message: Array, expected: Head, group: Group, peer: int) -> Head:
    """Return the header that a rank of `group` sent. Raises `ProtocolError` for an unexpected one."""
    head = Head.read(message)
    head.check(expected, group.members[peer])
    return head
