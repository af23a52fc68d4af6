"""Ranks on hosts that tests have made of network namespaces; see `scenarios`."""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_CLONE_NEWNET = 0x40000000


def enter(namespace: str) -> None:
    """This process is on that host from now on. `os.setns` came with Python 3.12."""
    namespaces = os.open(Path("/run/netns", namespace), os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespaces, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespaces)


def hosts(rank: int, world_size: int, namespaces: list[str], master: str) -> float:
    """Each rank on the host of its namespace, with nothing but torch's own store at `master`."""
    enter(namespaces[rank])
    limit = timedelta(seconds=20)
    dist.init_process_group("ringfort", init_method=f"tcp://{master}", rank=rank, world_size=world_size, timeout=limit)
    x = torch.tensor([1.0 + rank])
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item()
