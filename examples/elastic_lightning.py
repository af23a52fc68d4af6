"""Lightning with machines that come and go: start it on any number of machines, kill some, start them again.

    ringfort run --elastic --nodes 1:8 examples/elastic_lightning.py      # on each machine, at any time
    python examples/elastic_lightning.py --checkpoint run1                # or without a launcher

A small network learns the product of two numbers. The strategy is the line that differs. All members end with the same
weights, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import time

import lightning
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from ringfort.integrations.lightning import ElasticStrategy

SAMPLES, BATCH = 2000, 128


def product() -> TensorDataset:
    """Pairs of numbers, and their products."""
    x = torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(7)) * 2 - 1
    return TensorDataset(x, x[:, :1] * x[:, 1:])


def network() -> nn.Module:
    """The same on every machine that starts."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))


class Multiplier(lightning.LightningModule):
    def __init__(self, pause: float) -> None:
        super().__init__()
        self.network = network()
        self.pause = pause

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        time.sleep(self.pause)
        x, y = batch
        loss = nn.functional.mse_loss(self.network(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"]
        print(f"step {self.global_step}: loss of this member's samples {loss:.6f}", flush=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--checkpoint", help="a folder on this machine")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds per micro-batch, to watch the run")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    module = Multiplier(arguments.pause)
    trainer = lightning.Trainer(
        strategy=ElasticStrategy(batch=BATCH, checkpoint=arguments.checkpoint),  # the line that differs; before: "auto"
        devices=1,
        max_epochs=arguments.epochs,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(module, DataLoader(product(), batch_size=32, shuffle=True))

    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in module.state_dict().values())
    print(f"done at step {trainer.global_step}, weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
