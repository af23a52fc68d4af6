"""What a rank writes becomes the lines and rows that a terminal would show, however it comes in pieces."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ringfort.launch.drawing import GRACE_SECONDS, Drawing, Row

UP, CLEAR = b"\x1b[A", b"\x1b[2K"


def text(rows: list[Row]) -> list[bytes]:
    return [row.text for row in rows]


def whole(*pieces: bytes) -> list[bytes]:
    """All lines, when the stream has ended."""
    drawing = Drawing()
    return text([row for piece in pieces for row in drawing.feed(0.0, piece)] + drawing.end())


def test_of_a_bar_the_last_drawing_is_left_and_the_present_one_is_live() -> None:
    drawing = Drawing()
    assert drawing.feed(0.0, b"\r10%\r20%") == []
    assert drawing.live() == [Row(b"20%", is_bar=True)]
    assert drawing.feed(0.0, b"\r100%") == []
    assert drawing.end() == [Row(b"100%", is_bar=True)]


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (b"one\ntwo\n\nthree", [b"one", b"two", b"", b"three"]),
        (b"windows line\r\nanother\r\n", [b"windows line", b"another"]),
        (b"\xff\xfe\n\xe2\x96\n", [b"\xff\xfe", b"\xe2\x96"]),
        (b"\x1b[31mred\x1b[0m\n", [b"\x1b[31mred\x1b[0m"]),
        (b"\x1b[?25lhidden cursor\x1b[1G\n", [b"hidden cursor"]),
        (b"\r50%\r   \rdone\n", [b"done"]),
        (b"\r50%\r   \r", []),
        (b"\r50%\r" + CLEAR + b"done\n", [b"done"]),
        (b"ends in \x1b[3", [b"ends in \x1b[3"]),
        (b"no end", [b"no end"]),
        (b"", []),
    ],
)
def test_nothing_is_lost_but_what_was_drawn_over(written: bytes, lines: list[bytes]) -> None:
    assert whole(written) == lines
    assert whole(*(bytes([byte]) for byte in written)) == lines


@given(st.lists(st.sampled_from([b"\r", b"\n", UP, b"\x1b[2K", b"\x1b[31m", b"x", b"\xff"]), max_size=30), st.data())
def test_pieces_make_no_difference(tokens: list[bytes], data: st.DataObject) -> None:
    written = b"".join(tokens)
    cut = data.draw(st.integers(0, len(written)))
    assert whole(written) == whole(written[:cut], written[cut:])


@given(st.binary(max_size=200))
def test_any_bytes_are_taken(data: bytes) -> None:
    drawing = Drawing()
    drawing.feed(0.0, data)
    drawing.live()
    drawing.end()


def test_two_bars_of_one_rank_are_two_rows_however_slowly_they_are_drawn() -> None:
    """As tqdm draws a bar below another: down, the bar, and up again, each written by itself."""
    drawing = Drawing()
    drawing.feed(0.0, b"\router 0%")
    for percent in (b"1%", b"2%"):
        for piece in (b"\n", b"\rinner " + percent, UP):
            assert drawing.feed(GRACE_SECONDS / 2, piece) == []
    drawing.feed(1.0, b"\router 50%")
    assert text(drawing.live()) == [b"outer 50%", b"inner 2%"]
    assert text(drawing.end()) == [b"outer 50%", b"inner 2%"]


def test_a_bar_that_was_left_is_final_after_a_moment_or_when_text_follows() -> None:
    drawing = Drawing()
    assert drawing.feed(0.0, b"\r100%\n") == []
    assert drawing.finished(GRACE_SECONDS / 2) == []
    assert text(drawing.finished(GRACE_SECONDS)) == [b"100%"]
    assert drawing.feed(1.0, b"\r100%\n") == []
    assert text(drawing.feed(1.0, b"and then\n")) == [b"100%", b"and then"]
    assert drawing.live() == []


def test_a_line_without_an_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfort.launch.drawing.MAX_LINE_BYTES", 100)
    drawing = Drawing()
    found = [row for _ in range(5) for row in drawing.feed(0.0, 50 * b"x")] + drawing.end()
    assert b"".join(text(found)) == 250 * b"x"
