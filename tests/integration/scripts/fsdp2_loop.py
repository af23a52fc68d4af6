"""FSDP2 with a device mesh and a Gloo group beside it, as torchtitan does it."""

import os

import torch
import torch.distributed as dist
from marked import mark
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if not dist.is_initialized():  # as torchtitan asks
    dist.init_process_group("cpu:gloo")
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
beside = dist.new_group(backend="gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
mark(model)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank())
for step in range(10):
    x = torch.randn(16, 64)
    loss = (model(x) - x).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total, group=beside)
    if dist.get_rank() == 0:
        print(f"loss {step} {total.item():.6f}")
dist.barrier()
dist.destroy_process_group()
