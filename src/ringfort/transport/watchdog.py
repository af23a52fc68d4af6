"""`Watchdog`: what those who wait in vain are due: the end of their time, and a word to and from the one they wait
for."""

from __future__ import annotations

from ringfort.errors import PeerLostError
from ringfort.transport.frames import WAITING, pack
from ringfort.transport.inbound import Disagreement
from ringfort.transport.link import Job
from ringfort.transport.links import Links

_SAY_AFTER = 0.1
"""Seconds of waiting in a collective after which the one waited for is told: two ranks that have called different
things may each wait for the other, and nothing that they send would tell them."""


class Watchdog(Links):
    """The links, and what is looked at when nothing moves on them."""

    def _expire(self) -> None:
        now = self.now()
        for job in self._jobs:
            if job.deadline <= now and not job.is_done:
                self._time_out(job)

    def _say_what_we_wait_for(self) -> None:
        for job in self._jobs:
            receive, link = job.receive, job.receive_link
            if receive is None or link is None or receive.done or receive.envelope.members is None:
                continue
            if job.say_at is None:
                job.say_at = self.now() + _SAY_AFTER
            elif job.say_at <= self.now():
                job.say_at = float("inf")
                comm_id, tag, operation, call = receive.envelope[:4]
                frame = pack(WAITING, epoch=self._epoch, comm_id=comm_id, tag=tag, operation=operation, call=call)
                link.outbound.control(frame)
                self._write(link)

    def _look_for_silence(self) -> None:
        """A machine without power closes no connection: only its silence tells. See `Patience` in docs/clusters.md."""
        for peer, seconds in self._poller.silent():
            reason = f"its machine has not answered for {seconds:.1f} s"
            self._lose(self.links[peer], lambda peer=peer, reason=reason: PeerLostError(peer, reason), reason)

    def _look_for_disagreement(self) -> None:
        """A peer that called something else in place of what we wait for may never send what we wait for: its messages
        wait unclaimed in the inbox, or it has said that it waits for us. Looked at only when about to sleep."""
        for job in self._jobs:
            envelope = next((half.envelope for half, _ in job.halves() if not half.done), None)
            if envelope is None or envelope.members is None:
                continue
            for link in self.links.values():
                operation, call = link.waits_in.get(envelope.comm_id, (0, b""))
                if operation == envelope.operation and call != envelope.call:
                    self._disagree(link, Disagreement(envelope, operation, call))
                    return
                if not link.inbound.has_early:
                    continue
                for stored in link.inbound.early(envelope.comm_id):
                    is_other = stored.operation == envelope.operation and stored.call != envelope.call
                    if is_other or stored.operation < envelope.operation:
                        self._disagree(link, Disagreement(envelope, stored.operation, stored.call))
                        return

    def _next_look(self) -> float:
        """When something is due, if nothing comes before."""
        return min(map(_wakes_at, self._jobs), default=0.0)


def _wakes_at(job: Job) -> float:
    return job.deadline if job.say_at is None else min(job.deadline, job.say_at)
