"""The short way of a small message of a collective: one system call to send it, and what comes is compared as a whole
with what must come. Whatever is out of the ordinary, in any way, is left to the engine's ordinary way, from where it
stands.

The ordinary way makes some fifty Python calls for a message, 20 of the 35 microseconds that it takes.
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
from ringfort.transport.vigil import Vigil

LARGEST = 64 * KIB
"""Bytes of a message that goes this way: header and all, it fits one read of the receiving half's buffer."""


def is_small(job: Job) -> bool:
    """Whether `job` may go the short way: all of it small, and of a collective, whose headers are known beforehand."""
    send, receive = job.send, job.receive
    if job.before:
        return False
    if send is not None and (send.size > LARGEST or send.wants_go or send.envelope.call == NO_CALL):
        return False
    if receive is None:
        return True
    return type(receive) is Receive and receive.total <= LARGEST and receive.envelope.call != NO_CALL


def send(job: Job, link: Link, epoch: int) -> bool:
    """Sends `job.send`, which is no part of the job then. Raises `OSError`."""
    send = job.send
    assert send is not None
    frame = _head(send.envelope, send.size, epoch) + send.data
    link.outbound.went(send, frame, _push(link, frame))
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


def swap(link: Link, data: bytes | memoryview, envelope: Envelope, epoch: int, spin: Spin) -> memoryview | Job:
    """Sends `data` on an idle link and receives as much. Returns what came, or what is left to do for the ordinary way.
    Raises `OSError`."""
    size = len(data)
    head = _head(envelope, size, epoch)
    # Behind its header, where it is little: else the kernel gathers the two.
    sent = _push(link, head + data) if isinstance(data, bytes) else _push(link, head, data)
    left = Job("exchange", envelope.timeout, envelope.deadline or 0.0) if sent < HEADER_BYTES + size else None
    if left is None:
        link.outbound.count(size)
        found = _pull(link, head, size, spin)
        if found is not None:
            link.inbound.count(size)
            return found
        left = Job("exchange", envelope.timeout, envelope.deadline or 0.0)
    else:
        left.send, left.send_link = Send(memoryview(data), envelope, wants_go=False), link
        link.outbound.went(left.send, head + data, sent)
    left.receive, left.receive_link = Receive(memoryview(bytearray(size)), envelope, None), link
    return left


def _push(link: Link, frame: bytes, body: memoryview | None = None) -> int:
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
    return HEADER.pack(DATA, 0, size, epoch, envelope.channel, envelope.tag, envelope.operation, size, envelope.call)


class ShortWay(Vigil):
    """Links on which a small message may take the short way, if the one who leads sees that nothing is in its way."""

    _spin: Spin  # the engine's: the long way spins too

    def _quick_send(self, job: Job, out: Link) -> bool:
        try:
            if send(job, out, self._epoch):
                return True
        except OSError as exc:
            self._broken(out, exc)
            return False
        self._take_up(job)  # the rest of it is with the link: so the job must be too
        return False

    def _take_up(self, job: Job) -> None:
        """Posts a job whose first half is posted already."""
        job.is_posted = True
        self._jobs.append(job)
        if job.receive is not None and job.receive_link is not None:
            self._post_receive(job.receive, job.receive_link)

    def _quick_receive(self, job: Job, into: Link) -> bool:
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

    def _quick_swap(self, data: bytes | memoryview, link: Link, envelope: Envelope) -> memoryview | Job:
        try:
            found = swap(link, data, envelope, self._epoch, self._spin)
        except (ProtocolError, TamperedError) as exc:  # before OSError, which they are too
            self._garbled(link, exc)
        except OSError as exc:
            self._broken(link, exc)
        else:
            if isinstance(found, Job) and found.send is not None:
                self._take_up(found)  # the rest of it is with the link: so the job must be too
            else:
                self._after_read(link)
            return found
        lost = Job("exchange", envelope.timeout, envelope.deadline or 0.0)
        lost.receive, lost.receive_link = Receive(memoryview(bytearray(len(data))), envelope, None), link
        return lost  # posting it finds out why it cannot be
