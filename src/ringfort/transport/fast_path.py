"""The short way of a message of a collective that is one frame: one system call to send it, if the kernel takes it, and
of what comes the header is compared as a whole with what must come. What is out of the ordinary, in any way, is left to
the engine's ordinary way, from where it stands.

The ordinary way makes some fifty Python calls for a message, 20 of the 35 microseconds that a small one takes.
"""

from __future__ import annotations

import os
import time

from ringfort.config import KIB
from ringfort.errors import ProtocolError, TamperedError
from ringfort.transport.frames import DATA, HEADER, HEADER_BYTES, NO_CALL
from ringfort.transport.link import Job, Link
from ringfort.transport.messages import Envelope, Receive, Send
from ringfort.transport.spin import LONGEST, Spin
from ringfort.transport.watchdog import Watchdog

LARGEST = 64 * KIB
"""Bytes of a message that goes this way as part of any collective: header and all, it fits one read of the receiving
half's buffer. A `swap` moves as much as a frame may have."""
_TOGETHER = 32 * KIB
"""Bytes of what a swap brings that are read together with their header and then copied to their place. Beyond, a second
read is cheaper than the copy."""


def is_small(job: Job) -> bool:
    """Whether `job` may go the short way: all of it small, and of a collective, whose headers are known beforehand."""
    send, receive = job.send, job.receive
    if job.before:
        return False
    if send is not None and (send.size > LARGEST or send.is_rendezvous or send.envelope.call == NO_CALL):
        return False
    if receive is None:
        return True
    return type(receive) is Receive and receive.total <= LARGEST and receive.envelope.call != NO_CALL


def send(job: Job, link: Link, epoch: int) -> bool:
    """Sends `job.send`, which is no part of the job then. Raises `OSError`."""
    send = job.send
    assert send is not None
    head = _head(send.envelope, send.size, epoch)
    link.outbound.went(send, head, _push(link, head + send.data))
    if send.done:
        job.send = job.send_link = None
    return send.done


def receive(job: Job, link: Link, epoch: int, spin: Spin) -> bool:
    """Receives `job.receive`. If it did not come whole, what came is with the ordinary way. Raises `OSError`."""
    receive, inbound = job.receive, link.inbound
    if receive is None or not inbound.is_idle_for(receive.key):
        return False
    data = _pull(link, _head(receive.envelope, receive.total, epoch), receive.total, spin)
    if data is None:
        return False
    inbound.count(receive.total)
    receive.take(data)
    receive.done = True
    return True


def swap(
    link: Link,
    data: bytes | memoryview,
    into: memoryview,
    envelope: Envelope,
    epoch: int,
    spin: Spin,
) -> tuple[Job | None, int]:
    """Sends `data` on an idle link and fills `into`, each a message of one frame. Returns what is left to do for the
    ordinary way, and how many bytes of the frame that it waits for have come: as `_trade` does. Raises `OSError`."""
    outbound, inbound = link.outbound, link.inbound
    head = _head(envelope, len(data), epoch)
    awaited = head if len(into) == len(data) else _head(envelope, len(into), epoch)
    whole, total = HEADER_BYTES + len(data), HEADER_BYTES + len(into)
    # Behind its header, where it is little: else the kernel gathers the two.
    sent = _push(link, head + data) if isinstance(data, bytes) else _push(link, head, data)
    if sent == whole and len(into) <= _TOGETHER:
        found = _pull(link, awaited, len(into), spin)
        if found is not None:
            into[:] = found
        have = 0 if found is None else total  # what came in place of it is with the receiving half already
    else:
        sent, have = _trade(link, head, memoryview(data), sent, awaited, into, spin)
    if sent == whole:
        outbound.count(len(data))
    if have == total:
        inbound.count(len(into))
    if sent == whole and have == total:
        return None, have
    left = Job("exchange", envelope.timeout, envelope.deadline or 0.0)
    if sent < whole:
        left.send, left.send_link = Send(memoryview(data), envelope, is_rendezvous=False), link
        outbound.went(left.send, head, sent)
    if have < total:
        left.receive, left.receive_link = Receive(into, envelope, None), link
    return left, have


def _trade(
    link: Link, head: bytes, data: memoryview, sent: int, awaited: bytes, into: memoryview, spin: Spin
) -> tuple[int, int]:
    """Goes on sending a frame of which `sent` bytes are out, and receives the one that begins with `awaited`: in turns,
    for neither side may wait until the other has read all. Returns how much went and how much came in the end: a header
    into the receiving half's buffer, and what follows it into `into`."""
    stream, buffer = link.stream, link.inbound.buffer
    whole, total, have = HEADER_BYTES + len(data), HEADER_BYTES + len(into), 0
    tries, until = spin.budget, 0.0
    while sent < whole or have < total:
        moved = 0
        if sent < whole:
            moved = _push(link, head[sent:], data) if sent < HEADER_BYTES else _push(link, data[sent - HEADER_BYTES :])
            sent += moved
        if have < total:
            try:
                count = stream.recv_into(
                    buffer[have:HEADER_BYTES] if have < HEADER_BYTES else into[have - HEADER_BYTES :]
                )
            except BlockingIOError:
                pass
            else:
                if not count:
                    break  # the end: the ordinary way gives it its name
                moved, is_new = moved + count, have < HEADER_BYTES
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


def _push(link: Link, frame: bytes | memoryview, body: memoryview | None = None) -> int:
    try:
        if body is None:
            return link.stream.send(memoryview(frame))
        return link.stream.sendmsg((memoryview(frame), body))
    except BlockingIOError:
        return 0


def _pull(link: Link, head: bytes, size: int, spin: Spin) -> memoryview | None:
    """The message that begins with `head`; None if it does not come soon, or something else does."""
    inbound = link.inbound
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
            break  # the end, or something else: the ordinary way gives it its name
    spin.tell(paid=tries >= 0)
    if have == total and bytes(buffer[:HEADER_BYTES]) == head:
        return buffer[HEADER_BYTES:total]
    inbound.leave(have)
    return None


def _head(envelope: Envelope, size: int, epoch: int) -> bytes:
    return HEADER.pack(DATA, 0, size, epoch, envelope.comm_id, envelope.tag, envelope.operation, size, envelope.call)


class FastPath(Watchdog):
    """Links on which a message may take the short way, if the one who leads sees that nothing is in its way."""

    _spin: Spin  # the engine's: the long way spins too

    def _fast_send(self, job: Job, out: Link) -> bool:
        try:
            if send(job, out, self._epoch):
                return True
        except OSError as exc:
            self._broken(out, exc)
            return False
        self._take_up(job)  # the rest of it is with the link: so the job must be too
        return False

    def _take_up(self, job: Job) -> None:
        """Posts a job of which only the receiving half, if any, is not posted yet."""
        self._jobs.append(job)
        job.is_posted = True
        if job.receive is not None and job.receive_link is not None:
            self._post_receive(job.receive, job.receive_link)

    def _fast_receive(self, job: Job, into: Link) -> bool:
        try:
            is_done = receive(job, into, self._epoch, self._spin)
        except (ProtocolError, TamperedError) as exc:  # before OSError, which they are too
            self._garbled(into, exc)
            return False
        except OSError as exc:
            self._broken(into, exc)
            return False
        self._after_read(into)
        return is_done

    def _fast_swap(self, link: Link, data: bytes | memoryview, into: memoryview, envelope: Envelope) -> Job | None:
        left: Job | None = None
        try:
            left, have = swap(link, data, into, envelope, self._epoch, self._spin)
            if left is not None:
                self._take_up(left)  # first, so that what has come finds its place
                if left.receive is not None and have:
                    link.inbound.leave(min(have, HEADER_BYTES), into[: max(0, have - HEADER_BYTES)])
        except (ProtocolError, TamperedError) as exc:  # before OSError, which they are too
            self._garbled(link, exc)
        except OSError as exc:
            self._broken(link, exc)
        else:
            self._after_read(link)
            return left
        if left is None:
            left = Job("exchange", envelope.timeout, envelope.deadline or 0.0)
            left.receive, left.receive_link = Receive(into, envelope, None), link
        return left  # if it is not posted, that finds out why it cannot be
