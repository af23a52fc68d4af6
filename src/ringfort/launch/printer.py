"""What a launcher prints: the lines of its ranks, each with its rank in front, and the launcher's own messages.

In a terminal, rows that may still change, such as progress bars, are kept below all final lines and drawn again when
they change. Elsewhere a bar is written as a line from time to time, and when it is final.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple, TextIO

from ringfort.config import is_dumb_terminal, is_set
from ringfort.launch.drawing import Row
from ringfort.launch.failure_report import Failure, describe_exit

DRAW_SECONDS: Final = 0.1
"""Between two drawings of the rows that change: as often as tqdm draws."""
THIN_SECONDS: Final = 5.0
"""Between two lines of one bar where the output is not a terminal."""
_COLOURS: Final = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""The terminal's colours of the ranks, in turn. Red is for errors."""
_COLOUR: Final = re.compile(r"\x1b\[[0-?]*m")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f]")
"""Control characters that would move the cursor in a row; not escape, which begins colours."""


class Shown(NamedTuple):
    """Changes in one stream of a rank."""

    rank: int
    is_error: bool
    finished: list[Row]
    live: list[Row]
    """All rows that may still change."""


class Printer:
    """Writes to standard output and standard error; a rank's output goes to the same stream as in the rank."""

    def __init__(
        self, out: TextIO | None = None, err: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._streams = (out or sys.stdout, err or sys.stderr)
        terminals = [stream.isatty() for stream in self._streams]
        self._colours = tuple(is_terminal and not is_set("NO_COLOR") for is_terminal in terminals)
        self._is_live = tuple(is_terminal and not is_dumb_terminal() for is_terminal in terminals)
        self._live_stream = True if self._is_live[True] else False if self._is_live[False] else None
        """The stream on which rows are drawn: if both are terminals, they are the same terminal."""
        self._clock = clock
        self._width = 1
        self._live: dict[tuple[int, bool], list[Row]] = {}
        self._drawn: bytes = b""
        """The rows that are in the terminal now."""
        self._draw_at = 0.0
        self._thinned: dict[tuple[int, bool], tuple[float, list[Row]]] = {}
        """When bars were last written as lines, and the bars."""
        self.status = ""
        """A line about the run, below all other rows of the terminal; empty for none."""
        self.is_broken = False
        """The reader has gone (`ringfort run ... | head`)."""

    @property
    def has_terminal(self) -> bool:
        """Whether `status` is seen."""
        return self._live_stream is not None

    def set_world(self, world_size: int) -> None:
        """Set the width of ranks to that of the highest one."""
        self._width = len(str(world_size - 1))

    def show(self, changes: Iterable[Shown]) -> None:
        """Print final rows, and draw the others. To be called from time to time also without changes."""
        now = self._clock()
        final: list[tuple[bool, bytes]] = []
        for rank, is_error, finished, live in changes:
            key = rank, is_error
            _, before = self._thinned.get(key, (now, []))
            final.append((is_error, self._lines(key, [row for row in finished if not row.is_bar or row not in before])))
            self._live[key] = live
        final += [(key[1], self._thin(now, key)) for key in self._live if not self._is_live[key[1]]]
        self._print([(is_error, data) for is_error, data in final if data], now)

    def say(self, text: str) -> None:
        """Print a message of the launcher to standard error."""
        self._print([(True, f"ringfort run: {text}\n".encode())], self._clock())

    def finish(self) -> None:
        """Erase the rows that may still change."""
        self._live.clear()
        self.status = ""
        self._print([], self._clock(), is_due=True)

    def _thin(self, now: float, key: tuple[int, bool]) -> bytes:
        """The bars of a stream as lines, if it is time for the next ones."""
        bars = [row for row in self._live[key] if row.is_bar]
        if not bars:
            self._thinned.pop(key, None)
            return b""
        at, before = self._thinned.setdefault(key, (now, []))
        if now - at < THIN_SECONDS:
            return b""
        self._thinned[key] = now, bars
        return self._lines(key, [row for row in bars if row not in before])

    def _lines(self, key: tuple[int, bool], rows: Iterable[Row]) -> bytes:
        prefix = self._prefix(*key)
        return b"".join(prefix + row.text + b"\n" for row in rows)

    # --- drawing ----------------------------------------------------------------------------------------------------

    def _print(self, final: list[tuple[bool, bytes]], now: float, *, is_due: bool = False) -> None:
        """Write what is final, in a terminal above the rows that change; draw those again if that is due."""
        live = self._live_stream
        rows = self._drawn
        if live is not None and (final or is_due or now >= self._draw_at):
            rows = self._rows(live)
        disturbs = rows != self._drawn or any(self._is_live[is_error] for is_error, _ in final)
        pieces = final
        if live is not None and disturbs:
            pieces = [(live, _erase(self._drawn, self._size(live)[0])), *final, (live, rows)]
        # One write for all that goes to the same stream, so that nothing flickers.
        for is_error, group in groupby(pieces, key=itemgetter(0)):
            self._write(is_error, b"".join(data for _, data in group))
        if disturbs:
            self._drawn, self._draw_at = rows, now + DRAW_SECONDS

    def _rows(self, live: bool) -> bytes:
        """All rows that change, cut to the size of the terminal."""
        shown = [(key, row) for key in sorted(self._live) if self._is_live[key[1]] for row in self._live[key]]
        if not (shown or self.status):
            return b""
        columns, lines = self._size(live)
        room = lines - 1 - bool(self.status)
        more = len(shown) - room
        if more > 0:
            shown = shown[: max(1, room - 1)]
        text = [self._prefix(*key) + _fit(row.text, columns - self._width - 4) for key, row in shown]
        if more > 0:
            text.append(f"... and {more + 1} more".encode())
        if self.status:
            text.append(_fit(self.status.encode(), columns - 1))
        return b"\n".join(text)

    def _size(self, live: bool) -> tuple[int, int]:
        """Columns and lines of the terminal, which may change at any time."""
        from rich.console import Console

        columns, lines = Console(file=self._streams[live]).size
        return columns, lines

    def _prefix(self, rank: int, is_error: bool) -> bytes:
        text = f"[{rank:>{self._width}}]"
        if self._colours[is_error]:
            text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
        return f"{text} ".encode()

    def _write(self, is_error: bool, data: bytes) -> None:
        stream = self._streams[is_error]
        try:
            stream.flush()
            stream.buffer.write(data)
            stream.flush()
        except BrokenPipeError:
            self.is_broken = True
            # Nothing must fail a second time when the interpreter exits.
            with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
                os.dup2(nowhere.fileno(), stream.fileno())


def _erase(drawn: bytes, columns: int) -> bytes:
    """Go up to the first row that was drawn, and erase all below. Terminals that were made narrower since then have
    wrapped the rows."""
    if not drawn:
        return b""
    from rich.cells import cell_len

    widths = [cell_len(_COLOUR.sub("", row)) for row in drawn.decode(errors="replace").split("\n")]
    rows = sum(max(1, -(-width // max(1, columns))) for width in widths)
    return b"\r" + b"\x1b[A" * (rows - 1) + b"\x1b[J"


def _fit(text: bytes | bytearray, room: int) -> bytes:
    """Cut a row to `room` columns. Colours are kept if nothing is cut."""
    from rich.cells import cell_len, set_cell_size

    words = _CONTROL.sub(" ", text.decode(errors="replace"))
    plain = _COLOUR.sub("", words).replace("\x1b", " ")
    if cell_len(plain) > room:
        return set_cell_size(plain, max(0, room)).encode()
    return (words + "\x1b[0m" if words != plain else plain).encode()


def summary(failure: Failure, here: str, stopped: int | None, then: str = "") -> str:
    """Report which rank failed first, on which machine, and its last lines.

    `stopped` is the number of ranks of this machine that were stopped because of it, `then` says what follows.
    """
    if failure.rank is None:
        text = failure.why
    else:
        where = "" if failure.host == here else f" on {failure.host}"
        what = "lost another" if failure.is_victim else "failed first"
        text = f"rank {failure.rank}{where} {what}: it {describe_exit(failure.exit_code)}"
    if stopped:
        text += f"; stopped {stopped} {'other' if failure.rank is not None else 'rank'}{'s'[: stopped > 1]} here"
    if then:
        text += f"; {then}"
    if failure.tail:
        text += "\nits last lines:" + "".join(f"\n    {line}" for line in failure.tail)
    return text
