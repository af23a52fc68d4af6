"""Messages about a run: a page that applies them has what a page has that begins now."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given, strategies as st

from ringfort.dashboard.web.feed import Feed, Playback, overlap
from ringfort.telemetry.view import Curve, LinkView, RunView, ShownEvent, ShownStep, Split
from tests.helpers.dash_source import many_ranks, three_machines


def applied(state: dict[str, Any], data: bytes) -> dict[str, Any]:
    """What static/state.js does. A browser test compares the two."""
    message: dict[str, Any] = json.loads(data)
    if message.pop("full", False):
        state = {"curves": {}, "timeline": {}, "events": {}, "links": {}}
    else:
        assert message["seq"] == state["seq"] + 1
    following = {**state, **message}
    for section in ("curves", "timeline", "events"):
        lists = dict(state[section])
        for key, change in message.get(section, {}).items():
            if change is None:
                del lists[key]
            else:
                kept = lists.get(key, [])[change["drop"] : change["drop"] + change["keep"]]
                lists[key] = kept + change["add"]
        following[section] = lists
    links = {**state["links"], **message.get("links", {})}
    following["links"] = {key: link for key, link in links.items() if link is not None}
    return following


def following(feed: Feed, state: dict[str, Any], view: RunView) -> dict[str, Any]:
    """Checks that the change and everything lead to the same, and returns it."""
    changed = applied(state, feed.take(view)) if state else None
    whole = applied({}, feed.everything())
    assert changed is None or changed == whole
    return whole


steps = st.lists(st.integers(0, 12), max_size=8)


@given(st.lists(st.tuples(steps, steps, steps), min_size=2, max_size=6))
def test_changes_lead_to_what_a_new_page_gets(history: list[tuple[list[int], list[int], list[int]]]) -> None:
    feed, state = Feed(), dict[str, Any]()
    feed.take(RunView(0.0))
    for now, (events, points, rank) in enumerate(history):
        view = RunView(
            float(now),
            events=tuple(ShownEvent(float(at), "joined", "here") for at in events),
            curves=(Curve("loss", [float(p) for p in points], points, [p / 2 for p in points]),) if points else (),
            timeline={0: tuple(ShownStep(n, n / 10, Split(compute=0.1)) for n in rank)} if rank else {},
            links=tuple(LinkView("a", str(n), float(now // 2)) for n in sorted(set(rank))),
        )
        state = following(feed, state or applied({}, feed.everything()), view)
        assert [event["at"] for event in state["events"][""]] == events
        assert [point[1] for point in state["curves"].get("loss", [])] == points
        assert [step[0] for step in state["timeline"].get("0", [])] == rank
        assert state["links"].keys() == {f"a|{n}" for n in rank}


@given(steps, steps)
def test_the_overlap_of_two_lists_is_where_the_new_one_begins(old: list[int], new: list[int]) -> None:
    drop, keep = overlap(old, new)
    assert old[drop : drop + keep] == new[:keep]


def test_what_grows_is_sent_once() -> None:
    feed = Feed()
    at = list(range(600))

    def view(points: list[int]) -> RunView:
        return RunView(0.0, curves=(Curve("loss", [float(p) for p in points], points, [1.0] * len(points)),))

    feed.take(view(at))
    message = json.loads(feed.take(view([*at[1:], 600])))
    assert message["curves"] == {"loss": {"drop": 1, "keep": 599, "add": [[600.0, 600, 1.0]]}}
    assert json.loads(feed.take(view([*at[1:], 600]))) == {"seq": 3, "now": 0.0}


def test_a_day_of_many_ranks_is_small_twice_a_second() -> None:
    feed, now = Feed(), 1_700_086_400.0
    feed.take(many_ranks(now))
    whole = len(feed.everything())
    change = max(len(feed.take(many_ranks(now + second / 2))) for second in range(1, 4))
    print(f"32 ranks: {whole / 1000:.0f} kB at first, then up to {change / 1000:.0f} kB twice a second")
    assert whole < 600_000
    assert change < 60_000


def test_numbers_that_json_lacks_become_null() -> None:
    view = RunView(0.0, curves=(Curve("loss", [1.0], [1], [None]),))
    strange = msgspec.structs.replace(three_machines(1.7e9), now=float("nan"))
    feed = Feed()
    feed.take(view)
    assert applied({}, feed.everything())["curves"]["loss"] == [[1.0, 1, None]]
    assert json.loads(feed.take(strange))["now"] is None


def test_a_recording_says_where_it_is() -> None:
    feed = Feed()
    feed.take(RunView(0.0), Playback(1.0, 60.0, True, 2.0))
    moved = json.loads(feed.take(RunView(0.0), Playback(2.0, 60.0, True, 2.0)))
    assert moved["playback"] == {"position": 2.0, "duration": 60.0, "playing": True, "speed": 2.0}
