"""`ringfort.log` and `ringfort.loading`, and where values go beside those who watch."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ringfort
from ringfort.errors import InvalidArgumentError
from ringfort.telemetry import log as log_module
from ringfort.telemetry.forward import Forwarder
from ringfort.telemetry.trace import Trace
from tests.helpers.traces import Written, by_rank


def written(own: Trace) -> Written:
    assert own.folder is not None
    [found] = by_rank(own.folder)
    return found


@pytest.fixture(autouse=True)
def forwarder(monkeypatch: pytest.MonkeyPatch) -> Forwarder:
    """One that knows nothing yet; and no tool is imported."""
    found = Forwarder()
    monkeypatch.setattr(log_module, "_forwarder", found)
    for name in ("wandb", "mlflow", "torch.utils.tensorboard.writer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return found


def test_anything_that_is_one_number_can_be_logged(own: Trace) -> None:
    own.describe(rank=0)
    own.set_step(6)
    ringfort.log(loss=0.5, count=3, is_good=True, one=np.float32(2), array=np.array([[4.0]]), nothing=float("nan"))
    ringfort.log(np.int64(9), lr=0.1, samples=np.int64(32))
    own.restart_step()
    ringfort.log(samples=8)
    ringfort.log(samples=8)
    own.step_done()
    found = written(own)
    assert {name: values[6] for name, values in found.values.items() if name not in ("lr", "nothing")} == {
        "loss": 0.5,
        "count": 3,
        "is_good": 1,
        "one": 2,
        "array": 4,
    }
    assert found.values["nothing"][6] != found.values["nothing"][6]
    assert found.values["lr"] == {9: 0.1}
    assert found.samples == [16]  # those of a step that began before belong to none


@pytest.mark.parametrize("value", ["much", None, [1.0], np.ones(2), 1j, 10**400])
def test_what_is_not_one_number_is_an_error_that_names_it(own: Trace, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"loss=.*must be one number, such as a float"):
        ringfort.log(loss=value)


@pytest.mark.parametrize("step", [{"loss": 0.5}, -1, 0.5])
def test_values_are_given_by_name(own: Trace, step: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"give values by name, such as ringfort.log\(loss=0.3\)"):
        ringfort.log(step)


def test_a_program_without_a_group_may_log(own: Trace) -> None:
    ringfort.log(loss=1.0, samples=3)
    assert own.folder is None


# --- other tools ------------------------------------------------------------------------------------------------------


class Tool(ModuleType):
    """A module that was imported; what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        super().__init__(name)
        self.told: list[Any] = []
        monkeypatch.setitem(sys.modules, name, self)


def test_values_of_rank_0_go_to_wandb_and_mlflow_if_they_are_active(
    own: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb: Any = Tool(monkeypatch, "wandb")
    mlflow: Any = Tool(monkeypatch, "mlflow")
    run = SimpleNamespace(step=0, log=lambda values, step: wandb.told.append((values, step)))
    wandb.run = None
    mlflow.active_run = lambda: None
    mlflow.log_metrics = lambda values, step: mlflow.told.append((values, step))
    own.describe(rank=0)
    ringfort.log(1, loss=1.0)
    assert not wandb.told + mlflow.told
    wandb.run = run
    mlflow.active_run = lambda: "a run"
    ringfort.log(2, loss=2.0)
    run.step = 10  # the program has logged by itself
    ringfort.log(3, loss=3.0)
    own.describe(rank=1)
    ringfort.log(4, loss=4.0)
    assert wandb.told == [({"loss": 2.0}, 2), ({"loss": 3.0}, None)]
    assert mlflow.told == [({"loss": 2.0}, 2), ({"loss": 3.0}, 3)]


def test_a_tool_that_fails_is_warned_of_once(
    own: Trace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow: Any = Tool(monkeypatch, "mlflow")
    mlflow.active_run = lambda: 1 / 0
    for _ in range(3):
        ringfort.log(loss=1.0)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "MLflow did not take what ringfort.log got: ZeroDivisionError" in record.getMessage()


class SummaryWriter:
    """As torch's, of which nobody keeps a list."""

    def __init__(self) -> None:
        self.all_writers: dict[str, Any] | None = {}
        self.told: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.told.append((tag, value, step))


def test_the_one_open_writer_of_tensorboard_is_found(
    own: Trace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module: Any = Tool(monkeypatch, "torch.utils.tensorboard.writer")
    module.SummaryWriter = SummaryWriter
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(log_module, "_forwarder", Forwarder(lambda: clock.now))
    closed, writer = SummaryWriter(), SummaryWriter()
    closed.all_writers = None
    ringfort.log(1, loss=1.0)
    ringfort.log(2, loss=0.5, lr=0.25)
    assert writer.told == [("loss", 1.0, 1), ("loss", 0.5, 2), ("lr", 0.25, 2)]
    writer.all_writers = None
    train, validation = SummaryWriter(), SummaryWriter()
    ringfort.log(3, loss=0.25)
    clock.now = 30.0
    ringfort.log(4, loss=0.25)
    assert not closed.told + train.told + validation.told
    [record] = caplog.records
    assert "which of 2 SummaryWriters to use; call ringfort.log_to(writer)" in record.getMessage()
    ringfort.log_to(validation)
    ringfort.log(5, loss=0.125)
    assert validation.told == [("loss", 0.125, 5)]
    ringfort.log_to(None)
    with pytest.raises(InvalidArgumentError, match="must have add_scalar"):
        ringfort.log_to("somewhere")  # type: ignore[arg-type]


# --- loading ----------------------------------------------------------------------------------------------------------


def test_loading_yields_the_same_items_each_time_and_counts_the_wait(own: Trace) -> None:
    own.describe(rank=0)
    batches = ringfort.loading([3, 1, 2])
    assert (list(batches), list(batches), len(batches)) == ([3, 1, 2], [3, 1, 2], 3)
    with pytest.raises(TypeError):
        len(ringfort.loading(iter([1])))
    own.restart_step()
    for _ in ringfort.loading(iter(range(100))):
        pass
    own.step_done()
    [step] = written(own).steps
    assert 0 < step.data < step.seconds


def test_an_error_of_the_loader_reaches_the_program(own: Trace) -> None:
    def broken() -> Any:
        yield 1
        raise ValueError("no more rows")

    with pytest.raises(ValueError, match="no more rows"):
        list(ringfort.loading(broken()))
