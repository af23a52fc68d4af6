"""What stands in the picture of a run, in each state and size. Pure: no terminal and no Textual."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from ringfort.dashboard.drawing import ASCII
from ringfort.dashboard.picture import HELP, Section, picture, share_room, whole_picture
from ringfort.dashboard.playback import Played
from ringfort.dashboard.rank_section import window
from ringfort.dashboard.scene import Page, Scene
from ringfort.dashboard.states import without_replaced
from ringfort.telemetry.view import Curve, LinkView, RankView, RunView, ShownEvent, Split, Verdict
from tests.helpers.shown_runs import three_machines
from tests.helpers.telemetry import Rank, SimulatedRun

PAGES: tuple[Page, ...] = ("overview", "logs", "events", "help")


def shown(view: RunView | None, width: int = 80, height: int = 24, **scene: Any) -> str:
    return "\n".join(line.plain for line in picture(Scene(view, **scene), width, height))


def test_eighty_columns_and_24_lines_show_everything_that_matters() -> None:
    view = three_machines().view()
    text = shown(view)
    assert view.verdict.sentence
    assert view.verdict.sentence in " ".join(text.split())
    for words in (
        "step 60 of 5,000 (1%)  loss 0.1667  192 samples/s",
        "3 machines: 1.4 times the fastest alone",
        "RANKS  █ compute  ░ waiting  = wire  : data  % codec",
        "waits 30%   500 ms",
        "8 of 84 Mbit/s  Wi-Fi  2.1 ms",
        "laptop  CPU  35%  mem 16 of 16 GB  88 °C  battery 15%",
        "EVENTS",
        "q quit  ? help  l log  e events  p pause  ↑↓ rank",
    ):
        assert words in text
    assert "& seal" not in text  # no rank has any


def test_of_a_run_that_is_seen_in_part_the_figures_say_of_what_they_are() -> None:
    run = SimulatedRun([Rank("study"), Rank("attic"), Rank("laptop", compute=0.3, is_seen=False)])
    text = shown(run.advance(30))
    assert "2 of 3 ranks on 2 machines" in text
    assert "2 of 3 ranks are seen; up to 69% of each step" in text
    assert "200 samples/s of 2 ranks" in text
    for word in ("fastest", "link", "save"):
        assert word not in text.split("RANKS")[0]


def test_the_bars_tell_who_waits_for_whom() -> None:
    study, laptop = shown(three_machines().view()).splitlines()[6:8]
    assert study.startswith(">  0 study  ::██")
    assert "░" in study
    assert "░" not in laptop
    assert study.count("=") >= 10


@pytest.mark.parametrize("size", [(60, 20), (50, 14), (40, 10), (120, 40), (200, 60)])
@pytest.mark.parametrize("page", PAGES)
def test_every_size_has_a_picture_of_exactly_that_size(size: tuple[int, int], page: Page) -> None:
    view = replace(three_machines(3).view(), events=tuple(ShownEvent(1.0, "note", "x" * 200) for _ in range(99)))
    lines = picture(Scene(view, page=page, log=["y" * 300] * 99), *size)
    assert len(lines) == size[1]
    assert all(line.cell_len <= size[0] for line in lines)
    assert lines[-1].plain.startswith("q quit")
    assert "STOPPED" not in lines[0].plain


def test_sixty_columns_leave_columns_out_instead_of_breaking_them() -> None:
    text = shown(three_machines().view(), 60, 20)
    assert "waits 30%\n" in text
    assert "500 ms" not in text.split("LINKS")[0].splitlines()[8]
    assert "CPU  85%  mem 12 of 32 GB  GPU  97%  71 °C\n" in text  # the memory of the GPU has no room


@pytest.mark.parametrize("size", [(39, 24), (80, 9), (1, 1), (12, 3)])
def test_a_terminal_that_is_too_small_is_told_so(size: tuple[int, int]) -> None:
    lines = picture(Scene(three_machines(3).view()), *size)
    assert len(lines) == size[1]
    words = " ".join(line.plain for line in lines)
    assert f"This terminal has {size[0]}x{size[1]} characters; `ringfort top` needs 40x10" in words or size[0] < 39


def test_rows_that_have_no_room_are_counted_and_the_selected_one_is_shown() -> None:
    run = SimulatedRun([Rank(f"node-{number}") for number in range(32)])
    view = run.advance(3)
    text = shown(view, selected=view.ranks[20].key)
    assert "> 20 node-20" in text
    assert " of 32 shown, ↑↓" in text
    assert [window(32, at, 5) for at in (0, 16, 31)] == [(0, 5), (14, 19), (27, 32)]
    assert window(2, 1, 9) == (0, 2)
    for room in range(1, 12):
        height = [line.plain for line in picture(Scene(view, selected=view.ranks[31].key), 80, 9 + room)]
        assert any(line.startswith("> 31") for line in height)


def test_sections_get_what_they_need_in_order_of_importance_and_share_the_rest() -> None:
    def section(least: int, most: int) -> Section:
        return Section(least, most, lambda _: [])

    assert share_room([section(3, 9), section(2, 4), section(2, 99)], 12) == [5, 4, 3]
    assert share_room([section(3, 9), section(2, 4)], 4) == [4, 0]
    assert share_room([section(3, 9), section(2, 4)], 2) == [2, 0]
    assert share_room([section(1, 1)], 5) == [1]


# --- states -----------------------------------------------------------------------------------------------------------


def test_before_anybody_is_found_it_says_what_to_do() -> None:
    assert "Looking for runs on this machine and on the network" in shown(RunView(0.0), waited=1.0)
    text = shown(RunView(0.0, notice="Only this machine is seen: no network."), waited=60.0)
    for words in ("Nobody was found in 60 s", "ringfort run --local 2", "ringfort key join", "ringfort doctor"):
        assert words in text
    assert "! Only this machine is seen: no network." in text
    assert "l log" not in text


def test_a_run_that_is_not_there_is_named_with_those_that_are() -> None:
    text = shown(RunView(0.0, run="day", runs=("night", "noon")), wanted="day", waited=9.0)
    assert "The run day is not there. Runs that are there: night, noon. Press r" in text
    assert "r next run" in text


def test_a_lost_rank_is_told_in_a_sentence_and_in_its_row() -> None:
    run = three_machines()
    run.ranks[2].is_alive = False
    text = shown(run.advance(2))
    assert "! Rank 2 (attic) is lost: its process has ended. Its log may say why." in text
    assert "   2 attic  lost: its process has ended" in text
    assert "2 of 3 ranks on 2 machines" in text
    assert "attic → " not in text
    run.ranks[1].is_alive = False
    assert "Ranks 1 (laptop), 2 (attic) are lost: their processes have ended" in shown(run.advance(2))


def test_a_loss_is_seen_in_the_smallest_terminal() -> None:
    run = three_machines()
    run.ranks[2].is_alive = False
    view = replace(run.advance(2), notice="Only this machine is seen: no network. " * 3)
    text = shown(view, width=40, height=10, failure="It failed.")
    assert "! Rank 2 (attic) is lost: its process" in text
    assert "Its log may say why." in text


def test_a_rank_that_another_process_has_taken_over_is_shown_once() -> None:
    view = three_machines().view()
    ended = replace(view.ranks[1], key="laptop:1", state="lost")
    both = replace(view, ranks=(view.ranks[0], ended, *view.ranks[1:]))
    assert without_replaced(both) == view
    only_lost = replace(view, ranks=(view.ranks[0], ended))
    assert without_replaced(only_lost) == only_lost


def test_ranks_that_are_silent_or_send_nonsense_are_named() -> None:
    run = three_machines()
    run.history.nonsense("laptop", "laptop")
    text = shown(run.view())
    assert "! laptop sends reports that cannot be read" in text
    assert text.count("cannot be read") == 1
    assert "1 laptop cannot be understood; compare versions" in text
    assert "What rank 1 (laptop) sends cannot be understood" in shown(replace(run.view(), notice=""))
    run = three_machines()
    run.now += 12
    text = shown(run.view())
    assert "! Nothing was heard of ranks 0 (study), 1 (laptop), 2 (attic) for 12 s." in text
    assert "0 study  silent for 12 s" in text


def test_a_run_that_makes_no_steps_is_called_paused() -> None:
    run = three_machines()
    for rank in run.ranks:
        rank.compute = 1e6
    view = run.advance(8)
    text = shown(view)
    assert text.count("Paused: no rank has made a step for a while") == 1
    assert "paused   500 ms" in text or "paused     0 ms" in text
    assert "The run is paused" in shown(replace(view, verdict=Verdict()))


def test_learners_are_called_so() -> None:
    view = three_machines().view()
    learner = replace(view.ranks[2], state="learner")
    assert "learner" in shown(replace(view, ranks=(*view.ranks[:2], learner))).splitlines()[8]


def test_a_recording_says_where_it_is_when_it_ends_and_that_it_was_cut() -> None:
    view = replace(three_machines().view(), is_recording=True)
    assert "recording 3:07 of 12:40 at 4x" in shown(view, played=Played(187, 760, True, 4.0))
    text = shown(view, played=Played(187, 760, False))
    assert "recording 3:07 of 12:40, stopped" in text
    assert "←→ seek" in text
    cut = replace(view, notice="The recording was cut: 212 bytes at its end cannot be read.")
    text = shown(cut, played=Played(760, 760, False))
    assert "! The recording was cut: 212 bytes" in text
    assert "The recording ends here. The left arrow goes back; p plays it again." in text
    assert "The recording has no rank at this moment" in shown(RunView(0.0, is_recording=True), waited=99)


def test_a_source_that_fails_is_told_with_and_without_a_view() -> None:
    text = shown(three_machines().view(), failure="No view could be made. Disk full.")
    assert "! No view could be made. Disk full. The picture is the last one that is known." in text
    assert "RANKS" in text
    assert "! No view could be made. Disk full." in shown(None, failure="No view could be made. Disk full.")


def test_a_picture_that_was_stopped_says_so() -> None:
    text = shown(three_machines().view(), is_stopped=True)
    assert "STOPPED at " in text.splitlines()[0]
    assert "p continue" in text


# --- pages ------------------------------------------------------------------------------------------------------------


def test_the_log_of_the_selected_rank_is_below_the_bars() -> None:
    view = three_machines().view()
    log = [f"line {number}" for number in range(100)]
    text = shown(view, page="logs", selected=view.ranks[1].key, log=log)
    assert "LOG  rank 1 on laptop\n" in text
    assert "line 99\nq quit" in text
    older = shown(view, page="logs", selected=view.ranks[1].key, log=log, scroll=50)
    assert "LOG  rank 1 on laptop, 50 newer below" in older
    assert "line 49\nq quit" in older
    assert "line 0\n" in shown(view, page="logs", log=log, scroll=1000)
    assert "no output is known yet" in shown(view, page="logs")


def test_the_events_can_be_scrolled_through() -> None:
    events = tuple(ShownEvent(float(at), "note", f"event {at}", "study", 0) for at in range(100))
    view = replace(three_machines().view(), events=events)
    assert "event 99 (study rank 0)\nq quit" in shown(view, page="events")
    text = shown(view, page="events", scroll=30)
    assert "EVENTS  30 newer below" in text
    assert "event 69 (study rank 0)\nq quit" in text


def test_the_help_fits_sixty_columns_and_twenty_lines() -> None:
    text = shown(None, 60, 20, page="help")
    assert "…" not in text
    for key, what in HELP:
        assert key in text
        assert what in text


def test_a_large_terminal_has_a_curve_and_empty_lines() -> None:
    text = shown(three_machines().view(), 120, 40)
    assert "\n\nLOSS  5 → 0.1667 in 0:29\n" in text
    assert "\n\nLINKS\n" in text
    assert "sends 16 Mbit/s" in text


# --- what other machines send -----------------------------------------------------------------------------------------


def test_texts_of_other_machines_are_shown_and_not_obeyed() -> None:
    evil = "[red]x[/red]\x1b[2J\n\u202eevil"
    view = three_machines().view()
    rank = replace(view.ranks[0], name=evil, compression=evil)
    hostile = replace(
        view,
        run=evil,
        program=evil,
        ranks=(rank, *view.ranks[1:]),
        verdict=replace(view.verdict, sentence=evil),
        events=(ShownEvent(math.nan, evil, evil, evil),),
        curves=(Curve(evil, [0.0, 1.0], [0, 1], [0.0, 1.0]),),
        links=(LinkView("study", "attic", kind=evil),),
        runs=(evil, "b"),
        notice=evil,
    )
    for page in PAGES:
        text = shown(hostile, 120, 40, page=page, log=[evil])
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert len(text.splitlines()) == 40
    assert "[red]x[/red]?[2J??evil" in shown(hostile, 120, 40)
    assert "The run [red]x[/red]?[2J??evil is not there" in shown(RunView(0.0, runs=("b",)), wanted=evil)


FLOATS = st.floats(allow_nan=True, allow_infinity=True)
WORDS = st.text(max_size=12)
HOSTS = st.sampled_from(["a", "b", ""])
RANKS = st.builds(
    RankView,
    key=WORDS,
    rank=st.integers(-1, 1 << 40),
    name=WORDS,
    host=HOSTS,
    state=st.sampled_from(["training", "learner", "paused", "silent", "lost", "nonsense", "another"]),
    split=st.builds(Split, *[FLOATS] * 6),
    samples_per_second=FLOATS,
    heard=FLOATS,
    vitals=st.dictionaries(
        st.sampled_from(["cpu", "memory", "memory_total", "gpu", "gpu_memory_total", "temperature", "battery"]), FLOATS
    ),
    sent=FLOATS,
)
VIEWS = st.builds(
    RunView,
    now=FLOATS,
    run=WORDS,
    program=WORDS,
    verdict=st.builds(Verdict, sentence=WORDS, loss=FLOATS, eta=FLOATS, speed_up=FLOATS, steps_per_second=FLOATS),
    ranks=st.lists(RANKS, min_size=1, max_size=4).map(tuple),
    links=st.lists(st.builds(LinkView, HOSTS, HOSTS, FLOATS, st.none() | FLOATS, FLOATS, WORDS), max_size=3).map(tuple),
    events=st.lists(st.builds(ShownEvent, FLOATS, WORDS, WORDS, WORDS), max_size=3).map(tuple),
    curves=st.lists(
        st.lists(FLOATS, min_size=2, max_size=2).map(lambda v: Curve("loss", v, [0, 1], [*v])), max_size=1
    ).map(tuple),
    notice=WORDS,
)


@settings(max_examples=60)
@given(VIEWS, st.sampled_from(PAGES), st.integers(1, 130), st.integers(1, 40), st.integers(0, 9))
def test_whatever_machines_send_there_is_a_picture(
    view: RunView, page: Page, width: int, height: int, scroll: int
) -> None:
    lines = picture(Scene(view, page=page, scroll=scroll, log=["a", "b"]), width, height)
    assert len(lines) == height
    assert all(line.cell_len <= width for line in lines)
    assert all(line.plain.isprintable() for line in lines)


# --- as text ----------------------------------------------------------------------------------------------------------


def test_a_printout_has_all_rows_and_all_events() -> None:
    run = SimulatedRun([Rank(f"node-{number}") for number in range(20)])
    view = run.advance(5)
    text = "\n".join(line.plain for line in whole_picture(Scene(view, signs=ASCII), 100))
    assert all(f"node-{number} " in text for number in range(20))
    assert text.count("is here") == 19
    assert text.isascii()
    assert "Nobody was found" in whole_picture(Scene(RunView(0.0), waited=9), 80)[0].plain
