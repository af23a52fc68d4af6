"""The loss curve in characters."""

from __future__ import annotations

from ringfort.demo.screen import curve


def test_before_the_first_point_there_is_nothing() -> None:
    assert curve([], 100, width=72, height=6) == []


def test_the_curve_falls_from_the_top_left_to_the_bottom_right() -> None:
    *rows, caption = curve([(step, 5.0 - step / 25) for step in range(1, 101)], 100, width=40, height=4)
    assert caption.endswith("step 1 to 100: loss 4.96 at first, 1.00 now")
    assert rows[0].startswith("4.96 │ █")
    assert rows[-1].startswith("1.00 │ ██")
    assert rows[-1].endswith("▁")
    lengths = [len(row) for row in rows]
    assert lengths == sorted(lengths)
    assert all(len(row) <= 40 for row in rows)


def test_half_of_the_steps_fill_half_of_the_width() -> None:
    lowest = curve([(step, float(51 - step)) for step in range(1, 51)], 100, width=47, height=3)[-2]
    assert len(lowest) == len("50.00 │ ") + (47 - 5 - 3) // 2 + 1


def test_a_column_without_a_point_of_its_own_has_the_value_before_it() -> None:
    lowest = curve([(1, 2.0), (100, 1.0)], 100, width=20, height=2)[-2]
    assert lowest == "1.00 │ " + "█" * 12 + "▁"


def test_a_terminal_without_unicode_gets_ascii() -> None:
    lines = curve([(1, 3.0), (2, 1.0)], 2, width=20, height=3, blocks=False)
    assert "\n".join(lines).isascii()
    assert "#" in lines[0]


def test_one_value_is_no_division_by_zero() -> None:
    assert len(curve([(1, 2.0)], 1, width=20, height=3)) == 4
