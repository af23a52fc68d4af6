"""Tables for people: all columns on one line if there is room, else what matters most, and the rest below it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

GAP = "  "
INDENT = "    "
_NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Column:
    """One kind of value."""

    name: str
    label: str = ""
    """What stands before a value that is not below its heading; empty where the value speaks for itself."""


def clean(text: str) -> str:
    """Without what would move the cursor or begin a line: other machines may call themselves anything."""
    return "".join(character if character.isprintable() else "?" for character in text)


def fit(columns: Sequence[Column], rows: Sequence[Mapping[str, str]], width: int | None) -> list[str]:
    """The lines of a table whose columns are in the order of importance. `width` None is for a file: one line for each
    row, of any length. Columns without any value are left out; values are never cut."""
    columns = [column for column in columns if any(row.get(column.name) for row in rows)]
    widths = {
        column.name: max(len(column.name), *(len(row.get(column.name, "")) for row in rows)) for column in columns
    }
    beside: list[Column] = []
    for column in columns:
        needed = sum(widths[one.name] + len(GAP) for one in beside) + widths[column.name]
        if width is not None and needed > width and beside:
            break  # what matters less is below even where it would fit: a row reads in one order
        beside.append(column)
    below = columns[len(beside) :]

    def line(values: Mapping[str, str]) -> str:
        return GAP.join(f"{values.get(one.name, ''):<{widths[one.name]}}" for one in beside).rstrip()

    lines = [line({column.name: column.name for column in beside})]
    for row in rows:
        lines.append(line(row))
        rest = [f"{one.label} {row[one.name]}".strip() for one in below if row.get(one.name)]
        lines += _folded(rest, width or 1 << 30)
    return lines


def _folded(parts: Sequence[str], width: int) -> list[str]:
    """`parts` on as few lines as they need, none of them broken."""
    text = "; ".join(part.replace(" ", _NO_BREAK) for part in parts)
    reduced = wrap(
        text, width, initial_indent=INDENT, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK, " ") for line in reduced]
