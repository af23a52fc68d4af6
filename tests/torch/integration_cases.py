"""More of what the integrations do, by the only member of a run: `integration_cases.py CASE FOLDER` prints what was
seen, as JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ringfort.errors import DistributedError


def loader() -> DataLoader[Any]:
    x = torch.rand(90, 2, generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)


def lightning(folder: Path) -> dict[str, Any]:
    """Callbacks that are refused, and a second `fit`."""
    import lightning
    from lightning.pytorch import callbacks

    from ringfort.integrations.lightning import ElasticStrategy

    logging.getLogger("lightning").setLevel(logging.ERROR)

    class Adder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.calls = 0

        def training_step(self, batch: Any) -> Any:
            self.calls += 1
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    class Unfreezing(callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None: ...

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None: ...

    def trainer(*given: Any, epochs: int = 1, **options: Any) -> lightning.Trainer:
        strategy = ElasticStrategy(batch=32, nodes=1, name="callbacks", **options)
        return lightning.Trainer(
            strategy=strategy, callbacks=list(given), max_epochs=epochs,
            accelerator="cpu", devices=1, default_root_dir=str(folder), logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip

    refused = [
        callbacks.StochasticWeightAveraging(1e-2),
        Unfreezing(),
        callbacks.GradientAccumulationScheduler({0: 1, 4: 2}),
        callbacks.ModelPruning("l1_unstructured", amount=0.5),
    ]
    if hasattr(callbacks, "EMAWeightAveraging"):
        refused.append(callbacks.EMAWeightAveraging())
    seen: dict[str, Any] = {"refused": {}}
    for callback in refused:
        try:
            trainer(callback).fit(Adder(), loader())
            seen["refused"][type(callback).__name__] = "none"
        except DistributedError as exc:
            seen["refused"][type(callback).__name__] = str(exc)
    one, module = trainer(callbacks.LambdaCallback(), checkpoint=folder / "run"), Adder()
    one.fit(module, loader())
    before = [one.global_step, module.calls]
    one.fit_loop.max_epochs = 3
    try:
        one.fit(module, loader())
        seen["again"] = "none"
    except DistributedError as exc:
        seen["again"] = str(exc)
    seen |= {"before": before, "after": [one.global_step, module.calls]}
    more = trainer(epochs=3, checkpoint=folder / "run")
    more.fit(module, loader())
    return {**seen, "longer": [more.global_step, module.calls]}


def names(folder: Path) -> dict[str, Any]:
    """Strategies by their names. Of the elastic one, the loader says how many samples a step has."""
    import lightning

    from ringfort.integrations.lightning import RingfortStrategy

    class Adder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(2, 1)
            self.sizes = list[int]()

        def training_step(self, batch: Any) -> Any:
            self.sizes.append(len(batch[0]))
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    def fitted(strategy: str, rows: Any) -> tuple[Any, Any]:
        trainer = lightning.Trainer(
            strategy=strategy, max_epochs=1, accelerator="cpu", devices=1, default_root_dir=str(folder), logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = Adder()
        trainer.fit(module, rows)
        return trainer, module

    trainer, module = fitted("ringfort_elastic", DataLoader(loader().dataset, batch_size=32))
    seen = {"steps": trainer.global_step, "sizes": module.sizes, "of": len(loader().dataset)}
    plain, _ = fitted("ringfort", DataLoader(loader().dataset, batch_size=32))
    is_ours = isinstance(plain.strategy, RingfortStrategy)
    return {**seen, "backend": plain.strategy.process_group_backend if is_ours else "", "plain": plain.global_step}


def accelerate(folder: Path) -> dict[str, Any]:
    """A loop that is left before a micro-batch is computed, and continued."""
    from accelerate import Accelerator

    from ringfort.integrations.accelerate import prepare

    model, given = nn.Linear(2, 1), loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    accelerator = Accelerator(cpu=True)
    model, optimizer, prepared = prepare(
        accelerator, model, optimizer, given, batch=32, epochs=2, nodes=1, name="breaks"
    )
    seen: dict[str, Any] = {
        "length": len(prepared),
        "size": prepared.batch_size,
        "is_same": prepared.dataset is given.dataset,
    }
    counted, samples = list[int](), Counter[float]()
    for turn in range(4):
        counted.append(0)
        for number, (x, y) in enumerate(prepared):
            if turn == 0 and number == 5:
                break
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            counted[-1] += 1
            samples.update(x[:, 0].tolist())
    try:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        seen["scheduler"] = "none"
    except DistributedError as exc:
        seen["scheduler"] = str(exc)
    return {**seen, "counted": counted, "times": sorted(set(samples.values())), "step": prepared.run.number}


if __name__ == "__main__":
    print("seen " + json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))), flush=True)
