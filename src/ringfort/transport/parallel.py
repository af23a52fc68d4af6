"""`ParallelEngine`: one of several engines of a process that share its collectives. What ends one ends it on all."""

from __future__ import annotations

from collections.abc import Sequence

from ringfort.errors import PeerLostError
from ringfort.transport.abort_reasons import AbortReason, Lost
from ringfort.transport.engine import Engine
from ringfort.transport.messages import Envelope


class ParallelEngine(Engine):
    """An engine that can be told that a collective has failed elsewhere, and says why its own has."""

    number = 0
    """Where it stands among the process's engines, in the order in which they were made: the same at every rank."""

    def abort_reason_of(self, envelope: Envelope) -> AbortReason | None:
        """Why collectives of this group have failed here, in the words for the others; None if they have not."""
        return self._failed_comms.get(envelope.comm_id)

    def end(self, envelope: Envelope, abort_reason: AbortReason) -> None:
        """Ends the collectives of this group here too, and tells its members over these links."""
        self._as_leader(lambda: self._fail_comm(envelope.comm_id, envelope.members, abort_reason))


def end_all(engines: Sequence[ParallelEngine], failed: int, envelope: Envelope, error: BaseException) -> None:
    """Ends the collective of `envelope` on all engines, for `error` ended it on the one with the number `failed`."""
    abort_reason = engines[failed].abort_reason_of(envelope)
    if abort_reason is None and isinstance(error, PeerLostError) and isinstance(error.peer, int):
        abort_reason = Lost(error.peer, error.reason, engines[failed].rank)
    for number, engine in enumerate(engines):
        if number == failed:
            continue
        if abort_reason is not None:
            engine.end(envelope, abort_reason)
        else:  # this process cannot go on, whatever the group: it was interrupted, aborted or closed
            engine.abort(str(error) or type(error).__name__)
