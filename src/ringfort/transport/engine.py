"""The engine: moves the messages of one process over its links, in the threads of the callers.

There is no thread of its own. A caller posts what it wants to send and receive; if nobody is moving data it becomes the
**leader** and moves everybody's until its own is done; if somebody is, it sleeps as a **follower** and the leader does
its work. The law of this file: **only the leader, the holder of `_lead`, touches links and posted jobs.** Others append
to `_arrivals` and wake the leader.

One rank with one thread, the usual case, so never takes more than one uncontended lock, and pays no hand-over.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Container
from contextlib import suppress

from ringfort.config import KIB
from ringfort.errors import (
    AbortedError,
    ChannelClosedError,
    InboxFullError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
    TamperedError,
)
from ringfort.transport import notices
from ringfort.transport.frames import ABORT, GOODBYE, NO_CALL, WAITING, pack
from ringfort.transport.inbound import Control, Disagreement
from ringfort.transport.link import Job, Link, MakeError
from ringfort.transport.messages import CHUNK, Scratch
from ringfort.transport.notices import Aborted, Left, Lost, Mismatch, Notice, TimedOut
from ringfort.transport.stream import Poller, Stream

_LINGER = 0.3
"""Seconds that `close` and `abort` give the last frames to leave, and a peer that is sending to stop."""
_GO_PATIENCE = 1.0
"""Seconds that a finished receive stays to get its GO out. The one it is for waits and reads, so it is instant; unless
that one was frozen in the meantime."""

_QUIET = 0.02
"""Seconds without a byte after which the leader looks at more than its own job: for disagreements and deadlines."""
_YIELDS, _SMALL = 30, 64 * KIB
"""How often to give the processor away before sleeping on a message of at most so many bytes. The answer to a small
message is a matter of microseconds and waking up costs more; where ranks share cores, the other one runs meanwhile.
Measured on 4 bytes: 4 ranks on 2 cores took 0.75 of the time, 2 ranks 0.85."""
_SAY_AFTER = 0.1
"""Seconds of waiting in a collective after which the one waited for is told: two ranks that have called different
things may each wait for the other, and nothing that they send would tell them."""

_WITHOUT_A_WORD = "its process died or closed the connection without a word"

Describe = Callable[[bytes], str]
"""Turns a call's 16 bytes into words for people; the collectives know how."""


class Engine:
    """All links of one rank."""

    def __init__(
        self,
        rank: int,
        streams: dict[int, Stream],
        poller: Poller,
        *,
        inbox_bytes: int,
        epoch: int = 0,
        describe: Describe = bytes.hex,
    ) -> None:
        scratch = Scratch(max((stream.chunk for stream in streams.values()), default=CHUNK))
        self.rank = rank
        self.now = poller.now
        self.links = {peer: Link(peer, stream, scratch, inbox_bytes, epoch) for peer, stream in streams.items()}
        self._describe = describe
        self._inbox_bytes = inbox_bytes
        self._epoch = epoch
        self._poller = poller
        self._lead = threading.Lock()
        self._jobs: list[Job] = []  # posted and not done
        self._arrivals: deque[Job | Callable[[], None]] = deque()
        self._failure: MakeError | None = None  # of everything
        self._failed_channels: dict[int, Notice] = {}
        self._lost: dict[int, MakeError] = {}  # peers that went without a word
        self._pending: set[Link] = set()  # links that can be read though the poller does not know it
        self._has_trouble = False  # something of the above, or a closed link: posting must look closer
        self._is_closed = False
        for peer in self.links:
            poller.watch(peer, read=True, write=False)

    # --- callers --------------------------------------------------------------------------------------------------

    def run(self, job: Job) -> None:
        """Blocks until `job` is done; raises what it failed with."""
        if self._lead.acquire(blocking=False):
            self._lead_for(job)
        else:
            self._follow(job)
        for half, _ in job.halves():
            if half.error is not None:
                raise half.error

    def abort(self, reason: str) -> None:
        """Ends every call of this process and tells the peers."""
        self._as_leader(lambda: self._abort(Aborted(self.rank, reason)))

    def close(self) -> None:
        """Says goodbye and closes all links. Calls that wait end with `ChannelClosedError`."""
        self._as_leader(self._close)

    def drop(self) -> None:
        """Closes all links without a word, as a process that dies does. For fault injection."""
        self._as_leader(lambda: self._drop(lambda: ChannelClosedError("this rank was killed on purpose")))

    def traffic(self) -> tuple[int, int, int, int]:
        """Messages and bytes sent, messages and bytes received, since the start."""
        links = self.links.values()
        return (
            sum(link.outbound.messages for link in links),
            sum(link.outbound.bytes for link in links),
            sum(link.inbound.messages for link in links),
            sum(link.inbound.bytes for link in links),
        )

    # --- leading and following ------------------------------------------------------------------------------------

    def _lead_for(self, job: Job) -> None:
        """Moves data until `job` is done; `_lead` is held, and given up in the end."""
        try:
            if not job.is_posted:
                self._post(job)
            self._drive(job)
        except BaseException:
            # Ctrl-C, or a fault in a fold: a read may be half accounted for, so no link can be trusted any more.
            notice = Aborted(self.rank, "interrupted while it moved data")
            self._drop(lambda: notices.to_error(notice, self.rank))
            raise
        finally:
            if job in self._jobs:  # else the leader before had done it
                self._jobs.remove(job)
            self._release()

    def _follow(self, job: Job) -> None:
        job.turn = threading.Event()
        self._arrivals.append(job)
        self._poller.wake()
        try:
            while not self._lead.acquire(blocking=False):
                job.turn.wait()
                job.turn.clear()
                if job.is_done:
                    return
        except BaseException:  # Ctrl-C while asleep: the caller takes its memory back, the others go on
            self._as_leader(lambda: job.fail(lambda: ChannelClosedError("the call was interrupted")))
            raise
        job.turn = None
        self._lead_for(job)

    def _release(self) -> None:
        """Stops leading; a follower that is not done takes over. The order matters: a follower first queues itself,
        then tries the lock; the leader first frees the lock, then looks. So one of the two always sees the other."""
        while True:
            if self._arrivals or self._jobs:
                self._admit()
                self._wake_done()
            successor = next((job.turn for job in self._jobs if job.turn is not None), None)
            self._lead.release()
            if successor is not None:
                successor.set()
                return
            if not self._arrivals or not self._lead.acquire(blocking=False):
                return

    def _as_leader(self, action: Callable[[], None]) -> None:
        """Runs `action` with the rights of the leader, in this thread or in the leader's, before this returns. What it
        raises is raised here."""
        done = threading.Event()
        failure: list[BaseException] = []

        def act() -> None:
            try:
                action()
            except BaseException as exc:  # must not end the leader, who has nothing to do with it
                failure.append(exc)
            finally:
                done.set()

        self._arrivals.append(act)
        self._poller.wake()
        while not done.is_set():
            if self._lead.acquire(blocking=False):
                self._release()
            else:
                done.wait(0.01)
        if failure:
            raise failure[0]

    def _admit(self) -> None:
        """Takes up what other threads have left for the leader."""
        while self._arrivals:
            arrival = self._arrivals.popleft()
            if not isinstance(arrival, Job):
                arrival()
            elif not arrival.is_posted:
                self._post(arrival)

    def _wake_done(self) -> None:
        """Tells followers whose jobs are done."""
        for job in tuple(self._jobs):
            if job.turn is not None and job.is_done:
                self._jobs.remove(job)
                job.turn.set()

    # --- moving ---------------------------------------------------------------------------------------------------

    def _post(self, job: Job) -> None:
        job.is_posted = True
        self._jobs.append(job)
        error = self._obstacle(job) if self._has_trouble else None
        if error is not None:
            for half, _ in job.halves():
                half.error, half.done = error(), True
            return
        if job.send is not None and job.send_link is not None:
            job.send_link.outbound.post(job.send)
        if job.receive is not None and job.receive_link is not None:
            job.receive_link.inbound.post(job.receive)
            if job.receive_link.inbound.has_news:
                self._settle(job.receive_link)

    def _obstacle(self, job: Job) -> MakeError | None:
        """Why `job` cannot succeed any more, if so."""
        if self._failure is not None:
            return self._failure
        for half, link in job.halves():
            members = half.envelope.members
            if members is not None:
                notice = self._failed_channels.get(half.envelope.channel)
                if notice is not None:
                    return lambda: notices.to_error(notice, self.rank)
                for peer, error in self._lost.items():
                    if peer in members:
                        return error
            # What came before the link ended can still be received.
            if not link.is_open and not (half is job.receive and link.inbound.holds_whole(half.key)):
                if members is not None and link.is_left:
                    self._fail_channel(half.envelope.channel, members, Left(link.peer))
                return link.error
        return None

    def _drive(self, job: Job) -> None:
        """Moves data until `job` is done and the GO it owes is out. The hot loop."""
        send, receive = job.send, job.receive
        out, into = job.send_link, job.receive_link
        rounds = 0
        is_stuck = False  # writing: tried again only after some reads, or when the poller says so
        while True:
            moved = False
            if out is not None and send is not None and not send.done and not is_stuck:
                moved = self._write(out)
                is_stuck = not moved
            if into is not None and receive is not None:
                if into.outbound.owes_go:
                    moved = self._write(into) or moved
                if not receive.done:
                    moved = self._read(into) or moved
            if job.is_done:
                if into is None or not into.outbound.owes_go or not into.is_open:
                    return
                job.deadline = min(job.deadline, self.now() + _GO_PATIENCE)
                if self.now() >= job.deadline:
                    return
            rounds += 1
            if not moved:
                self._sleep(job)
                is_stuck = False
            elif rounds & 3 == 0:
                is_stuck = False
                if rounds & 15 == 0 and (self._arrivals or len(self._jobs) > 1 or self.now() >= job.deadline):
                    self._serve(job, wait=False)

    def _sleep(self, job: Job) -> None:
        """Waits until something can move. While only this job is there and data flows, that is all there is to do."""
        if self._arrivals or len(self._jobs) > 1:
            self._serve(job, wait=True)
            return
        receive, into = job.receive, job.receive_link
        if receive is not None and into is not None and receive.total <= _SMALL and not receive.done:
            for _ in range(_YIELDS):
                os.sched_yield()
                if self._read(into):
                    return
        for _, link in job.halves():
            if link.error is None:
                self._update_watch(link)
        if not job.is_done and not self._move_ready(min(job.deadline, self.now() + _QUIET)):
            self._serve(job, wait=True)

    def _serve(self, job: Job, *, wait: bool) -> None:
        """Serves all links for all jobs; with `wait`, sleeps until one of them can move or a job's time is up."""
        self._admit()
        if self._is_closed:
            return  # by what was just admitted; all jobs are done
        if wait:
            self._say_what_we_wait_for()
            self._look_for_disagreement()
        for link in self.links.values():
            if link.error is None:
                self._update_watch(link)
        self._expire()
        self._wake_done()
        # What was found above may just have ended the job that this leader is here for.
        wait = wait and (not job.is_done or (job.receive_link is not None and job.receive_link.outbound.owes_go))
        self._move_ready(min(map(_wakes_at, self._jobs), default=0.0) if wait else 0.0)
        self._expire()
        self._wake_done()

    def _move_ready(self, deadline: float) -> bool:
        """Waits until `deadline` for a link that can move, and moves it."""
        if self._pending:
            for link in tuple(self._pending):
                if not self._read(link):
                    self._pending.discard(link)
            return True
        events = self._poller.wait(deadline)
        for ready in events:
            link = self.links[ready.peer]
            if ready.writable and not self._write(link) and link.error is None:
                self._update_watch(link)  # nothing is left to write there
            if ready.readable and not self._read(link) and link.inbound.is_full:
                self._broken(link)  # a hang-up: nothing else is looked for on a link that is full
        return bool(events)

    def _update_watch(self, link: Link) -> None:
        if link.inbound.is_full:
            for job in self._jobs:
                if any(other is link and not half.done for half, other in job.halves()):
                    job.fail(lambda: InboxFullError(self._inbox_bytes, peer=link.peer))
        watch = (not link.inbound.is_full, link.outbound.is_active)
        if watch != link.watch:
            link.watch = watch
            self._poller.watch(link.peer, read=watch[0], write=watch[1])

    def _write(self, link: Link) -> bool:
        if link.error is not None:
            return False
        try:
            return link.write()
        except OSError as exc:
            self._broken(link, exc)
            return True

    def _read(self, link: Link) -> bool:
        inbound = link.inbound
        if link.error is not None or inbound.is_full:
            return False
        try:
            if not link.read():
                return False
        except EOFError:
            self._ended(link)
            return True
        except (ProtocolError, TamperedError) as exc:  # before OSError, which they are too
            self._garbled(link, exc)
            return True
        except OSError as exc:
            self._broken(link, exc)
            return True
        if link.stream.has_pending:
            self._pending.add(link)
        elif self._pending:
            self._pending.discard(link)
        if inbound.has_news:
            self._settle(link)
        return True

    def _settle(self, link: Link) -> None:
        """Carries out what arrived frames ask for."""
        inbound, outbound = link.inbound, link.outbound
        if inbound.replies:
            for key, serial in inbound.replies:
                outbound.reply_go(key, serial)
            inbound.replies.clear()
            self._write(link)
        if inbound.granted:
            for key, serial in inbound.granted:
                outbound.granted(key, serial)
            inbound.granted.clear()
        while inbound.events:
            event = inbound.events.popleft()
            if isinstance(event, Disagreement):
                self._disagree(link, event)
            else:
                self._controlled(link, event)

    # --- failing: one job, one group, one peer, everything ------------------------------------------------------------

    def _expire(self) -> None:
        now = self.now()
        for job in self._jobs:
            if job.deadline <= now and not job.is_done:
                self._time_out(job)

    def _time_out(self, job: Job) -> None:
        half, link = [(half, link) for half, link in job.halves() if not half.done][-1]
        envelope, peer = half.envelope, link.peer
        if envelope.members is None:
            what, state = f"{job.what}, waiting for rank {peer}", "the message was dropped, the link is usable"
            job.fail(lambda: OperationTimeoutError(what, job.timeout, peer=peer, state=state))
            self._write(link)
            return
        what = f"operation {envelope.operation}, {self._describe(envelope.call)}, waiting for rank {peer}"
        self._fail_channel(envelope.channel, envelope.members, TimedOut(self.rank, what, job.timeout, peer))

    def _say_what_we_wait_for(self) -> None:
        for job in self._jobs:
            receive, link = job.receive, job.receive_link
            if receive is None or link is None or receive.done or receive.envelope.members is None:
                continue
            if job.say_at is None:
                job.say_at = self.now() + _SAY_AFTER
            elif job.say_at <= self.now():
                job.say_at = float("inf")
                channel, tag, operation, call = receive.envelope[:4]
                frame = pack(WAITING, epoch=self._epoch, channel=channel, tag=tag, operation=operation, call=call)
                link.outbound.control(frame)
                self._write(link)

    def _look_for_disagreement(self) -> None:
        """A peer that called something else in place of what we wait for may never send what we wait for: its messages
        wait unclaimed in the inbox, or it has said that it waits for us. Looked at only when about to sleep."""
        for job in self._jobs:
            envelope = next((half.envelope for half, _ in job.halves() if not half.done), None)
            if envelope is None or envelope.members is None:
                continue
            for link in self.links.values():
                operation, call = link.waits_in.get(envelope.channel, (0, b""))
                if operation == envelope.operation and call != envelope.call:
                    self._disagree(link, Disagreement(envelope, operation, call))
                    return
                if not link.inbound.has_early:
                    continue
                for stored in link.inbound.early(envelope.channel):
                    is_other = stored.operation == envelope.operation and stored.call != envelope.call
                    if is_other or stored.operation < envelope.operation:
                        self._disagree(link, Disagreement(envelope, stored.operation, stored.call))
                        return

    def _disagree(self, link: Link, event: Disagreement) -> None:
        envelope = event.ours
        ours = "recv" if envelope.call == NO_CALL else self._describe(envelope.call)
        theirs = "send" if event.call == NO_CALL else self._describe(event.call)
        if event.operation != envelope.operation:
            theirs += f" as its operation {event.operation}"
        notice = Mismatch(self.rank, ours, link.peer, theirs, envelope.operation)
        self._fail_channel(envelope.channel, envelope.members or frozenset(self.links), notice)

    def _fail_channel(
        self, channel: int, members: Container[int] | None, notice: Notice, error: MakeError | None = None
    ) -> None:
        """Ends the collectives of one group for good, and tells its members, once: also what we were told ourselves,
        for a peer must not hear that we cancelled a message, or left, before it hears why."""
        self._has_trouble = True
        is_news = channel not in self._failed_channels
        notice = self._failed_channels.setdefault(channel, notice)
        jobs = [job for job in self._jobs if job.is_on(channel)]
        for job in jobs:
            members = members or next(half.envelope.members for half, _ in job.halves())
        if is_news and members is not None:
            self._tell(members, notice, channel)
        for job in jobs:
            job.fail(error or (lambda: notices.to_error(notice, self.rank)))

    def _tell(self, members: Container[int], notice: Notice, channel: int = 0) -> None:
        payload = notices.encode(notice)
        frame = pack(ABORT, channel=channel, length=len(payload), epoch=self._epoch) + payload
        for link in self.links.values():
            if link.error is None and link.peer in members:
                link.outbound.control(frame)
                self._push(link)

    def _push(self, link: Link) -> None:
        while link.error is None and link.outbound.has_control and self._write(link):
            pass

    def _controlled(self, link: Link, event: Control) -> None:
        header = event.header
        if header.kind == GOODBYE:
            link.is_left = True
            return
        if header.kind == WAITING:
            link.waits_in[header.channel] = (header.operation, header.call)
            return
        try:
            notice = notices.decode(event.payload)
        except ProtocolError as exc:
            self._garbled(link, exc)
            return
        if isinstance(notice, Aborted):
            self._fail_all(lambda: notices.to_error(notice, self.rank))
        else:
            self._fail_channel(header.channel, None, notice)

    def _garbled(self, link: Link, exc: ProtocolError | TamperedError) -> None:
        kind, message = type(exc), f"rank {link.peer}: {exc}"
        self._lose(link, lambda: kind(message, peer=link.peer), str(exc))

    def _broken(self, link: Link, exc: OSError | None = None) -> None:
        """The kernel says that the way is gone. What the peer said before is read first: it may name another. That is
        no more than a socket holds, so the inbox's limit can wait."""
        with suppress(OSError, EOFError):  # the end that we have come to report
            while link.error is None and link.read():
                self._settle(link)
        if link.error is None:
            self._ended(link, _WITHOUT_A_WORD if exc is None else f"connection broken ({exc.strerror or exc})")

    def _ended(self, link: Link, reason: str = _WITHOUT_A_WORD) -> None:
        peer = link.peer
        if link.is_left:
            self._leave(link)
        else:
            self._lose(link, lambda: PeerLostError(peer, reason), reason)

    def _leave(self, link: Link) -> None:
        """A peer has closed. Collectives that need nothing more of it go on: it may only have been done first."""
        notice = Left(link.peer)
        needed = [
            half.envelope for job in self._jobs for half, other in job.halves() if other is link and not half.done
        ]
        self._close_link(link, lambda: notices.to_error(notice, self.rank))
        for envelope in needed:
            if envelope.members is not None:
                self._fail_channel(envelope.channel, envelope.members, notice)
        self._shut(link, lambda: notices.to_error(notice, self.rank))

    def _lose(self, link: Link, error: MakeError, reason: str) -> None:
        """A peer is gone: end what waits on it, and every collective that it is part of."""
        self._lost.setdefault(link.peer, error)
        failed = {
            half.envelope.channel: half.envelope.members
            for job in self._jobs
            for half, _ in job.halves()
            if half.envelope.members is not None and link.peer in half.envelope.members
        }
        self._close_link(link, error)
        for channel, members in failed.items():
            self._fail_channel(channel, members, Lost(link.peer, reason), error)
        self._shut(link, error)

    def _shut(self, link: Link, error: MakeError) -> None:
        """Closes one link and ends what waits on it."""
        self._close_link(link, error)
        for job in self._jobs:
            if any(other is link and not half.done for half, other in job.halves()):
                job.fail(error)

    def _close_link(self, link: Link, error: MakeError) -> None:
        self._has_trouble = True
        if link.error is None:
            link.error = error
            self._poller.forget(link.peer)
            link.stream.close()

    def _fail_all(self, error: MakeError) -> None:
        self._has_trouble = True
        self._failure = self._failure or error
        for job in self._jobs:
            job.fail(self._failure)

    def _drop(self, error: MakeError) -> None:
        self._fail_all(error)
        for link in self.links.values():
            self._shut(link, error)

    def _abort(self, notice: Aborted) -> None:
        self._fail_all(lambda: notices.to_error(notice, self.rank))
        self._tell(self.links, notice)
        self._flush()
        for link in self.links.values():
            # A link that is stuck inside a frame cannot carry the notice: its end says enough.
            if link.error is None and link.outbound.has_control:
                self._shut(link, lambda: AbortedError(notice.reason))

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_all(lambda: ChannelClosedError("this rank's backend is closed"))
        for link in self.links.values():
            if link.error is None:
                link.outbound.control(pack(GOODBYE, epoch=self._epoch))
        self._flush()
        self._drain()
        for link in self.links.values():
            self._shut(link, lambda: ChannelClosedError("this rank's backend is closed"))
        self._poller.close()

    def _flush(self) -> None:
        """Writes what is queued, until `_LINGER` is over."""
        deadline = self.now() + _LINGER
        while True:
            for link in self.links.values():
                self._push(link)
            stuck = [link for link in self.links.values() if link.error is None and link.outbound.has_control]
            if not stuck or self.now() >= deadline:
                return
            for link in stuck:
                self._poller.watch(link.peer, read=False, write=True)
            self._poller.wait(deadline)

    def _drain(self) -> None:
        """Reads and drops what still arrives, until every peer has ended its side or `_LINGER` is over: a socket that
        is closed with unread bytes in it resets the connection, and the peer could lose what we sent last."""
        deadline = self.now() + _LINGER
        nowhere = Scratch().bytes
        still = {link.peer: link for link in self.links.values() if link.error is None}
        for link in still.values():
            link.stream.shut_down()
            self._poller.watch(link.peer, read=True, write=False)
        while still and self.now() < deadline:
            for ready in self._poller.wait(deadline):
                try:
                    over = ready.peer in still and not still[ready.peer].stream.recv_into(nowhere)
                except BlockingIOError:
                    continue
                except OSError:
                    over = True
                if over:
                    self._poller.forget(ready.peer)
                    del still[ready.peer]


def _wakes_at(job: Job) -> float:
    return job.deadline if job.say_at is None else min(job.deadline, job.say_at)
