"""Medians, ratios and means, and how they are shown."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from ringfort.bench.options import Case, Options
from ringfort.bench.results import Report, Row, Timing
from ringfort.bench.runner import Step
from ringfort.bench.tables import Watcher, duration, print_report, size

MACHINE = {
    "processor": "Some CPU",
    "cores": 2,
    "threads": 2,
    "memory_gib": 8.0,
    "load_at_start": 0.1,
    "system": "Linux",
    "versions": {"python": "3.11"},
}


def timing(median: float) -> Timing:
    return Timing(calls=10, median_us=median, p10_us=median / 2, p90_us=median * 2)


def row(ranks: int, nbytes: int, ours: float, gloo: float | None) -> Row:
    timings = {"ringfort": timing(ours)}
    if gloo is None:
        return Row(ranks, nbytes, timings, {"gloo": "RuntimeError: no such thing"})
    return Row(ranks, nbytes, {**timings, "gloo": timing(gloo)})


def report(*rows: Row) -> Report:
    return Report(Options(ranks=(2, 4), against=("gloo",)), MACHINE, rows)


def shown(given: Report) -> str:
    screen = io.StringIO()
    print_report(Console(file=screen, width=140), given)
    return screen.getvalue()


def test_a_calls_time_is_that_of_its_slowest_rank() -> None:
    whole = Timing.of([[[1000, 9000], [2000, 1000]], [[3000], [3000]]])
    assert whole == Timing(3, 3.0, pytest.approx(2.2), pytest.approx(7.8), [5.5, 3.0])


def test_the_spread_of_a_ratio_is_that_of_the_rounds_in_which_both_had_their_turn() -> None:
    ours, other = Timing.of([[[1000]], [[4000]]]), Timing.of([[[2000]], [[8000]]])
    drifted = Row(2, 4, {"ringfort": ours, "gloo": other})
    assert drifted.ratio_spread("gloo") == (2.0, 2.0)
    assert drifted.ratio_spread("mlx") is None


def test_the_ratio_says_how_many_times_as_long_the_other_took() -> None:
    assert row(2, 4, 10.0, 25.0).ratio("gloo") == 2.5
    assert row(2, 4, 10.0, None).ratio("gloo") is None


def test_speed_is_in_bytes_of_the_buffer() -> None:
    assert row(2, 1_000_000, 1000.0, None).gigabytes_per_second() == pytest.approx(1.0)


def test_the_mean_of_ratios_is_geometric_and_given_for_each_world_size() -> None:
    means = report(row(2, 4, 1, 2), row(2, 8, 1, 8), row(4, 4, 1, 1)).geometric_means("gloo")
    assert means == {"2": pytest.approx(4.0), "4": pytest.approx(1.0), "all": pytest.approx(16 ** (1 / 3))}


def test_the_table_has_times_ratios_means_and_the_machine() -> None:
    text = shown(report(row(2, 4, 10.0, 25.0), row(4, 1 << 20, 1234.5, 1000.0)))
    for part in ("Some CPU", "4 B", "1 MiB", "10.0 us", "5.00-20.0", "2.50", "1.23 ms", "0.81", "geometric mean"):
        assert part in text


def test_more_ranks_than_processors_are_pointed_out() -> None:
    assert "4 ranks share 2 processors" in shown(report(row(4, 4, 10.0, 25.0)))


def test_what_an_engine_cannot_do_is_said_and_leaves_no_ratio() -> None:
    text = shown(report(row(2, 4, 10.0, None)))
    assert "no such thing" in text
    assert "geometric mean" not in text


def test_the_json_form_survives_json_and_has_a_schema() -> None:
    again = json.loads(json.dumps(report(row(2, 4, 10.0, 25.0)).to_dict(), sort_keys=True))
    assert again["schema"] == 1
    assert json.loads(json.dumps(Report.from_dict(again).to_dict())) == again
    assert again["rows"][0]["ratios"] == {"gloo": 2.5}
    assert again["geometric_mean_ratios"]["gloo"]["all"] == pytest.approx(2.5)


def test_many_engines_have_a_line_each() -> None:
    timings = {name: timing(10.0) for name in ("ringfort", "gloo", "plain", "sockets")}
    many = Report(Options(against=("gloo", "plain", "sockets")), MACHINE, [Row(2, 4, timings)])
    lines = [line.split() for line in shown(many).splitlines()]
    assert [line[0] for line in lines if line and line[0] in timings] == ["gloo", "plain", "sockets"]


def test_without_a_terminal_each_case_is_a_line() -> None:
    screen = io.StringIO()
    watcher = Watcher(Console(file=screen, width=80))
    case = Case.of("all_reduce", 4096, "float32", 2)
    with watcher.bar:
        watcher.step(Step(0.0, 1, case, None))
        watcher.step(Step(1.0, 1, case, row(2, 4096, 10.0, 25.0)))
    assert screen.getvalue() == "all_reduce 4 KiB, 2 ranks: ringfort 10.0 us, gloo 25.0 us\n"


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (2.345, "2.35 us"),
        (28.11, "28.1 us"),
        (999.4, "999 us"),
        (999.6, "1.00 ms"),
        (9461.0, "9.46 ms"),
        (1.4e6, "1.40 s"),
    ],
)
def test_durations_have_three_digits_and_a_unit(microseconds: float, text: str) -> None:
    assert duration(microseconds) == text


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (4, "4 B"), (1536, "1.5 KiB"), (256 << 20, "256 MiB")])
def test_sizes_are_written_as_they_are_asked_for(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
