"""The ranks in a terminal: one bar per rank, which says where the time of its steps goes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from ringfort.dashboard.drawing import (
    ALWAYS,
    COLOURS,
    GAP,
    PARTS,
    Signs,
    cut,
    fit,
    flow,
    line,
    share,
    shorten,
    split_bar,
    width_of,
    wrap,
)
from ringfort.telemetry.view import RankView
from ringfort.telemetry.words import bandwidth, clean, count, percent, step_time, uptime

SHOWN: Final = 0.005
"""The fraction of a step from which on a part is mentioned."""
WIDE: Final = 110
"""Columns from which on a row has further figures."""
MEDIUM: Final = 70
NARROW: Final = 50
DETAIL_LINES: Final = 2

INSTEAD: Final = {
    "lost": "lost: its process has ended",
    "ended": "ended: its program has finished",
    "nonsense": "cannot be understood; compare versions",
    "silent": "silent",
}
"""What stands in the place of a bar."""


def legend(ranks: Sequence[RankView], width: int, signs: Signs) -> list[Text]:
    """The heading, with the sign of each part that occurs."""
    shown = [part for part in ALWAYS if part in PARTS]
    shown += [part for part in PARTS if part not in ALWAYS and any(rank.split.part(part) >= SHOWN for rank in ranks)]
    items = [line((signs.parts[part], COLOURS[part]), f" {part}") for part in shown]
    return flow([line(("RANKS", "bold")), *items], width)


def row(rank: RankView, longest: float, name_width: int, width: int, signs: Signs, *, is_selected: bool) -> Text:
    """One rank. A step of `longest` seconds fills the bar."""
    style = "bold" if is_selected else ""
    number = f"{rank.rank:>2}" if rank.rank >= 0 else " -"
    name = fit(clean(rank.name) or "?", name_width, signs)
    before = f"{signs.selected if is_selected else ' '} {number} {name} "
    after = [] if rank.state in INSTEAD else _figures(rank, width)
    room = width - width_of(before) - sum(width_of(text) + len(GAP) for text in after)
    if rank.state in INSTEAD:
        heard = f" for {uptime(rank.heard)}" if rank.state == "silent" else ""
        colour = "dim" if rank.state == "ended" else "bold bright_red"
        return line((before, style), (cut(INSTEAD[rank.state] + heard, room, signs), colour))
    bar = split_bar(rank.split, longest, room, signs)
    bar.pad_right(max(0, room - bar.cell_len))
    return line((before, style)).append_text(bar).append("".join(GAP + text for text in after), style)


def _figures(rank: RankView, width: int) -> list[str]:
    """What stands behind a bar, right-aligned."""
    waits = percent(share(rank.split.part("waiting")))
    is_late = rank.state in ("learner", "paused")
    figures = [f"{rank.state if is_late else f'waits {waits:>3}':>9}"]
    if width >= WIDE:
        figures.append(f"{f'{count(rank.samples_per_second)} samples/s' if rank.samples_per_second else '':>15}")
        figures.append(f"{f'sends {bandwidth(rank.sent)}' if rank.sent else '':>17}")
    if width >= MEDIUM:
        figures.append(f"{step_time(rank.split.total):>7}")
    return figures


def detail(rank: RankView, width: int, room: int, signs: Signs) -> list[Text]:
    """The figures of the selected rank, in at most `room` lines."""
    split = rank.split
    parts = [f"{part} {step_time(getattr(split, part))}" for part in PARTS if split.part(part) >= SHOWN]
    found = [
        f"rank {rank.rank} on {clean(rank.name) or '?'}, process {rank.pid}",
        f"step {rank.step:,}" + (f": {', '.join(parts)}" if parts else ""),
    ]
    if rank.sent or rank.received:
        found.append(f"sends {bandwidth(rank.sent)}, receives {bandwidth(rank.received)}")
    if rank.compression:
        found.append(f"compression {clean(rank.compression)}")
    lines = shorten(wrap("; ".join(found), max(1, width - 2)), room, width - 2, signs)
    return [line(("  " + text, "dim")) for text in lines]


def rank_section(ranks: Sequence[RankView], selected: int, width: int, height: int | None, signs: Signs) -> list[Text]:
    """The legend, the ranks around the selected one, and its figures, in at most `height` lines; None for all."""
    heading = legend(ranks, width, signs)
    lines = DETAIL_LINES
    longest = max((rank.split.total for rank in ranks if rank.state not in INSTEAD), default=0.0)
    most = 16 if width >= WIDE else 12 if width >= NARROW else 8
    name_width = min(most, max(width_of(clean(rank.name)) for rank in ranks))
    first, last = 0, len(ranks)
    if height is not None:
        heading = heading[: max(1, height - 2)]
        room = max(1, height - len(heading))
        lines = min(lines, max(0, room - len(ranks)))
        first, last = window(len(ranks), selected, room - lines)
    rows = [
        row(rank, longest, name_width, width, signs, is_selected=index == selected)
        for index, rank in enumerate(ranks[first:last], first)
    ]
    if last - first < len(ranks):
        hidden = f"{last - first} of {len(ranks)} shown, {signs.up_down}"
        if heading[-1].cell_len + len(GAP) + width_of(hidden) <= width:
            heading[-1].append(GAP).append(hidden, "bold")
    return [*heading, *rows, *detail(ranks[selected], width, lines, signs)]


def window(total: int, selected: int, room: int) -> tuple[int, int]:
    """Return the first row that is shown and the one after the last, so that the selected one is among them."""
    room = max(1, min(room, total))
    first = min(max(0, selected - room // 2), total - room)
    return first, first + room
