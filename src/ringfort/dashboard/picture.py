"""A run as lines of a terminal: what stands above, sections that share the room below, and the keys. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.text import Text

from ringfort.dashboard.drawing import GAP, cut, line, wrap
from ringfort.dashboard.headline import head_lines, run_name, text_lines, title_line
from ringfort.dashboard.rank_section import DETAIL_LINES, legend, rank_section
from ringfort.dashboard.scene import Scene
from ringfort.dashboard.sections import curve_section, event_section, link_section, log_section, machine_section
from ringfort.dashboard.states import nobody
from ringfort.telemetry.view import RunView

MIN_WIDTH: Final = 40
MIN_HEIGHT: Final = 10
CURVE_HEIGHT: Final = 28
"""Lines from which on there is room for a curve."""
ENOUGH: Final = 7
"""Lines of a section. Empty lines between sections are drawn only if each can have as many, or all that it has."""


@dataclass(frozen=True)
class Section:
    """A part of the picture that has between `least` and `most` lines."""

    least: int
    most: int
    draw: Callable[[int], list[Text]]


def picture(scene: Scene, width: int, height: int) -> list[Text]:
    """Return exactly `height` lines of at most `width` columns."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        lines = _too_small(width, height)
    elif scene.page == "help":
        lines = [title_line(scene, width), *_help(scene, width, height - 2)]
    elif scene.view is None or not scene.view.ranks:
        lines = [title_line(scene, width), *text_lines(nobody(*_absence(scene)), width, height - 2, spaced=True)]
    else:
        lines = _page(scene, scene.view, width, height)
    if width >= MIN_WIDTH and height >= MIN_HEIGHT:
        lines = [*lines[: height - 1], *(line() for _ in range(height - 1 - len(lines))), _keys(scene, width)]
    for text in lines:
        if text.cell_len > width:
            text.truncate(width, overflow="crop")
    return [*lines[:height], *(line() for _ in range(height - len(lines)))]


def whole_picture(scene: Scene, width: int) -> list[Text]:
    """Return all lines of all sections, for a file or a printout."""
    view, signs = scene.view, scene.signs
    if view is None or not view.ranks:
        return text_lines(nobody(*_absence(scene)), width, 100)
    parts = [
        rank_section(view.ranks, scene.index, width, None, signs),
        link_section(view, width, None, signs),
        machine_section(view, width, None, signs),
        curve_section(view.curves, width, signs),
        event_section(view.events, width, None, signs),
    ]
    lines = [line(cut(run_name(view), width, signs)), *head_lines(scene, view, width)]
    for part in parts:
        lines += [line(), *part] if part else []
    return lines


def _too_small(width: int, height: int) -> list[Text]:
    words = (
        f"This terminal has {width}x{height} characters; `ringfort top` needs {MIN_WIDTH}x{MIN_HEIGHT}. "
        "Enlarge it, or press q."
    )
    return [line(text) for text in wrap(words, max(1, width))]


def _absence(scene: Scene) -> tuple[RunView | None, str, str | None, float]:
    return scene.view, scene.failure, scene.wanted, scene.waited


def _page(scene: Scene, view: RunView, width: int, height: int) -> list[Text]:
    sections = _sections(scene, view, width, height)
    head = [title_line(scene, width), *head_lines(scene, view, width, max(3, height // 2 - 1))]
    room = height - 1 - len(head)
    spaces = len(sections)
    if sum(min(section.most, ENOUGH) for section in sections) + spaces > room:
        spaces = 0
    lines = head
    for section, given in zip(sections, share_room(sections, room - spaces), strict=True):
        if given:
            lines += [line()] if spaces else []
            lines += section.draw(given)[:given]
    return lines


def share_room(sections: Sequence[Section], room: int) -> list[int]:
    """Return the lines of each section: the least that each needs, in order of importance, then the rest in turn."""
    given = [0] * len(sections)
    for index, section in enumerate(sections):
        if section.least <= room or index == 0:
            given[index] = min(section.least, room)
            room -= given[index]
    while room > 0:
        wanting = [index for index, section in enumerate(sections) if 0 < given[index] < section.most]
        if not wanting:
            break
        for index in wanting[:room]:
            given[index] += 1
        room -= min(room, len(wanting))
    return given


def _sections(scene: Scene, view: RunView, width: int, height: int) -> list[Section]:
    signs, ranks = scene.signs, view.ranks
    heading = len(legend(ranks, width, signs))
    shown = min(3, len(ranks))
    all_ranks = Section(
        heading + shown,
        heading + len(ranks) + DETAIL_LINES,
        lambda room: rank_section(ranks, scene.index, width, room, signs),
    )
    events = Section(
        2,
        1 + max(1, len(view.events)),
        lambda room: event_section(view.events, width, room, signs, scene.scroll if scene.page == "events" else 0),
    )
    if scene.page == "events":
        return [replace(all_ranks, most=heading + shown), events]
    if scene.page == "logs":
        log = Section(
            2,
            height,
            lambda room: log_section(ranks[scene.index], scene.log, width, room, signs, scene.scroll),
        )
        return [replace(all_ranks, most=heading + shown), log]
    links = link_section(view, width, None, signs)
    machines = machine_section(view, width, None, signs)
    curve = curve_section(view.curves, width, signs) if height >= CURVE_HEIGHT else []
    found = [
        all_ranks,
        Section(2, len(links), lambda room: link_section(view, width, room, signs)),
        Section(2, len(machines), lambda room: machine_section(view, width, room, signs, ranks[scene.index].host)),
        Section(2, len(curve), lambda room: curve[:room]),
        events,
    ]
    return [section for section in found if section.most]


HELP: Final = (
    ("up, down", "select a rank"),
    ("l", "log of the selected rank"),
    ("e", "events"),
    ("PgUp, PgDn", "older and newer lines of the log or the events"),
    ("r", "next run"),
    ("p", "stop and continue the picture or recording"),
    ("left, right", "10 s back and forth in a recording"),
    ("+, -", "play a recording faster and slower"),
    ("Esc", "back to the overview"),
    ("q, Ctrl-C", "quit"),
    ("compute", "computing, and all that is not below"),
    ("data", "waiting for the data loader"),
    ("codec", "compressing gradients"),
    ("waiting", "waiting for ranks that exchange later"),
    ("wire", "exchanging, when all ranks are there"),
    ("seal", "agreeing that a step counts (elastic runs)"),
)


def _help(scene: Scene, width: int, room: int) -> list[Text]:
    shown = HELP[min(scene.scroll, max(0, len(HELP) + 1 - room)) :]
    rows = [line("  ", (f"{key:<12}", "bold"), cut(what, width - 14, scene.signs)) for key, what in shown]
    return [line(("KEYS AND PARTS OF A STEP", "bold")), *rows]


def _keys(scene: Scene, width: int) -> Text:
    """The keys that do something now, as many as there is room for; those that everybody needs first."""
    view, page = scene.view, scene.page
    has_ranks = view is not None and bool(view.ranks)
    keys = [
        ("q", "quit", True),
        ("?", "help", page != "help"),
        ("Esc", "back", page != "overview"),
        ("l", "log", has_ranks and page != "logs"),
        ("e", "events", has_ranks and page != "events"),
        ("p", "continue" if scene.is_stopped else "pause", has_ranks),
        (scene.signs.up_down, "rank", has_ranks and page != "help"),
        (scene.signs.left_right, "seek", scene.played is not None),
        ("PgUp", "older", page in ("logs", "events")),
        ("r", "next run", view is not None and len(view.runs) > 1),
    ]
    text = line()
    for key, what, is_useful in keys:
        item = line((key, "bold reverse"), f" {what}")
        if is_useful and text.cell_len + len(GAP) + item.cell_len <= width:
            text.append(GAP if text.cell_len else "").append_text(item)
    return text
