"""What `ringfort.log` tells is in the files that TensorBoard, MLflow and Weights & Biases write, without an account."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ringfort
from ringfort.telemetry import log as log_module
from ringfort.telemetry.forward import Forwarder
from ringfort.telemetry.trace import Trace, own_trace

STEPS = (1, 2, 3)
BLOCK = 1 << 15


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """A trace of rank 0, which forwards."""
    monkeypatch.setattr(log_module, "_forwarder", Forwarder())
    own_trace.cache_clear()
    yield own_trace()
    own_trace().close()
    own_trace.cache_clear()


def log() -> None:
    for step in STEPS:
        ringfort.log(step, loss=1 / step)


def tensorboard(folder: Path) -> list[tuple[int, float]]:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    log()
    writer.close()
    found = EventAccumulator(str(folder))
    found.Reload()
    return [(one.step, one.value) for one in found.Scalars("loss")]


def mlflow(folder: Path) -> list[tuple[int, float]]:
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow: pip install mlflow-skinny")
    mlflow.set_tracking_uri((folder / "store").as_uri())  # which must not be there yet
    with mlflow.start_run() as run:
        log()
    return [(one.step, one.value) for one in mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")]


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's format, which those of Weights & Biases have: in blocks of 32 KiB, parts of
    records with a checksum, a length, and whether they are whole (1), first (2), middle (3) or last (4)."""
    at, record = 0, b""
    while at < len(data):
        left = BLOCK - (at + 7) % BLOCK
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record = (b"" if kind in (1, 2) else record) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record


def wandb(folder: Path) -> list[tuple[int, float]]:
    wandb = pytest.importorskip("wandb", reason="needs Weights & Biases: pip install wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    with wandb.init(project="test", dir=str(folder)):
        log()
    wandb.teardown()  # its service
    [path] = folder.rglob("*.wandb")
    found: list[tuple[int, float]] = []
    for record in map(Record.FromString, leveldb_records(path.read_bytes()[7:])):  # behind what sort of file it is
        values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if "loss" in values:
            found.append((int(values["_step"]), float(values["loss"])))
    return found


@pytest.mark.filterwarnings("default")  # of the tools
@pytest.mark.parametrize("read_back", [tensorboard, mlflow, wandb], ids=["tensorboard", "mlflow", "wandb"])
def test_what_is_logged_is_in_the_files_of_the_tool(
    own: Trace,
    read_back: Callable[[Path], list[tuple[int, float]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    assert read_back(tmp_path) == [(step, pytest.approx(1 / step)) for step in STEPS]
