"""The engine: moves the messages of one process over its links, in the threads of the callers.

There is no thread of its own. A caller posts what it wants to send and receive; if nobody is moving data it becomes the
**leader** and moves everybody's until its own is done; if somebody is, it sleeps as a **follower** and the leader does
its work. The law of this file: **only the leader, the holder of `_lead`, touches links and posted jobs.** Others append
to `_arrivals` and wake the leader.

One rank with one thread, the usual case, so never takes more than one uncontended lock, and pays no hand-over.

An interrupt (Ctrl-C) may end a call at any bytecode. `_lead` knows its owner, so each call that can take it asks on its
way out whether it still holds it, and then closes all links: what they carried may be half accounted for. A signal
handler or a finaliser may also call the engine in the middle of a call that leads. See `_unwind` and `_leads_below`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Final, NoReturn

from ringfort.errors import AbortedError, ChannelClosedError, PeerLostError
from ringfort.transport import abort_reasons
from ringfort.transport.abort_reasons import Aborted
from ringfort.transport.fast_path import FastPath, is_small
from ringfort.transport.forks import FORKED, keep_from_children
from ringfort.transport.frames import BELL, pack
from ringfort.transport.inbound import Disagreement
from ringfort.transport.link import Job, Link, MakeError
from ringfort.transport.links import Describe
from ringfort.transport.locks import Signal, is_mine
from ringfort.transport.messages import Envelope, Send, Watch
from ringfort.transport.spin import LONGEST, Spin
from ringfort.transport.stream import Poller, Stream

_CLEAR_PATIENCE = 1.0
"""Seconds that a finished receive stays to get its clear-to-send out. The one it is for waits and reads, so it is
instant; unless that one was frozen in the meantime."""

_QUIET = 0.02
"""Seconds without a byte after which the leader looks at more than its own job: for disagreements and deadlines."""

_WATCH = 0.25
"""Seconds that a thread sleeps at most before it looks whether anybody leads: the leader may have been interrupted
before it could wake its successor."""
_MOST_LATE = 20
"""Sleeps of `_WATCH` after its deadline that a follower forgives the leader, which normally ends it."""
_ANSWER = 10.0
"""Seconds in which the leader must do what another thread asks, such as to close. It does in milliseconds, unless a
reduction takes as long."""


class Engine(FastPath):
    """Moves what callers want moved. Its methods may be called from any thread."""

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
        super().__init__(rank, streams, poller, inbox_bytes=inbox_bytes, epoch=epoch, describe=describe)
        self._lead = threading.RLock()
        self._is_led = False  # set by the holder of `_lead`, which must not begin to lead again before it is cleared
        self._arrivals: deque[Job | Callable[[], None]] = deque()
        self._spin = Spin()
        keep_from_children(self)

    # --- callers --------------------------------------------------------------------------------------------------

    def run(self, job: Job) -> None:
        """Blocks until `job` is done; raises what it failed with."""
        try:
            if self._lead.acquire(blocking=False):
                if self._is_led:
                    self._enter_again()
                self._is_led = True
                if self._jobs or self._arrivals or self.has_trouble or not is_small(job) or not self._fast(job):
                    self._lead_for(job)
            else:
                self._follow(job)
        except BaseException:
            self._unwind()
            raise
        self._raise_of(job)

    @staticmethod
    def _raise_of(job: Job) -> None:
        for half, _ in job.halves():
            if half.error is not None:
                try:
                    raise half.error
                finally:
                    # Its traceback knows this frame, which must not know it: else all that the caller holds, such as
                    # shared memory, would stay until the garbage collector comes.
                    half.error = None

    def swap(self, data: bytes | memoryview, into: memoryview, peer: int, envelope: Envelope) -> bool:
        """Sends `data`, a message of a collective that is one frame, to `peer` and receives what fills `into`; or does
        nothing and returns False, if anything is out of the ordinary."""
        link = self.links[peer]
        try:
            if not self._lead.acquire(blocking=False):
                return False
            if self._is_led:
                self._lead.release()
                return False
            if (
                self._jobs
                or self._arrivals
                or self.has_trouble
                or not link.outbound.is_idle
                or not link.inbound.is_idle_for(envelope[:2])
            ):
                self._release()
                return False
            self._is_led = True
            left = self._fast_swap(link, data, into, envelope)
            if left is None:
                self._stop_leading()
                return True
            self._lead_for(left)
        except BaseException:
            self._unwind()
            raise
        self._raise_of(left)
        return True

    def watch(self, is_ready: Callable[[], bool], peer: int, envelope: Envelope) -> None:
        """Blocks until `is_ready()`, which is looked at whenever something comes; raises what ends a collective that
        waits for `peer`."""
        job = Job("watch", envelope.timeout, envelope.deadline or 0.0)
        job.receive, job.receive_link = Watch(envelope, is_ready), self.links[peer]
        self.run(job)

    def nudge(self, peer: int) -> None:
        """Makes `peer` look at what it watches."""
        link = self.links[peer]

        def ring() -> None:
            if link.error is None:
                link.outbound.control(pack(BELL, epoch=self._epoch))
                self._push(link)

        self._as_leader(ring)

    def disagree(self, peer: int, operation: int, call: bytes, envelope: Envelope) -> NoReturn:
        """Ends the collective of `envelope`, for `peer` is in another; raises `CollectiveMismatchError`, or what ended
        it before."""
        link, disagreement = self.links[peer], Disagreement(envelope, operation, call)
        self._as_leader(lambda: self._disagree(link, disagreement))
        raise abort_reasons.to_error(self._failed_comms[envelope.comm_id], self.rank)

    def check(self, envelope: Envelope) -> None:
        """Raises what keeps a collective from beginning. What needs a peer finds out about that peer by itself."""
        error = self._trouble_of(envelope) if self.has_trouble else None
        if error is not None:
            raise error()

    def abort(self, reason: str) -> None:
        """Ends every call of this process and tells the peers."""
        self._as_leader(lambda: self._abort(Aborted(self.rank, reason)))

    def close(self, *, has_ended: bool = False) -> None:
        """Says goodbye and closes all links. Calls that wait end with `ChannelClosedError`. If the program `has_ended`
        without a close, peers that still need this rank have lost it."""
        self._as_leader(lambda: self._close(has_ended=has_ended))

    def let_go(self) -> None:
        """`close` for a group that nobody holds any more; waits for nothing. Peers that still need this rank have lost
        it."""
        if not self._is_closed:
            self._soon(lambda: self._close(has_ended=True, linger=0.0))

    def drop(self) -> None:
        """Closes all links without a word, as a process that dies does. For fault injection."""
        self._as_leader(lambda: self._drop(lambda: ChannelClosedError("this rank was killed on purpose")))

    def abandon(self) -> None:
        """In a forked child: the links are the parent's, and the threads of the jobs do not exist here."""
        self._lead, self._is_led = threading.RLock(), False
        self._arrivals.clear()
        self._jobs.clear()
        self._is_closed = self.has_trouble = True
        error = self._failure = lambda: ChannelClosedError(FORKED)
        for link in self.links.values():
            link.error = link.error or error

    def lose(self, peer: int, reason: str) -> None:
        """Somebody who watches `peer` has found that it is gone: ends what waits on it, and every collective that it is
        part of. Returns at once."""
        link = self.links[peer]
        self._soon(lambda: self._lose(link, lambda: PeerLostError(peer, reason), reason))

    def fail(self, error: MakeError) -> None:
        """Ends every call of this process, now and later, with `error`. The peers are not told. Returns at once."""
        self._soon(lambda: self._fail_all(error))

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

    def _fast(self, job: Job) -> bool:
        """Takes the short way and gives up the lead, or tells that the ordinary one must go on with what is left."""
        out, into = job.send_link, job.receive_link
        if out is not None and not (out.outbound.is_idle and self._fast_send(job, out)):
            return False
        if into is not None and not self._fast_receive(job, into):
            return False
        self._stop_leading()
        return True

    def _stop_leading(self) -> None:
        """`_release`, where no job is posted."""
        self._is_led = False
        self._lead.release()
        if self._arrivals and self._lead.acquire(blocking=False):
            self._release()

    def _lead_for(self, job: Job) -> None:
        """Moves data until `job` is done; `_lead` is held, and given up in the end."""
        if not job.is_posted:
            self._post(job)
        self._drive(job)
        if job in self._jobs:  # else the leader before had done it
            self._jobs.remove(job)
        self._release()

    def _follow(self, job: Job) -> None:
        job.turn = Signal()
        self._arrivals.append(job)
        self._poller.wake()
        late = 0
        try:
            while not self._lead.acquire(blocking=False):
                job.turn.wait(_WATCH)
                if job.is_done:
                    return
                late = late + 1 if self.now() > job.deadline else 0
                if late > _MOST_LATE:
                    raise ChannelClosedError("the thread that moves this process's messages has stopped doing so")
        except BaseException:  # Ctrl-C while asleep: the caller takes its memory back, the others go on
            if not is_mine(self._lead):
                self._as_leader(lambda: job.fail(lambda: ChannelClosedError("the call was interrupted")))
            raise
        self._is_led = True
        job.turn = None
        self._lead_for(job)

    def _release(self) -> None:
        """Stops leading; a follower that is not done takes over. The order matters: a follower first queues itself,
        then tries the lock; the leader first frees the lock, then looks. So one of the two always sees the other."""
        while True:
            self._is_led = True
            if self._arrivals or self._jobs:
                self._admit()
                self._wake_done()
            successor = next((job.turn for job in self._jobs if job.turn is not None), None)
            self._is_led = False
            self._lead.release()
            if successor is not None:
                successor.send()
                return
            if not self._arrivals or not self._lead.acquire(blocking=False):
                return

    def _as_leader(self, action: Callable[[], None]) -> None:
        """Runs `action` with the rights of the leader, in this thread or in the leader's, before this returns. What it
        raises is raised here. Where this interrupts a call of the same thread that leads, that call runs `action` when
        it goes on, after this has returned."""
        try:
            if self._lead.acquire(blocking=False):
                if self._is_led:
                    if self._leads_below():
                        self._lead.release()
                        self._arrivals.append(action)
                        return
                    self._recover()
                    self._lead.acquire()
                self._is_led = True
                try:
                    action()
                except Exception:
                    self._release()
                    raise
                self._release()
                return
            self._have_leader_do(action)
        except BaseException:
            self._unwind()
            raise

    def _have_leader_do(self, action: Callable[[], None]) -> None:
        done = Signal()
        failure: list[Exception] = []

        def act() -> None:
            try:
                action()
            except Exception as exc:  # must not end the leader, who has nothing to do with it
                failure.append(exc)
            done.send()

        self._arrivals.append(act)
        self._poller.wake()
        until = time.monotonic() + _ANSWER
        while not done.wait(0.01):
            if self._lead.acquire(blocking=False):
                self._release()
            elif time.monotonic() > until:
                # Whoever leads is stuck: its links end here, so that at least the peers go on.
                self._drop(lambda: ChannelClosedError("the thread that moved this process's messages is stuck"))
                return
        if failure:
            raise failure[0]

    def _soon(self, action: Callable[[], None]) -> None:
        """Runs `action` with the rights of the leader, here if nobody leads, else by the leader, a moment later. If one
        is just stopping, it sees what was left for it: see `_release`."""
        self._arrivals.append(action)
        self._poller.wake()
        try:
            if self._lead.acquire(blocking=False):
                if not self._is_led:
                    self._release()
                elif self._leads_below():
                    self._lead.release()
                else:
                    self._recover()
        except BaseException:
            self._unwind()
            raise

    # --- interrupts -----------------------------------------------------------------------------------------------

    def _unwind(self) -> None:
        """Ends what an exception found under way. Called by each call that can take the lead, on its way out: if this
        thread still holds it, and none of its calls below does so rightly, the links are closed and it is given up."""
        if is_mine(self._lead) and not self._leads_below():
            self._recover()

    def _recover(self) -> None:
        """Ctrl-C, or a fault in a reduce, has ended a call that led: a read may be half accounted for, so no link can
        be trusted any more. Fails all that waits, and gives up the lead. If that is interrupted too, whoever comes next
        in this thread does it again."""
        abort_reason = Aborted(self.rank, "interrupted while it moved data")
        self._drop(lambda: abort_reasons.to_error(abort_reason, self.rank))
        self._admit()
        self._wake_done()
        self._jobs.clear()
        self._is_led = False
        while is_mine(self._lead):
            self._lead.release()

    def _enter_again(self) -> None:
        """A call begins in a thread that holds the lead already. Raises `AbortedError` if a call below leads: a signal
        handler or a finaliser has interrupted it, and would wait for its own thread. Else that call was interrupted and
        is gone."""
        if self._leads_below():
            self._lead.release()
            raise AbortedError(
                "a signal handler or a finaliser has interrupted a call of this group and cannot call the group itself"
            )
        self._recover()
        self._lead.acquire()

    def _leads_below(self) -> bool:
        """Whether this thread's stack has a call that may lead, below the one that asks. The stack is the one witness
        that an interrupt cannot make wrong."""
        calls, frame = 0, _this_frame()
        while frame is not None and calls < 2:
            calls += frame.f_code in _LEADING and frame.f_locals.get("self") is self
            frame = frame.f_back
        return calls > 1

    def _admit(self) -> None:
        """Takes up what other threads have left for the leader. What is taken up leaves the queue last, so that an
        interrupt cannot lose it."""
        while self._arrivals:
            arrival = self._arrivals[0]
            try:
                if not isinstance(arrival, Job):
                    arrival()
                elif not arrival.is_posted:
                    self._post(arrival)
            except Exception:
                self._arrivals.popleft()
                raise
            self._arrivals.popleft()

    def _wake_done(self) -> None:
        """Tells followers whose jobs are done."""
        for job in tuple(self._jobs):
            if job.turn is not None and job.is_done:
                self._jobs.remove(job)
                job.turn.send()

    # --- moving ---------------------------------------------------------------------------------------------------

    def _drive(self, job: Job) -> None:
        """Moves data until `job` is done and the clear-to-send it owes is out. The hot loop."""
        send, receive = job.send, job.receive
        out, into = job.send_link, job.receive_link
        asks = _asks_elsewhere(job)
        rounds = 0
        is_stuck = False  # writing: tried again only after some reads, or when the poller says so
        while True:
            moved = False
            if out is not None and send is not None and not send.done and not is_stuck:
                moved = self._write(out)
                if not moved:
                    is_stuck = not out.outbound.is_between
            if asks is not None and out is not None:
                if asks.is_clear or asks.done:
                    asks = None
                else:
                    moved = self._read(out) or moved
            if into is not None and receive is not None:
                if into.outbound.owes_go:
                    moved = self._write(into) or moved
                if not receive.done:
                    moved = self._read(into) or moved
            if (send is None or send.done) and (receive is None or receive.done):
                if into is None or not into.outbound.owes_go or not into.is_open:
                    return
                job.deadline = min(job.deadline, self.now() + _CLEAR_PATIENCE)
                if self.now() >= job.deadline:
                    return
            rounds += 1
            if not moved:
                self._sleep(job, out if asks is not None else None)
                is_stuck = False
            elif rounds & 3 == 0:
                is_stuck = False
                if rounds & 15 == 0 and (self._arrivals or len(self._jobs) > 1 or self.now() >= job.deadline):
                    self._serve(job, wait=False)

    def _sleep(self, job: Job, granting: Link | None = None) -> None:
        """Waits until something can move. While only this job is there and data flows, that is all there is to do.
        From `granting` a clear-to-send is awaited."""
        if self._arrivals or len(self._jobs) > 1:
            self._serve(job, wait=True)
            return
        receive, into, send, out = job.receive, job.receive_link, job.send, job.send_link
        if type(receive) is not Watch:  # who watches has tried long enough
            reads = into if receive is not None and not receive.done else None
            writes = out if send is not None and not send.done and send.is_clear else None
            until = time.monotonic() + LONGEST
            for _ in range(self._spin.budget):
                os.sched_yield()
                if (
                    (reads is not None and self._read(reads))
                    or (writes is not None and self._write(writes))
                    or (granting is not None and self._read(granting))
                ):
                    self._spin.tell(paid=True)
                    return
                if time.monotonic() > until:
                    break
            self._spin.tell(paid=False)
        for link in (out,) if out is into else (out, into):
            if link is not None and link.error is None:
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
            self._look_for_silence()
        for link in self.links.values():
            if link.error is None:
                self._update_watch(link)
        self._expire()
        self._wake_done()
        # What was found above may just have ended the job that this leader is here for.
        wait = wait and (not job.is_done or (job.receive_link is not None and job.receive_link.outbound.owes_go))
        self._move_ready(self._next_look() if wait else 0.0)
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


def _asks_elsewhere(job: Job) -> Send | None:
    """The message of `job` that waits for a clear-to-send, where that comes on another link than what the job receives.
    Nobody else reads that one while data flow: a ring of three ranks and more would wait for the clear-to-send until
    nothing flows."""
    if job.send_link is job.receive_link:
        return None
    return next((half for half, _ in job.halves() if isinstance(half, Send) and not half.is_clear), None)


_LEADING: Final[frozenset[CodeType]] = frozenset(
    method.__code__
    for method in (Engine.run, Engine.swap, Engine._as_leader, Engine._soon)  # pyright: ignore[reportPrivateUsage]
)
"""The calls that can take the lead, and that `_unwind` when they end with an exception."""


def _this_frame() -> FrameType | None:
    return sys._getframe()  # pyright: ignore[reportPrivateUsage]
