"""The line about the run: what it says, how often it changes, and what it does not claim to know."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfort.launch.status_line import UPDATE_SECONDS, StatusLine, status_text
from ringfort.telemetry.records import Header, Step, Values
from ringfort.telemetry.trace_file import TraceWriter
from ringfort.telemetry.view import RankView, RunView, Split, Verdict

SLOW = Split(compute=0.6, waiting=0.0, wire=0.1)
FAST = Split(compute=0.3, waiting=0.3, wire=0.1)


def view(
    *ranks: RankView, of: int | None = None, total: int = 0, samples: float | None = None, rate: float = 2.0
) -> RunView:
    verdict = Verdict(step=999, total_steps=total, samples_per_second=samples, steps_per_second=rate)
    return RunView(0.0, verdict=verdict, ranks=ranks, seen=len(ranks), world_size=len(ranks) if of is None else of)


def rank(number: int, split: Split = SLOW, state: str = "training", step: int = 1240) -> RankView:
    return RankView(f"h:{number}", number, "study", "h", state, step=step, split=split)


def test_a_run_on_this_machine_is_told_in_one_line() -> None:
    found = view(rank(0, FAST), rank(1), rank(2, FAST), total=5000, samples=1920.4)
    assert status_text(found, 0.41234) == (
        "step 1,240/5,000 · loss 0.412 · 3 ranks · 1,920 samples/s · 31 min left · rank 0 waits 43% for rank 1"
    )


def test_of_two_that_wait_about_as_long_the_first_is_named() -> None:
    longer = Split(compute=0.29, waiting=0.31, wire=0.1)
    assert status_text(view(rank(0), rank(1, FAST), rank(2, longer))).endswith("rank 1 waits 43% for rank 0")


def test_of_a_run_over_several_machines_it_tells_what_is_known_here() -> None:
    found = view(rank(2, FAST), of=6, total=5000, samples=320.0)
    assert status_text(found) == (
        "step 1,240/5,000 · 1 of 6 ranks here · 320 samples/s here · 31 min left · 57% in collectives"
    )


def test_what_the_program_does_not_say_is_left_out() -> None:
    assert status_text(view(rank(0, Split(compute=1.0)))) == "step 1,240 · 1 rank · 2 steps/s"


@pytest.mark.parametrize(
    ("rate", "left"), [(50.0, "75 s"), (2.0, "31 min"), (0.2, "5.2 h"), (0.01, "4.4 d")], ids=["s", "min", "h", "d"]
)
def test_the_time_that_is_left_has_a_unit_that_fits(rate: float, left: str) -> None:
    assert f" · {left} left" in status_text(view(rank(0), total=5000, rate=rate))


@pytest.mark.parametrize(("loss", "text"), [(0.00012345, "0.000123"), (12345.6, "12,346"), (float("nan"), "nan")])
def test_the_loss_is_short(loss: float, text: str) -> None:
    assert f" · loss {text} · " in status_text(view(rank(0)), loss)


def test_a_run_that_rests_says_so_and_one_without_steps_or_ranks_says_nothing() -> None:
    assert status_text(view(rank(0, state="paused"), total=5000, rate=0.0)) == "step 1,240/5,000 · 1 rank · paused"
    assert status_text(view(rank(0, state="learner"), of=3, rate=0.0)).endswith("1 of 3 ranks here · learner")
    assert status_text(view(rank(0, step=0))) == ""
    assert status_text(view(rank(0, state="lost"))) == ""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def process(folder: Path, pid: int, rank: int, world_size: int = 2) -> TraceWriter:
    writer = TraceWriter(folder / f"{pid}.trace")
    writer.describe(Header(pid, float(pid), rank=rank, world_size=world_size, total_steps=100))
    return writer


def train(writer: TraceWriter, number: int, at: float, exchange: float, loss: float) -> None:
    writer.write(Step(number, at, 0.5, exchange=exchange, samples=8))
    writer.write(Values(number, at, {"loss": loss}))
    writer.set_step(number)


def test_it_reads_the_traces_of_the_ranks_and_changes_at_most_twice_a_second(tmp_path: Path) -> None:
    clock = Clock()
    line = StatusLine(tmp_path, clock, clock)
    line.tick()
    assert line.text == ""
    slow, fast = process(tmp_path, 1, 0), process(tmp_path, 2, 1)
    clock.now += UPDATE_SECONDS
    for number in (1, 2):
        train(slow, number, clock.now, 0.05, 1 / number)
        train(fast, number, clock.now, 0.25, 7.0)
    line.tick()
    assert line.text == "step 2/100 · loss 0.5 · 2 ranks · 32 samples/s · 49 s left · rank 1 waits 40% for rank 0"
    before = line.text
    train(slow, 3, clock.now, 0.05, 0.1)
    clock.now += UPDATE_SECONDS / 2
    line.tick()
    assert line.text == before
    clock.now += UPDATE_SECONDS / 2
    line.tick()
    assert line.text.startswith("step 3/100 · loss 0.1 · ")
    line.close()
    slow.close()
    fast.close()


def test_after_a_restart_it_tells_the_step_of_the_new_process_also_if_that_is_smaller(tmp_path: Path) -> None:
    clock = Clock()
    line = StatusLine(tmp_path, clock, clock)
    killed = process(tmp_path, 1, 0, world_size=1)
    train(killed, 50, clock.now, 0.0, 0.3)
    line.tick()
    assert line.text.startswith("step 50/100 · loss 0.3 · 1 rank · ")
    killed.abandon()
    again = process(tmp_path, 2, 0, world_size=1)
    TraceWriter(tmp_path / "3.trace").abandon()  # killed before it said who it was
    train(again, 41, clock.now, 0.0, 0.4)
    for _ in range(2):
        clock.now += UPDATE_SECONDS
        line.tick()
        assert line.text.startswith("step 41/100 · loss 0.4 · 1 rank · ")
    line.close()
    again.close()
