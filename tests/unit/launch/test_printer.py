"""What a launcher prints: each line with its rank, and in a summary who failed first."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

import pytest

from ringfort.launch.drawing import Row
from ringfort.launch.failure_report import Failure
from ringfort.launch.printer import DRAW_SECONDS, THIN_SECONDS, Printer, Shown, summary
from tests.helpers.terminal import Screen


class Stream(io.TextIOWrapper):
    """A text stream into memory that may claim to be a terminal."""

    def __init__(self, tty: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty

    @property
    def text(self) -> str:
        return self.buffer.getvalue().decode()  # pyright: ignore[reportAttributeAccessIssue]


def output(rank: int, *lines: bytes, is_error: bool = False, live: Sequence[Row] = ()) -> Shown:
    return Shown(rank, is_error, [Row(line, False) for line in lines], list(live))


def bar(text: bytes) -> Row:
    return Row(text, is_bar=True)


class Clock:
    """Time that passes when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def screen_of(*streams: Stream) -> list[str]:
    screen = Screen()
    for stream in streams:
        screen.feed(stream.text)
    return screen.rows


def test_each_line_has_its_rank_in_front_and_goes_where_it_was_written() -> None:
    out, err = Stream(), Stream()
    printer = Printer(out, err)
    printer.set_world(12)
    printer.show([output(3, b"one", b""), output(11, b"two", is_error=True)])
    assert out.text == "[ 3] one\n[ 3] \n"
    assert err.text == "[11] two\n"


def test_a_terminal_gets_a_colour_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Stream(tty=True)
    Printer(out, Stream()).show([output(0, b"x"), output(1, b"x")])
    first, second, _ = out.text.split("\n")
    assert first.startswith("\x1b[36m[0]\x1b[0m ")
    assert first[:5] != second[:5]


def test_no_color_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = Stream(tty=True)
    Printer(out, Stream()).show([output(0, b"x")])
    assert out.text == "[0] x\n"


# --- progress bars ----------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Stream:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    return Stream(tty=True)


def test_in_a_terminal_each_ranks_bar_stands_below_the_lines_and_is_drawn_over(terminal: Stream) -> None:
    clock = Clock()
    printer = Printer(terminal, terminal, clock)
    for percent in (b"1%", b"2%"):
        clock.now += DRAW_SECONDS
        printer.show([output(rank, live=[bar(percent)], is_error=True) for rank in (0, 1)])
    assert screen_of(terminal) == ["[0] 2%", "[1] 2%"]
    printer.show([output(0, b"a line")])
    assert screen_of(terminal) == ["[0] a line", "[0] 2%", "[1] 2%"]
    printer.say("words")
    printer.show([Shown(0, True, [bar(b"100%")], [])])
    assert screen_of(terminal) == ["[0] a line", "ringfort run: words", "[0] 100%", "[1] 2%"]
    printer.show([Shown(1, True, [bar(b"100%")], [])])
    printer.finish()
    assert screen_of(terminal) == ["[0] a line", "ringfort run: words", "[0] 100%", "[1] 100%", ""]


def test_bars_are_drawn_no_more_often_than_the_eye_needs(terminal: Stream) -> None:
    clock = Clock()
    printer = Printer(terminal, terminal, clock)
    printer.show([output(0, live=[bar(b"1%")])])
    printer.show([output(0, live=[bar(b"2%")])])
    assert screen_of(terminal) == ["[0] 1%"]
    clock.now += DRAW_SECONDS
    printer.show([])
    assert screen_of(terminal) == ["[0] 2%"]


def test_rows_that_are_too_wide_are_cut_and_what_moves_the_cursor_is_left_out(terminal: Stream) -> None:
    printer = Printer(terminal, terminal, Clock())
    printer.show([output(0, live=[bar("\u2588".encode() * 200), bar(b"a\x08\tb\x07"), bar(b"\x1b[31mred")])])
    first, second, third = screen_of(terminal)
    assert first == "[0] " + 75 * "\u2588"
    assert second == "[0] a \tb "
    assert third == "[0] red"
    assert "\x1b[31mred\x1b[0m" in terminal.text


def test_more_rows_than_the_terminal_has_are_counted(terminal: Stream) -> None:
    printer = Printer(terminal, terminal, Clock())
    printer.show([output(rank, live=[bar(b"1%")]) for rank in range(40)])
    rows = screen_of(terminal)
    assert len(rows) == 23
    assert rows[-1] == "... and 18 more"


def test_the_status_stands_below_everything_else_and_is_gone_at_the_end(terminal: Stream) -> None:
    clock = Clock()
    printer = Printer(terminal, terminal, clock)
    assert printer.has_terminal
    printer.status = "step 1"
    printer.show([output(0, b"a line", live=[bar(b"1%")])])
    assert screen_of(terminal) == ["[0] a line", "[0] 1%", "step 1"]
    clock.now += DRAW_SECONDS
    printer.status = "step 2 \u00b7 loss " + 100 * "9"
    printer.show([output(1, live=[bar(b"2%")])])
    assert screen_of(terminal) == ["[0] a line", "[0] 1%", "[1] 2%", ("step 2 \u00b7 loss " + 100 * "9")[:79]]
    printer.say("words")
    assert screen_of(terminal)[1:3] == ["ringfort run: words", "[0] 1%"]
    printer.finish()
    assert screen_of(terminal) == ["[0] a line", "ringfort run: words", ""]


def test_the_status_keeps_its_row_when_there_are_too_many_bars(terminal: Stream) -> None:
    printer = Printer(terminal, terminal, Clock())
    printer.status = "step 1"
    printer.show([output(rank, live=[bar(b"1%")]) for rank in range(40)])
    rows = screen_of(terminal)
    assert len(rows) == 23
    assert rows[-2:] == ["... and 19 more", "step 1"]


def test_a_terminal_that_was_made_narrower_has_no_ghosts(terminal: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, screen = Clock(), Screen()
    printer = Printer(terminal, terminal, clock)
    printer.status = "step 1 " + "\u00b7" * 60
    printer.show([output(0, b"a line", live=[bar(b"x" * 70), bar(b"short")])])
    screen.feed(terminal.text)
    before = len(terminal.text)
    monkeypatch.setenv("COLUMNS", "30")
    screen.wrap(30)
    assert len(screen.rows) == 8
    clock.now += DRAW_SECONDS
    printer.status = "step 2"
    printer.show([output(0, live=[bar(b"y" * 70)])])
    screen.feed(terminal.text[before:])
    assert screen.rows == ["[0] a line", "[0] " + 25 * "y", "step 2"]


def test_without_a_terminal_no_status_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = Stream(), Stream()
    printer = Printer(out, err, Clock())
    printer.status = "step 1"
    printer.show([output(0, b"x")])
    printer.finish()
    assert (out.text, err.text, printer.has_terminal) == ("[0] x\n", "", False)
    monkeypatch.setenv("TERM", "dumb")
    assert not Printer(Stream(tty=True), Stream(tty=True)).has_terminal


def test_lines_that_go_to_a_file_do_not_disturb_the_bars_in_the_terminal(terminal: Stream) -> None:
    out = Stream()
    printer = Printer(out, terminal, Clock())
    printer.show([output(0, live=[bar(b"1%")], is_error=True)])
    drawn = terminal.text
    printer.show([output(0, b"a line")])
    assert (out.text, terminal.text) == ("[0] a line\n", drawn)


def test_in_a_file_a_bar_is_a_line_now_and_then_and_when_it_is_final() -> None:
    out, clock = Stream(), Clock()
    printer = Printer(out, Stream(), clock)
    for second in range(13):
        printer.show([output(0, live=[bar(b"%d s" % second)])])
        clock.now += 1.0
    assert out.text == "[0] 5 s\n[0] 10 s\n"
    printer.show([Shown(0, False, [bar(b"13 s")], [])])
    assert out.text == "[0] 5 s\n[0] 10 s\n[0] 13 s\n"


def test_in_a_file_what_a_bar_last_said_is_not_said_twice_and_unfinished_lines_wait() -> None:
    out, clock = Stream(), Clock()
    printer = Printer(out, Stream(), clock)
    printer.show([output(0, live=[bar(b"99%"), Row(b"name: ", is_bar=False)])])
    for _ in range(3):
        clock.now += THIN_SECONDS
        printer.show([])
    assert out.text == "[0] 99%\n"
    printer.show([Shown(0, False, [bar(b"99%"), Row(b"name: x", is_bar=False)], [])])
    assert out.text == "[0] 99%\n[0] name: x\n"


def test_bytes_that_are_no_text_are_passed_on() -> None:
    out = Stream()
    Printer(out, Stream()).show([output(0, b"\xff\xfe")])
    assert out.buffer.getvalue() == b"[0] \xff\xfe\n"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_reader_that_went_away_is_noticed_once_and_hurts_no_more() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        printer = Printer(out, Stream())
        printer.show([output(0, b"x")])
        assert printer.is_broken
        printer.show([output(0, b"x")])


def test_the_summary_names_rank_machine_and_last_lines() -> None:
    failure = Failure("host-b", 3, rank=2, tail=("Traceback", "ValueError: x"))
    text = summary(failure, "host-a", stopped=2)
    assert "rank 2 on host-b failed first: it ended with exit code 3; stopped 2 others here" in text
    assert text.endswith("its last lines:\n    Traceback\n    ValueError: x")
    assert "rank 2 failed first" in summary(failure, "host-b", stopped=0)


def test_the_summary_of_a_victim_does_not_call_it_the_cause() -> None:
    assert "rank 2 lost another" in summary(Failure("a", 1, rank=2, is_victim=True), "a", stopped=1)


def test_the_summary_without_a_rank_says_why() -> None:
    assert summary(Failure("b", 1, why="b is gone: silent"), "a", 1) == "b is gone: silent; stopped 1 rank here"


def test_the_summary_says_that_it_starts_again() -> None:
    text = summary(Failure("b", -9, rank=1), "a", 1, "starting again, 1 of 2")
    assert text.endswith(
        "rank 1 on b failed first: it was killed by SIGKILL; stopped 1 other here; starting again, 1 of 2"
    )
