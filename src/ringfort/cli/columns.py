"""Tables that fit a terminal: the most important columns on the first line of a row, the others below it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

GAP = "  "
INDENT = "    "
_NO_BREAK = "\N{NO-BREAK SPACE}"


def fit(rows: Sequence[Mapping[str, str]], labels: Mapping[str, str], width: int | None) -> list[str]:
    """The lines of a table. All `rows` have the same columns, in order of importance; empty ones are left out.

    `labels` are put before values that are not below their heading. `width` None is for a file: one line per row, of
    any length. Values are never cut.
    """
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    beside: list[str] = []
    for name in columns:
        needed = sum(widths[one] + len(GAP) for one in beside) + widths[name]
        if width is not None and needed > width and beside:
            break  # less important columns are below even if they would fit, so that a row reads in one order
        beside.append(name)

    def line(values: Mapping[str, str]) -> str:
        return GAP.join(f"{values[name]:<{widths[name]}}" for name in beside).rstrip()

    lines = [line({name: name for name in beside})]
    for row in rows:
        lines.append(line(row))
        rest = [f"{labels.get(name, '')} {row[name]}".strip() for name in columns[len(beside) :] if row[name]]
        lines += _wrapped(rest, width or 1 << 30)
    return lines


def _wrapped(parts: Sequence[str], width: int) -> list[str]:
    """`parts` on as few lines as possible, none of them broken."""
    text = "; ".join(part.replace(" ", _NO_BREAK) for part in parts)
    lines = wrap(
        text, width, initial_indent=INDENT, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]
