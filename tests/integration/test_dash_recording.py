"""A recording in the page: play, pause, seek and speed, by keyboard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ringfort.dashboard.known import Linked, Reported
from ringfort.dashboard.recording import RecordedSource
from ringfort.dashboard.recording_file import Recorder
from ringfort.dashboard.web.server import DashServer
from ringfort.telemetry.report import Report
from ringfort.telemetry.view import LinkView
from tests.helpers.telemetry import Rank, SimulatedRun
from tests.integration.conftest import faults_by_axe, picture, reached_by_tab

if TYPE_CHECKING:
    from playwright.sync_api import Page

SECONDS = 300.0


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Five minutes of three ranks, of which one dies in the middle."""
    path = tmp_path / "night.rec"
    recorder = Recorder(path)
    links = tuple(LinkView(a, b, 0.0, 1e8, 2e-4, "Ethernet") for a in "abc" for b in "abc" if a != b)
    run = SimulatedRun([Rank("a"), Rank("b", compute=0.07), Rank("c", compute=0.2)], total_steps=5000, run="night")
    recorder.write(Linked(links), run.now)

    def take(report: Report, received_at: float | None = None) -> None:
        recorder.write(Reported(report), run.now)

    run.history.take = take
    run.advance(SECONDS / 2)
    run.ranks[2].is_alive = False
    run.advance(SECONDS / 2)
    recorder.close()
    return path


def states(page: Page) -> list[str]:
    return page.locator("#ranks tbody tr").evaluate_all("(rows) => rows.map((row) => row.dataset.state)")


def seconds(page: Page) -> float:
    return float(page.input_value("#seek"))


def test_a_recording_is_played_by_keyboard(new_page: Callable[..., Page], recording: Path) -> None:
    page = new_page()
    with RecordedSource(recording) as source, DashServer(source, port=0) as server:
        page.goto(server.new_link())
        page.wait_for_selector("#status:has-text('Recording')")
        page.focus("#play")
        page.keyboard.press("Enter")
        page.wait_for_selector("#play:text-is('Play')")
        page.focus("#seek")
        page.keyboard.press("Home")
        page.keyboard.press("PageUp")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("#position:text-is('1:05 / 5:00')")
        assert not source.playing
        assert source.position == 65.0
        page.wait_for_selector("#ranks tbody tr:nth-child(3)")
        assert states(page) == ["training"] * 3
        assert "c" in page.inner_text("#sentence")
        picture(page, "recording")

        page.keyboard.press("End")
        page.wait_for_selector("#position:text-is('5:00 / 5:00')")
        page.wait_for_selector("#ranks [data-state=lost]")
        assert states(page) == ["training", "training", "lost"]
        page.keyboard.press("Home")
        page.keyboard.press("PageUp")
        page.wait_for_selector("#ranks:not(:has([data-state=lost])) [data-key='c:102']")

        page.focus("#speed")
        page.select_option("#speed", "100")
        page.focus("#play")
        page.keyboard.press("Space")
        page.wait_for_selector("#position:text-is('5:00 / 5:00')")
        page.wait_for_selector("#play:text-is('Play')")
        assert source.speed == 100


def test_a_recording_that_was_cut_is_played_up_to_there(new_page: Callable[..., Page], recording: Path) -> None:
    page = new_page()
    recording.write_bytes(recording.read_bytes()[:-1000])
    with RecordedSource(recording) as source, DashServer(source, port=0) as server:
        source.seek(source.duration)
        page.goto(server.new_link())
        page.wait_for_selector("#notice:visible")
        assert page.inner_text("#notice") == "The recording was cut off or is damaged: it ends here."
        assert page.locator("#ranks tbody tr").count() == 3
        assert SECONDS - 5 < source.duration < SECONDS


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_axe_finds_no_fault_in_a_recording(
    new_page: Callable[..., Page], recording: Path, scheme: str, width: int
) -> None:
    page = new_page(color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True)
    with RecordedSource(recording) as source, DashServer(source, port=0) as server:
        page.goto(server.new_link())
        page.wait_for_selector("#player:visible")
        source.playing = False
        for position in (60.0, source.duration):  # all three train; one is lost
            source.seek(position)
            page.wait_for_selector(f"#ranks tr:nth-child(3)[data-state={'training' if position == 60 else 'lost'}]")
            assert faults_by_axe(page) == []


def test_every_control_of_a_recording_is_reached_by_tab(new_page: Callable[..., Page], recording: Path) -> None:
    page = new_page()
    with RecordedSource(recording) as source, DashServer(source, port=0) as server:
        page.goto(server.new_link())
        page.wait_for_selector("#player:visible")
        page.wait_for_selector("#ranks tbody tr:nth-child(3)")
        source.playing = False
        reached = reached_by_tab(page)
        assert {"play", "seek", "speed"} <= set(reached)
