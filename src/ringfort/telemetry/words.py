"""Texts and figures for people, as the command line, `ringfort top` and the status line of a run show them. Pure."""

from __future__ import annotations

import math
import re
import time
from typing import Final

_ESCAPE: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]")
"""What a program writes to a terminal to change colours, to move the cursor, or to set a title."""
_TAB: Final = 4


def clean(text: str) -> str:
    """Replace control characters: the name of another machine may contain anything."""
    return "".join(character if character.isprintable() else "?" for character in text)


def clean_output(line: str) -> str:
    """Return a line of a program's output as a terminal would leave it: without colours, the last state of a progress
    bar, and no control characters."""
    line = _ESCAPE.sub("", line.rstrip("\r\n"))
    return clean(line.rpartition("\r")[2].expandtabs(_TAB))


def round_trip(seconds: float | None) -> str:
    """A time in milliseconds, with three digits."""
    return "" if seconds is None else f"{seconds * 1000:.3g} ms"


def bandwidth(bytes_per_second: float | None, limits: tuple[float, float] | None = None) -> str:
    """A bandwidth in bits per second; a range if measurements differ by more than a quarter."""
    if bytes_per_second is None:
        return ""
    if limits is not None and limits[1] > limits[0] * 1.25:
        unit, name = _unit(limits[1])
        return f"{two_digits(limits[0] * 8 / unit)}-{two_digits(limits[1] * 8 / unit)} {name}"
    unit, name = _unit(bytes_per_second)
    return f"{bytes_per_second * 8 / unit:.3g} {name}"


def used_bandwidth(used: float, measured: float | None) -> str:
    """Bytes per second that are sent, and how many can be, in bits: `71 of 84 Mbit/s`."""
    if measured is None:
        return bandwidth(used)
    unit, name = _unit(max(used, measured))
    return f"{two_digits(used * 8 / unit)} of {two_digits(measured * 8 / unit)} {name}"


def _unit(bytes_per_second: float) -> tuple[float, str]:
    return (1e9, "Gbit/s") if bytes_per_second * 8 >= 1e9 else (1e6, "Mbit/s")


def two_digits(value: float) -> str:
    """A number such as 0.94, 4.2, 42 or 420."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"


def uptime(seconds: float | None) -> str:
    """A time in the largest unit of which there are at least two."""
    if seconds is None:
        return ""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def step_time(seconds: float) -> str:
    """The time of a step or of a part of it: `0.8 ms`, `412 ms`, `1.31 s`, `75 s`."""
    if seconds < 0.9995:
        return f"{two_digits(seconds * 1000)} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.0f} s"


def memory(used: float, total: float) -> str:
    """Bytes in use and bytes that there are: `12 of 32 GB`."""
    return f"{two_digits(used / 1e9)} of {two_digits(total / 1e9)} GB"


def percent(fraction: float) -> str:
    """A fraction from 0 to 1."""
    return f"{fraction * 100:.0f}%"


def count(value: float) -> str:
    """A rate such as 0.41, 9.6, 512 or 12,800."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def position(seconds: float) -> str:
    """A place in a recording: `3:07` or `1:02:45`."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def clock(at: float) -> str:
    """The time of day of `time.time()`; empty if there is none."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return ""
