"""Bars and texts of an exact width: what is drawn adds up, and nothing is wider than it may be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st
from rich.cells import cell_len

from ringfort.dashboard.drawing import (
    ASCII,
    PARTS,
    UNICODE,
    chop,
    cut,
    fit,
    meter,
    share,
    shorten,
    signs_for,
    sparkline,
    split_bar,
    split_cells,
    wrap,
)
from ringfort.telemetry.view import Split

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
SPLITS = st.builds(Split, *[ANY_FLOAT] * 6)


def test_a_bar_has_the_parts_of_a_step_in_the_order_in_which_they_happen() -> None:
    split = Split(compute=0.4, data=0.1, waiting=0.2, wire=0.3)
    assert split_bar(split, 1.0, 10, UNICODE).plain == ":████░░==="
    assert split_bar(split, 1.0, 10, ASCII).plain == ":####..==="
    assert split_bar(split, 2.0, 20, UNICODE).plain == ":████░░==="  # half of the longest step


def test_every_part_has_a_sign_of_its_own_so_that_colours_are_not_needed() -> None:
    for signs in (UNICODE, ASCII):
        assert len({signs.parts[part] for part in PARTS}) == len(PARTS)
        assert all(len(sign) == 1 for sign in signs.parts.values())


@given(SPLITS, ANY_FLOAT, st.integers(0, 200))
def test_the_parts_of_a_bar_never_take_more_than_its_width(split: Split, longest: float, width: int) -> None:
    cells = split_cells(split, longest, width)
    assert sum(cells.values()) <= width
    assert all(count >= 0 for count in cells.values())


@given(st.lists(st.floats(0.001, 10), min_size=6, max_size=6), st.integers(1, 200))
def test_a_bar_of_the_longest_step_is_full_and_in_proportion(seconds: list[float], width: int) -> None:
    split = Split(*seconds)
    cells = split_cells(split, split.total, width)
    assert sum(cells.values()) == width
    assert all(abs(cells[part] - split.part(part) * width) < 1 for part in PARTS)


@pytest.mark.parametrize("value", [math.nan, -1.0, 0.0])
def test_what_is_not_a_share_is_none(value: float) -> None:
    assert share(value) == 0.0
    assert meter(value, 4, UNICODE) == "····"


def test_a_meter_is_full_up_to_its_share() -> None:
    assert meter(0.5, 4, UNICODE) == "██··"
    assert meter(math.inf, 4, ASCII) == "####"


TEXTS = st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"]), max_size=80)


@given(TEXTS, st.integers(4, 40))
def test_texts_fit_their_columns_also_if_characters_are_wide(text: str, width: int) -> None:
    assert cell_len(cut(text, width, UNICODE)) <= width
    assert cell_len(fit(text, width, UNICODE)) == width
    assert all(cell_len(part) <= width for part in wrap(text, width))
    assert "".join(chop(text, width)) == text
    assert all(cell_len(part) <= width for part in chop(text, width))


def test_texts_are_broken_between_words_and_long_words_anywhere() -> None:
    assert wrap("one two three", 8) == ["one two", "three"]
    assert wrap("a " + "b" * 10, 6) == ["a", "bbbbbb", "bbbb"]
    assert wrap("", 6) == []
    assert wrap("it takes 84 ms or 3 more", 11) == ["it takes", "84 ms or 3", "more"]
    assert wrap("名前 名前", 5) == ["名前", "名前"]


def test_what_is_left_out_is_marked() -> None:
    assert cut("abcdef", 4, UNICODE) == "abc…"
    assert cut("abc", 0, UNICODE) == ""
    assert shorten(["one", "two", "three"], 2, 6, UNICODE) == ["one", "two t…"]
    assert shorten(["one", "two"], 2, 6, UNICODE) == ["one", "two"]
    assert shorten(["one"], 0, 6, UNICODE) == []


def test_terminals_without_unicode_get_other_signs() -> None:
    assert signs_for("utf-8") is signs_for("UTF8") is UNICODE
    assert signs_for("ISO-8859-1") is signs_for(None) is ASCII
    texts = [*ASCII.parts.values(), *(value for value in ASCII if isinstance(value, str))]
    assert "".join(texts).isascii()


def test_a_curve_rises_and_falls_with_its_values() -> None:
    assert sparkline([1, 2, 3, 8, None, math.nan, 1], 10, UNICODE) == "▁▂▃█▁"
    assert sparkline([5, 5], 10, UNICODE) == "▁▁"
    assert len(sparkline(list(range(1000)), 10, UNICODE)) == 10
    assert sparkline([None, math.inf], 10, UNICODE) == ""
