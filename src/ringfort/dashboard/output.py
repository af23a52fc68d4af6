"""`RankOutput`: the last output of one rank, put together from the parts that arrive. Pure."""

from __future__ import annotations

import re
from typing import Final

from ringfort.telemetry.watching import LogPart, LogRequest

MAX_BYTES: Final = 64 * 1024
"""Bytes of output that are kept of a rank."""
MAX_LINES: Final = 500
"""Lines that are shown of a rank."""
_GAP: Final = b"\n[some output was not sent]\n"
_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
"""Sequences that control a terminal: those of colours and cursors, of titles, and short ones."""


class RankOutput:
    """Knows a part of the output, from some point on."""

    def __init__(self) -> None:
        self._file = self._start = 0
        self._data = b""
        self._before = b""
        """What came before, in a file or part that does not grow any more."""

    def request(self, rank: int) -> LogRequest:
        """Return a request for what is missing."""
        is_enough = bool(self._before) or len(self._data) >= MAX_BYTES
        return LogRequest(rank, self._file, 0 if is_enough else self._start, self._start + len(self._data))

    def add(self, part: LogPart) -> None:
        """Take a part that was requested."""
        end = self._start + len(self._data)
        if part.file != self._file:
            is_next = part.start == 0
            self._begin(part, b"" if is_next else _GAP)
        elif part.start > end:
            self._begin(part, _GAP)
        elif part.end > end:
            self._data += part.data[end - part.start :]
        elif part.start < self._start <= part.end and not self._before:
            self._data = part.data[: self._start - part.start] + self._data
            self._start = part.start
        elif part.end < self._start or not self._has(part):
            self._begin(part, _GAP)  # another file with the same number
        over = max(0, len(self._data) - MAX_BYTES)
        self._data, self._start = self._data[over:], self._start + over
        self._before = self._before[-(MAX_BYTES - len(self._data)) :] if len(self._data) < MAX_BYTES else b""

    def _has(self, part: LogPart) -> bool:
        place = part.start - self._start
        return place < 0 or self._data[place : place + len(part.data)] == part.data

    def _begin(self, part: LogPart, gap: bytes) -> None:
        self._before = self._before + self._data + gap if self._data else self._before
        self._file, self._start, self._data = part.file, part.start, part.data

    def lines(self) -> list[str]:
        """Return the last lines, without control characters."""
        text = (self._before + self._data).decode(errors="replace")
        if text.endswith("\n"):
            text = text[:-1]
        return [_printable(line) for line in text.split("\n")[-MAX_LINES:]] if text else []


def _printable(line: str) -> str:
    """A line as a terminal shows it in the end: a progress bar is written again and again over itself."""
    line = _ESCAPES.sub("", line.rstrip("\r")).expandtabs()
    line = next((part for part in reversed(line.split("\r")) if part), "")
    return "".join(character if character.isprintable() else "?" for character in line)
