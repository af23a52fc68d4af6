"""`Progress`: moves the bytes of all posted jobs, in the thread of the leader, until the leader's own job is done.

While data flow, it only reads and writes the links of the leader's job. When nothing moves it tries again for a moment
(`Spin`), then sleeps on the poller, and then serves all links for all jobs and lets the watchdog look.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

from ringfort.transport.links import Link, LinkTable
from ringfort.transport.locks import Signal
from ringfort.transport.messages import Job, Send, Watch
from ringfort.transport.watchdog import Watchdog

_CLEAR_PATIENCE = 1.0
"""Seconds that a finished receive stays to get its clear-to-send out. Its peer waits and reads, so that takes no time,
unless the peer was frozen in the meantime."""
_QUIET = 0.02
"""Seconds without a byte after which the leader looks at more than its own job: for mismatches and deadlines."""
_MOST, _LEAST = 200, 4
"""Tries. One is a system call that finds nothing and one that gives the processor away: some 2 microseconds, while
sleeping and being woken costs 50 to 100 on a virtual machine. The most is what two sleeps would cost; the least keeps
looking whether waiting has become worth it again."""
LONGEST = 0.0005
"""Seconds: where others want the processor, giving it away takes a time slice and not a microsecond. A thread
that sleeps is woken before those that compute; one that only yields comes behind them.

Linux with `sched_autogroup_enabled` lets a process yield only to those of its own session, and our launcher gives
each rank one, as torchrun does. Four ranks on two cores, all in one session, took a tenth less over 64 KiB to 16 MiB of
TCP, but twice as long over a tiny all-reduce through shared memory. So it stays."""


class Spin:
    """The tries before a sleep: doubled when what was waited for came in time, halved when it did not. So a rank whose
    peers are busy elsewhere soon sleeps at once, and where ranks answer each other quickly none of them sleeps."""

    __slots__ = ("budget",)

    def __init__(self) -> None:
        self.budget = _MOST

    def tell(self, *, paid: bool) -> None:
        """What was waited for came while trying, or did not."""
        self.budget = min(_MOST, self.budget * 2) if paid else max(_LEAST, self.budget // 2)


class Progress:
    """Moves the jobs of a table. Only the leader calls it; other threads append to `arrivals`."""

    def __init__(self, table: LinkTable, spin: Spin) -> None:
        self._table = table
        self._watchdog = Watchdog(table)
        self._spin = spin
        self.arrivals: deque[Job | Callable[[], None]] = deque()
        """What other threads have left for the leader: jobs to post, and actions to run."""

    def drive(self, job: Job) -> None:
        """Move data until `job` is done and the clear-to-send that it owes is out. The hot loop."""
        table, arrivals = self._table, self.arrivals
        if not job.is_posted:
            table.post(job)
        read, write, now, jobs = table.read, table.write, table.now, table.jobs
        send, receive = job.send, job.receive
        out, into = job.send_link, job.receive_link
        asks = _asks_elsewhere(job)
        rounds = 0
        is_stuck = False  # writing: tried again only after some reads, or when the poller says so
        while True:
            moved = False
            if out is not None and send is not None and not send.done and not is_stuck:
                moved = write(out)
                if not moved:
                    is_stuck = not out.outbound.is_between
            if asks is not None and out is not None:
                if asks.is_clear or asks.done:
                    asks = None
                else:
                    moved = read(out) or moved
            if into is not None and receive is not None:
                if into.outbound.owes_clear:
                    moved = write(into) or moved
                if not receive.done:
                    moved = read(into) or moved
            if (send is None or send.done) and (receive is None or receive.done):
                if into is None or not into.outbound.owes_clear or into.error is not None:
                    break
                job.deadline = min(job.deadline, now() + _CLEAR_PATIENCE)
                if now() >= job.deadline:
                    break
            rounds += 1
            if not moved:
                self._sleep(job, out if asks is not None else None)
                is_stuck = False
            elif rounds & 3 == 0:
                is_stuck = False
                if rounds & 15 == 0 and (arrivals or len(jobs) > 1 or now() >= job.deadline):
                    self._serve(job, wait=False)
        if job in jobs:  # else the leader before had done it
            jobs.remove(job)

    def hand_over(self) -> Signal | None:
        """Take up what has arrived and wake the callers whose jobs are done. Returns what wakes the caller that
        should lead next, if there is one."""
        self.admit()
        self._wake_done()
        return next((job.turn for job in self._table.jobs if job.turn is not None), None)

    def admit(self) -> None:
        """Take up what other threads have left. It leaves the queue last, so that an interrupt cannot lose it."""
        arrivals = self.arrivals
        while arrivals:
            arrival = arrivals[0]
            try:
                if not isinstance(arrival, Job):
                    arrival()
                elif not arrival.is_posted:
                    self._table.post(arrival)
            except Exception:
                arrivals.popleft()
                raise
            arrivals.popleft()

    def _wake_done(self) -> None:
        """Wake the followers whose jobs are done."""
        for job in tuple(self._table.jobs):
            if job.turn is not None and job.is_done:
                self._table.jobs.remove(job)
                job.turn.send()

    def _sleep(self, job: Job, clearing: Link | None) -> None:
        """Wait until something can move. While only this job is there and data flow, that is all there is to do.
        From `clearing` a clear-to-send is awaited."""
        table, spin = self._table, self._spin
        if self.arrivals or len(table.jobs) > 1:
            self._serve(job, wait=True)
            return
        receive, into, send, out = job.receive, job.receive_link, job.send, job.send_link
        if type(receive) is not Watch:  # which has been tried long enough before it was posted
            reads = into if receive is not None and not receive.done else None
            writes = out if send is not None and not send.done and send.is_clear else None
            until = time.monotonic() + LONGEST
            for _ in range(spin.budget):
                os.sched_yield()
                if (
                    (reads is not None and table.read(reads))
                    or (writes is not None and table.write(writes))
                    or (clearing is not None and table.read(clearing))
                ):
                    spin.tell(paid=True)
                    return
                if time.monotonic() > until:
                    break
            spin.tell(paid=False)
        for link in (out,) if out is into else (out, into):
            if link is not None and link.error is None:
                table.update_watch(link)
        if job.is_done or self._move_ready(min(job.deadline, table.now() + _QUIET)):
            return
        if (
            not job.is_done or self.arrivals or len(table.jobs) > 1
        ):  # else it was woken because what it watches is there
            self._serve(job, wait=True)

    def _serve(self, job: Job, *, wait: bool) -> None:
        """Serve all links for all jobs; with `wait`, sleep until a link can move or a job times out."""
        table, watchdog = self._table, self._watchdog
        self.admit()
        if table.is_closed:
            return  # by what was just admitted; all jobs are done
        if wait:
            watchdog.look()
        for link in table.links.values():
            if link.error is None:
                table.update_watch(link)
        watchdog.expire()
        self._wake_done()
        # What was found above may just have ended the job that this leader is here for.
        wait = wait and (not job.is_done or (job.receive_link is not None and job.receive_link.outbound.owes_clear))
        self._move_ready(watchdog.next_look() if wait else 0.0)
        watchdog.expire()
        self._wake_done()

    def _move_ready(self, deadline: float) -> bool:
        """Wait until `deadline` for a link that can move, and move it."""
        table = self._table
        if table.pending:
            for link in tuple(table.pending):
                if not table.read(link):
                    table.pending.discard(link)
            return True
        events = table.poller.wait(deadline)
        for ready in events:
            link = table.links[ready.peer]
            if ready.writable and not table.write(link) and link.error is None:
                table.update_watch(link)  # nothing is left to write there
            if ready.readable and not table.read(link) and link.inbound.is_full:
                table.end_broken(link)  # a hang-up: nothing else is looked for on a link that is full
        return bool(events)


def _asks_elsewhere(job: Job) -> Send | None:
    """Return the message of `job` that waits for a clear-to-send, if that comes on another link than the one on which
    the job receives. Nobody else reads that link while data flow: a ring of three ranks or more would wait for the
    clear-to-send until nothing flows."""
    if job.send_link is job.receive_link:
        return None
    return next((half for half, _ in job.halves() if isinstance(half, Send) and not half.is_clear), None)
