"""What `ElasticStrategy` does in the `Trainer`, by the only member of a run: `lightning_cases.py CASE FOLDER` prints
what was seen, as JSON."""

from __future__ import annotations

import csv
import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from ringfort.errors import DistributedError
from ringfort.integrations.lightning import ElasticStrategy

SAMPLES, BATCH, MICRO, EPOCHS = 90, 32, 8, 2
"""The last batch of a pass has 26 samples, and its last micro-batch 2."""


def data() -> TensorDataset:
    x = torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, x.sum(1, keepdim=True))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(data(), **{"batch_size": MICRO, "shuffle": True, **options})


class Adder(lightning.LightningModule):
    def __init__(self, interval: str = "epoch") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)
        self.interval = interval
        self.seen = Counter[str]()

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def training_step(self, batch: Any) -> Tensor:
        self.seen["training_step"] += 1
        self.seen["samples"] += len(batch[0])
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.seen["validation_step"] += 1
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = {"scheduler": StepLR(optimizer, 1, 0.5), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Watch(Callback):
    """Writes down the counters of the `Trainer` at the end of batches and epochs."""

    def __init__(self) -> None:
        self.batches = list[list[int]]()
        self.epochs = list[list[int]]()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append([trainer.current_epoch, batch_idx, trainer.global_step])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append([trainer.current_epoch, trainer.global_step, module.seen["validation_step"]])


def trainer(folder: Path, callbacks: tuple[Any, ...] = (), **options: Any) -> lightning.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "devices": 1}
    given = {"max_epochs": EPOCHS, "default_root_dir": str(folder), "num_sanity_val_steps": 0, **quiet, **options}
    if "strategy" not in given:
        given["strategy"] = ElasticStrategy(batch=BATCH, nodes=1, name="cases")
    if "enable_checkpointing" not in given:
        given["enable_checkpointing"] = any(isinstance(one, ModelCheckpoint) for one in callbacks)
    return lightning.Trainer(accelerator="cpu", callbacks=list(callbacks), **given)


def plain(steps: list[float], clip: float) -> list[float]:
    """The weights of a loop over whole passes without a run, in any order: each step has all samples. `steps` are the
    learning rates."""
    module, (x, y) = Adder(), data().tensors
    for rate in steps:
        module.zero_grad()
        module.loss((x, y)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), clip)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.sub_(rate * parameter.grad)
    return [value for tensor in module.state_dict().values() for value in tensor.flatten().tolist()]


def weights(module: Any) -> list[float]:
    return [value for tensor in module.state_dict().values() for value in tensor.flatten().tolist()]


# --- the cases --------------------------------------------------------------------------------------------------------


def whole(folder: Path) -> dict[str, Any]:
    """All that a Trainer usually has: validation, loggers, checkpoints, a monitor of learning rates; and the same
    program once more, after the run has finished."""
    seen: dict[str, Any] = {}
    for turn in ("first", "again"):
        module, watch = Adder(), Watch()
        saving = ModelCheckpoint(dirpath=folder / turn, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        logger = CSVLogger(folder / turn, name="log", version=0)
        one = trainer(
            folder,
            (watch, saving, LearningRateMonitor()),
            strategy=ElasticStrategy(batch=BATCH, nodes=1, name="whole", checkpoint=folder / "run1"),
            logger=logger,
            log_every_n_steps=1,
        )
        one.fit(module, loader(), DataLoader(data(), batch_size=45))
        seen[turn] = {
            "batches": watch.batches,
            "epochs": watch.epochs,
            "estimate": module.estimate,
            "counted": dict(module.seen),
            "step": one.global_step,
            "epoch": one.current_epoch,
            "rate": one.optimizers[0].param_groups[0]["lr"],
            "saved": sorted(path.name for path in (folder / turn).glob("*.ckpt")),
            "log": (folder / turn / "log" / "version_0" / "metrics.csv").read_text() if turn == "first" else "",
            "weights": weights(module),
        }
    return seen


def rounds(folder: Path) -> dict[str, Any]:
    """Passes with fixed rounds and without a `batch`; and planned rounds up to a step."""
    seen: dict[str, Any] = {}
    for name, sync, options in (
        ("local", {"sync": "local", "every": 4}, {}),
        ("auto", {"sync": "auto"}, {"max_steps": 14}),
    ):
        module, watch = Adder(), Watch()
        strategy = ElasticStrategy(nodes=1, name=f"rounds {name}", **sync)
        logger = CSVLogger(folder / name, name="log", version=0)
        one = trainer(folder, (watch,), strategy=strategy, logger=logger, log_every_n_steps=5, **options)
        one.fit(module, loader(), DataLoader(data(), batch_size=45))
        rows = list(csv.DictReader((folder / name / "log" / "version_0" / "metrics.csv").open()))
        seen[name] = {
            "batches": watch.batches,
            "epochs": watch.epochs,
            "samples": module.seen["samples"],
            "step": one.global_step,
            "estimate": module.estimate,
            "rate": one.optimizers[0].param_groups[0]["lr"],
            "logged": [int(row["step"]) for row in rows if row["train_step"]],
        }
    return seen


def precision(folder: Path) -> dict[str, Any]:
    """Scaled losses in half precision, and clipping, in whole passes as batches, against a plain loop."""
    module = Adder(interval="step")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    one = trainer(
        folder,
        strategy=ElasticStrategy(batch=SAMPLES, nodes=1, name="precision"),
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        gradient_clip_val=0.5,
        max_steps=3,
        max_epochs=-1,
    )
    one.fit(module, loader())
    return {"weights": weights(module), "plain": plain([0.5, 0.25, 0.125], 0.5), "step": one.global_step}


def skipping(folder: Path) -> dict[str, Any]:
    """A training step may return None for some micro-batches."""

    class Picky(Adder):
        def training_step(self, batch: Any) -> Any:
            self.seen["called"] += 1
            return super().training_step(batch) if self.seen["called"] % 2 else None

    module = Picky()
    one = trainer(folder, max_epochs=1)
    one.fit(module, loader())
    return {"counted": dict(module.seen), "step": one.global_step}


def refusals(folder: Path) -> dict[str, Any]:
    """The first line of each error."""

    class Hooked(Adder):
        def optimizer_step(self, *_: Any, **__: Any) -> None:
            raise AssertionError("not called")

    class Plateau(Adder):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            scheduler = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    class Manual(Adder):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    cases: dict[str, Any] = {
        "hook": ({}, Hooked(), loader()),
        "plateau": ({}, Plateau(), loader()),
        "manual": ({}, Manual(), loader()),
        "accumulate": ({"accumulate_grad_batches": 2}, Adder(), loader()),
        "limit": ({"limit_train_batches": 2}, Adder(), loader()),
        "value": ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, Adder(), loader()),
        "endless": ({"max_epochs": -1}, Adder(), loader()),
        "devices": ({"devices": 2}, Adder(), loader()),
        "two": ({}, Adder(), {"a": loader(), "b": loader()}),
        "sampler": ({}, Adder(), loader(sampler=list(range(SAMPLES)), shuffle=False)),
    }
    seen = {}
    for name, (options, module, train) in cases.items():
        try:
            trainer(folder, **options).fit(module, train)
            seen[name] = "none"
        except DistributedError as exc:
            seen[name] = str(exc)
    one = trainer(folder, enable_checkpointing=True)
    one.strategy.connect(module := Adder())
    torch.save(
        {"state_dict": module.state_dict(), "pytorch-lightning_version": lightning.__version__}, folder / "x.ckpt"
    )
    try:
        one.fit(module, loader(), ckpt_path=str(folder / "x.ckpt"))
    except DistributedError as exc:
        seen["ckpt"] = str(exc)
    return seen


if __name__ == "__main__":
    logging.getLogger("lightning").setLevel(logging.ERROR)
    print("seen " + json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))), flush=True)
