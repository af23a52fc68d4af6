"""What a viewer asks of the peers of its cluster, and what they answer, in notes on the control links. Pure.

    viewer                                  control service of a peer
    ringfort.watch           ->             every `RENEW_EVERY` seconds, while the viewer looks
                             <-             ringfort.report: one for each rank, each second
    ringfort.logs            ->             `LogRequest`, each second, while the viewer shows the output of a rank
                             <-             ringfort.log: `LogPart`, if there is something new

Nothing is sent without a watch of the last `LEASE` seconds.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ringfort.errors import ProtocolError

WATCH: Final = "ringfort.watch"
REPORT: Final = "ringfort.report"
LOGS: Final = "ringfort.logs"
LOG: Final = "ringfort.log"

LEASE: Final = 6.0
"""Seconds for which a watch counts: two that are lost do not matter."""
RENEW_EVERY: Final = 2.0
"""Seconds between two watches of one viewer."""
REPORT_EVERY: Final = 1.0
"""Seconds between two reports of one rank."""
MAX_WATCHERS: Final = 8
"""Viewers that a peer answers. Each costs up to 2 KB a second for each of its ranks, and as much for each rank whose
output it shows."""
MAX_REPORTS: Final = 13
"""Reports that a peer sends to one viewer in a second; more ranks take turns. A control link is closed for more than
20 notes a second (`GOSSIP_RATE`)."""
MAX_LOGS: Final = 4
"""Ranks whose output a peer sends to one viewer in a second."""
MAX_PART: Final = 1900
"""Bytes of output in one note."""

Position = Annotated[int, Meta(ge=0, lt=1 << 62)]


class LogRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks for output of a rank beyond the part from `start` to `end` of a file, which the viewer has."""

    rank: Annotated[int, Meta(ge=0, lt=65536)]
    file: Position = 0
    """Which file: output is kept in two in turn. 0 if the viewer has nothing yet."""
    start: Position = 0
    end: Position = 0


class LogPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of the output of a rank."""

    rank: Annotated[int, Meta(ge=0, lt=65536)]
    file: Position
    start: Position
    """Where in the file the part begins."""
    data: Annotated[bytes, Meta(max_length=MAX_PART)]

    @property
    def end(self) -> int:
        """Where in the file it ends."""
        return self.start + len(self.data)


_requests: msgspec.msgpack.Decoder[LogRequest] = msgspec.msgpack.Decoder(LogRequest)
_parts: msgspec.msgpack.Decoder[LogPart] = msgspec.msgpack.Decoder(LogPart)


def encode(message: LogRequest | LogPart) -> bytes:
    """Return the body of a note."""
    return msgspec.msgpack.encode(message)


def decode_request(body: bytes) -> LogRequest:
    """Return the request in a note. Raises `ProtocolError` if it is malformed."""
    try:
        return _requests.decode(body)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise ProtocolError(f"Malformed request for output: {exc}") from exc


def decode_part(body: bytes) -> LogPart:
    """Return the output in a note. Raises `ProtocolError` if it is malformed."""
    try:
        return _parts.decode(body)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise ProtocolError(f"Malformed output: {exc}") from exc


class Watchers:
    """The viewers that look at this peer."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        """When the lease of each ends, by peer."""
        self._logged: dict[tuple[str, int], float] = {}
        """When each was last sent output of each rank, in the last second."""

    def renew(self, peer: str, now: float) -> bool:
        """Take a watch of `peer`. Return False if there are too many viewers."""
        watching = self.current(now)
        if peer not in watching and len(watching) >= MAX_WATCHERS:
            return False
        self._until[peer] = now + LEASE
        return True

    def current(self, now: float) -> list[str]:
        """Return the peers that look now."""
        self._until = {peer: until for peer, until in self._until.items() if until > now}
        return list(self._until)

    def may_log(self, peer: str, rank: int, now: float) -> bool:
        """Return whether `peer` may be sent output of a rank now: only a viewer, and once a second for each rank."""
        # A little less than a second: the clocks of both sides tick on their own.
        self._logged = {key: at for key, at in self._logged.items() if 0 <= now - at < 0.9 * REPORT_EVERY}
        is_viewer, ranks = peer in self.current(now), [rank for other, rank in self._logged if other == peer]
        return is_viewer and rank not in ranks and len(ranks) < MAX_LOGS

    def logged(self, peer: str, rank: int, now: float) -> None:
        """Count output of a rank that was sent to `peer`."""
        self._logged[peer, rank] = now
