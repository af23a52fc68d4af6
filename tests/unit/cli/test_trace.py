"""`ringfort trace`: which run it follows, when it is done, and what it says if steps are missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringfort.cli import app
from ringfort.cli.trace import SETTLE_SECONDS, gather
from ringfort.dashboard import source as source_module
from ringfort.telemetry.view import RunView
from tests.helpers.telemetry import Rank, SimulatedRun


class Simulated:
    """A source of made-up runs; time passes when somebody waits."""

    def __init__(self, *runs: SimulatedRun, best: Callable[[float], int] = lambda _: 0) -> None:
        self._runs, self._best = runs, best
        self._now = 0.0
        self.notice = "A notice."

    def __enter__(self) -> Simulated:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def log(self, rank: int, run: str | None = None) -> list[str]:
        return []

    def clock(self) -> float:
        return self._now

    def wait(self, seconds: float) -> None:
        self._now += seconds
        for run in self._runs:
            run.advance(seconds)

    def view(self, run: str | None = None) -> RunView:
        views = {view.run: view for view in (one.view() for one in self._runs) if view.run}
        names = tuple(views)
        if run is None and names:
            run = names[self._best(self._now)]
        found = views.get(run or "")
        return RunView(self._now, run or "", runs=names, notice=self.notice) if found is None else _with(found, names)


def _with(view: RunView, runs: tuple[str, ...]) -> RunView:
    import msgspec

    return msgspec.structs.replace(view, runs=runs)


def test_it_waits_for_the_steps_of_every_rank_and_long_enough_for_all_machines_to_be_seen() -> None:
    for compute, seconds in ((0.01, SETTLE_SECONDS), (1.0, 6.0)):
        source = Simulated(SimulatedRun([Rank("study", compute), Rank("shed", compute)]))
        recorder, runs = gather(source, None, 6, 60.0, source.clock, source.wait)
        assert (recorder.is_complete, recorder.run, runs) == (True, "train.py", ("train.py",))
        assert seconds <= source.clock() < seconds + 2.5


def test_it_does_not_wait_for_other_runs_if_one_is_named() -> None:
    source = Simulated(SimulatedRun([Rank("study", 0.01), Rank("shed", 0.01)]))
    recorder, _ = gather(source, "train.py", 6, 60.0, source.clock, source.wait)
    assert recorder.is_complete
    assert source.clock() < SETTLE_SECONDS


def test_it_follows_one_run_to_the_end_once_all_could_be_seen() -> None:
    ranks = [Rank("study", 0.5)]
    runs = SimulatedRun(ranks, run="one"), SimulatedRun(ranks, run="other")
    source = Simulated(*runs, best=lambda now: 0 if now < 1 else 1 if now < SETTLE_SECONDS + 1 else 0)
    recorder, names = gather(source, None, 20, 60.0, source.clock, source.wait)
    assert (recorder.is_complete, recorder.run, names) == (True, "other", ("one", "other"))


def test_when_the_time_is_up_it_has_what_was_seen() -> None:
    run = SimulatedRun([Rank("study", 0.5)])
    source = Simulated(run)
    recorder, _ = gather(source, "train.py", 100, 10.0, source.clock, source.wait)
    assert not recorder.is_complete
    assert recorder.has_steps
    assert 10.0 <= source.clock() < 10.5
    (missing,) = recorder.missing()
    assert missing.startswith("rank 0 on study (training): ")


def ask(monkeypatch: pytest.MonkeyPatch, source: Simulated, *arguments: str) -> tuple[int, str, str]:
    from ringfort.cli import trace

    monkeypatch.setattr(source_module, "LiveSource", lambda _: source)
    monkeypatch.setattr(
        trace,
        "gather",
        lambda *given: gather(*given, source.clock, source.wait),  # virtual time
    )
    result = CliRunner().invoke(app, ["trace", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_file_is_written_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = [Rank("study", 0.2)]
    source = Simulated(SimulatedRun(ranks, run="one"), SimulatedRun(ranks, run="other"))
    file = tmp_path / "t.json"
    file.write_text("something longer that was there before")
    code, out, err = ask(monkeypatch, source, "--steps", "4", "-o", str(file))
    assert (code, out) == (0, "")
    where = f"4 steps of 1 rank of 'one' in {file}; open it at https://ui.perfetto.dev"
    assert err == f"{where}. Other runs are 'other': see --run\n"
    assert sum(event.get("cat") == "step" for event in json.loads(file.read_text())["traceEvents"]) == 4


def test_it_may_go_to_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = ask(monkeypatch, Simulated(SimulatedRun([Rank("study")])), "--steps", "3", "-o", "-")
    assert code == 0
    assert json.loads(out)["otherData"]["run"] == "train.py"


def test_what_is_missing_after_the_timeout_is_said_and_the_rest_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "t.json"
    source = Simulated(SimulatedRun([Rank("study", 1.0)]))
    code, _, err = ask(monkeypatch, source, "--steps", "50", "--timeout", "8", "-o", str(file))
    assert code == 1
    assert "error: after 8 s, steps are missing: rank 0 on study (training): " in err
    assert json.loads(file.read_text())["traceEvents"]


def test_if_there_is_no_such_run_or_none_at_all_that_is_said_and_no_file_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "t.json"
    source = Simulated(SimulatedRun([Rank("study")]))
    code, _, err = ask(monkeypatch, source, "--run", "mine", "--timeout", "5", "-o", str(file))
    assert (code, err) == (
        1,
        "error: no step was seen in 5 s: there are 'train.py', not 'mine'. Look at `ringfort top`\n",
    )
    code, _, err = ask(monkeypatch, Simulated(), "--timeout", "5", "-o", str(file))
    assert (code, err) == (1, "error: no step was seen in 5 s: no rank was found. A notice.\n")
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "steps=0: must be from 1 to 100,000"),
        (["--timeout", "nan"], "timeout=nan: must be a positive, finite number"),
        (["-o", "/proc/trace.json"], "output='/proc/trace.json': cannot be written: "),
        (["-o", "/"], "output='/': cannot be written: Is a directory"),
    ],
)
def test_what_cannot_be_is_refused_before_anybody_waits(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    code, _, err = ask(monkeypatch, Simulated(), *arguments)
    assert code == 2
    assert err.startswith(f"error: {said}")
