"""`Link`: one peer; and `LinkTable`: all links of one process, the jobs posted on them, and what has failed.

It moves one system call's worth of bytes at a time, and it decides what an end means for the other jobs:

    what ends                         method              who is told               error of the jobs that need it
    a job, by its timeout             time_out            the communicator, if any  OperationTimeoutError
    a collective, by disagreement     mismatch            the communicator          CollectiveMismatchError
    a communicator, for any reason    fail_comm           its members, once         that of the reason
    a link, by an error or its end    end_after           every collective with it  PeerLostError, ProtocolError, ...
    a peer that another part reports  lose                every collective with it  PeerLostError
    everything in this process        fail_all, abort,    all peers, or none        AbortedError, ChannelClosedError
                                      close, drop

It knows nothing of threads: only the leader of the engine calls it, except
where a method says otherwise. Nothing here waits, except `close` and `abort`, which give their last frames a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial

from ringfort.errors import (
    AbortedError,
    ChannelClosedError,
    InboxFullError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
    TamperedError,
)
from ringfort.transport import abort_reasons
from ringfort.transport.abort_reasons import Aborted, AbortReason, Left, Lost, Mismatch, TimedOut
from ringfort.transport.frames import ABORT, GOODBYE, HAS_ENDED, NO_CALL, WAITING, WAKE_UP, pack
from ringfort.transport.inbound import Cancelled, Cleared, Control, Disagreement, Inbound, Reply
from ringfort.transport.messages import CHUNK, Envelope, Job, MakeError, Receive, Scratch, Send
from ringfort.transport.outbound import Outbound
from ringfort.transport.socket_streams import SealedStream
from ringfort.transport.stream import Poller, Stream

_LINGER = 0.3
"""Seconds that `close` and `abort` give the last frames to leave, and a peer that is sending to stop."""
_WITHOUT_GOODBYE = "its process died or closed the connection without a goodbye"
_WITHOUT_CLOSING = "its program ended or dropped the group while this group still needed it"
_MOST_WAITS = 1024
"""Communicators for which a link remembers where its peer waits; torch's callbacks make many that end soon."""

Members = Container[int] | None


class Link:
    """One peer. Reading and writing are one system call each and say whether bytes moved."""

    __slots__ = ("_sealed", "error", "goodbye", "inbound", "outbound", "peer", "stream", "waits_in", "watch")

    def __init__(self, peer: int, stream: Stream, scratch: Scratch, inbox_bytes: int, epoch: int) -> None:
        self.peer = peer
        self.stream = stream
        # Most tries move only a part of a record: that needs no place for its content.
        self._sealed = stream if isinstance(stream, SealedStream) else None
        self.inbound = Inbound(peer, scratch, inbox_bytes, epoch)
        self.outbound = Outbound(epoch)
        self.error: MakeError | None = None
        """Why the stream cannot be used any more; None while it can."""
        self.goodbye: AbortReason | None = None
        """The peer said goodbye: the abort reason for collectives that still need it."""
        self.waits_in: dict[int, tuple[int, bytes]] = {}
        """By communicator: the collective in which the peer said that it waits for us, as its number and call."""
        self.watch: tuple[bool, bool] = (True, False)
        """What the poller looks for: reading, writing."""

    def write(self) -> bool:
        """Write once; whether bytes moved. Raises `OSError` when the connection is gone."""
        try:
            if self._sealed is not None and self._sealed.is_sending:
                count = self._sealed.push()
                if not count:
                    return False
            else:
                head, body = self.outbound.pieces()
                if head and body:
                    count = self.stream.sendmsg((head, body))
                elif head or body:
                    count = self.stream.send(head or body)
                else:
                    return False
        except BlockingIOError:
            return False
        self.outbound.wrote(count)
        return True

    def read(self) -> bool:
        """Read once; whether bytes moved. Raises `OSError` when the connection is gone, `EOFError` at its end and
        `ProtocolError` if what came is invalid."""
        inbound = self.inbound
        try:
            if self._sealed is not None and not self._sealed.pull():
                return False
            count = self.stream.recv_into(inbound.want())
        except BlockingIOError:
            return False
        if not count:
            raise EOFError
        inbound.took(count)
        return True


class LinkTable:
    """The links, the jobs posted on them, and what has failed."""

    def __init__(
        self, rank: int, streams: dict[int, Stream], poller: Poller, *, inbox_bytes: int, epoch: int = 0
    ) -> None:
        scratch = Scratch(max((stream.chunk for stream in streams.values()), default=CHUNK))
        self.rank = rank
        self.epoch = epoch
        self.poller = poller
        self.now = poller.now
        self.links = {peer: Link(peer, stream, scratch, inbox_bytes, epoch) for peer, stream in streams.items()}
        self.jobs: list[Job] = []
        """Posted and not yet taken off by the caller."""
        self.pending: set[Link] = set()
        """Links that can be read though the poller does not know it."""
        self.failed_comms: dict[int, AbortReason] = {}
        """By communicator id: why its collectives have failed."""
        self.has_trouble = False
        """Something has failed or a link is closed: posting must look closer."""
        self.is_closed = False
        self.describe: Callable[[bytes], str] = bytes.hex
        """Turns a call's 16 bytes into words for people; the collectives set one that knows how."""
        self._inbox_bytes = inbox_bytes
        self._failure: MakeError | None = None  # of everything
        self._lost: dict[int, MakeError] = {}  # peers that went without a goodbye
        for peer in self.links:
            poller.watch(peer, read=True, write=False)

    # --- moving ---------------------------------------------------------------------------------------------------

    def post(self, job: Job) -> None:
        """Put the messages of `job` on their links, or fail it if it cannot succeed any more."""
        self.jobs.append(job)
        job.is_posted = True
        error = self._obstacle(job) if self.has_trouble else None
        if error is not None:
            for half, _ in job.halves():
                half.error, half.done = error(), True
            return
        for half, link in job.halves():
            if isinstance(half, Send):
                if not half.begun:  # else the fast path has begun it
                    link.outbound.post(half)
            elif type(half) is Receive:
                link.inbound.post(half)
                if link.inbound.events:
                    self._settle(link)

    def _obstacle(self, job: Job) -> MakeError | None:
        """Return why `job` cannot succeed any more, or None."""
        for half, link in job.halves():
            trouble = self.trouble_of(half.envelope)
            if trouble is not None:
                return trouble
            is_here = half is job.receive and link.inbound.holds_whole(half.key)  # it came before the link ended
            if link.error is not None and not half.done and not is_here and half.needs_link:
                if half.envelope.members is not None and link.goodbye is not None:
                    self.fail_comm(half.envelope.comm_id, half.envelope.members, link.goodbye)
                return link.error
        return None

    def trouble_of(self, envelope: Envelope) -> MakeError | None:
        """Return why nothing of `envelope` can succeed any more, or None. Changes nothing: any thread may ask."""
        if self._failure is not None:
            return self._failure
        members = envelope.members
        if members is None:
            return None
        abort_reason = self.failed_comms.get(envelope.comm_id)
        if abort_reason is not None:
            return self._error_for(abort_reason)
        return next((error for peer, error in tuple(self._lost.items()) if peer in members), None)

    def update_watch(self, link: Link) -> None:
        """Tell the poller what to look for on `link`; fail what needs a link whose inbox is full."""
        is_full = link.inbound.is_full
        if is_full:
            self._fail_jobs_on(link, lambda: InboxFullError(self._inbox_bytes, peer=link.peer))
        watch = (not is_full, link.outbound.is_active)
        if watch != link.watch:
            link.watch = watch
            self.poller.watch(link.peer, read=watch[0], write=watch[1])

    def write(self, link: Link) -> bool:
        """Write once. Return whether anything has changed."""
        if link.error is not None:
            return False
        try:
            return link.write()
        except OSError as exc:
            self.end_after(link, exc)
            return True

    def read(self, link: Link) -> bool:
        """Read once and do what the frames ask for. Return whether anything has changed."""
        if link.error is not None or link.inbound.is_full:
            return False
        try:
            if not link.read():
                return False
        except (OSError, EOFError) as exc:
            self.end_after(link, exc)
            return True
        self.after_read(link)
        return True

    def after_read(self, link: Link) -> None:
        """Do what the frames ask for that were just read."""
        if link.stream.has_pending:
            self.pending.add(link)
        elif self.pending:
            self.pending.discard(link)
        if link.inbound.events:
            self._settle(link)

    def _settle(self, link: Link) -> None:
        events = link.inbound.events
        while events:
            event = events.popleft()
            if isinstance(event, Reply):
                link.outbound.reply_clear(*event)
                self.write(link)
            elif isinstance(event, Cleared):
                link.outbound.cleared(*event)
            elif isinstance(event, Disagreement):
                self.mismatch(link, event)
            elif isinstance(event, Cancelled):
                self._cancelled(link, event.receive)
            else:
                self._controlled(link, event)

    def _cancelled(self, link: Link, receive: Receive) -> None:
        why = "the sender gave up in the middle of a message"
        if not receive.done:
            receive.error, receive.done = AbortedError(why, peer=link.peer), True
        for job in self.jobs:
            if any(half is receive for half, _ in job.before):
                job.fail(lambda: AbortedError(why, peer=link.peer))  # what was to be passed on never comes

    def _controlled(self, link: Link, event: Control) -> None:
        header = event.header
        if header.kind == GOODBYE:
            lost = Lost(link.peer, _WITHOUT_CLOSING, self.rank)
            link.goodbye = lost if header.flags & HAS_ENDED else Left(link.peer)
        elif header.kind == WAITING:
            link.waits_in[header.comm_id] = (header.operation, header.call)
            if len(link.waits_in) > _MOST_WAITS:
                del link.waits_in[next(iter(link.waits_in))]
        elif header.kind != WAKE_UP:  # that has done its work by arriving: whoever slept looks again
            try:
                abort_reason = abort_reasons.decode(event.payload)
            except ProtocolError as exc:
                self.end_after(link, exc)
                return
            if not isinstance(abort_reason, Aborted):
                self.fail_comm(header.comm_id, None, abort_reason)
                return
            is_news = self._failure is None
            self.fail_all(self._error_for(abort_reason))
            if is_news:  # passed on, as in `fail_comm`: else a peer that waits for us may hear only that we left
                self._tell(self.links.keys() - {link.peer}, abort_reason)

    # --- the end of one job or one communicator ---------------------------------------------------------------------

    def time_out(self, job: Job) -> None:
        """End `job`, whose time is over."""
        left = [(half, link) for half, link in job.halves() if not half.done]
        if not left:  # another thread, or another process, has just done what it watches
            return
        half, link = left[-1]
        envelope, peer = half.envelope, link.peer
        if envelope.members is None:
            what, state = f"{job.what}, waiting for rank {peer}", "the message was dropped, the link is usable"
            job.fail(lambda: OperationTimeoutError(what, job.timeout, peer=peer, state=state))
            self.write(link)
            return
        what = f"operation {envelope.operation}, {self.describe(envelope.call)}, waiting for rank {peer}"
        self.fail_comm(envelope.comm_id, envelope.members, TimedOut(self.rank, what, job.timeout, peer))

    def mismatch(self, link: Link, event: Disagreement) -> None:
        """End the collective of this rank, because the peer of `link` is in another one."""
        envelope = event.ours
        ours = "recv" if envelope.call == NO_CALL else self.describe(envelope.call)
        theirs = "send" if event.call == NO_CALL else self.describe(event.call)
        if event.operation != envelope.operation:
            theirs += f" as its operation {event.operation}"
        abort_reason = Mismatch(self.rank, ours, link.peer, theirs, envelope.operation)
        self.fail_comm(envelope.comm_id, envelope.members or frozenset(self.links), abort_reason)

    def fail_comm(
        self, comm_id: int, members: Members, abort_reason: AbortReason, error: MakeError | None = None
    ) -> None:
        """End the collectives of a communicator for good, and tell its members once, even if another rank told this
        one: a peer must not hear that we cancelled a message, or left, before it hears why."""
        self.has_trouble = True
        is_news = comm_id not in self.failed_comms
        abort_reason = self.failed_comms.setdefault(comm_id, abort_reason)
        jobs = [job for job in self.jobs if job.is_on(comm_id)]
        for job in jobs:
            members = members or next(half.envelope.members for half, _ in job.halves())
        if is_news and members is not None:
            self._tell(members, abort_reason, comm_id)
        if error is None or not is_news:  # what came first is the cause: the peer that told us may have ended since
            error = self._error_for(abort_reason)
        for job in jobs:
            job.fail(error)

    def _error_for(self, abort_reason: AbortReason) -> MakeError:
        return partial(abort_reasons.to_error, abort_reason, self.rank)

    def _tell(self, members: Container[int], abort_reason: AbortReason, comm_id: int = 0) -> None:
        payload = abort_reasons.encode(abort_reason)
        frame = pack(ABORT, comm_id=comm_id, length=len(payload), epoch=self.epoch) + payload
        told = [link for link in self.links.values() if link.error is None and link.peer in members]
        for link in told:  # queue for all first: writing may find out that a peer is gone, and tell of that
            link.outbound.control(frame)
        for link in told:
            self.push(link)

    def push(self, link: Link) -> None:
        """Write the control frames that are queued, as far as the kernel takes them."""
        while link.error is None and link.outbound.has_control and self.write(link):
            pass

    # --- the end of one peer --------------------------------------------------------------------------------------

    def end_after(self, link: Link, exc: OSError | EOFError) -> None:
        """End `link`: reading or writing it raised `exc`."""
        if isinstance(exc, (ProtocolError, TamperedError)):
            kind, peer = TamperedError if isinstance(exc, TamperedError) else ProtocolError, link.peer
            why = exc.why if isinstance(exc, TamperedError) else f"Invalid data from rank {peer}: {exc}"
            self.lose(link, lambda: kind(why, peer=peer), str(exc))
        elif isinstance(exc, EOFError):
            self._end_peer(link, _WITHOUT_GOODBYE)
        else:
            self.end_broken(link, f"connection broken ({exc.strerror or exc})")

    def end_broken(self, link: Link, reason: str = _WITHOUT_GOODBYE) -> None:
        """End `link`: the kernel says that the connection is gone. What the peer sent before is read first, because it
        may name another rank. That is no more than a socket holds, so the limit of the inbox does not matter."""
        try:
            while link.error is None and link.read():
                self._settle(link)
        except (ProtocolError, TamperedError) as found:
            self.end_after(link, found)
        except (OSError, EOFError):
            pass  # the end that is reported below
        if link.error is None:
            self._end_peer(link, reason)

    def _end_peer(self, link: Link, reason: str) -> None:
        peer, goodbye = link.peer, link.goodbye
        if goodbye is None:
            self.lose(link, lambda: PeerLostError(peer, reason), reason)
            return
        # Collectives that need nothing more of the peer continue: it may only have been done first.
        needed = [half.envelope for job in self.jobs for half in job.waits_on(link)]
        self._end_link(link, self._error_for(goodbye), goodbye, needed)

    def lose(self, link: Link, error: MakeError, reason: str) -> None:
        """End what waits for a peer that is gone, and every collective that it is part of."""
        self._lost.setdefault(link.peer, error)
        envelopes = [half.envelope for job in self.jobs for half, _ in job.halves()]
        with_peer = [envelope for envelope in envelopes if link.peer in (envelope.members or ())]
        self._end_link(link, error, Lost(link.peer, reason, self.rank), with_peer)

    def _end_link(self, link: Link, error: MakeError, abort_reason: AbortReason, ended: list[Envelope]) -> None:
        """Close `link`, and end the collectives of `ended` and what waits for the peer."""
        self._close_link(link, error)
        comms = {envelope.comm_id: envelope.members for envelope in ended if envelope.members is not None}
        for comm_id, members in comms.items():
            self.fail_comm(comm_id, members, abort_reason, error)
        self._fail_jobs_on(link, error)

    def _close_link(self, link: Link, error: MakeError) -> None:
        self.has_trouble = True
        if link.error is None:
            self.poller.forget(link.peer)
            link.stream.close()
            link.error = error  # last: if an interrupt comes before, this is done again

    def _fail_jobs_on(self, link: Link, error: MakeError) -> None:
        for job in self.jobs:
            if job.waits_on(link):
                job.fail(error)

    # --- the end of everything ------------------------------------------------------------------------------------

    def fail_all(self, error: MakeError) -> None:
        """End every job, now and later, with `error`, or with what ended them before."""
        self.has_trouble = True
        self._failure = self._failure or error
        for job in self.jobs:
            job.fail(self._failure)

    def drop(self, error: MakeError) -> None:
        """Close all links without a goodbye, as a process that dies does."""
        self.fail_all(error)
        for link in self.links.values():
            self._close_link(link, error)

    def abandon(self, error: MakeError) -> None:
        """Fail everything in a forked child: the links are the parent's, and the threads of the jobs do not exist
        here."""
        self.jobs.clear()
        self.is_closed = True
        self._failure = None
        self.fail_all(error)
        for link in self.links.values():
            link.error = link.error or error

    def abort(self, abort_reason: Aborted) -> None:
        """End every job and tell the peers."""
        self.fail_all(self._error_for(abort_reason))
        self._tell(self.links, abort_reason)
        self._flush(_LINGER)
        for link in self.links.values():
            # A link that is stuck inside a frame cannot carry the abort reason: its end says enough.
            if link.error is None and link.outbound.has_control:
                self._close_link(link, lambda: AbortedError(abort_reason.reason))

    def close(self, *, has_ended: bool = False, linger: float = _LINGER) -> None:
        """Say goodbye and close all links, within `linger` seconds."""
        error: MakeError = partial(ChannelClosedError, "This rank has closed its backend")
        if not self.is_closed:
            self.is_closed = True
            self.fail_all(error)
            for link in self.links.values():
                if link.error is None:
                    link.outbound.control(pack(GOODBYE, flags=HAS_ENDED if has_ended else 0, epoch=self.epoch))
            self._flush(linger)
            self._drain(linger)
        # Also if it is closed already: the close before may have been interrupted.
        for link in self.links.values():
            self._close_link(link, error)
        self.poller.close()

    def _flush(self, linger: float) -> None:
        """Write what is queued, for at most `linger` seconds."""
        deadline = self.now() + linger
        while True:
            for link in self.links.values():
                self.push(link)
            stuck = [link for link in self.links.values() if link.error is None and link.outbound.has_control]
            if not stuck or self.now() >= deadline:
                return
            for link in stuck:
                self.poller.watch(link.peer, read=False, write=True)
            self.poller.wait(deadline)

    def _drain(self, linger: float) -> None:
        """Read and drop what still arrives, until every peer has ended its side or `linger` seconds are over: a
        socket that is closed with unread bytes in it resets the connection, and the peer could lose what we sent
        last."""
        deadline = self.now() + linger
        nowhere = Scratch().bytes
        still = {link.peer: link for link in self.links.values() if link.error is None}
        for link in still.values():
            link.stream.shut_down()
            self.poller.watch(link.peer, read=True, write=False)
        while still and self.now() < deadline:
            for ready in self.poller.wait(deadline):
                try:
                    over = ready.peer in still and not still[ready.peer].stream.recv_into(nowhere)
                except BlockingIOError:
                    continue
                except OSError:
                    over = True
                if over:
                    self.poller.forget(ready.peer)
                    del still[ready.peer]
