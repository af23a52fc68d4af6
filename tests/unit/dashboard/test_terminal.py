"""`ringfort top` by its keys, in Textual's own test terminal. What each picture says is in test_picture.py."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

pytest.importorskip("textual", reason="needs textual")

from textual.pilot import Pilot
from textual.strip import Strip

from ringfort.dashboard.picture import HELP
from ringfort.dashboard.recording import RecordedSource
from ringfort.dashboard.source import Source
from ringfort.dashboard.terminal import Terminal
from ringfort.errors import TransportError
from ringfort.telemetry.view import RunView, ShownEvent
from tests.helpers.shown_runs import ViewSource, record, three_machines


class Person:
    """Somebody in front of the terminal."""

    def __init__(self, app: Terminal, pilot: Pilot[None]) -> None:
        self.app, self._pilot = app, pilot

    async def press(self, *keys: str) -> str:
        """Press keys, and return what is then on the screen."""
        await self._pilot.press(*keys)
        return await self.see()

    async def see(self) -> str:
        """What is on the screen, as Textual sends it to the terminal."""
        self.app.look()
        await self._pilot.pause()
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in strips)

    async def resize(self, width: int, height: int) -> str:
        await self._pilot.resize_terminal(width, height)
        return await self.see()


@asynccontextmanager
async def watching(source: Source, run: str | None = None) -> AsyncIterator[Person]:
    app = Terminal(source, run)
    async with app.run_test(size=(80, 24)) as pilot:
        yield Person(app, pilot)


def follow(source: Source, story: Callable[[Person], Awaitable[None]], run: str | None = None) -> None:
    async def go() -> None:
        async with watching(source, run) as person:
            await story(person)

    asyncio.run(go())


def test_keys_select_ranks_and_show_logs_events_and_help() -> None:
    source = ViewSource(three_machines().view(), ["\x1b[31mhello[/red]\x1b[0m", "world"])

    async def story(person: Person) -> None:
        assert ">  0 study  ::███" in await person.see()
        assert source.asked == []
        assert ">  1 laptop" in await person.press("down")
        text = await person.press("l")
        assert "LOG  rank 1 on laptop\nhello[/red]\nworld\n" in text
        assert ">  2 attic" in await person.press("down", "down")
        assert "LOG  rank 0 on study" in await person.press("up", "up", "up")
        assert source.asked[0] == (1, "night")
        assert source.asked[-1] == (0, "night")
        text = await person.press("e")
        assert "LOG" not in text
        assert "rank 1 on laptop is here" in text
        text = await person.press("question_mark")
        assert all(what in text for _, what in HELP)
        assert "LINKS" in await person.press("escape")
        assert "LOG" in await person.press("l")
        assert "LINKS" in await person.press("l")

    follow(source, story)


def test_the_picture_follows_the_run_and_the_size_of_the_terminal() -> None:
    run = three_machines()
    source = ViewSource(run.view())

    async def story(person: Person) -> None:
        assert "step 60 of 5,000" in await person.see()
        run.ranks[2].is_alive = False
        source.now = run.advance(2)
        text = await person.see()
        assert "step 64 of 5,000" in text
        assert "Rank 2 (attic) is lost" in text
        text = await person.resize(60, 20)
        assert max(map(len, text.splitlines())) <= 60
        assert len(text.splitlines()) == 20
        assert "waits 30%" in text
        assert "needs 40x10" in await person.resize(38, 9)
        assert "LOSS" in await person.resize(120, 40)

    follow(source, story)


def test_p_stops_the_picture_and_lets_it_continue() -> None:
    run = three_machines()
    source = ViewSource(run.view())

    async def story(person: Person) -> None:
        assert "STOPPED at" in await person.press("p")
        source.now = run.advance(10)
        assert "step 60 of" in await person.see()
        text = await person.press("p")
        assert "step 80 of" in text
        assert "STOPPED" not in text

    follow(source, story)


def test_r_goes_to_the_next_run() -> None:
    source = ViewSource(replace(three_machines().view(), runs=("night", "noon", "day")))

    async def story(person: Person) -> None:
        await person.press("r")
        assert source.wanted[-1] == "noon"
        source.now = replace(source.now, run="day")
        await person.see()
        await person.press("r")
        assert source.wanted[-1] == "night"

    follow(source, story, run="night")
    assert source.wanted[0] == "night"


def test_a_source_that_fails_is_told_and_asked_again() -> None:
    source = ViewSource(three_machines().view())
    source.error = TransportError("[bold]no\nnetwork[/bold]")

    async def story(person: Person) -> None:
        text = await person.see()
        assert "! No view could be made. [bold]no?network[/bold]." in text
        source.error = None
        assert "RANKS" in await person.see()
        source.error = KeyError("x")
        text = await person.see()
        assert "! No view could be made. KeyError: 'x'. The picture is the last one" in text
        assert "RANKS" in text

    follow(source, story)


def test_nobody_yet_and_then_somebody() -> None:
    source = ViewSource(RunView(0.0))

    async def story(person: Person) -> None:
        assert "Looking for runs" in await person.press("down", "r", "e", "pageup", "escape", "left", "plus")
        source.now = three_machines().view()
        assert ">  0 study" in await person.see()

    follow(source, story)


def test_a_recording_is_stopped_moved_and_played_faster(tmp_path: Path) -> None:
    record(tmp_path / "night.rec", 41)
    now = 100.0
    source = RecordedSource(tmp_path / "night.rec", clock=lambda: now)

    async def story(person: Person) -> None:
        nonlocal now
        now += 5.0
        text = await person.see()
        assert "recording 0:05 of 0:40" in text
        assert "step 12 of 5,000" in text
        text = await person.press("right")
        assert "recording 0:15 of 0:40" in text
        assert "step 32 of 5,000" in text
        assert "recording 0:00 of 0:40" in await person.press("left", "left")
        assert "0:00 of 0:40 at 4x" in await person.press("plus", "plus")
        now += 2.0
        assert "recording 0:08 of 0:40 at 4x" in await person.see()
        assert "recording 0:08 of 0:40, stopped" in await person.press("minus", "minus", "p")
        now += 2.0
        assert "recording 0:08 of 0:40, stopped" in await person.see()
        text = await person.press("p", *["right"] * 4)
        assert "recording 0:40 of 0:40" in text
        assert "The recording ends here" in text
        assert "recording 0:00 of 0:40" in await person.press("p")

    with source:
        follow(source, story)


def test_q_and_ctrl_c_quit() -> None:
    for key in ("q", "ctrl+c"):

        async def story(person: Person, key: str = key) -> None:
            assert person.app.is_running
            await person._pilot.press(key)
            await person._pilot.pause()
            assert not person.app.is_running

        follow(ViewSource(RunView(0.0)), story)


def test_only_lines_that_changed_are_sent_to_the_terminal() -> None:
    run = three_machines()
    source = ViewSource(run.view())

    async def story(person: Person) -> None:
        await person.see()
        drawn: list[int] = []
        canvas = person.app._canvas
        render = canvas.render_line

        def spy(y: int) -> Strip:
            drawn.append(y)
            return render(y)

        canvas.render_line = spy  # type: ignore[method-assign]
        await person.see()
        assert drawn == []
        source.now = replace(source.now, verdict=replace(source.now.verdict, loss=7.0))
        await person.see()
        assert drawn == [3]
        await person.press("down")  # styles change in the rows of two ranks, and the figures below them
        assert sorted(set(drawn)) == [3, 6, 7, 9, 10]

    follow(source, story)


def test_ten_thousand_events_at_each_look_do_not_grow_memory() -> None:
    view = three_machines(3).view()

    def flood(start: int) -> RunView:
        return replace(
            view, events=tuple(ShownEvent(float(at), "note", f"event {at}") for at in range(start, start + 10_000))
        )

    source = ViewSource(flood(0))

    async def story(person: Person) -> None:
        await person.press("e")
        tracemalloc.start()
        try:
            sizes: list[int] = []
            for look in range(1, 4):
                source.now = flood(look * 10_000)
                assert f"event {look * 10_000 + 9_999}" in await person.see()
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        one_view = sizes[0]
        assert one_view > 500_000  # it is counted
        assert sizes[-1] - sizes[0] < one_view / 2  # two more views were seen; what stays is in caches of a fixed size

    follow(source, story)
