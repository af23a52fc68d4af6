"""`Drawing`: what one stream of a rank would show in a terminal, so that progress bars come out right. Pure.

After a carriage return a program draws the current row again. Programs with several bars also move the cursor down with
a line feed and up again with an escape code. On a terminal that ranks share these codes are wrong, so `Drawing` follows
them and does not pass them on. It does pass on colours, and bytes that are not text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Final

from ringfort.launch.processes import MAX_LINE_BYTES

GRACE_SECONDS: Final = 0.25
"""How long the cursor may still return to a bar after a line feed. A program with several bars moves back at once, but
may write the two codes separately."""
MAX_LIVE_BYTES: Final = 4096
"""Per row that may still change: more than a terminal is wide."""
MAX_ROWS: Final = 64
"""Rows that the cursor may return to."""
_MAX_ESCAPE: Final = 32
"""Bytes of an incomplete escape code; a longer one is not an escape code."""

_TOKEN: Final = re.compile(rb"\r|\n|\x1b\[([0-?]*)[ -/]*([@-~])|\x1b|[^\r\n\x1b]+")
"""A control character, an escape code (its argument and its letter), or text."""
_INCOMPLETE: Final = re.compile(rb"\x1b(\[[0-?]*[ -/]*)?\Z")
_COLOUR: Final = re.compile(rb"\x1b\[[0-?]*m")


@dataclass
class Row:
    """One row, without its line end."""

    text: bytes | bytearray = field(default_factory=bytearray)
    is_bar: bool = False
    """Whether it was drawn more than once."""
    left_at: float = field(default=0.0, compare=False)
    """When the cursor left it."""

    @property
    def is_blank(self) -> bool:
        """Whether it shows nothing."""
        return not _COLOUR.sub(b"", self.text).strip()


class Drawing:
    """One stream of one rank."""

    def __init__(self) -> None:
        self._rows = [Row()]
        self._cursor = 0
        self._is_fresh = False
        """Whether the next text replaces the row."""
        self._rest = b""
        """The beginning of an incomplete escape code."""

    def feed(self, now: float, data: bytes) -> list[Row]:
        """The rows that `data` completes."""
        data = self._rest + data
        incomplete = _INCOMPLETE.search(data, max(0, len(data) - _MAX_ESCAPE))
        self._rest = b"" if incomplete is None else data[incomplete.start() :]
        data = data[: len(data) - len(self._rest)]
        found: list[Row] = []
        if self._is_plain and b"\r" not in data and b"\x1b" not in data:
            # Ordinary lines, perhaps very many: a fast path.
            *lines, data = data.split(b"\n")
            if lines:
                found = [Row(self._rows[0].text + lines[0]), *map(Row, lines[1:])]
                self._rows = [Row()]
        for token in _TOKEN.finditer(data):
            match token[0], token[2]:
                case b"\r", _:
                    self._is_fresh = True
                case b"\n", _:
                    self._line_feed(now)
                    found += self.finished(now)
                case text, None | b"m":  # colours are kept
                    self._write(text)
                case _, letter:
                    self._move(letter, token[1])
        row = self._rows[self._cursor]
        if len(row.text) > MAX_LINE_BYTES:
            found.append(replace(row))
            row.text = bytearray()
        return found

    @property
    def _is_plain(self) -> bool:
        return len(self._rows) == 1 and not self._is_fresh and not self._rows[0].is_bar

    def finished(self, now: float) -> list[Row]:
        """The rows that have become final by now."""
        found: list[Row] = []
        while self._cursor and self._is_final(now):
            self._cursor -= 1
            found.append(self._rows.pop(0))
        return [row for row in found if not (row.is_bar and row.is_blank)]

    def _is_final(self, now: float) -> bool:
        """Whether the cursor, which has left the first row, will not return to it."""
        left = self._rows[: self._cursor]
        # A program that writes text below a bar has finished the bar.
        return any(not row.is_bar for row in left) or now - left[0].left_at >= GRACE_SECONDS or len(left) > MAX_ROWS

    def live(self) -> list[Row]:
        """The rows that may still change and are not blank, from top to bottom."""
        return [replace(row, text=row.text[:MAX_LIVE_BYTES]) for row in self._rows if not row.is_blank]

    def end(self) -> list[Row]:
        """The rows that are left at the end of the stream."""
        if self._rest:
            self._write(self._rest)
        done, left = self._rows[: self._cursor], [row for row in self._rows[self._cursor :] if row.text]
        self._rows, self._cursor, self._is_fresh, self._rest = [Row()], 0, False, b""
        return [row for row in (*done, *left) if not (row.is_bar and row.is_blank)]

    def _write(self, text: bytes) -> None:
        row = self._rows[self._cursor]
        if self._is_fresh:
            row.text, row.is_bar, self._is_fresh = bytearray(), True, False
        row.text += text

    def _line_feed(self, now: float) -> None:
        self._rows[self._cursor].left_at = now
        self._cursor += 1
        # The next text replaces a row that exists already; after CR LF it does not.
        self._is_fresh = self._cursor < len(self._rows)
        if not self._is_fresh:
            self._rows.append(Row())

    def _move(self, letter: bytes, argument: bytes) -> None:
        number = int(argument) if argument.isdigit() else 0
        match letter:
            case b"A" | b"F" | b"B" | b"E":
                down = max(1, min(number, MAX_ROWS)) * (1 if letter in b"BE" else -1)
                self._cursor, self._is_fresh = min(max(0, self._cursor + down), len(self._rows) - 1), True
            case b"K" if number == 2 or self._is_fresh:
                self._rows[self._cursor].text = bytearray()
            case b"J":
                for row in self._rows[self._cursor + (0 if self._is_fresh else 1) :]:
                    row.text = bytearray()
            case _:
                pass
