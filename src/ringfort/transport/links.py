"""All links of one process, one system call at a time; and what the end of a message, a group or a peer means for the
others. Who calls this, and when, is the engine's business: nothing here waits, but for the last words of a close."""

from __future__ import annotations

from collections.abc import Callable, Container

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
from ringfort.transport.frames import ABORT, BELL, GOODBYE, HAS_ENDED, NO_CALL, WAITING, pack
from ringfort.transport.inbound import Control, Disagreement, GivenUp
from ringfort.transport.link import Job, Link, MakeError
from ringfort.transport.messages import CHUNK, Envelope, Receive, Scratch, Send
from ringfort.transport.stream import Poller, Stream

_LINGER = 0.3
"""Seconds that `close` and `abort` give the last frames to leave, and a peer that is sending to stop."""
_WITHOUT_A_WORD = "its process died or closed the connection without a word"
_WITHOUT_CLOSING = "its program ended, or dropped the group, while it was still needed"
_MOST_WAITS = 1024
"""Groups of which a link keeps in which collective its peer waits; the callbacks of torch make many that end soon."""

Describe = Callable[[bytes], str]
"""Turns a call's 16 bytes into words for people; the collectives know how."""


class Links:
    """The links, and the jobs posted on them."""

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
        self.describe = describe
        self._inbox_bytes = inbox_bytes
        self._epoch = epoch
        self._poller = poller
        self._jobs: list[Job] = []  # posted and not done
        self._failure: MakeError | None = None  # of everything
        self._failed_comms: dict[int, AbortReason] = {}
        self._lost: dict[int, MakeError] = {}  # peers that went without a word
        self._pending: set[Link] = set()  # links that can be read though the poller does not know it
        self.has_trouble = False  # something of the above, or a closed link: posting must look closer
        self._is_closed = False
        for peer in self.links:
            poller.watch(peer, read=True, write=False)

    # --- moving ---------------------------------------------------------------------------------------------------

    def _post(self, job: Job) -> None:
        self._jobs.append(job)
        job.is_posted = True
        error = self._obstacle(job) if self.has_trouble else None
        if error is not None:
            for half, _ in job.halves():
                half.error, half.done = error(), True
            return
        for half, link in job.halves():
            if isinstance(half, Send):
                link.outbound.post(half)
            elif type(half) is Receive:
                self._post_receive(half, link)

    def _post_receive(self, receive: Receive, link: Link) -> None:
        link.inbound.post(receive)
        if link.inbound.has_news:
            self._settle(link)

    def _obstacle(self, job: Job) -> MakeError | None:
        """Why `job` cannot succeed any more, if so."""
        for half, link in job.halves():
            members = half.envelope.members
            trouble = self._trouble_of(half.envelope)
            if trouble is not None:
                return trouble
            # What came before the link ended can still be received.
            if not link.is_open and not half.done and not (half is job.receive and link.inbound.holds_whole(half.key)):
                if members is not None and link.farewell is not None:
                    self._fail_comm(half.envelope.comm_id, members, link.farewell)
                return link.error
        return None

    def _trouble_of(self, envelope: Envelope) -> MakeError | None:
        """Why nothing of `envelope` can succeed any more, if so. Changes nothing: it may be asked by any thread."""
        if self._failure is not None:
            return self._failure
        members = envelope.members
        if members is None:
            return None
        abort_reason = self._failed_comms.get(envelope.comm_id)
        if abort_reason is not None:
            return lambda: abort_reasons.to_error(abort_reason, self.rank)
        return next((error for peer, error in tuple(self._lost.items()) if peer in members), None)

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
        self._after_read(link)
        return True

    def _after_read(self, link: Link) -> None:
        if link.stream.has_pending:
            self._pending.add(link)
        elif self._pending:
            self._pending.discard(link)
        if link.inbound.has_news:
            self._settle(link)

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
            elif isinstance(event, GivenUp):
                self._given_up(link, event.receive)
            else:
                self._controlled(link, event)

    def _given_up(self, link: Link, receive: Receive) -> None:
        why = "the sender gave up in the middle of a message"
        if not receive.done:
            receive.error, receive.done = AbortedError(why, peer=link.peer), True
        for job in self._jobs:
            if any(half is receive for half, _ in job.before):
                job.fail(lambda: AbortedError(why, peer=link.peer))  # what was to be passed on never comes

    # --- ending: one job, one group, one peer, everything -----------------------------------------------------------

    def _time_out(self, job: Job) -> None:
        half, link = [(half, link) for half, link in job.halves() if not half.done][-1]
        envelope, peer = half.envelope, link.peer
        if envelope.members is None:
            what, state = f"{job.what}, waiting for rank {peer}", "the message was dropped, the link is usable"
            job.fail(lambda: OperationTimeoutError(what, job.timeout, peer=peer, state=state))
            self._write(link)
            return
        what = f"operation {envelope.operation}, {self.describe(envelope.call)}, waiting for rank {peer}"
        self._fail_comm(envelope.comm_id, envelope.members, TimedOut(self.rank, what, job.timeout, peer))

    def _disagree(self, link: Link, event: Disagreement) -> None:
        envelope = event.ours
        ours = "recv" if envelope.call == NO_CALL else self.describe(envelope.call)
        theirs = "send" if event.call == NO_CALL else self.describe(event.call)
        if event.operation != envelope.operation:
            theirs += f" as its operation {event.operation}"
        abort_reason = Mismatch(self.rank, ours, link.peer, theirs, envelope.operation)
        self._fail_comm(envelope.comm_id, envelope.members or frozenset(self.links), abort_reason)

    def _fail_comm(
        self, comm_id: int, members: Container[int] | None, abort_reason: AbortReason, error: MakeError | None = None
    ) -> None:
        """Ends the collectives of one group for good, and tells its members, once: also what we were told ourselves,
        for a peer must not hear that we cancelled a message, or left, before it hears why."""
        self.has_trouble = True
        is_news = comm_id not in self._failed_comms
        abort_reason = self._failed_comms.setdefault(comm_id, abort_reason)
        jobs = [job for job in self._jobs if job.is_on(comm_id)]
        for job in jobs:
            members = members or next(half.envelope.members for half, _ in job.halves())
        if is_news and members is not None:
            self._tell(members, abort_reason, comm_id)
        if error is None or not is_news:  # what came first is the cause: who told us of it may have ended since
            error = lambda: abort_reasons.to_error(abort_reason, self.rank)  # noqa: E731
        for job in jobs:
            job.fail(error)

    def _tell(self, members: Container[int], abort_reason: AbortReason, comm_id: int = 0) -> None:
        payload = abort_reasons.encode(abort_reason)
        frame = pack(ABORT, comm_id=comm_id, length=len(payload), epoch=self._epoch) + payload
        told = [link for link in self.links.values() if link.error is None and link.peer in members]
        for link in told:  # all of them first: what is pushed may find out that a peer is gone, and tell of that
            link.outbound.control(frame)
        for link in told:
            self._push(link)

    def _push(self, link: Link) -> None:
        while link.error is None and link.outbound.has_control and self._write(link):
            pass

    def _controlled(self, link: Link, event: Control) -> None:
        header = event.header
        if header.kind == GOODBYE:
            lost = Lost(link.peer, _WITHOUT_CLOSING, self.rank)
            link.farewell = lost if header.flags & HAS_ENDED else Left(link.peer)
            return
        if header.kind == BELL:
            return  # it has done all it can: whoever slept is awake and looks
        if header.kind == WAITING:
            link.waits_in[header.comm_id] = (header.operation, header.call)
            if len(link.waits_in) > _MOST_WAITS:
                del link.waits_in[next(iter(link.waits_in))]
            return
        try:
            abort_reason = abort_reasons.decode(event.payload)
        except ProtocolError as exc:
            self._garbled(link, exc)
            return
        if isinstance(abort_reason, Aborted):
            is_news = self._failure is None
            self._fail_all(lambda: abort_reasons.to_error(abort_reason, self.rank))
            if is_news:  # passed on, as `_fail_channel` does: else one who waits for us may hear only that we left
                self._tell(self.links.keys() - {link.peer}, abort_reason)
        else:
            self._fail_comm(header.comm_id, None, abort_reason)

    def _garbled(self, link: Link, exc: ProtocolError | TamperedError) -> None:
        if isinstance(exc, TamperedError):
            why = exc.why
            self._lose(link, lambda: TamperedError(why, peer=link.peer), str(exc))
        else:
            message = f"rank {link.peer}: {exc}"
            self._lose(link, lambda: ProtocolError(message, peer=link.peer), str(exc))

    def _broken(self, link: Link, exc: OSError | None = None) -> None:
        """The kernel says that the way is gone. What the peer said before is read first: it may name another. That is
        no more than a socket holds, so the inbox's limit can wait."""
        try:
            while link.error is None and link.read():
                self._settle(link)
        except (ProtocolError, TamperedError) as found:
            self._garbled(link, found)
        except (OSError, EOFError):
            pass  # the end that we have come to report
        if link.error is None:
            self._ended(link, _WITHOUT_A_WORD if exc is None else f"connection broken ({exc.strerror or exc})")

    def _ended(self, link: Link, reason: str = _WITHOUT_A_WORD) -> None:
        peer = link.peer
        if link.farewell is not None:
            self._leave(link, link.farewell)
        else:
            self._lose(link, lambda: PeerLostError(peer, reason), reason)

    def _leave(self, link: Link, abort_reason: AbortReason) -> None:
        """A peer has said goodbye. Collectives that need nothing more of it go on: it may only have been done first."""
        needed = [
            half.envelope for job in self._jobs for half, other in job.halves() if other is link and not half.done
        ]
        self._close_link(link, lambda: abort_reasons.to_error(abort_reason, self.rank))
        for envelope in needed:
            if envelope.members is not None:
                self._fail_comm(envelope.comm_id, envelope.members, abort_reason)
        self._shut(link, lambda: abort_reasons.to_error(abort_reason, self.rank))

    def _lose(self, link: Link, error: MakeError, reason: str) -> None:
        """A peer is gone: end what waits on it, and every collective that it is part of."""
        self._lost.setdefault(link.peer, error)
        failed = {
            half.envelope.comm_id: half.envelope.members
            for job in self._jobs
            for half, _ in job.halves()
            if half.envelope.members is not None and link.peer in half.envelope.members
        }
        self._close_link(link, error)
        for comm_id, members in failed.items():
            self._fail_comm(comm_id, members, Lost(link.peer, reason, self.rank), error)
        self._shut(link, error)

    def _shut(self, link: Link, error: MakeError) -> None:
        """Closes one link and ends what waits on it."""
        self._close_link(link, error)
        for job in self._jobs:
            if any(other is link and not half.done for half, other in job.halves()):
                job.fail(error)

    def _close_link(self, link: Link, error: MakeError) -> None:
        self.has_trouble = True
        if link.error is None:
            self._poller.forget(link.peer)
            link.stream.close()
            link.error = error  # last: if an interrupt comes before, this is done again

    def _fail_all(self, error: MakeError) -> None:
        self.has_trouble = True
        self._failure = self._failure or error
        for job in self._jobs:
            job.fail(self._failure)

    def _drop(self, error: MakeError) -> None:
        self._fail_all(error)
        for link in self.links.values():
            self._shut(link, error)

    def _abort(self, abort_reason: Aborted) -> None:
        self._fail_all(lambda: abort_reasons.to_error(abort_reason, self.rank))
        self._tell(self.links, abort_reason)
        self._flush()
        for link in self.links.values():
            # A link that is stuck inside a frame cannot carry the notice: its end says enough.
            if link.error is None and link.outbound.has_control:
                self._shut(link, lambda: AbortedError(abort_reason.reason))

    def _close(self, *, has_ended: bool = False, linger: float = _LINGER) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._fail_all(lambda: ChannelClosedError("this rank's backend is closed"))
            for link in self.links.values():
                if link.error is None:
                    link.outbound.control(pack(GOODBYE, flags=HAS_ENDED if has_ended else 0, epoch=self._epoch))
            self._flush(linger)
            self._drain(linger)
        # Also if it is closed already: what closed it may have been interrupted.
        for link in self.links.values():
            self._shut(link, lambda: ChannelClosedError("this rank's backend is closed"))
        self._poller.close()

    def _flush(self, linger: float = _LINGER) -> None:
        """Writes what is queued, until `linger` is over."""
        deadline = self.now() + linger
        while True:
            for link in self.links.values():
                self._push(link)
            stuck = [link for link in self.links.values() if link.error is None and link.outbound.has_control]
            if not stuck or self.now() >= deadline:
                return
            for link in stuck:
                self._poller.watch(link.peer, read=False, write=True)
            self._poller.wait(deadline)

    def _drain(self, linger: float) -> None:
        """Reads and drops what still arrives, until every peer has ended its side or `linger` is over: a socket that
        is closed with unread bytes in it resets the connection, and the peer could lose what we sent last."""
        deadline = self.now() + linger
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
