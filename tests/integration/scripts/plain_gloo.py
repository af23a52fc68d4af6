"""DDP with `init_process_group("gloo")`, as in torch's own tutorial."""

import torch
import torch.distributed as dist
from marked import mark
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
mark(model)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank())
for step in range(10):
    x = torch.randn(16, 32)
    loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach_())
    if dist.get_rank() == 0:
        print(f"loss {step} {loss.item():.6f}")
dist.destroy_process_group()
