"""Lightning: the Trainer runs the loop, and its DDP strategy takes the name of the backend.

    ringfort run -n 2 examples/with_lightning.py
    ringfort run -n 2 --nodes 2 examples/with_lightning.py --nodes 2      # on each of two machines

From https://lightning.ai/docs/pytorch/stable/starter/introduction.html
"""

from __future__ import annotations

import argparse
import os

import lightning
import torch
from language import Text, Transformer, loss_of
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader


class Speller(lightning.LightningModule):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.model = Transformer(characters)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        inputs, targets = batch
        loss = loss_of(self.model(inputs), targets)
        self.print(f"step {self.global_step + 1} loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=1, help="machines, as `ringfort run` was told")
    options = parser.parse_args()

    lightning.seed_everything(0)
    text = Text()
    trainer = lightning.Trainer(
        strategy=DDPStrategy(process_group_backend="ringfort"),  # the line that differs; before: strategy="ddp",
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "2")),
        num_nodes=options.nodes,
        max_steps=options.steps,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Speller(len(text.characters)), DataLoader(text, batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
