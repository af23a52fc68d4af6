"""`FastPath`: messages of a collective that fit one frame, without the machinery that large ones need.

One system call sends the message, if the kernel takes it whole. Of what arrives, the header is compared as a whole with
the one that must come. Anything else (a late peer, another frame, an error) is left to the ordinary path, which
continues from where this one stopped.

The ordinary path makes some fifty Python calls for a message: 20 of the 35 microseconds that a small one takes.
"""

from __future__ import annotations

import os
import time

from ringfort.config import KIB
from ringfort.transport.frames import DATA, HEADER, HEADER_BYTES, NO_CALL
from ringfort.transport.links import Link, LinkTable
from ringfort.transport.messages import Envelope, Job, Receive, Send
from ringfort.transport.progress import LONGEST, Spin

LARGEST = 64 * KIB
"""Bytes of a message that takes the fast path in any collective: with its header it fits one read of the receiving
half's buffer. A `swap` moves as much as a frame may have."""
_TOGETHER = 32 * KIB
"""Bytes of a swapped message that are read together with their header and then copied to their place. Beyond, a second
read is cheaper than the copy."""


def is_small(job: Job) -> bool:
    """Whether `job` may take the fast path: all of it small, and of a collective, whose headers are known
    beforehand."""
    send, receive = job.send, job.receive
    if send is not None and (send.size > LARGEST or send.is_rendezvous or send.envelope.call == NO_CALL):
        return False
    if receive is None:
        return True
    return type(receive) is Receive and receive.total <= LARGEST and receive.envelope.call != NO_CALL


class FastPath:
    """Moves small messages over the links of a table. Only the leader calls it, when no job is posted."""

    def __init__(self, table: LinkTable, spin: Spin) -> None:
        self._table = table
        self._epoch = table.epoch
        self._spin = spin

    def run(self, job: Job) -> bool:
        """Do `job`, which is small, and return True; or return False, and the ordinary path must do the rest."""
        send, out = job.send, job.send_link
        if send is not None and out is not None:
            if not out.outbound.is_idle:
                return False
            head = self._head(send.envelope, send.size)
            try:
                out.outbound.went(send, head, _push(out, head + send.data))
            except OSError as exc:
                self._table.end_after(out, exc)
                return False
            if not send.done:
                self._table.post(job)  # the rest of the message is with the link: so the job must be too
                return False
            job.send = job.send_link = None
        receive, link = job.receive, job.receive_link
        if receive is None or link is None:
            return True
        inbound = link.inbound
        if not inbound.is_idle_for(receive.key):
            return False
        try:
            data = self._pull(link, self._head(receive.envelope, receive.total), receive.total)
            if data is not None:
                inbound.count(receive.total)
                receive.take(data)
                receive.done = True
        except OSError as exc:
            self._table.end_after(link, exc)
            return False
        self._table.after_read(link)
        return receive.done

    def swap(self, link: Link, data: bytes | memoryview, into: memoryview, envelope: Envelope) -> Job | None:
        """Send `data` on an idle link and fill `into`, each a message of one frame. Returns what is left for the
        ordinary path, or None."""
        outbound, inbound = link.outbound, link.inbound
        head = self._head(envelope, len(data))
        awaited = head if len(into) == len(data) else self._head(envelope, len(into))
        whole, total = HEADER_BYTES + len(data), HEADER_BYTES + len(into)
        left: Job | None = None
        try:
            # Small data are copied behind their header; the kernel gathers the two where they are large.
            sent = _push(link, head + data) if isinstance(data, bytes) else _push(link, head, data)
            if sent == whole and len(into) <= _TOGETHER:
                found = self._pull(link, awaited, len(into))
                if found is not None:
                    into[:] = found
                have = 0 if found is None else total  # what came instead is with the receiving half already
            else:
                sent, have = self._trade(link, head, memoryview(data), sent, awaited, into)
            if sent == whole:
                outbound.count(len(data))
            if have == total:
                inbound.count(len(into))
            if sent < whole or have < total:
                left = Job("exchange", envelope.timeout, envelope.deadline or 0.0)
                if sent < whole:
                    left.send, left.send_link = Send(memoryview(data), envelope, is_rendezvous=False), link
                    outbound.went(left.send, head, sent)
                if have < total:
                    left.receive, left.receive_link = Receive(into, envelope, None), link
                self._table.post(left)  # first, so that what has come finds its place
                if 0 < have < total:
                    inbound.leave(min(have, HEADER_BYTES), into[: max(0, have - HEADER_BYTES)])
        except OSError as exc:
            self._table.end_after(link, exc)
            if left is None:  # posting it will find out why it cannot be done
                left = Job("exchange", envelope.timeout, envelope.deadline or 0.0)
                left.receive, left.receive_link = Receive(into, envelope, None), link
            return left
        self._table.after_read(link)
        return left

    def _trade(
        self, link: Link, head: bytes, data: memoryview, sent: int, awaited: bytes, into: memoryview
    ) -> tuple[int, int]:
        """Continue to send a frame of which `sent` bytes are out, and receive the one that begins with `awaited`: in
        turns, because neither side may wait until the other has read everything. Returns how many bytes went and came:
        a header into the receiving half's buffer, and what follows it into `into`."""
        stream, buffer, spin = link.stream, link.inbound.buffer, self._spin
        whole, total, have = HEADER_BYTES + len(data), HEADER_BYTES + len(into), 0
        tries, until = spin.budget, 0.0
        while sent < whole or have < total:
            moved = 0
            if sent < whole:
                is_begun = sent >= HEADER_BYTES
                moved = _push(link, data[sent - HEADER_BYTES :]) if is_begun else _push(link, head[sent:], data)
                sent += moved
            if have < total:
                is_new = have < HEADER_BYTES
                try:
                    count = stream.recv_into(buffer[have:HEADER_BYTES] if is_new else into[have - HEADER_BYTES :])
                except BlockingIOError:
                    pass
                else:
                    if not count:
                        break  # the end of the stream: the ordinary path finds out why
                    moved += count
                    have += count
                    if is_new and have >= HEADER_BYTES and bytes(buffer[:HEADER_BYTES]) != awaited:
                        break
            if moved:
                tries = spin.budget
                continue
            now = time.monotonic()
            if tries == spin.budget:
                until = now + LONGEST
            tries -= 1
            if tries < 0 or now > until:
                tries = -1
                break
            os.sched_yield()
        spin.tell(paid=tries >= 0)
        return sent, have

    def _pull(self, link: Link, head: bytes, size: int) -> memoryview | None:
        """Return the message that begins with `head`; None if it does not come soon, or something else does."""
        inbound, spin = link.inbound, self._spin
        buffer, total = inbound.buffer, HEADER_BYTES + size
        recv_into, tries, have = link.stream.recv_into, spin.budget, 0
        until = time.monotonic() + LONGEST
        while have < total:
            try:
                count = recv_into(buffer[have:total])
            except BlockingIOError:
                tries -= 1
                if tries < 0 or time.monotonic() > until:
                    tries = -1
                    break
                os.sched_yield()
                continue
            have += count
            if not count or (have >= HEADER_BYTES and bytes(buffer[:HEADER_BYTES]) != head):
                break  # the end of the stream, or something else: the ordinary path finds out what
        spin.tell(paid=tries >= 0)
        if have == total and bytes(buffer[:HEADER_BYTES]) == head:
            return buffer[HEADER_BYTES:total]
        inbound.leave(have)
        return None

    def _head(self, envelope: Envelope, size: int) -> bytes:
        comm_id, tag, operation, call = envelope[:4]
        return HEADER.pack(DATA, 0, size, self._epoch, comm_id, tag, operation, size, call)


def _push(link: Link, frame: bytes | memoryview, body: memoryview | None = None) -> int:
    try:
        if body is None:
            return link.stream.send(memoryview(frame))
        return link.stream.sendmsg((memoryview(frame), body))
    except BlockingIOError:
        return 0
