"""The trace of one process: its latest records, in a ring in a memory-mapped file.

Writing is a copy into mapped memory: no system call, no thread, no lock that a reader could hold. Readers are other
processes (a launcher, a control process, a viewer on this machine), and they read only while somebody looks. What a
process wrote before it was killed can still be read. The writer holds a lock on the file (`flock`), so that a reader
knows whether it lives.

    header: magic, number of slots, length of the header's text, latest step, the text (`records.Header`)
    slot:   number of the record from 1, its length, the record

A reader may meet a slot that is just being written: the number of a slot is set to 0 before and to the record's number
after it is written, and a record that cannot be decoded is skipped.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Final

from ringfort.errors import ProtocolError
from ringfort.telemetry import records
from ringfort.telemetry.records import MAX_RECORD_BYTES, AnyRecord, Header

MAGIC: Final = b"ringfort trace 1"
SLOTS: Final = 2048
"""Records that are kept: with those of 256 bytes, half a MiB."""
SUFFIX: Final = ".trace"

_HEADER_BYTES: Final = 1024
_START: Final = Struct("<16sII")
_STEP: Final = Struct("<Q")
_TEXT: Final = _START.size + _STEP.size
"""Where the text of the header begins."""
_SLOT: Final = Struct("<QH")
_NUMBER: Final = Struct("<Q")
_SLOT_BYTES: Final = 256
_SIZE: Final = _HEADER_BYTES + SLOTS * _SLOT_BYTES

assert _SLOT.size + MAX_RECORD_BYTES == _SLOT_BYTES


class TraceWriter:
    """Writes the trace of this process. For one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Create the file. Raises `OSError`."""
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Allocated, not only extended: on a full disk a write to mapped memory would kill the process (SIGBUS).
            _allocate(self._file, _SIZE)
            self._memory = mmap.mmap(self._file, _SIZE)
        except BaseException:
            os.close(self._file)
            path.unlink(missing_ok=True)
            raise
        self._written = 0

    def describe(self, header: Header) -> None:
        """Write who this process is now."""
        text = records.encode(header)
        if len(text) > _HEADER_BYTES - _TEXT:
            return
        memory = self._memory
        _START.pack_into(memory, 0, MAGIC, SLOTS, 0)
        memory[_TEXT : _TEXT + len(text)] = text
        _START.pack_into(memory, 0, MAGIC, SLOTS, len(text))

    def write(self, record: AnyRecord) -> None:
        """Write a record over the oldest one. A record that is too long is left out."""
        text = records.encode(record)
        if len(text) > MAX_RECORD_BYTES:
            return
        memory, number = self._memory, self._written + 1
        start = _HEADER_BYTES + self._written % SLOTS * _SLOT_BYTES
        _SLOT.pack_into(memory, start, 0, len(text))
        memory[start + _SLOT.size : start + _SLOT.size + len(text)] = text
        _NUMBER.pack_into(memory, start, number)
        self._written = number

    def set_step(self, number: int) -> None:
        """Write the latest step, which a launcher reads without reading the records."""
        _STEP.pack_into(self._memory, _START.size, number)

    def close(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        self.abandon()

    def abandon(self) -> None:
        """Close this process's copy of the file, in a forked child."""
        self._memory.close()
        os.close(self._file)


class TraceReader:
    """Reads the trace of another process, or of one that has ended."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises `OSError` if it cannot be read, `ProtocolError` if it is not a trace."""
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(self._file).st_size < _SIZE:
                raise ProtocolError(f"{path} is not a trace, or has not been written yet")
            self._memory = mmap.mmap(self._file, _SIZE, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self._file)
            raise
        self._read = 0
        self.lost = 0
        """Records that were overwritten before they were read."""

    def header(self) -> Header:
        """Return who writes. Raises `ProtocolError` if the header is malformed or not there yet."""
        magic, slots, length = _START.unpack_from(self._memory, 0)
        if magic != MAGIC or slots != SLOTS or not 0 < length <= _HEADER_BYTES - _TEXT:
            raise ProtocolError(f"{self.path} has no header of a trace, or not yet")
        return records.decode_header(self._memory[_TEXT : _TEXT + length])

    @property
    def step(self) -> int:
        """The latest step."""
        return _STEP.unpack_from(self._memory, _START.size)[0]

    def is_alive(self) -> bool:
        """Whether the process that writes still runs."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return False

    def new_records(self) -> Iterator[AnyRecord]:
        """Yield the records that were written since the last call, oldest first. Malformed ones are skipped."""
        newest = self._newest()
        first = max(self._read + 1, newest - SLOTS + 1)
        self.lost += first - self._read - 1
        for number in range(first, newest + 1):
            record = self._record(number)
            if record is not None:
                yield record
        self._read = newest

    def _newest(self) -> int:
        """The number of the newest record: after it follows a slot with an older one, or one that is being written."""
        newest = self._read
        while self._number(newest + 1) >= newest + 1:
            following = self._number(newest + 1)
            newest = following  # more than one round may have passed
        return newest

    def _number(self, number: int) -> int:
        start = _HEADER_BYTES + (number - 1) % SLOTS * _SLOT_BYTES
        return _NUMBER.unpack_from(self._memory, start)[0]

    def _record(self, number: int) -> AnyRecord | None:
        start = _HEADER_BYTES + (number - 1) % SLOTS * _SLOT_BYTES
        found, length = _SLOT.unpack_from(self._memory, start)
        if found != number or length > MAX_RECORD_BYTES:
            return None
        text = self._memory[start + _SLOT.size : start + _SLOT.size + length]
        if self._number(number) != number:
            return None  # overwritten meanwhile
        try:
            return records.decode(text)
        except ProtocolError:
            return None

    def close(self) -> None:
        """Close the file."""
        self._memory.close()
        os.close(self._file)


def _allocate(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:  # macOS
        os.pwrite(file, bytes(size), 0)
