"""`Report`: what one rank tells a viewer each second, in at most 2 KB; and `Reporter`, which makes them of a trace.

Steps that are too many for the room are thinned by their numbers, so that the steps of different ranks can still be
compared: of each 2, 4, 8... rows of `ROW` steps one is left, the same at every rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ringfort.errors import ProtocolError
from ringfort.telemetry.records import Count, Event, Header, Name, Seconds, Sent, Step, Time, Values
from ringfort.telemetry.trace_file import TraceReader

MAX_REPORT_BYTES: Final = 2000
"""Of one report, of which a rank sends one each second."""
MAX_EVENTS: Final = 8
"""Events in one report. Those that come faster are counted."""
MAX_NAMES: Final = 16
"""Names of values in one report."""
_KEPT: Final = 2048
"""Steps, and values, that wait for the next report."""
_MOST_STEPS: Final = 512
"""Steps in one report. Over the network there is room for about 30."""
_VALUES: Final = 0.4
"""The part of the room that values may take."""
_SPARSEST: Final = 1 << 20
ROW: Final = 16
"""Steps that follow each other and are sent, or not, together: a timeline without gaps shows more."""
LOCAL_BYTES: Final = 16_000
"""Of one report that does not leave this machine."""


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """All steps since the report before, added up."""

    steps: Count = 0
    seconds: Seconds = 0.0
    data: Seconds = 0.0
    exchange: Seconds = 0.0
    codec: Seconds = 0.0
    seal: Seconds = 0.0
    samples: Count = 0


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """One second of one rank."""

    header: Header
    now: Time
    """The rank's clock, when it was made."""
    host: Annotated[str, Meta(max_length=64)] = ""
    """Identifies the machine."""
    name: Annotated[str, Meta(max_length=64)] = ""
    """The machine's name."""
    is_alive: bool = True
    """Whether the process still runs."""
    step: Count = 0
    sums: Sums = Sums()
    steps: Annotated[tuple[Step, ...], Meta(max_length=_MOST_STEPS)] = ()
    """Some of the steps, oldest first."""
    every: Annotated[int, Meta(ge=1, le=1 << 40)] = 1
    """`steps` are those in rows whose number is a multiple of this."""
    values: Annotated[tuple[Values, ...], Meta(max_length=_MOST_STEPS)] = ()
    events: Annotated[tuple[Event, ...], Meta(max_length=MAX_EVENTS)] = ()
    dropped: Count = 0
    """Events that there was no room for."""
    sent: Annotated[dict[int, float], Meta(max_length=256)] = {}
    """Bytes per second, by the rank that they were sent to."""
    received: float = 0.0
    """Bytes per second."""
    vitals: Annotated[dict[Name, float], Meta(max_length=16)] = {}
    """The machine: cpu (0 to 1, of all cores), memory and memory_total, gpu (0 to 1), gpu_memory and
    gpu_memory_total (bytes), temperature (degrees Celsius), battery (0 to 1), plugged (0 or 1)."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(report: Report) -> bytes:
    """Return a report as bytes."""
    return _encoder.encode(report)


def decode(data: bytes) -> Report:
    """Return the report in `data`. Raises `ProtocolError` if it is malformed or too long."""
    if len(data) > MAX_REPORT_BYTES:
        raise ProtocolError(f"A report has at most {MAX_REPORT_BYTES} bytes, this one has {len(data)}")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"Malformed report: {exc}") from exc


class Reporter:
    """Makes the reports of one rank. `report` is called each second, while somebody looks."""

    def __init__(
        self,
        reader: TraceReader,
        host: str = "",
        name: str = "",
        clock: Callable[[], float] = time.time,
        limit: int = MAX_REPORT_BYTES,
    ) -> None:
        """`limit` is how many bytes a report may have."""
        self.reader = reader
        self._limit = limit
        self._host, self._name, self._clock = host, name, clock
        self._steps: deque[Step] = deque(maxlen=_KEPT)
        self._values: deque[Values] = deque(maxlen=_KEPT)
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._dropped = 0
        self._sums = Sums()
        self._sent: tuple[float, dict[int, int], int] | None = None
        self._rates: tuple[dict[int, float], float] = {}, 0.0

    def read(self) -> None:
        """Read what is new in the trace."""
        sent: dict[int, int] | None = None
        received, at = 0, 0.0
        for record in self.reader.new_records():
            match record:
                case Step():
                    self._steps.append(record)
                    self._sums = _add(self._sums, record)
                case Values():
                    self._values.append(record)
                case Event():
                    self._dropped += len(self._events) == MAX_EVENTS
                    self._events.append(record)
                case Sent():
                    if sent is None or record.at != at:
                        sent = {}
                    sent.update(record.sent)
                    received, at = record.received, record.at
        if sent is not None:
            self._rates = self._rate(at, sent, received)

    def _rate(self, at: float, sent: dict[int, int], received: int) -> tuple[dict[int, float], float]:
        before, self._sent = self._sent, (at, sent, received)
        if before is None or at <= before[0]:
            return {}, 0.0
        seconds = at - before[0]
        # Groups that follow each other start from nothing.
        rates = {rank: max(0, count - before[1].get(rank, 0)) / seconds for rank, count in sent.items()}
        return rates, max(0, received - before[2]) / seconds

    def report(self, vitals: Mapping[str, float] | None = None) -> Report:
        """Return the report of what happened since the one before. Raises `ProtocolError` if there is no header."""
        header = self.reader.header()
        self.read()
        report = Report(
            header,
            self._clock(),
            self._host[:64],
            self._name[:64],
            self.reader.is_alive(),
            self.reader.step,
            self._sums,
            events=tuple(self._events),
            dropped=self._dropped,
            sent=self._rates[0],
            received=self._rates[1],
            vitals=dict(vitals or {}),
        )
        steps, values = list(self._steps), list(self._values)
        self._steps.clear()
        self._values.clear()
        self._events.clear()
        self._dropped, self._sums = 0, Sums()
        return fitted(report, steps, values, self._limit)


def _add(sums: Sums, step: Step) -> Sums:
    return Sums(
        sums.steps + 1,
        sums.seconds + step.seconds,
        sums.data + step.data,
        sums.exchange + step.exchange,
        sums.codec + step.codec,
        sums.seal + step.seal,
        sums.samples + step.samples,
    )


def fitted(report: Report, steps: Sequence[Step], values: Sequence[Values], limit: int = MAX_REPORT_BYTES) -> Report:
    """Return a report with these steps and values instead of its own, as many as there is room for."""
    report = msgspec.structs.replace(report, steps=(), values=())
    room = limit - len(encode(report))
    sparse = 1
    while len(_encoder.encode(logged := _newest(values, sparse))) > room * _VALUES and sparse < _SPARSEST:
        sparse *= 2
    report = msgspec.structs.replace(report, values=tuple(logged))
    every, short = 1, [_short(step) for step in steps]
    while True:
        shown = [step for step in short if step.number // ROW % every == 0][-_MOST_STEPS:]
        found = msgspec.structs.replace(report, steps=tuple(shown), every=every)
        if len(encode(found)) <= limit:
            return found
        if every < _SPARSEST:
            every *= 2
        elif report.events:
            report = msgspec.structs.replace(report, events=report.events[1:], dropped=report.dropped + 1)
        else:  # a run of hundreds of ranks
            return msgspec.structs.replace(report, sent={}, vitals={})


def _short(step: Step) -> Step:
    """A step whose phases without time take one byte each, not nine."""
    phases = {name: 0 for name in ("data", "exchange", "codec", "seal") if getattr(step, name) == 0}
    return msgspec.structs.replace(step, **phases)


def _newest(values: Sequence[Values], every: int) -> list[Values]:
    """The values of some steps, and the newest of each name in any case."""
    last: dict[str, int] = {}
    for index, record in enumerate(values):
        for name in record.values:
            last[name] = index
    kept = set(sorted(last.values())[-MAX_NAMES:])
    return [r for index, r in enumerate(values) if index in kept or r.step % every == 0][-_MOST_STEPS:]
