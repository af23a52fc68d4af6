"""The engine: moves the messages of one process over its links, in the threads of the callers.

There is no thread of its own. A caller posts what it wants to send and receive; if nobody is moving data it becomes the
**leader** and moves everybody's until its own is done; if somebody is, it sleeps as a **follower** and the leader does
its work. The law of this file: **only the leader, the holder of `_lead`, touches links and posted messages.** Others
append to `_arrivals` and wake the leader.

One rank with one thread, the usual case, so never takes more than one uncontended lock, and pays no hand-over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from ringfort.errors import ChannelClosedError, DistributedError, OperationTimeoutError, PeerLostError
from ringfort.transport import notices
from ringfort.transport.frames import ABORT, GOODBYE, NO_CALL, pack
from ringfort.transport.inbound import Control, Disagreement, Inbound
from ringfort.transport.messages import Receive, Scratch, Send
from ringfort.transport.notices import Aborted, Lost, Mismatch, Notice, TimedOut
from ringfort.transport.outbound import Outbound
from ringfort.transport.stream import Poller, Stream

_LINGER = 0.5
"""Seconds that `close` gives the last frames to reach the kernel when a peer reads slowly."""

Describe = Callable[[bytes], str]
"""Turns a call's 16 bytes into words for people; the collectives know how."""


class Link:
    """One peer: its stream and both halves of the protocol on it."""

    __slots__ = ("error", "inbound", "is_left", "outbound", "peer", "stream", "watch")

    def __init__(self, peer: int, stream: Stream, scratch: Scratch, inbox_bytes: int, epoch: int) -> None:
        self.peer = peer
        self.stream = stream
        self.inbound = Inbound(peer, scratch, inbox_bytes, epoch)
        self.outbound = Outbound(epoch)
        self.error: Callable[[], DistributedError] | None = None
        """Set when the link is of no more use: makes the error that says why."""
        self.is_left = False
        """The peer said goodbye."""
        self.watch = (True, False)


class Job:
    """What one caller waits for: messages to send and to receive, and until when."""

    __slots__ = ("deadline", "is_posted", "receive", "receive_link", "send", "send_link", "timeout", "turn", "what")

    def __init__(self, what: str, timeout: float, deadline: float) -> None:
        self.what = what
        self.timeout = timeout
        self.deadline = deadline
        self.send: Send | None = None
        self.send_link: Link | None = None
        self.receive: Receive | None = None
        self.receive_link: Link | None = None
        self.is_posted = False
        self.turn: threading.Event | None = None
        """Set when a follower is done or is to lead."""

    @property
    def is_done(self) -> bool:
        return (self.send is None or self.send.done) and (self.receive is None or self.receive.done)

    def halves(self) -> Iterator[Send | Receive]:
        if self.send is not None:
            yield self.send
        if self.receive is not None:
            yield self.receive

    def fail(self, error: Callable[[], DistributedError]) -> None:
        """Ends the halves that are not done, and takes them off their links."""
        if self.send is not None and not self.send.done:
            self.send_link.outbound.withdraw(self.send)  # pyright: ignore[reportOptionalMemberAccess]
            self.send.error, self.send.done = error(), True
        if self.receive is not None and not self.receive.done:
            self.receive_link.inbound.withdraw(self.receive)  # pyright: ignore[reportOptionalMemberAccess]
            self.receive.error, self.receive.done = error(), True


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
        scratch = Scratch()
        self.rank = rank
        self.describe = describe
        self.links = {peer: Link(peer, stream, scratch, inbox_bytes, epoch) for peer, stream in streams.items()}
        self._epoch = epoch
        self._poller = poller
        self._lead = threading.Lock()
        self._jobs: list[Job] = []  # posted and not done
        self._arrivals: deque[Job | Callable[[], None]] = deque()
        self._failure: Callable[[], DistributedError] | None = None  # of everything
        self._failed_channels: dict[int, Notice] = {}
        self._lost: dict[int, Callable[[], DistributedError]] = {}  # peers that went without a word
        self._is_closed = False
        for peer in self.links:
            poller.watch(peer, read=True, write=False)

    # --- callers --------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """The engine's clock."""
        return self._poller.now()

    def run(self, job: Job) -> None:
        """Blocks until `job` is done; raises what it failed with."""
        lead = self._lead
        if not lead.acquire(blocking=False):
            self._follow(job)
        else:
            try:
                self._post(job)
                if not job.is_done:
                    self._drive(job)
            except BaseException:
                self._interrupted(job)
                raise
            finally:
                self._hand_over(job)
        for half in job.halves():
            if half.error is not None:
                raise half.error

    def check(self, members: frozenset[int] | None, channel: int, peer: int | None) -> None:
        """Raises if a message on `channel` to `peer` cannot succeed any more."""
        if self._failure is not None:
            raise self._failure()
        if members is not None:
            if self._failed_channels:
                notice = self._failed_channels.get(channel)
                if notice is not None:
                    raise notices.to_error(notice, self.rank)
            for lost in self._lost:
                if lost in members:
                    raise self._lost[lost]()
        if peer is not None:
            link = self.links[peer]
            if link.error is not None:
                raise link.error()

    def abort(self, reason: str) -> None:
        """Ends every call of this process and tells the peers."""
        notice = Aborted(self.rank, reason)

        def do() -> None:
            self._fail_all(lambda: notices.to_error(notice, self.rank))
            self._tell(self.links, notice, channel=0, everything=True)

        self._as_leader(do)

    def close(self) -> None:
        """Says goodbye and closes all links. Calls that wait end with `ChannelClosedError`."""
        self._as_leader(self._close, wait=True)

    def drop(self) -> None:
        """Closes all links without a word, as a process that dies does. For fault injection."""

        def do() -> None:
            self._fail_all(lambda: ChannelClosedError("this rank was dropped on purpose"))
            for link in self.links.values():
                self._shut(link, lambda: ChannelClosedError("this rank was dropped on purpose"))

        self._as_leader(do)

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

    def _follow(self, job: Job) -> None:
        job.turn = threading.Event()
        self._arrivals.append(job)
        self._poller.wake()
        try:
            while True:
                if self._lead.acquire(blocking=False):
                    try:
                        self._admit()
                        self._drive(job)
                    finally:
                        self._hand_over(job)
                    return
                job.turn.wait()
                job.turn.clear()
                if job.is_done:
                    return
        except BaseException:  # Ctrl-C and the like: the caller takes its memory back, the others go on
            self._as_leader(lambda: self._forget(job), wait=True)
            raise

    def _hand_over(self, job: Job) -> None:
        """Stops leading. A follower that is not done takes over, if there is one."""
        self._forget(job)
        self._lead.release()
        # The order matters: a follower first queues itself, then tries the lock; the leader first frees the lock, then
        # looks. So one of the two always sees the other.
        while self._jobs or self._arrivals:
            successor = next((item for item in (*self._jobs, *self._arrivals) if isinstance(item, Job)), None)
            if successor is not None and successor.turn is not None:
                successor.turn.set()
                return
            if not self._lead.acquire(blocking=False):
                return
            self._admit()
            self._lead.release()

    def _forget(self, job: Job) -> None:
        if not job.is_done:
            job.fail(lambda: ChannelClosedError("the call was interrupted"))
        if job in self._jobs:
            self._jobs.remove(job)

    def _interrupted(self, job: Job) -> None:
        """An exception that is not ours came while leading, so a read may be half accounted for: trust no link."""
        if self._failure is None:
            notice = Aborted(self.rank, "interrupted while it moved data")
            self._fail_all(lambda: notices.to_error(notice, self.rank))
            for link in self.links.values():
                self._shut(link, lambda: notices.to_error(notice, self.rank))

    def _as_leader(self, action: Callable[[], None], *, wait: bool = False) -> None:
        """Runs `action` with the rights of the leader, soon; or before this returns."""
        done = threading.Event()

        def act() -> None:
            try:
                action()
            finally:
                done.set()

        self._arrivals.append(act)
        self._poller.wake()
        while not done.is_set():
            if self._lead.acquire(blocking=False):
                try:
                    self._admit()
                finally:
                    self._lead.release()
                self._wake_done()
                break
            if not wait:
                break
            done.wait(0.05)

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
        try:
            for half in job.halves():
                link = job.send_link if half is job.send else job.receive_link
                assert link is not None
                self.check(half.envelope.members, half.envelope.channel, link.peer)
        except DistributedError as exc:
            for half in job.halves():
                half.error, half.done = exc, True
            return
        if job.send is not None:
            job.send_link.outbound.post(job.send)  # pyright: ignore[reportOptionalMemberAccess]
        if job.receive is not None:
            link = job.receive_link
            link.inbound.post(job.receive)  # pyright: ignore[reportOptionalMemberAccess]
            self._settle(link)  # pyright: ignore[reportArgumentType]

    def _drive(self, job: Job) -> None:
        """Moves data until `job` is done and the answers it owes are out. The hot loop."""
        send, receive = job.send, job.receive
        out, into = job.send_link, job.receive_link
        rounds = 0
        while True:
            moved = False
            if out is not None and (not send.done or out.outbound.owes):  # pyright: ignore[reportOptionalMemberAccess]
                moved = self._write(out)
            if into is not None:
                if into is not out and into.outbound.owes:
                    moved = self._write(into) or moved
                if not receive.done:  # pyright: ignore[reportOptionalMemberAccess]
                    moved = self._read(into) or moved
            if job.is_done and (into is None or into.error is not None or not into.outbound.owes):
                return
            rounds += 1
            if not moved or (rounds & 7 == 0 and (self._arrivals or len(self._jobs) > 1)):
                if self._poller.now() >= job.deadline and job.is_done:
                    return
                self._serve(job, wait=not moved)

    def _serve(self, job: Job, *, wait: bool) -> None:
        """Serves all links for all jobs; with `wait`, sleeps until one of them can move or a job's time is up."""
        self._admit()
        if wait:
            self._look_for_disagreement()
        for link in self.links.values():
            if link.error is None:
                self._update_watch(link)
        self._wake_done()
        # A disagreement, a full inbox or an arrival may just have ended the job this leader is here for.
        wait = wait and (not job.is_done or (job.receive_link is not None and job.receive_link.outbound.owes))
        for ready in self._poller.wait(self._next_deadline() if wait else self._poller.now()):
            link = self.links[ready.peer]
            if ready.writable:
                self._write(link)
            if ready.readable:
                self._read(link)
        self._expire()
        self._wake_done()

    def _next_deadline(self) -> float:
        return min(job.deadline for job in self._jobs)

    def _update_watch(self, link: Link) -> None:
        if link.inbound.is_full:
            link.inbound.refuse_for_fullness()
        watch = (not link.inbound.is_full, link.outbound.is_active)
        if watch != link.watch:
            link.watch = watch
            self._poller.watch(link.peer, read=watch[0], write=watch[1])

    def _write(self, link: Link) -> bool:
        """One system call. True if bytes moved."""
        if link.error is not None:
            return False
        outbound = link.outbound
        head, body = outbound.pieces()
        try:
            if not body:
                if not head:
                    return False
                count = link.stream.send(head)
            elif head:
                count = link.stream.sendmsg((head, body))
            else:
                count = link.stream.send(body)
        except BlockingIOError:
            return False
        except OSError as exc:
            self._broken(link, exc)
            return True
        outbound.wrote(count)
        return True

    def _read(self, link: Link) -> bool:
        """One system call. True if bytes moved."""
        if link.error is not None or link.inbound.is_full:
            return False
        inbound = link.inbound
        try:
            count = link.stream.recv_into(inbound.want())
            if count:
                inbound.took(count)
        except BlockingIOError:
            return False
        except DistributedError as exc:  # the protocol was broken: the stream is of no more use
            message, kind = str(exc), type(exc)
            self._lose(link, lambda: kind(message, peer=link.peer), Lost(link.peer, message))
            return True
        except OSError as exc:
            self._broken(link, exc)
            return True
        if count:
            self._settle(link)
        else:
            self._ended(link)
        return True

    def _settle(self, link: Link) -> None:
        """Carries out what arrived frames ask for."""
        inbound = link.inbound
        if inbound.replies:
            for key, serial in inbound.replies:
                link.outbound.reply_go(key, serial)
            inbound.replies.clear()
            self._write(link)
        if inbound.granted:
            for key, serial in inbound.granted:
                link.outbound.granted(key, serial)
            inbound.granted.clear()
        while inbound.events:
            event = inbound.events.popleft()
            if isinstance(event, Disagreement):
                self._disagree(link, event)
            else:
                self._controlled(link, event)

    def _expire(self) -> None:
        now = self._poller.now()
        for job in tuple(self._jobs):
            if job.deadline <= now and not job.is_done:
                self._time_out(job)

    # --- failing --------------------------------------------------------------------------------------------------

    def _time_out(self, job: Job) -> None:
        waits_for = job.receive_link if job.receive is not None and not job.receive.done else job.send_link
        assert waits_for is not None
        envelope = next(half.envelope for half in job.halves() if not half.done)
        if envelope.members is None:
            state = "the message was dropped, the link is usable"
            what = f"{job.what}, waiting for rank {waits_for.peer}"
            job.fail(lambda: OperationTimeoutError(what, job.timeout, peer=waits_for.peer, state=state))
            return
        what = f"operation {envelope.operation}, {self.describe(envelope.call)}, waiting for rank {waits_for.peer}"
        notice = TimedOut(self.rank, what, job.timeout, waits_for.peer)
        self._fail_channel(envelope.channel, envelope.members, notice)

    def _look_for_disagreement(self) -> None:
        """A peer that called something else in place of what we wait for may never send what we wait for: its messages
        wait unclaimed in the inbox. Looked at only when about to sleep."""
        for job in self._jobs:
            half = next((half for half in job.halves() if not half.done), None)
            if half is None or half.envelope.members is None:
                continue
            envelope = half.envelope
            for link in self.links.values():
                if not link.inbound.has_early:
                    continue
                for stored in link.inbound.early(envelope.channel):
                    behind = stored.operation < envelope.operation
                    if behind or (stored.operation == envelope.operation and stored.call != envelope.call):
                        self._disagree(
                            link, Disagreement(envelope.operation, envelope.call, stored.operation, stored.call)
                        )
                        return

    def _disagree(self, link: Link, event: Disagreement) -> None:
        job = next(
            (
                (job, half)
                for job in self._jobs
                for half in job.halves()
                if half.envelope.call == event.receive_call and half.envelope.operation == event.receive_operation
            ),
            None,
        )
        if job is None:
            return
        envelope = job[1].envelope
        ours = self.describe(event.receive_call) if event.receive_call != NO_CALL else "recv"
        theirs = self.describe(event.call) if event.call != NO_CALL else "send"
        if event.operation != event.receive_operation:
            theirs += f" as its operation {event.operation}"
        notice = Mismatch(self.rank, ours, link.peer, theirs, event.receive_operation)
        self._fail_channel(envelope.channel, envelope.members or frozenset(self.links), notice)

    def _controlled(self, link: Link, event: Control) -> None:
        if event.kind == GOODBYE:
            link.is_left = True
            return
        assert event.kind == ABORT
        try:
            notice = notices.decode(event.payload)
        except DistributedError as exc:
            message = str(exc)
            self._lose(link, lambda: PeerLostError(link.peer, message), Lost(link.peer, message))
            return
        if isinstance(notice, Aborted):
            self._fail_all(lambda: notices.to_error(notice, self.rank))
        else:
            self._fail_channel(event.channel, None, notice)

    def _fail_channel(self, channel: int, members: frozenset[int] | None, notice: Notice) -> None:
        """Ends the collectives of one group for good, and tells its other members unless they told us."""
        if channel in self._failed_channels:
            return
        self._failed_channels[channel] = notice
        for job in self._jobs:
            if any(half.envelope.channel == channel and half.envelope.members is not None for half in job.halves()):
                job.fail(lambda: notices.to_error(notice, self.rank))
        if members is not None:
            self._tell(members, notice, channel=channel)

    def _fail_all(self, error: Callable[[], DistributedError]) -> None:
        if self._failure is None:
            self._failure = error
        for job in self._jobs:
            job.fail(self._failure)

    def _tell(self, members: object, notice: Notice, *, channel: int, everything: bool = False) -> None:
        frame_payload = notices.encode(notice)
        frame = pack(ABORT, channel=channel, length=len(frame_payload), epoch=self._epoch) + frame_payload
        for link in self.links.values():
            if link.error is None and (everything or link.peer in members):  # pyright: ignore[reportOperatorIssue, reportUnknownMemberType]
                link.outbound.control(frame)
                while link.outbound.is_active and self._write(link):
                    pass

    def _broken(self, link: Link, exc: OSError) -> None:
        """The kernel says that the way is gone. What the peer said before it died is read first: it may name another."""
        while link.error is None and not link.is_left and self._read_last(link):
            pass
        if link.error is None:
            self._ended(link, f"connection broken ({exc.strerror or exc})")

    def _read_last(self, link: Link) -> bool:
        try:
            count = link.stream.recv_into(link.inbound.want())
            if count:
                link.inbound.took(count)
                self._settle(link)
        except (OSError, DistributedError):
            return False
        return count > 0

    def _ended(self, link: Link, reason: str = "its process died or closed the connection without a word") -> None:
        peer = link.peer
        if link.is_left:
            self._shut(link, lambda: ChannelClosedError(f"rank {peer} has closed its backend", peer=peer))
        else:
            self._lose(link, lambda: PeerLostError(peer, reason), Lost(peer, reason))

    def _lose(self, link: Link, error: Callable[[], DistributedError], notice: Notice) -> None:
        """A link is gone: end what waits on it, and every collective that its peer is part of."""
        self._lost[link.peer] = error
        self._shut(link, error)
        failed: dict[int, frozenset[int]] = {}
        for job in self._jobs:
            for half in job.halves():
                members = half.envelope.members
                if members is not None and link.peer in members:
                    failed[half.envelope.channel] = members
        for channel, members in failed.items():
            for job in self._jobs:
                if any(half.envelope.channel == channel and half.envelope.members for half in job.halves()):
                    job.fail(error)
            self._fail_channel(channel, members, notice)

    def _shut(self, link: Link, error: Callable[[], DistributedError]) -> None:
        """Closes one link and ends what waits on it."""
        if link.error is None:
            link.error = error
            self._poller.watch(link.peer, read=False, write=False)
            link.stream.close()
        for job in self._jobs:
            if link in (job.send_link, job.receive_link):
                job.fail(link.error)

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_all(lambda: ChannelClosedError("this rank's backend is closed"))
        frame = pack(GOODBYE, epoch=self._epoch)
        for link in self.links.values():
            if link.error is None:
                link.outbound.control(frame)
        self._flush(self._poller.now() + _LINGER)
        for link in self.links.values():
            self._shut(link, lambda: ChannelClosedError("this rank's backend is closed"))
        self._poller.close()

    def _flush(self, deadline: float) -> None:
        """Writes what is queued, until `deadline`."""
        while True:
            waiting = [link for link in self.links.values() if link.error is None and link.outbound.is_active]
            for link in waiting:
                while link.outbound.is_active and self._write(link):
                    pass
            if not any(link.error is None and link.outbound.is_active for link in waiting):
                return
            for link in waiting:
                self._update_watch(link)
            self._poller.wait(deadline)
            if self._poller.now() >= deadline:
                return
