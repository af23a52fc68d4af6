"""Figures and texts for people: short, and without anything that a terminal would obey."""

from __future__ import annotations

import math

import pytest

from ringfort.telemetry.words import (
    bandwidth,
    clean,
    clean_output,
    clock,
    count,
    memory,
    percent,
    position,
    round_trip,
    step_time,
    two_digits,
    uptime,
    used_bandwidth,
)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (round_trip(None), ""),
        (round_trip(12e-6), "0.012 ms"),
        (bandwidth(None), ""),
        (bandwidth(1.25e9), "10 Gbit/s"),
        (bandwidth(117e6, (115e6, 118e6)), "936 Mbit/s"),
        (bandwidth(300e6, (92.75e6, 518.75e6)), "0.74-4.2 Gbit/s"),
        (bandwidth(5e6, (4e6, 8e6)), "32-64 Mbit/s"),
        (used_bandwidth(71e6 / 8, 84e6 / 8), "71 of 84 Mbit/s"),
        (used_bandwidth(0.4e9 / 8, 2.5e9 / 8), "0.4 of 2.5 Gbit/s"),
        (used_bandwidth(8.4e6 / 8, None), "8.4 Mbit/s"),
        (two_digits(9.97), "10"),
        (uptime(None), ""),
        (uptime(90), "90 s"),
        (uptime(7500), "2 h"),
        (step_time(0.00083), "0.83 ms"),
        (step_time(0.412), "412 ms"),
        (step_time(1.314), "1.31 s"),
        (step_time(75.2), "75 s"),
        (memory(11.8e9, 32e9), "12 of 32 GB"),
        (percent(0.384), "38%"),
        (count(0.414), "0.414"),
        (count(12800.4), "12,800"),
        (position(187.9), "3:07"),
        (position(3765), "1:02:45"),
        (position(math.inf), "?"),
        (clock(math.nan), ""),
        (clock(1e30), ""),
    ],
)
def test_numbers_are_short(found: str, words: str) -> None:
    assert found == words


def test_control_characters_become_question_marks() -> None:
    assert clean("a\x1b[2J\nb\u202ec\x07") == "a?[2J?b?c?"


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("\x1b[32mgreen\x1b[0m", "green"),
        ("10%\r20%\r30%\r\n", "30%"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b]0;a title that never ends", ""),
        ("a\tb", "a   b"),
        ("\x1b(0\x00bell\x07", "?(0?bell?"),
        ("[bold]as it is[/bold]", "[bold]as it is[/bold]"),
    ],
)
def test_a_line_of_output_is_what_a_terminal_would_leave_of_it(line: str, left: str) -> None:
    assert clean_output(line) == left
