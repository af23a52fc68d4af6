"""The file of a recording: `Recorder` appends frames to it, `RecordingReader` reads them anywhere.

    ringfort recording 1\\n
    length, flags, time, frame      again and again; the frame is msgpack (`known.AnyFrame`)
    ...
    length, flags, time, Over       if the viewer came to its end

A file without its end can be read up to there.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from ringfort.config import GIB
from ringfort.dashboard.known import AnyFrame, Over, Reported
from ringfort.errors import InvalidArgumentError
from ringfort.telemetry.report import fitted

LIMIT: Final = 4 * GIB
"""Bytes of a recording: a day of 32 ranks with 1.5 KB a second each. A report has at most 2 KB, and usually 0.6."""
_NAME: Final = b"ringfort recording "
_MAGIC: Final = _NAME + b"1\n"
_HEAD: Final = Struct("<IBd")
_MAX_FRAME: Final = 1 << 20
"""Bytes. A longer one is damage: a report has 2 KB, the links of 256 machines fewer than this."""
_NEEDED: Final = 1
"""The flag of a frame that may not be skipped: all but the usual reports."""
_MAX_BLOCK: Final = 1 << 20
"""Bytes of a block, up to its last frame: this much of a recording is in memory."""
_MAX_TIME: Final = 1e11
"""Seconds since 1970; a later time is damage."""
_READ: Final = 1 << 20
"""Bytes that are read at once when the blocks are looked for."""

_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)

_OVER: Final = msgspec.msgpack.encode(Over())


class Recorder:
    """Appends to a new file. It never raises after it was opened: it stops and says why."""

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        """Create the file. Raises `InvalidArgumentError` if it exists or cannot be created."""
        self.notice = ""
        """Why the recording has stopped; empty while it goes on."""
        self._limit = limit
        self._written, self._latest = len(_MAGIC), 0.0
        try:
            self._file = path.open("xb")
        except FileExistsError:
            raise InvalidArgumentError("record", str(path), "exists already; choose another name") from None
        except OSError as exc:
            raise InvalidArgumentError("record", str(path), f"cannot be created: {exc.strerror}") from exc
        self._file.write(_MAGIC)

    def write(self, frame: AnyFrame, at: float) -> None:
        """Append a frame. Times never go back, even if the clock was set."""
        if self.notice:
            return
        self._latest = max(self._latest, at)
        if isinstance(frame, Reported):  # those of this machine have more than there is room for in a day
            frame = Reported(fitted(frame.report, frame.report.steps, frame.report.values))
        data = _framed(frame, self._latest)
        if self._written + len(data) > self._limit:
            self._put(_framed(Over(), self._latest))
            self._stop(f"The recording has reached its limit of {self._limit / GIB:g} GiB and has stopped.")
            return
        self._put(data)

    def flush(self) -> None:
        """Have what was written in the file."""
        self._put(b"", flush=True)

    def close(self) -> None:
        """Write the end and close the file. Idempotent."""
        if not self.notice:
            self._put(_framed(Over(), self._latest))
            self._stop("The recording has ended.")

    def _put(self, data: bytes, *, flush: bool = False) -> None:
        if self.notice:
            return
        try:
            self._file.write(data)
            self._written += len(data)
            if flush:
                self._file.flush()
        except OSError as exc:
            self._stop(f"The recording has stopped: {exc.strerror}.")

    def _stop(self, why: str) -> None:
        self.notice = why
        try:
            self._file.close()
        except OSError as exc:
            self.notice = f"The recording has stopped: {exc.strerror}."


def _framed(frame: AnyFrame, at: float) -> bytes:
    body = msgspec.msgpack.encode(frame)
    is_usual = isinstance(frame, Reported) and frame.report.is_alive and not frame.report.events
    return _HEAD.pack(len(body), 0 if is_usual else _NEEDED, at) + body


class Block(NamedTuple):
    """The frames of one second; of one with very many, a part."""

    at: float
    """When it begins."""
    offset: int
    size: int
    held: int
    """Its frames."""
    is_needed: bool
    """Some of them may not be skipped."""


class RecordingReader:
    """Reads a recording. It keeps the places of the blocks in memory, not what is there: 29 bytes for each second."""

    def __init__(self, path: Path) -> None:
        """Open the file and find its blocks. Raises `InvalidArgumentError` if it is not a recording or cannot be
        read."""
        self.notice = ""
        """What is wrong with it; empty if it is complete."""
        self.start = self.end = 0.0
        """The times of the first and the last frame."""
        self._at, self._offsets, self._counts = array("d"), array("Q"), array("I")
        self._needed = bytearray()
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise InvalidArgumentError("recording", str(path), f"cannot be read: {exc.strerror}") from exc
        try:
            self._check(os.pread(self._file, len(_MAGIC), 0), path)
            self._scan(os.fstat(self._file).st_size)
        except OSError as exc:  # a folder, for example
            self.close()
            raise InvalidArgumentError("recording", str(path), f"cannot be read: {exc.strerror}") from exc
        except BaseException:
            self.close()
            raise

    def _check(self, head: bytes, path: Path) -> None:
        if head == _MAGIC:
            return
        if head.startswith(_NAME):
            raise InvalidArgumentError("recording", str(path), "was made by another version of Ringfort")
        raise InvalidArgumentError("recording", str(path), "is not a recording of `ringfort top` or `ringfort dash`")

    def _scan(self, size: int) -> None:
        offset = end = len(_MAGIC)
        for offset, length, flags, at in self._heads(end, size):
            if not self._at:
                self.start = at
            if not self._at or int(at) != int(self._at[-1]) or offset - self._offsets[-1] > _MAX_BLOCK:
                self._at.append(at)
                self._offsets.append(offset)
                self._counts.append(0)
                self._needed.append(0)
            self.end, end = at, offset + _HEAD.size + length
            self._counts[-1] += 1
            self._needed[-1] |= flags & _NEEDED
        self._offsets.append(end)
        if end != size or os.pread(self._file, size, offset + _HEAD.size) != _OVER:
            self.notice = "The recording was cut off or is damaged: it ends here."

    def _heads(self, offset: int, size: int) -> Iterator[tuple[int, int, int, float]]:
        """Yield offset, length, flags and time of every frame that is complete, and stop at damage."""
        part, begin, latest = b"", offset, 0.0
        while offset + _HEAD.size <= size:
            if offset + _HEAD.size > begin + len(part):
                part, begin = os.pread(self._file, _READ, offset), offset
                if len(part) < _HEAD.size:
                    return
            length, flags, at = _HEAD.unpack_from(part, offset - begin)
            if length > _MAX_FRAME or offset + _HEAD.size + length > size or not latest <= at < _MAX_TIME:
                return
            yield offset, length, flags, at
            latest, offset = at, offset + _HEAD.size + length

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self._at)

    def block(self, number: int) -> Block:
        """Return where a block is."""
        offset = self._offsets[number]
        size = self._offsets[number + 1] - offset
        return Block(self._at[number], offset, size, self._counts[number], bool(self._needed[number]))

    def block_at(self, at: float) -> int:
        """Return the number of the first block that begins at or after the time `at`."""
        return bisect_left(self._at, at)

    def frames(self, block: Block) -> Iterator[tuple[float, AnyFrame]]:
        """Yield the frames of a block, each with its time. Malformed ones are left out."""
        data, offset = os.pread(self._file, block.size, block.offset), 0
        while offset + _HEAD.size <= len(data):
            length, _, at = _HEAD.unpack_from(data, offset)
            offset += _HEAD.size + length
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                yield at, _decoder.decode(data[offset - length : offset])

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
