"""What stands above the sections in a terminal: the name of the run, the sentence, notices, and its figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from ringfort.dashboard.drawing import GAP, cut, flow, line, shorten, width_of, wrap
from ringfort.dashboard.scene import Scene
from ringfort.dashboard.states import Notice, notices
from ringfort.telemetry.view import ENDED, RankView, RunView
from ringfort.telemetry.words import clean, clock, count, percent, uptime

SENTENCE_LINES: Final = 3
NOTICE_LINES: Final = 5


def run_name(view: RunView) -> str:
    """The program, the run, and where it is."""
    program, run = clean(view.program), clean(view.run)
    living = [rank for rank in view.ranks if rank.state not in ENDED]
    there = min(len(living), view.seen)
    ranks = f"{there} of {view.world_size} ranks" if there < view.world_size else _plural(len(living), "rank")
    where = f"{ranks} on {_plural(machines(living), 'machine')}"
    names = [program or run or "a run", f"run {run}" if run not in ("", program) else "", where]
    return GAP.join(name for name in names if name)


def machines(ranks: Sequence[RankView]) -> int:
    """Return how many machines the ranks are on."""
    return len({rank.host or rank.name for rank in ranks})


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def title_line(scene: Scene, width: int) -> Text:
    """The first line: the run, and the time."""
    view, signs = scene.view, scene.signs
    left = run_name(view) if view is not None and view.ranks else "ringfort top"
    if view is not None and len(view.runs) > 1:
        left += f"{GAP}({_plural(len(view.runs), 'run')}: r)"
    if scene.played is not None:
        right = str(scene.played)
    elif scene.is_stopped:
        right = f"STOPPED at {clock(view.now) if view is not None else ''}: p continues"
    else:
        right = clock(view.now) if view is not None else ""
    right = cut(right, width // 2, signs)
    left = cut(left, width - width_of(right) - 3, signs)
    space = " " * (width - 2 - width_of(left) - width_of(right))
    return line((f" {left}{space}{right} ", "reverse"))


def head_lines(scene: Scene, view: RunView, width: int, room: int = 100) -> list[Text]:
    """The sentence, what a person should know, and the figures of the run, in at most `room` lines. Faults come first
    if there is no room for everything."""
    sentence = shorten(wrap(clean(view.verdict.sentence), width), SENTENCE_LINES, width, scene.signs)
    told = text_lines(notices(view, scene.failure, scene.played), width, NOTICE_LINES)
    figures = flow([line(item) for item in verdict_items(view)], width)
    said = [line((text, "bold")) for text in sentence]
    lines = [*said, *told, *figures]
    has_faults = len(told) > 0 and told[0].plain.startswith("! ")
    return (lines if len(lines) <= room or not has_faults else [*told, *said, *figures])[:room]


def verdict_items(view: RunView) -> list[str]:
    """The figures of the run: step, loss, speed, time left, and what further machines bring."""
    verdict = view.verdict
    step = f"step {verdict.step:,}"
    if verdict.total_steps:
        step += f" of {verdict.total_steps:,} ({percent(verdict.step / verdict.total_steps)})"
    items = [step]
    if verdict.loss is not None:
        items.append(f"loss {verdict.loss:.4g}")
    if verdict.samples_per_second is not None:
        whose = "" if view.is_whole else f" of {_plural(view.seen, 'rank')}"
        items.append(f"{count(verdict.samples_per_second)} samples/s{whose}")
    if verdict.steps_per_second:
        items.append(f"{count(verdict.steps_per_second)} steps/s")
    if verdict.eta is not None:
        items.append(f"ETA {uptime(verdict.eta)}")
    training = [rank for rank in view.ranks if rank.state == "training"]
    if verdict.speed_up is not None and len(training) > 1:
        hosts = machines(training)
        who = _plural(hosts, "machine") if hosts > 1 else _plural(len(training), "rank")
        items.append(f"{who}: {verdict.speed_up:.2g} times the fastest alone")
    return items


def text_lines(found: Sequence[Notice], width: int, room: int, *, spaced: bool = False) -> list[Text]:
    """Sentences, with a mark before each that tells of a fault, in at most `room` lines."""
    lines: list[Text] = []
    for notice in found:
        style = "bold bright_red" if notice.is_bad else ""
        lines += [line()] if spaced else []
        for number, text in enumerate(wrap(notice.text, width - 2)):
            lines.append(line(("! " if notice.is_bad and not number else "  ", style), (text, style)))
    return lines[: max(1, room)]
