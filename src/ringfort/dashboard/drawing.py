"""What pictures for a terminal are made of: signs, bars, and texts that fit a number of columns. Pure.

Every part of a bar has a sign of its own, so that a picture can be read without colours. Colours are the sixteen that
terminals have by name: people choose how those look, so they are legible on light and dark backgrounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from ringfort.telemetry.view import Split

PARTS: Final = ("data", "compute", "codec", "waiting", "wire", "seal")
"""The parts of a step, in the order in which they happen."""
ALWAYS: Final = ("compute", "waiting", "wire", "data")
"""Those that the legend names even if no rank has any."""
COLOURS: Final = {
    "data": "magenta",
    "compute": "green",
    "codec": "bold",
    "waiting": "bright_red",
    "wire": "bright_blue",
    "seal": "",
}
"""Styles. Cyan and yellow are left out because they cannot be read on white; dark red and blue, because of black."""
GAP: Final = "  "
_NO_BREAK: Final = "\N{NO-BREAK SPACE}"
_UNIT: Final = re.compile(r"(\d) (?=(?:ms|s|min|h|GB|[MG]bit/s|samples/s|steps/s)(?:\W|$))")


class Signs(NamedTuple):
    """The characters of pictures."""

    parts: Mapping[str, str]
    full: str
    empty: str
    to: str
    cut: str
    rule: str
    selected: str
    up_down: str
    left_right: str
    levels: str
    """From low to high."""


UNICODE: Final = Signs(
    {"data": ":", "compute": "█", "codec": "%", "waiting": "░", "wire": "=", "seal": "+"},
    *("█", "·", "→", "…", "─", ">", "↑↓", "←→", "▁▂▃▄▅▆▇█"),
)
ASCII: Final = Signs(
    {"data": ":", "compute": "#", "codec": "%", "waiting": ".", "wire": "=", "seal": "+"},
    *("#", ".", "->", "~", "-", ">", "up/down", "left/right", "_.-=*#"),
)


def signs_for(encoding: str | None) -> Signs:
    """Return the signs that a terminal or file with this encoding can show."""
    return UNICODE if (encoding or "").lower().replace("-", "").startswith("utf") else ASCII


def line(*pieces: str | tuple[str, str]) -> Text:
    """Join texts, some of them with a style. Nothing in them is taken for markup."""
    text = Text(no_wrap=True, overflow="ignore", end="")
    for piece in pieces:
        text.append(*((piece,) if isinstance(piece, str) else piece))
    return text


def width_of(text: str) -> int:
    """Return the columns that `text` takes."""
    return cell_len(text)


def cut(text: str, width: int, signs: Signs) -> str:
    """Return `text`, shortened to `width` columns."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(0, width - cell_len(signs.cut))).rstrip() + signs.cut if width > 0 else ""


def fit(text: str, width: int, signs: Signs) -> str:
    """Return `text`, shortened or filled up to `width` columns."""
    return set_cell_size(cut(text, width, signs), max(0, width))


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Return `text` in lines of at most `width` columns, broken between words where possible, but not between a number
    and its unit."""
    lines: list[str] = []
    current = ""
    for word in _UNIT.sub(rf"\1{_NO_BREAK}", text).split(" "):
        for piece in _pieces(word, width - len(indent)):
            longer = f"{current} {piece}" if current.strip() else current + piece
            if current.strip() and cell_len(longer) > width:
                lines.append(current)
                current = indent + piece
            else:
                current = longer
    lines += [current] if current.strip() else []
    return [line.replace(_NO_BREAK, " ") for line in lines]


def shorten(lines: list[str], room: int, width: int, signs: Signs) -> list[str]:
    """Return `lines` in at most `room` lines; if there are more, the last one ends with a sign."""
    if len(lines) <= room or room <= 0:
        return lines[: max(0, room)]
    return [*lines[: room - 1], cut(" ".join(lines[room - 1 :]), width, signs)]


def chop(text: str, width: int) -> list[str]:
    """Return `text` in lines of at most `width` columns, broken anywhere; spaces stay."""
    return _pieces(text, width) or [""]


def _pieces(text: str, width: int) -> list[str]:
    return [text] if cell_len(text) <= width else chop_cells(text, max(2, width))  # a wide character takes two


def flow(items: Sequence[Text], width: int) -> list[Text]:
    """Return items side by side, in as few lines as possible. None of them is broken."""
    lines: list[Text] = []
    for item in items:
        if lines and lines[-1].cell_len + len(GAP) + item.cell_len <= width:
            lines[-1].append(GAP).append_text(item)
        else:
            lines.append(item.copy())
    return lines


def share(value: float) -> float:
    """Return `value` within 0 and 1. What is not a number is 0: other machines may send anything."""
    return min(1.0, value) if value > 0 else 0.0


def meter(fraction: float, width: int, signs: Signs) -> str:
    """Return a bar of `width` columns that is full up to `fraction`."""
    filled = round(share(fraction) * width)
    return signs.full * filled + signs.empty * (width - filled)


def split_bar(split: Split, longest: float, width: int, signs: Signs) -> Text:
    """Return a step as a bar. A step of `longest` seconds has `width` columns."""
    cells = split_cells(split, longest, width)
    return line(*((signs.parts[part] * cells[part], COLOURS[part]) for part in PARTS))


def split_cells(split: Split, longest: float, width: int) -> dict[str, int]:
    """Return the columns of each part. Their sum is the step's share of `width`, rounded once."""
    seconds = {part: _positive(getattr(split, part)) for part in PARTS}
    total = sum(seconds.values())
    if not 0 < total < math.inf or not 0 < longest < math.inf:
        return dict.fromkeys(PARTS, 0)
    room = round(share(total / longest) * width)
    exact = {part: seconds[part] / total * room for part in PARTS}
    cells = {part: int(exact[part]) for part in PARTS}
    by_rest = sorted(PARTS, key=lambda part: cells[part] - exact[part])
    for part in by_rest[: room - sum(cells.values())]:
        cells[part] += 1
    return cells


def _positive(value: float) -> float:
    return value if 0 < value < math.inf else 0.0


def sparkline(values: Iterable[float | None], width: int, signs: Signs) -> str:
    """Return the latest values as a row of `width` columns at most, higher values with higher signs."""
    kept = [value for value in values if value is not None and math.isfinite(value)]
    if not kept or width <= 0:
        return ""
    size = max(1, -(-len(kept) // width))  # values of one column: their mean is shown
    start = len(kept) % size
    groups = [kept[:start]] if start else []
    groups += [kept[at : at + size] for at in range(start, len(kept), size)]
    means = [sum(group) / len(group) for group in groups][-width:]
    low, high = min(means), max(means)
    top = len(signs.levels) - 1
    return "".join(signs.levels[round(share((mean - low) / (high - low)) * top) if high > low else 0] for mean in means)
