"""Tables that fit a terminal: the most important columns on the first line of a row, the others below it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

GAP = "  "
INDENT = "    "
_NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    name: str
    label: str = ""
    """Put before a value that is not below its heading; empty if the value is clear without it."""


def clean(text: str) -> str:
    """Replace control characters: the name of another machine may contain anything."""
    return "".join(character if character.isprintable() else "?" for character in text)


def fit(columns: Sequence[Column], rows: Sequence[Mapping[str, str]], width: int | None) -> list[str]:
    """The lines of a table whose columns are in order of importance. `width` None is for a file: one line per row, of
    any length. Columns without any value are left out; values are never cut."""
    columns = [column for column in columns if any(row.get(column.name) for row in rows)]
    widths = {
        column.name: max(len(column.name), *(len(row.get(column.name, "")) for row in rows)) for column in columns
    }
    beside: list[Column] = []
    for column in columns:
        needed = sum(widths[one.name] + len(GAP) for one in beside) + widths[column.name]
        if width is not None and needed > width and beside:
            break  # less important columns are below even if they would fit, so that a row reads in one order
        beside.append(column)
    below = columns[len(beside) :]

    def line(values: Mapping[str, str]) -> str:
        return GAP.join(f"{values.get(one.name, ''):<{widths[one.name]}}" for one in beside).rstrip()

    lines = [line({column.name: column.name for column in beside})]
    for row in rows:
        lines.append(line(row))
        rest = [f"{one.label} {row[one.name]}".strip() for one in below if row.get(one.name)]
        lines += _wrapped(rest, width or 1 << 30)
    return lines


def _wrapped(parts: Sequence[str], width: int) -> list[str]:
    """`parts` on as few lines as possible, none of them broken."""
    text = "; ".join(part.replace(" ", _NO_BREAK) for part in parts)
    lines = wrap(
        text, width, initial_indent=INDENT, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]
