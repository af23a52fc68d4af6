"""What a launcher prints: the lines of its ranks, each with its rank in front, and the launcher's own words."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import BinaryIO, Final, TextIO

from ringfort.children import Output
from ringfort.config import is_set
from ringfort.launch.blame import Failure
from ringfort.local import describe_exit

_COLOURS: Final = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""Of the terminal, one a rank in turn. Red is for errors."""


class Printer:
    """Writes to standard output and standard error. A rank's output goes where the rank wrote it."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._streams = (out or sys.stdout, err or sys.stderr)
        self._colours = tuple(stream.isatty() and not is_set("NO_COLOR") for stream in self._streams)
        self._width = 1
        self.is_broken = False
        """Nobody reads any more (`ringfort run ... | head`)."""

    def set_world(self, world_size: int) -> None:
        """From now on ranks are as wide as the widest."""
        self._width = len(str(world_size - 1))

    def lines(self, outputs: Iterable[Output]) -> None:
        """Print what ranks wrote. Of a line that was drawn over itself, as progress bars are, the last drawing."""
        for child, is_error, lines in outputs:
            prefix = self._prefix(child.number, is_error)
            self._write(is_error, b"".join(prefix + _last_drawing(line) + b"\n" for line in lines))

    def say(self, words: str) -> None:
        """The launcher's own words, on standard error."""
        self._write(True, f"{words}\n".encode())

    def _prefix(self, rank: int, is_error: bool) -> bytes:
        text = f"[{rank:>{self._width}}]"
        if self._colours[is_error]:
            text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
        return f"{text} ".encode()

    def _write(self, is_error: bool, data: bytes) -> None:
        stream = self._streams[is_error]
        try:
            stream.flush()
            binary: BinaryIO | None = getattr(stream, "buffer", None)
            if binary is None:
                stream.write(data.decode(errors="replace"))
            else:
                binary.write(data)
            stream.flush()
        except BrokenPipeError:
            self.is_broken = True
            # So that nothing fails a second time, at the interpreter's end.
            with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
                os.dup2(nowhere.fileno(), stream.fileno())


def _last_drawing(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def summary(failure: Failure, here: str, stopped: int, then: str = "") -> str:
    """Who failed first, on which machine, and its last lines. `stopped` ranks of this machine were ended for it. `then`
    says what follows."""
    if failure.rank is None:
        text = f"ringfort run: {failure.why}"
    else:
        where = "" if failure.host == here else f" on {failure.host}"
        what = "lost another" if failure.is_victim else "failed first"
        text = f"ringfort run: rank {failure.rank}{where} {what}: it {describe_exit(failure.exit_code)}"
    if stopped:
        text += f"; stopped {stopped} {'other' if failure.rank is not None else 'rank'}{'s'[: stopped > 1]} here"
    if then:
        text += f"; {then}"
    if failure.tail:
        text += "\nits last lines:" + "".join(f"\n    {line}" for line in failure.tail)
    return text
