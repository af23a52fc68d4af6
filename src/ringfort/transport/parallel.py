"""Several engines of a process that share its collectives: what ends a collective on one ends it on all."""

from __future__ import annotations

from collections.abc import Sequence

from ringfort.errors import PeerLostError
from ringfort.transport.abort_reasons import Lost
from ringfort.transport.engine import Engine
from ringfort.transport.messages import Envelope


def end_all(engines: Sequence[Engine], failed: int, envelope: Envelope, error: BaseException) -> None:
    """End the collective of `envelope` on all engines, because `error` ended it on the one with the number `failed`."""
    abort_reason = engines[failed].abort_reason_of(envelope)
    if abort_reason is None and isinstance(error, PeerLostError) and isinstance(error.peer, int):
        abort_reason = Lost(error.peer, error.reason, engines[failed].rank)
    for number, engine in enumerate(engines):
        if number == failed:
            continue
        if abort_reason is not None:
            engine.end(envelope, abort_reason)
        else:  # this process cannot continue, whatever the group: it was interrupted, aborted or closed
            engine.abort(str(error) or type(error).__name__)
