"""`Watchdog`: deadlines and mismatch detection for blocked operations.

The leader calls it only when nothing moves, so it costs nothing while data flow.
"""

from __future__ import annotations

from ringfort.errors import PeerLostError
from ringfort.transport.frames import WAITING, pack
from ringfort.transport.inbound import Disagreement
from ringfort.transport.links import LinkTable
from ringfort.transport.messages import Job

SAY_AFTER = 0.1
"""Seconds of waiting in a collective after which a rank tells the peer that it waits for what it is in: two ranks that
have called different things may each wait for the other, and nothing that they send would tell them."""


class Watchdog:
    """Ends the jobs of a table that can make no progress."""

    def __init__(self, table: LinkTable) -> None:
        self._table = table

    def look(self) -> None:
        """Look for peers that are in another collective or whose machine is silent, and tell peers what this rank waits
        for."""
        self._say_what_we_wait_for()
        self._look_for_mismatch()
        self._look_for_silence()

    def expire(self) -> None:
        """End the jobs whose time is over."""
        now = self._table.now()
        for job in self._table.jobs:
            if job.deadline <= now and not job.is_done:
                self._table.time_out(job)

    def next_look(self) -> float:
        """Return when to look next, if nothing happens before."""
        return min(map(_due_at, self._table.jobs), default=0.0)

    def _say_what_we_wait_for(self) -> None:
        table = self._table
        for job in table.jobs:
            receive, link = job.receive, job.receive_link
            if receive is None or link is None or receive.done or receive.envelope.members is None:
                continue
            if job.say_at is None:
                job.say_at = table.now() + SAY_AFTER
            elif job.say_at <= table.now():
                job.say_at = float("inf")
                comm_id, tag, operation, call = receive.envelope[:4]
                frame = pack(WAITING, epoch=table.epoch, comm_id=comm_id, tag=tag, operation=operation, call=call)
                link.outbound.control(frame)
                table.write(link)

    def _look_for_mismatch(self) -> None:
        """A peer that called something else may never send what we wait for: its messages lie unclaimed in the inbox,
        or it has said that it waits for us."""
        for job in self._table.jobs:
            envelope = next((half.envelope for half, _ in job.halves() if not half.done), None)
            if envelope is None or envelope.members is None:
                continue
            for link in self._table.links.values():
                operation, call = link.waits_in.get(envelope.comm_id, (0, b""))
                seen = [(operation, call)] if operation == envelope.operation else []
                seen += link.inbound.early(envelope.comm_id)
                for operation, call in seen:
                    if operation < envelope.operation or (operation == envelope.operation and call != envelope.call):
                        self._table.mismatch(link, Disagreement(envelope, operation, call))
                        return

    def _look_for_silence(self) -> None:
        """A machine without power closes no connection: only its silence tells. See `Patience` in docs/clusters.md."""
        for peer, seconds in self._table.poller.silent():
            reason = f"its machine has not answered for {seconds:.1f} s"
            error = lambda peer=peer, reason=reason: PeerLostError(peer, reason)  # noqa: E731
            self._table.lose(self._table.links[peer], error, reason)


def _due_at(job: Job) -> float:
    return job.deadline if job.say_at is None else min(job.deadline, job.say_at)
