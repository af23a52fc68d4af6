"""The page of `ringfort dash` in a real browser, with made-up runs."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

from ringfort.cli.dash import redirect_to
from ringfort.dashboard.web.feed import Feed
from ringfort.dashboard.web.hub import MAX_VIEWERS
from ringfort.dashboard.web.security import LINK_SECONDS, Keys
from ringfort.dashboard.web.server import DashServer
from ringfort.telemetry.records import Event
from ringfort.telemetry.report import ROW
from ringfort.telemetry.view import Curve, LinkView, RunView, ShownEvent, ShownStep, Split
from tests.helpers.agents import until
from tests.helpers.dash_source import BEGUN, LOGS, ShownSource, has_ended, many_ranks, nothing_yet, three_machines
from tests.helpers.telemetry import Rank, SimulatedRun
from tests.integration.conftest import faults_by_axe, picture, reached_by_tab

if TYPE_CHECKING:
    from playwright.sync_api import Page

NewPage = Callable[..., "Page"]


@contextmanager
def shown(page: Page, make: Callable[[float], RunView] = three_machines, **options: Any) -> Iterator[DashServer]:
    """Serve a run, and open its link."""
    with ShownSource(make, LOGS) as source, DashServer(source, port=0, **options) as server:
        opened(page, server)
        yield server


def opened(page: Page, server: DashServer) -> None:
    page.goto(server.new_link())
    page.wait_for_selector("#status[data-state=live]")
    page.wait_for_selector("#figures .value:not(:empty)")  # the first frame


def text(page: Page, selector: str) -> str:
    return page.locator(selector).inner_text()


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_it_shows_the_run_and_asks_no_other_host(new_page: NewPage) -> None:
    page = new_page()
    with shown(page):
        assert text(page, "#sentence").endswith("compression int8 would save about 130 ms.")
        assert text(page, "#sentence strong") == "laptop"
        assert text(page, "#title") == "language-model"
        assert page.locator("#figures dt").all_inner_texts() == ["Step", "Loss", "Throughput", "Time left", "Speed-up"]
        assert page.locator("#figures .value").all_inner_texts()[2] == "343"
        assert page.locator("#ranks tbody .name").all_inner_texts() == ["study", "attic", "laptop"]
        assert page.locator("#ranks .bar").first.get_attribute("aria-label").startswith("data 1%, compute 35%")
        assert page.locator("#graph .node .below").all_text_contents() == ["study", "attic", "laptop"]
        assert "36.8 of 84 Mbit/s" in page.locator("#graph .labels").text_content()
        assert page.locator("#vitals tbody tr").count() == 3
        assert page.locator("#events li").count() == 6
        page.locator("#output-panel").scroll_into_view_if_needed()
        page.wait_for_selector("#log:has-text('step 12390')")
        assert page.locator(".uplot canvas").count() == 2


def test_of_a_run_that_is_seen_in_part_it_names_nobody(new_page: NewPage) -> None:
    run = SimulatedRun([Rank("study"), Rank("attic"), Rank("laptop", compute=0.3, is_seen=False)])
    run.advance(30)
    page = new_page()
    with shown(page, lambda _: run.view()):
        assert text(page, "#sentence").startswith(
            "2 of 3 ranks are seen; up to 69% of each step is spent in collectives"
        )
        assert page.locator("#sentence strong").count() == 0
        notes = page.locator("#figures .note").all_inner_texts()
        assert [notes[2], notes[4]] == ["samples/s of 2 of 3 ranks", "not all ranks are seen"]
        assert page.locator("#figures .value").all_inner_texts()[4] == "\N{EN DASH}"
        assert page.locator(".culprit").count() == 0
        picture(page, "seen-in-part")


def test_text_of_other_machines_stays_text(new_page: NewPage) -> None:
    bad = "<img src=x onerror=alert(1)>"

    def hostile(now: float) -> RunView:
        view = three_machines(now)
        return msgspec.structs.replace(
            view,
            run=bad,
            program=bad,
            notice=bad,
            runs=(bad, "other"),
            verdict=msgspec.structs.replace(view.verdict, sentence=f"{bad} waits", culprit=bad),
            ranks=tuple(msgspec.structs.replace(rank, name=bad, key=bad + rank.key) for rank in view.ranks),
            events=(ShownEvent(now, bad, bad, bad),),
            curves=(*view.curves, *(Curve(name, [now], [1], [1.0]) for name in (bad, "constructor", "__proto__"))),
        )

    page = new_page()
    with shown(page, hostile):
        assert text(page, "#sentence").endswith(f"{bad} waits")
        assert text(page, "#events .text") == bad
        assert page.locator("img").count() == 1, "only the mark of the page itself"
        assert {bad, "constructor", "__proto__"} < set(page.locator("#value option").all_inner_texts())


@pytest.mark.parametrize("width", [1440, 390])
def test_long_and_foreign_names_leave_room_for_the_rest(new_page: NewPage, width: int) -> None:
    names = {"study": "\u0645\u062e\u062a\u0628\u0631-3", "attic": "\N{MICROSCOPE}" * 30, "laptop": "kitchen-" * 8}

    def named(now: float) -> RunView:
        view = three_machines(now)
        return msgspec.structs.replace(
            view,
            ranks=tuple(msgspec.structs.replace(rank, name=names[rank.name]) for rank in view.ranks),
            events=tuple(msgspec.structs.replace(event, name=names[event.name]) for event in view.events),
            verdict=msgspec.structs.replace(view.verdict, sentence="Rank 1 waits for laptop.", culprit="rank 1"),
        )

    page = new_page(viewport={"width": width, "height": 1000})
    with shown(page, named):
        assert text(page, "#sentence strong") == "Rank 1"
        for selector in ("#events .text", "#ranks .bar"):
            boxes = [node.bounding_box() for node in page.locator(selector).all()]
            assert min(box["width"] for box in boxes if box) > 60, selector
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        picture(page, f"names-{width}")


def test_a_run_that_has_ended_keeps_its_last_picture(new_page: NewPage) -> None:
    page = new_page()
    with shown(page, has_ended):
        page.focus("#timeline-canvas")
        page.keyboard.press("ArrowLeft")
        assert text(page, "#timeline-readout").startswith("rank 0 on study, step ")
        assert not page.locator("#links-details").is_visible(), "there is no link"
        picture(page, "ended")


def test_before_anything_is_found_it_says_so(new_page: NewPage) -> None:
    page = new_page()
    with shown(page, nothing_yet):
        assert text(page, "#sentence") == "No rank has been seen yet."
        assert "ringfort.log(loss=...)" in text(page, "#value-empty")
        assert text(page, "#notice") == "Nobody else was found on this network."
        picture(page, "nothing-yet")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("size", "width", "height"), [("wide", 1440, 1000), ("narrow", 390, 844)])
def test_pictures(new_page: NewPage, scheme: Any, size: str, width: int, height: int) -> None:
    for name, make in (("three", three_machines), ("many", many_ranks)):
        page = new_page(color_scheme=scheme, viewport={"width": width, "height": height})
        with shown(page, make):
            page.locator("#output-panel").scroll_into_view_if_needed()
            page.wait_for_selector("#log:not(:empty)")
            page.evaluate("() => scrollTo(0, 0)")
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
            picture(page, f"{name}-{size}-{scheme}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_axe_finds_no_fault(new_page: NewPage, scheme: Any, width: int) -> None:
    # axe makes HTML, which the policy of the page forbids.
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}, "bypass_csp": True}
    for make in (three_machines, many_ranks, has_ended, nothing_yet):
        page = new_page(**options)
        with shown(page, make) as server:
            if make in (three_machines, many_ranks):  # the others have no links
                page.locator("summary").click()
            assert faults_by_axe(page) == []
            page.goto(f"{server.site.origin}/static/closed.html")
            assert faults_by_axe(page) == []
            page.goto(f"{server.site.origin}/open#wrong")
            page.wait_for_selector("#help:visible")
            assert faults_by_axe(page) == []


# --- controls ---------------------------------------------------------------------------------------------------------


def test_every_control_is_reached_by_tab_and_its_focus_is_seen(new_page: NewPage) -> None:
    page = new_page()
    with shown(page):
        assert len(reached_by_tab(page)) > 20


def test_controls_work_by_keyboard(new_page: NewPage) -> None:
    page = new_page(color_scheme="light")
    with shown(page):
        page.focus("#theme")
        page.keyboard.press("d")
        assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"
        assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(13, 16, 21)"
        page.reload()
        page.wait_for_selector("#status[data-state=live]")
        assert page.evaluate("() => document.documentElement.dataset.theme") == "dark", "it is remembered"

        page.focus("#value")
        page.keyboard.press("ArrowDown")
        assert text(page, "#value-title") == "lr"
        page.focus("#logarithmic")
        page.keyboard.press("Space")
        assert page.is_checked("#logarithmic")
        page.focus("#over")
        page.keyboard.press("s")
        page.focus("#value-chart")
        page.keyboard.press("End")
        last = text(page, "#value-readout")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert " at step " in last
        assert text(page, "#value-readout") != last

        page.focus("#timeline-canvas")
        page.keyboard.press("ArrowLeft")
        first = text(page, "#timeline-readout")
        page.keyboard.press("ArrowDown")
        assert first.startswith("rank 0 on study, step ")
        assert text(page, "#timeline-readout").startswith("rank 1 on attic, step ")
        page.focus("#timeline-steps")
        page.keyboard.press("a")
        assert page.input_value("#timeline-steps") == "128"

        node = page.locator("#graph .node").nth(2)
        node.focus()
        page.keyboard.press("Enter")
        assert node.get_attribute("aria-pressed") == "true"
        assert page.locator("#graph .edges > *").count() == 2
        page.locator("summary").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("#links tbody tr:nth-child(4)")
        node.focus()
        page.keyboard.press("Space")
        page.wait_for_selector("#links tbody tr:nth-child(6)")

        page.get_by_role("button", name="Output of rank 1").focus()
        page.keyboard.press("Enter")
        assert page.input_value("#log-rank") == "1"
        assert page.evaluate("() => document.activeElement.id") == "log"
        page.focus("#log-follow")
        page.keyboard.press("Space")
        assert not page.is_checked("#log-follow")


def test_steps_that_were_not_sent_are_marked_or_not_shown(new_page: NewPage) -> None:
    def thinned(_: float) -> RunView:
        view = three_machines(BEGUN + 1e6)  # no step comes while the keys are pressed
        timeline = {
            rank: tuple(step for step in steps if step.number // ROW % 2 == 0) for rank, steps in view.timeline.items()
        }
        return msgspec.structs.replace(view, timeline=timeline)

    page = new_page()
    with shown(page, thinned):
        mark = page.locator("#timeline-unsent")
        page.focus("#timeline-canvas")
        numbers: list[int] = []
        for _ in range(12):
            page.keyboard.press("ArrowLeft")
            numbers.append(int(re.findall(r"step ([\d,]+)", text(page, "#timeline-readout"))[0].replace(",", "")))
        assert mark.is_hidden()
        assert all(number // ROW == numbers[0] // ROW for number in numbers), "twelve that follow each other"
        page.select_option("#timeline-steps", "128")
        mark.wait_for(state="visible")
        picture(page, "thinned")


def test_the_timeline_has_even_edges(new_page: NewPage) -> None:
    def uneven(now: float) -> RunView:
        view = three_machines(now)
        timeline = {
            rank: tuple(
                ShownStep(step.number, step.start + 0.1 * rank, Split(0.3 + 0.1 * rank, wire=0.1)) for step in steps
            )
            for rank, steps in view.timeline.items()
        }
        return msgspec.structs.replace(view, timeline=timeline)

    page = new_page()
    with shown(page, uneven):
        page.wait_for_timeout(600)
        found = page.evaluate(
            """() => {
              const canvas = document.querySelector("#timeline-canvas canvas");
              const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
              const opaque = (x, y) => data[4 * (y * canvas.width + x) + 3] === 255;
              return [0, 1, 2].map((row) => [135, canvas.width - 4].map((x) => opaque(x, 4 + 28 * row + 14)));
            }"""
        )
        assert found == [[True, True]] * 3


def test_another_run_is_chosen(new_page: NewPage) -> None:
    page = new_page()
    asked: list[str | None] = []

    class Source(ShownSource):
        def view(self, run: str | None = None) -> RunView:
            asked.append(run)
            return msgspec.structs.replace(three_machines(time.time()), run=run or "language-model")

    with DashServer(Source(three_machines), port=0) as server:
        opened(page, server)
        page.focus("#run")
        page.keyboard.press("v")
        page.wait_for_selector("#title:has-text('vision')")
        until(lambda: server.viewers == 1, "the connection for the first run stays open")
        asked.clear()
        until(lambda: len(asked) >= 2, "no view is made")
        assert set(asked) == {"vision"}


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_link_that_was_used_or_is_incomplete_says_so(new_page: NewPage) -> None:
    page, other = new_page(), new_page()
    with ShownSource(three_machines) as source, DashServer(source, port=0) as server:
        link = server.new_link()
        page.goto(link)
        page.wait_for_selector("#ranks tbody tr")
        assert page.url == f"{server.site.origin}/"
        other.goto(link)
        other.wait_for_selector("#text:has-text('was used before')")
        assert "press Enter" in text(other, "#help")
        assert other.url == f"{server.site.origin}/open", "the secret is not left in the address line"
        other.goto("about:blank")
        other.goto(f"{server.site.origin}/open")
        other.wait_for_selector("#text:has-text('missing')")
        other.goto(f"{server.site.origin}/")
        assert "type ringfort dash" in text(other, "main")
        picture(other, "no-access")


def test_an_expired_link_says_so_and_how_to_get_another(new_page: NewPage) -> None:
    page, later = new_page(), [0.0]
    keys = Keys(lambda: later[0])
    with ShownSource(three_machines) as source, DashServer(source, port=0, keys=keys) as server:
        link = server.new_link()
        later[0] = LINK_SECONDS + 1
        page.goto(link)
        page.wait_for_selector("#text:has-text('This link has expired. Each link is for 60 seconds.')")
        assert "press Enter. It prints a new link" in text(page, "#help")
        picture(page, "expired-link")
        opened(page, server)  # the next link lets in


def test_the_file_that_opens_a_browser_leads_to_the_page(new_page: NewPage) -> None:
    page = new_page()
    with ShownSource(three_machines) as source, DashServer(source, port=0) as server:
        with redirect_to(server.new_link()) as file:
            page.goto(file.as_uri())
            page.wait_for_selector("#status[data-state=live]")
        assert page.url == f"{server.site.origin}/"


def test_a_browser_with_the_cookie_and_without_the_key_sees_nothing(new_page: NewPage) -> None:
    page = new_page()
    with shown(page) as server:
        page.evaluate("() => localStorage.removeItem('ringfort-page')")
        page.reload()
        page.wait_for_selector("#status[data-state=closed]")
        assert page.locator("#ranks tbody tr").count() == 0
        opened(page, server)


def test_a_page_waits_for_its_server_and_recovers(new_page: NewPage) -> None:
    page = new_page()
    keys = Keys()
    with shown(page, keys=keys) as server:
        port = server.site.port
    page.wait_for_selector("#status[data-state=lost]")
    assert "type ringfort dash" in text(page, "#banner")
    assert page.locator("#ranks tbody tr").count() == 3, "the last view stays"
    picture(page, "not-connected")
    with ShownSource(many_ranks) as source, DashServer(source, port=port, keys=keys):
        page.wait_for_selector("#status[data-state=live]")
        page.wait_for_selector("#ranks tbody tr:nth-child(32)")
        assert page.locator("#banner").is_hidden()
    with ShownSource(three_machines) as source, DashServer(source, port=port) as strange:
        page.wait_for_selector("#status[data-state=closed]")
        assert "press Enter" in text(page, "#banner")
        # A new link, in another tab of the same browser, is enough for this page too.
        tab = page.context.new_page()
        tab.goto(strange.new_link())
        page.wait_for_selector("#status[data-state=live]")


def test_a_page_that_slept_for_an_hour_connects_again(new_page: NewPage) -> None:
    page = new_page()
    page.clock.install()
    streams: list[str] = []
    page.on("request", lambda request: streams.append(request.url) if "/api/events" in request.url else None)
    with shown(page):
        assert len(streams) == 1
        # The machine wakes up: an hour is over, and the connection has said nothing in it.
        with page.expect_request("**/api/events"):
            page.clock.fast_forward("01:00:00")
        page.wait_for_selector("#status[data-state=live]")
        assert len(streams) == 2


def test_a_page_that_was_dropped_comes_back(new_page: NewPage) -> None:
    page = new_page()
    with shown(page) as server, ExitStack() as stack:
        [cookie] = page.context.cookies()
        key = page.evaluate("() => localStorage.getItem('ringfort-page')")
        headers = {"cookie": f"{cookie['name']}={cookie['value']}", "ringfort-page": key}
        with page.expect_request("**/api/events"):
            for _ in range(MAX_VIEWERS):  # so that there is no room for the oldest, which is the page
                other = stack.enter_context(closing(HTTPConnection("127.0.0.1", server.site.port)))
                other.request("GET", "/api/events", headers=headers)
                stack.enter_context(closing(other.getresponse()))
        page.wait_for_selector("#status[data-state=live]")


def test_a_page_that_is_open_for_a_night_does_not_grow(new_page: NewPage) -> None:
    """As many views as in ten minutes, with events and steps that never repeat."""
    page = new_page()
    begun = 1_700_000_000.0
    step = iter(range(10**9))

    def later(_: float) -> RunView:
        now = begun + 5 * next(step)
        view = three_machines(now)
        noise = random.Random(now)
        events = tuple(ShownEvent(now - n, "epoch", f"epoch {noise.random()}", "a") for n in range(200))
        return msgspec.structs.replace(view, events=events)

    with shown(page, later, interval=0.002):
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")

        def size() -> dict[str, float]:
            session.send("HeapProfiler.collectGarbage")
            metrics = session.send("Performance.getMetrics")["metrics"]
            return {one["name"]: one["value"] for one in metrics}

        def views(number: int) -> None:
            goal = next(step) + number
            while next(step) < goal:
                page.wait_for_timeout(100)

        views(200)
        before = size()
        views(1200)
        after = size()
        heap, nodes = [[one[name] for one in (before, after)] for name in ("JSHeapUsedSize", "Nodes")]
        print(f"1200 views: heap {heap[0] / 1e6:.1f} -> {heap[1] / 1e6:.1f} MB, nodes {nodes[0]:.0f} -> {nodes[1]:.0f}")
        assert heap[1] < heap[0] + 3e6
        assert nodes[1] < nodes[0] * 1.5 + 500


# --- a day of many ranks ----------------------------------------------------------------------------------------------


def test_the_page_applies_messages_as_the_tests_of_the_feed_do(new_page: NewPage) -> None:
    page = new_page()
    feed, begun = Feed(), 1_700_080_000.0
    feed.take(many_ranks(begun, 4))
    messages = [feed.everything(), *(feed.take(many_ranks(begun + at / 3, 4)) for at in range(1, 20))]
    messages += [feed.take(three_machines(begun)), feed.take(nothing_yet(begun)), feed.take(three_machines(begun))]
    with shown(page):
        found = page.evaluate(
            "async (messages) => { const { apply, empty } = await import('/static/state.js');"
            " return JSON.stringify(messages.reduce((state, one) => apply(state, JSON.parse(one)), empty())); }",
            [one.decode() for one in messages],
        )
    state, wanted = json.loads(found), json.loads(feed.everything())
    assert state["events"] == wanted["events"][""]["add"]
    for section in ("curves", "timeline"):
        assert state[section] == {key: change["add"] for key, change in wanted[section].items()}
    for section in ("ranks", "links", "verdict", "notice", "seq"):
        assert state[section] == wanted[section]


HOUR = 3600.0
MEASURE_FRAMES = """async () => {
  const times = [];
  await new Promise((done) => {
    const begin = performance.now();
    const frame = (now) => { times.push(now); now - begin < 6000 ? requestAnimationFrame(frame) : done(); };
    requestAnimationFrame(frame);
  });
  const gaps = times.slice(1).map((time, index) => time - times[index]).sort((a, b) => a - b);
  return { rate: 1000 * gaps.length / (times.at(-1) - times[0]), worst: gaps.at(-1),
           late: gaps[Math.floor(gaps.length * 0.99)] };
}"""


class SimulatedSource:
    """A `Source` that shows a simulated run. `pass_time` lets hours pass in it; otherwise it keeps time."""

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._looked_at = time.monotonic()

    def pass_time(self, seconds: float) -> None:
        with self._lock:
            self._run.advance(seconds)
            rank = self._run.ranks[int(self._run.now) % len(self._run.ranks)]
            checkpoint = Event(self._run.now, "checkpoint", f"a checkpoint at {self._run.now:.0f}")
            self._run.history.take(self._run.report(rank, [], [checkpoint]))
            self._looked_at = time.monotonic()

    def view(self, run: str | None = None) -> RunView:
        with self._lock:
            now = time.monotonic()
            elapsed, self._looked_at = now - self._looked_at, now
            return self._run.advance(elapsed)

    def log(self, rank: int, run: str | None = None) -> list[str]:
        return []

    def close(self) -> None:
        pass

    def __enter__(self) -> SimulatedSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def browser_memory(page: Page) -> float:
    """The bytes of all that the page's scripts hold."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    used = session.send("Runtime.getHeapUsage")["usedSize"]
    session.detach()
    return used


@pytest.mark.timeout(1800)  # two and a half million reports
def test_a_day_of_32_ranks_takes_no_more_memory_and_has_30_frames_a_second(new_page: NewPage) -> None:
    names = [f"node-{number:02}" for number in range(32)]
    links = [LinkView(a, b, 0.0, 1.17e8, 2e-4, "Ethernet") for a in names for b in names if a != b]
    ranks = [Rank(name, compute=0.9 + n / 1000, vitals={"cpu": 0.5, "memory": 1e9}) for n, name in enumerate(names)]
    source = SimulatedSource(SimulatedRun(ranks, wire=0.05, links=links, total_steps=10**9))
    page, process = new_page(), psutil.Process()
    with DashServer(source, port=0) as server:
        source.pass_time(HOUR)
        opened(page, server)
        page.select_option("#timeline-steps", "128")
        page.locator("summary").click()
        page.wait_for_selector("#links tbody tr:nth-child(992)")
        for _ in range(6):
            source.pass_time(HOUR / 6)
            page.wait_for_timeout(500)
        heap, resident = browser_memory(page), process.memory_info().rss
        for _ in range(6 * 22):
            source.pass_time(HOUR / 6)
            page.wait_for_timeout(500)
        heap_grew, grew = browser_memory(page) - heap, process.memory_info().rss - resident
        print(f"\nfrom 2 h to 24 h: this process {resident / 1e6:.0f} MB, {grew / 1e6:+.1f} MB;")
        print(f"scripts of the page {heap / 1e6:.1f} MB, {heap_grew / 1e6:+.1f} MB")

        for rank in ranks:  # more steps a second than a page draws frames
            rank.compute -= 0.88
        source.pass_time(60)
        page.wait_for_timeout(1000)
        session = page.context.new_cdp_session(page)
        # The processor time of the main thread: of its own work, whatever else the machine does.
        session.send("Performance.enable", {"timeDomain": "threadTicks"})

        def used() -> float:
            return {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}[
                "TaskDuration"
            ]

        before, begun = used(), time.monotonic()
        found = page.evaluate(MEASURE_FRAMES)
        work = (used() - before) / (time.monotonic() - begun)
        late, worst = found["late"], found["worst"]
        print(f"32 ranks, 24 h: {found['rate']:.0f} frames/s, 99% within {late:.0f} ms, worst {worst:.0f} ms")
        print(f"processor time of the page: {1000 * work:.0f} ms a second")
        assert found["rate"] >= 30
        assert grew < 10e6
        assert heap_grew < 2e6  # 150 more events
