"""What a launcher prints: each line with its rank, and in a summary who failed first."""

from __future__ import annotations

import io
import os

import pytest

from ringfort.children import Child, Output
from ringfort.launch.blame import Failure
from ringfort.launch.show import Printer, summary


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


class Numbered(Child):
    """A child that has a number and no process."""

    def __init__(self, number: int) -> None:
        self.number = number


def output(rank: int, *lines: bytes, is_error: bool = False) -> Output:
    return Output(Numbered(rank), is_error, list(lines))


def test_each_line_has_its_rank_in_front_and_goes_where_it_was_written() -> None:
    out, err = Stream(), Stream()
    printer = Printer(out, err)
    printer.set_world(12)
    printer.lines([output(3, b"one", b""), output(11, b"two", is_error=True)])
    assert out.text == "[ 3] one\n[ 3] \n"
    assert err.text == "[11] two\n"


def test_a_terminal_gets_a_colour_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Stream(tty=True)
    Printer(out, Stream()).lines([output(0, b"x"), output(1, b"x")])
    first, second, _ = out.text.split("\n")
    assert first.startswith("\x1b[36m[0]\x1b[0m ")
    assert first[:5] != second[:5]


def test_no_color_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = Stream(tty=True)
    Printer(out, Stream()).lines([output(0, b"x")])
    assert out.text == "[0] x\n"


def test_of_a_progress_bar_the_last_drawing_is_shown() -> None:
    out = Stream()
    Printer(out, Stream()).lines([output(0, b"\r10%\r20%\r100%", b"windows line\r")])
    assert out.text == "[0] 100%\n[0] windows line\n"


def test_bytes_that_are_no_text_are_passed_on() -> None:
    out = Stream()
    Printer(out, Stream()).lines([output(0, b"\xff\xfe")])
    assert out.buffer.getvalue() == b"[0] \xff\xfe\n"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_reader_that_went_away_is_noticed_once_and_hurts_no_more() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        printer = Printer(out, Stream())
        printer.lines([output(0, b"x")])
        assert printer.is_broken
        printer.lines([output(0, b"x")])


def test_the_summary_names_rank_machine_and_last_lines() -> None:
    failure = Failure("host-b", 3, rank=2, tail=("Traceback", "ValueError: x"))
    text = summary(failure, "host-a", stopped=2)
    assert "rank 2 on host-b failed first: it ended with exit code 3; stopped 2 others here" in text
    assert text.endswith("its last lines:\n    Traceback\n    ValueError: x")
    assert "rank 2 failed first" in summary(failure, "host-b", stopped=0)


def test_the_summary_of_a_victim_does_not_call_it_the_cause() -> None:
    assert "rank 2 lost another" in summary(Failure("a", 1, rank=2, is_victim=True), "a", stopped=1)


def test_the_summary_without_a_rank_says_why() -> None:
    assert (
        summary(Failure("b", 1, why="b is gone: silent"), "a", 1)
        == "ringfort run: b is gone: silent; stopped 1 rank here"
    )
