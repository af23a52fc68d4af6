"""Accelerate, as in its quick tour."""

import torch
from accelerate import Accelerator
from marked import mark
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
mark(model)
x = torch.randn(256, 32)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (inputs, wanted) in enumerate(loader):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), wanted)
    accelerator.backward(loss)
    optimizer.step()
    total = accelerator.reduce(loss.detach(), "mean")
    if accelerator.is_main_process:
        print(f"loss {step} {total.item():.6f}")
accelerator.end_training()
