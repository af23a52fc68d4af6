"""The output of a rank, as it is shown."""

from __future__ import annotations

from hypothesis import given, strategies as st

from ringfort.dashboard.output import MAX_BYTES, MAX_LINES, RankOutput
from ringfort.telemetry.watching import LogPart


def shown(text: str | bytes) -> list[str]:
    output = RankOutput()
    output.add(LogPart(0, 1, 0, text.encode() if isinstance(text, str) else text))
    return output.lines()


def test_control_characters_colours_and_titles_are_not_shown() -> None:
    assert shown("\x1b[31mred\x1b[0m \x1b]0;title\x07end\x08\n") == ["red end?"]
    assert shown(b"caf\xc3\xa9 \xff\n") == ["café \N{REPLACEMENT CHARACTER}"]
    assert shown("a\tb") == ["a       b"]


def test_of_a_progress_bar_the_last_state_is_shown() -> None:
    assert shown("10%\r50%\r100%\r\ndone\r\n") == ["100%", "done"]


def test_memory_is_bounded_whatever_comes() -> None:
    output = RankOutput()
    for number in range(2000):
        output.add(LogPart(0, number % 7, 0, b"line\n" * 100))
    assert len(output._before) + len(output._data) <= MAX_BYTES
    assert len(output.lines()) <= MAX_LINES
    output = RankOutput()
    for number in range(2000):
        output.add(LogPart(0, 1, number * 500, b"line\n" * 100))
    assert len(output._data) <= MAX_BYTES
    assert output.request(0).start == 0  # nothing that came before is asked for
    assert output.request(0).end == 2000 * 500


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.binary(max_size=40)), max_size=30))
def test_any_parts_are_put_together_without_a_fault(parts: list[tuple[int, int, bytes]]) -> None:
    output = RankOutput()
    for file, start, data in parts:
        output.add(LogPart(0, file, start, data))
        request = output.request(0)
        assert request.start <= request.end
        assert all(line.isprintable() for line in output.lines())
