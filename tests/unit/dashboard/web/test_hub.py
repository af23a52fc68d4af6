"""Who gets which messages, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from ringfort.dashboard.web.hub import MAX_VIEWERS, MAX_WAITING, Hub, Viewer
from ringfort.telemetry.view import RunView
from tests.helpers.dash_source import ShownSource, three_machines

NEVER = 1e6
"""Seconds between two views, where a test asks for each."""


def run(test: Callable[[Hub, ShownSource], Coroutine[Any, Any, None]], source: ShownSource | None = None) -> None:
    """Runs a test beside a hub that serves."""
    shown = source or ShownSource(three_machines)

    async def both() -> None:
        hub = Hub(shown, interval=NEVER)
        serving = asyncio.ensure_future(hub.serve())
        try:
            await test(hub, shown)
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving

    asyncio.run(both())


async def message(viewer: Viewer) -> dict[str, Any]:
    return json.loads(await viewer.messages.get())


def test_a_page_gets_everything_at_once_and_then_what_has_changed() -> None:
    async def test(hub: Hub, source: ShownSource) -> None:
        first = hub.join(None)
        assert (await message(first))["full"]
        second = hub.join(None)
        assert (await message(second))["full"]
        assert "full" not in await message(first)
        hub.look_now()
        assert (await message(first)) == (await message(second))

    run(test)


def test_the_source_is_asked_only_while_somebody_looks_and_once_per_run() -> None:
    async def test(hub: Hub, source: ShownSource) -> None:
        assert source.asked == []
        viewers = [hub.join(None), hub.join(None), hub.join("vision")]
        for viewer in viewers:
            await message(viewer)
        assert sorted(source.asked, key=str) == [None, "vision"]
        for viewer in viewers:
            hub.leave(viewer)
        source.asked.clear()
        hub.look_now()
        await message(hub.join("other"))
        assert source.asked == ["other"]

    run(test)


def test_a_page_that_takes_nothing_is_closed_and_the_others_go_on() -> None:
    async def test(hub: Hub, source: ShownSource) -> None:
        slow, quick = hub.join(None), hub.join(None)
        await message(quick)
        for _ in range(MAX_WAITING):
            assert not slow.closed.is_set()
            hub.look_now()
            await message(quick)
        assert slow.closed.is_set()
        assert slow.messages.qsize() == MAX_WAITING
        assert not quick.closed.is_set()

    run(test)


def test_the_number_of_pages_is_bounded_and_the_oldest_goes_first() -> None:
    async def test(hub: Hub, source: ShownSource) -> None:
        viewers = [hub.join(None) for _ in range(MAX_VIEWERS + 2)]
        assert [viewer.closed.is_set() for viewer in viewers[:3]] == [True, True, False]
        assert hub.viewers == MAX_VIEWERS

    run(test)


def test_a_view_that_fails_is_told_on_the_page_and_the_next_one_is_shown() -> None:
    fails = [True]

    def make(now: float) -> RunView:
        if fails:
            fails.clear()
            raise ValueError("no such thing")
        return three_machines(now)

    async def test(hub: Hub, source: ShownSource) -> None:
        viewer = hub.join(None)
        assert "no such thing" in (await message(viewer))["notice"]
        hub.look_now()
        assert len((await message(viewer))["ranks"]) == 3

    run(test, ShownSource(make))


def test_after_the_end_no_page_is_let_in() -> None:
    async def test(hub: Hub, source: ShownSource) -> None:
        viewer = hub.join(None)
        hub.close()
        assert viewer.closed.is_set()
        assert hub.join(None).closed.is_set()

    run(test)
