"""The trace of this process: phases, steps, what is kept before it is opened, forks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ringfort import DistributedContext, SimulatedBackend
from ringfort.telemetry.records import Event, Step, Values
from ringfort.telemetry.step_time import Exchanged, Phase
from ringfort.telemetry.trace import OFF, Trace, own_trace
from ringfort.telemetry.trace_file import TraceReader
from ringfort.training import average_gradients


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace(str(tmp_path))


def reader_of(trace: Trace) -> TraceReader:
    assert trace.folder is not None
    return TraceReader(trace.folder / f"{os.getpid()}.trace")


def test_a_step_has_the_time_of_its_phases(trace: Trace) -> None:
    trace.describe(rank=1, world_size=2)
    trace.restart_step()
    with trace.blocked(Phase.DATA):
        time.sleep(0.02)
    time.sleep(0.03)
    trace.exchange_from(iter([Exchanged(0.005), None]).__next__)
    trace.add_samples(64)
    trace.step_done()
    trace.step_done()
    first, second = (record for record in reader_of(trace).new_records() if isinstance(record, Step))
    assert (first.number, first.samples, second.number, second.samples) == (1, 64, 2, 0)
    assert first.data >= 0.02
    assert first.exchange == pytest.approx(0.005)
    assert first.compute == pytest.approx(first.seconds - first.data - first.exchange)
    assert second.exchange == 0
    assert reader_of(trace).step == 2


def test_phases_never_take_longer_than_the_step(trace: Trace) -> None:
    trace.describe(rank=0)
    trace.time.add(Phase.EXCHANGE, 100.0)
    trace.time.add(Phase.CODEC, 300.0)
    trace.step_done()
    step = next(record for record in reader_of(trace).new_records() if isinstance(record, Step))
    assert step.exchange + step.codec <= step.seconds * 1.001
    assert step.codec == pytest.approx(3 * step.exchange)


def test_steps_of_several_optimizers_are_counted_once(trace: Trace) -> None:
    class Optimizer:
        pass

    one, other = Optimizer(), Optimizer()
    for _ in range(3):
        trace.mark(one)
        trace.mark(other)
    assert trace.step == 3


@dataclass
class Unhashable:
    """As some optimizers are."""

    lr: float = 0.1


class Slotted:
    """Without room for a mark."""

    __slots__ = ()


def test_any_object_may_do_steps_and_need_not_stay(trace: Trace) -> None:
    doer = Unhashable()
    for _ in range(3):
        trace.mark(doer)
    trace.mark(Slotted())
    del doer
    trace.mark(Unhashable())
    assert trace.step == 3


def test_averaging_gradients_is_a_step() -> None:
    [backend] = SimulatedBackend.create_group(1)
    context, before = DistributedContext(backend), own_trace().step
    for _ in range(before + 2):
        average_gradients(context, [np.ones(3, np.float32)])
    assert own_trace().step == before + 2


def test_values_and_events_are_written_and_cut(trace: Trace) -> None:
    trace.event("early", "kept until the trace is opened")
    trace.describe(rank=0)
    trace.log({f"value{n}": float(n) for n in range(10)}, step=7)
    trace.log({"x" * 100: float("nan")})
    trace.event("lost", "word " * 100)
    found = list(reader_of(trace).new_records())
    values = {name: value for record in found if isinstance(record, Values) for name, value in record.values.items()}
    assert [values[f"value{n}"] for n in range(10)] == list(range(10))
    assert "x" * 32 in values
    texts = [record.text for record in found if isinstance(record, Event)]
    assert texts[0] == "kept until the trace is opened"
    assert texts[1].endswith("…")


def test_texts_without_utf8_are_written_with_a_replacement(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/data/tr\udce9s.py"])
    named = Trace(str(trace._told), run="n\udcff")
    named.event("che\udcffck", "cannot write /data/\udce9t\udce9: no space")  # kept until it is opened
    named.describe(rank=0, codec="int8\udcff")
    named.event("checkpoint", "\udcff" * 500)
    named.show({"lo\udcffss": 1.0})
    reader = reader_of(named)
    assert (reader.header().program, reader.header().run, reader.header().codec) == ("tr?s.py", "n?", "int8?")
    first, second, value = reader.new_records()
    assert isinstance(first, Event)
    assert (first.kind, first.text) == ("che?ck", "cannot write /data/?t?: no space")
    assert isinstance(second, Event)
    assert second.text.startswith("???")
    assert isinstance(value, Values)
    assert value.values == {"lo?ss": 1.0}


def test_names_that_become_the_same_when_cut_are_told_once(trace: Trace, caplog: pytest.LogCaptureFixture) -> None:
    trace.describe(rank=0)
    long = "validation_accuracy_of_the_model_"
    for _ in range(3):
        trace.show({long + "one": 1.0, long + "two": 2.0, "validation_loss": 1.0})
    (warning,) = caplog.messages
    assert f"{long}one" in warning
    assert f"{long}two" in warning
    trace.show({f"{long[:30]}{number}{'x' * 30}": 1.0 for number in range(1000)})
    assert len(trace._cut_names) <= 64


@pytest.mark.parametrize(
    ("program", "is_finished"),
    [("pass", True), ("raise SystemExit", True), ("raise RuntimeError", False), ("os._exit(0)", False)],
)
def test_a_process_that_ends_says_whether_it_has_finished(tmp_path: Path, program: str, is_finished: bool) -> None:
    code = f"""
import os
from ringfort.telemetry.trace import own_trace
own_trace().describe(rank=0)
print(flush=True)
input()
{program}
"""
    environment = {**os.environ, "RINGFORT_TELEMETRY": str(tmp_path)}
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        reader = TraceReader(tmp_path / f"{process.pid}.trace")
        assert reader.is_alive()
        process.communicate(b"\n")
    assert not reader.is_alive()
    assert reader.header().is_finished == is_finished


def test_the_file_goes_with_the_trace(trace: Trace) -> None:
    trace.describe(rank=0)
    path = reader_of(trace).path
    trace.close()
    trace.close()
    assert not path.exists()
    trace.step_done()  # counts, and writes nothing
    trace.event("late", "nobody sees it")


@pytest.mark.parametrize("folder", [OFF, "/proc/nowhere"])
def test_without_a_place_nothing_is_written_and_nothing_raises(folder: str) -> None:
    trace = Trace(folder)
    trace.describe(rank=0)
    trace.step_done(samples=3)
    trace.log({"loss": 1.0})
    trace.event("a", "b")
    assert (trace.step, trace.folder) == (1, None)


def test_a_forked_child_does_not_write_to_its_parents_trace(trace: Trace) -> None:
    trace.describe(rank=0)
    trace.step_done()
    child = os.fork()
    if child == 0:
        trace.abandon()
        trace.step_done(5)
        trace.close()
        os._exit(0)
    os.waitpid(child, 0)
    reader = reader_of(trace)
    assert reader.is_alive()
    assert reader.step == 1
    trace.step_done()
    assert reader.step == 2
