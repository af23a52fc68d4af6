"""The other sections in a terminal: links, machines, events, a curve, and the log of a rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from ringfort.dashboard.drawing import GAP, Signs, chop, cut, fit, line, meter, share, sparkline, width_of
from ringfort.telemetry.view import ENDED, Curve, LinkView, RankView, RunView, ShownEvent
from ringfort.telemetry.words import (
    clean,
    clean_output,
    clock,
    memory,
    percent,
    position,
    round_trip,
    used_bandwidth,
)

BUSY: Final = 0.8
"""The fraction of a link's bandwidth, of memory or of a GPU from which on it is marked."""
HOT: Final = 85.0
"""Degrees Celsius from which on machines slow down."""
LOW: Final = 0.2
"""The charge of a battery from which on it is marked."""
METER: Final = 10
NEWEST_EVENTS: Final = 1000
"""Events that can be scrolled through, of those that the view has."""


def names(ranks: Sequence[RankView]) -> dict[str, str]:
    """The name of each machine."""
    return {rank.host: clean(rank.name) for rank in ranks if rank.host}


def link_section(view: RunView, width: int, height: int | None, signs: Signs) -> list[Text]:
    """The links, the busiest first: which machines, how much is used of what was measured, and the round trip."""
    known = names([rank for rank in view.ranks if rank.state not in ENDED])
    links = [link for link in view.links if link.source in known and link.target in known]
    if not links:
        return []
    links.sort(key=lambda link: (-_load(link), -share(link.used / 1e12)))
    shown = links if height is None else links[: max(1, height - 1)]
    more = "" if len(shown) == len(links) else f"the busiest {len(shown)} of {len(links)}"
    rows = [_link(link, known, signs) for link in shown]
    widths = [max(width_of(values[index]) for values in rows) for index in range(len(rows[0]))]
    lines = [heading("LINKS", more)]
    for link, values in zip(shown, rows, strict=True):
        load = _load(link)
        used = line(("  " + fit(values[0], min(widths[0], max(10, width // 3)), signs), ""))
        room = width - used.cell_len
        for index, value in enumerate(values[1:], 1):
            if (needed := widths[index]) and needed + len(GAP) <= room:
                used.append(GAP + fit(value, needed, signs), "bold bright_red" if load >= BUSY and index == 1 else "")
                room -= needed + len(GAP)
        if link.measured and room >= METER + len(GAP):
            used.append(GAP).append(meter(load, METER, signs), "bright_red" if load >= BUSY else "bright_blue")
        lines.append(used)
    return lines


def _link(link: LinkView, known: dict[str, str], signs: Signs) -> list[str]:
    ends = [known[host] or "?" for host in (link.source, link.target)]
    path = f"within {ends[0]}" if link.source == link.target else f" {signs.to} ".join(ends)
    return [path, used_bandwidth(link.used, link.measured), clean(link.kind), round_trip(link.round_trip)]


def _load(link: LinkView) -> float:
    return share(link.used / link.measured) if link.measured else 0.0


def machine_section(view: RunView, width: int, height: int | None, signs: Signs, first: str = "") -> list[Text]:
    """The vitals of each machine: processor, memory, GPU, temperature, battery, where the system tells. If there is no
    room for all, the machine `first` is among those that are shown."""
    vitals: dict[str, dict[str, float]] = {}
    for rank in view.ranks:
        if rank.vitals and rank.state not in ENDED:
            vitals.setdefault(rank.host or rank.name, rank.vitals)
    if not vitals:
        return []
    known = names(view.ranks)
    shown = list(vitals.items())
    if height is not None and height - 1 < len(shown):
        shown = sorted(shown, key=lambda item: item[0] != first)[: max(1, height - 1)]
    more = "" if len(shown) == len(vitals) else f"{len(shown)} of {len(vitals)}"
    name_width = min(12, max(width_of(known.get(host, host)) for host, _ in shown))
    lines = [heading("MACHINES", more)]
    for host, values in shown:
        text = line("  ", fit(known.get(host) or clean(host), name_width, signs))
        for item in vital_items(values):
            if text.cell_len + len(GAP) + item.cell_len <= width:
                text.append(GAP).append_text(item)
        lines.append(text)
    return lines


def vital_items(vitals: dict[str, float]) -> list[Text]:
    """What is known of a machine, the most important first. What needs attention is bold."""
    items: list[Text] = []

    def add(text: str, needs_attention: bool = False) -> None:
        items.append(line((text, "bold bright_red" if needs_attention else "")))

    if "cpu" in vitals:
        add(f"CPU {percent(vitals['cpu']):>4}")
    if vitals.get("memory_total"):
        add(f"mem {memory(vitals.get('memory', 0), vitals['memory_total'])}", _is_full(vitals, "memory"))
    if "gpu" in vitals:
        add(f"GPU {percent(vitals['gpu']):>4}")
    if vitals.get("gpu_memory_total"):
        add(
            f"GPU mem {memory(vitals.get('gpu_memory', 0), vitals['gpu_memory_total'])}", _is_full(vitals, "gpu_memory")
        )
    if "temperature" in vitals:
        add(f"{vitals['temperature']:.0f} °C", vitals["temperature"] >= HOT)
    if "battery" in vitals:
        is_plugged = bool(vitals.get("plugged"))
        add(
            f"battery {percent(vitals['battery'])}{', plugged in' if is_plugged else ''}",
            not is_plugged and vitals["battery"] < LOW,
        )
    return items


def _is_full(vitals: dict[str, float], name: str) -> bool:
    return vitals.get(name, 0.0) > 0.95 * vitals[f"{name}_total"]


def event_section(
    events: Sequence[ShownEvent], width: int, height: int | None, signs: Signs, scroll: int = 0
) -> list[Text]:
    """The latest events, newest last; `scroll` is how many of the newest are left out."""
    if not events:
        return [heading("EVENTS"), line(("  none yet", "dim"))]
    room = len(events) if height is None else max(1, height - 1)
    first, last = scrolled(min(len(events), NEWEST_EVENTS), room, scroll)
    offset = max(0, len(events) - NEWEST_EVENTS)
    shown = events[offset + first : offset + last]
    more = f"newest {len(shown)} of {len(events)}" if scroll == 0 else f"{scroll} newer below"
    lines = [heading("EVENTS", more if len(shown) < len(events) else "")]
    for event in shown:
        text, who = clean(event.text), clean(event.name)
        if who and who not in text:
            text += f" ({who}{f' rank {event.rank}' if event.rank >= 0 else ''})"
        kind = fit(clean(event.kind), 11, signs) + " " if width >= 70 else ""
        style = "bold bright_red" if event.kind in ("lost", "refused") else "bold"
        before = line("  ", (clock(event.at) or "?", "dim"), " ", (kind, style))
        lines.append(before.append(cut(text, width - before.cell_len, signs)))
    return lines


def log_section(
    rank: RankView, log: Sequence[str], width: int, height: int, signs: Signs, scroll: int = 0
) -> list[Text]:
    """The end of the output of a rank; `scroll` is how many of the newest lines are left out."""
    title = f"rank {rank.rank} on {clean(rank.name) or '?'}"
    if not log:
        nothing = "no output is known yet. It is kept for ranks that `ringfort run` starts."
        return [heading("LOG", title), line(("  " + cut(nothing, width - 2, signs), "dim"))]
    room = max(1, height - 1)
    _, last = scrolled(len(log), room, scroll)
    lines = [text for entry in log[max(0, last - room) : last] for text in chop(clean_output(entry), width)]
    below = f", {len(log) - last} newer below" if last < len(log) else ""
    return [heading("LOG", title + below), *(line(text) for text in lines[-room:])]


def scrolled(total: int, room: int, scroll: int) -> tuple[int, int]:
    """Return the first line that is shown and the one after the last, if the newest `scroll` are left out."""
    last = max(min(room, total), total - max(0, scroll))
    return max(0, last - room), last


def curve_section(curves: Sequence[Curve], width: int, signs: Signs) -> list[Text]:
    """The loss, or else the first value that the program logs, as a row of signs."""
    curve = next((one for one in curves if one.name == "loss"), curves[0] if curves else None)
    numbers = [value for value in curve.values if value is not None] if curve is not None else []
    if curve is None or len(numbers) < 2:
        return []
    about = f"{numbers[0]:.4g} {signs.to} {numbers[-1]:.4g} in {position(curve.at[-1] - curve.at[0])}"
    title = heading(cut(clean(curve.name).upper(), 16, signs), about)
    return [title, line("  ", (sparkline(curve.values, width - 2, signs), "green"))]


def heading(title: str, note: str = "") -> Text:
    """The first line of a section."""
    return line((title, "bold"), GAP + note if note else "")
