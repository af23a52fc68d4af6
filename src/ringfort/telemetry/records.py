"""What a rank writes down while it trains: steps, values, events, and how much it sent. Pure.

Times are seconds; `at` is the writer's clock (`time.time()`), which differs from those of other machines.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ringfort.errors import ProtocolError

MAX_TEXT: Final = 120
"""Characters of an event's text."""
MAX_NAME: Final = 32
"""Characters of a value's name."""
MAX_VALUES: Final = 4
"""Values in one record."""
MAX_RECORD_BYTES: Final = 246
"""Of one encoded record. Texts that need more are cut."""

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Time = Annotated[float, Meta(ge=0, le=1e11)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class of what is written down."""


class Step(Record, frozen=True, tag=1):
    """One step of training. Computing is what is left of `seconds` after `data`, `exchange`, `codec` and `seal`."""

    number: Count
    at: Time
    """When it ended."""
    seconds: Seconds
    data: Seconds = 0.0
    """Waiting for the data loader."""
    exchange: Seconds = 0.0
    """Waiting in collectives: for slower ranks, and for the wire."""
    codec: Seconds = 0.0
    """Compressing and decompressing gradients."""
    seal: Seconds = 0.0
    """Agreeing that the step counts, in elastic training."""
    samples: Count = 0
    """Samples that this rank took part with; 0 if the program does not say."""

    @property
    def compute(self) -> float:
        """Seconds of computing."""
        return max(0.0, self.seconds - self.data - self.exchange - self.codec - self.seal)


class Values(Record, frozen=True, tag=2):
    """What the program wants to be seen (`ringfort.log`)."""

    step: Count
    at: Time
    values: Annotated[dict[Name, float], Meta(max_length=MAX_VALUES)]


class Event(Record, frozen=True, tag=3):
    """Something that happened."""

    at: Time
    kind: Annotated[str, Meta(max_length=MAX_NAME)]
    """joined, left, lost, epoch, leader, learner, compression, connections, refused, checkpoint, paused, or another."""
    text: Annotated[str, Meta(max_length=MAX_TEXT)]
    """A sentence for people."""
    step: Count = 0


class Sent(Record, frozen=True, tag=4):
    """Bytes that this rank has exchanged with others since it started."""

    at: Time
    sent: Annotated[dict[int, Count], Meta(max_length=256)]
    """By rank."""
    received: Count = 0


AnyRecord = Step | Values | Event | Sent


class Header(msgspec.Struct, frozen=True):
    """Who writes, at the moment."""

    pid: int
    started: Time
    """When the process opened its trace."""
    rank: Annotated[int, Meta(ge=-1, lt=65536)] = -1
    """-1 before it has one."""
    world_size: Annotated[int, Meta(ge=0, lt=65537)] = 0
    epoch: Count = 0
    program: Annotated[str, Meta(max_length=64)] = ""
    run: Annotated[str, Meta(max_length=64)] = ""
    role: Annotated[str, Meta(max_length=16)] = ""
    """member, learner, or empty."""
    total_steps: Count = 0
    """The last step of the program, if it is known."""
    codec: Annotated[str, Meta(max_length=32)] = ""
    """The compression of its gradients, if there is one."""
    gradient_bytes: Count = 0
    """Bytes of the gradients of a step before compression, if known."""
    codec_seconds: Annotated[dict[Name, Seconds], Meta(max_length=8)] = {}
    """By codec: the seconds that this rank would need for `gradient_bytes`, if it has measured that."""
    is_finished: bool = False
    """Whether the process has ended as programs should. Without it, one that has ended was killed or has failed."""

    @property
    def run_name(self) -> str:
        """What its run is called in views."""
        return self.run or self.program or "training"


_records: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)
_headers: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)
_encoder = msgspec.msgpack.Encoder()


def encode(record: AnyRecord | Header) -> bytes:
    """Return a record as bytes."""
    return _encoder.encode(record)


def decode(data: bytes) -> AnyRecord:
    """Return the record in `data`. Raises `ProtocolError` if it is malformed."""
    try:
        return _records.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"Malformed record of telemetry: {exc}") from exc


def decode_header(data: bytes) -> Header:
    """Return the header in `data`. Raises `ProtocolError` if it is malformed."""
    try:
        return _headers.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"Malformed header of telemetry: {exc}") from exc
