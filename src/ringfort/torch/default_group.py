"""The default group of a program that `ringfort run --torch-backend ringfort` has started: it exists before the program
runs, and whatever the program makes of `torch.distributed` goes over Ringfort.

Programs are not changed for that, so functions of torch are: `init_process_group` hands out the group that exists, and
every group is made of our backend, whichever the program names. The group's key-value store is ours too, because
torch's own sends plaintext.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, Final

from ringfort.config import Environment
from ringfort.context import DistributedContext
from ringfort.errors import ConfigError
from ringfort.startup import init
from ringfort.torch import BACKEND
from ringfort.torch.every_group import make_ours, tell_children
from ringfort.torch.linked_store import keep
from ringfort.torch.names import dist, torch
from ringfort.torch.rpc_store import RpcStore

_log = logging.getLogger("ringfort.torch")
_OPTION: Final = f"`ringfort run --torch-backend {BACKEND}`"
_c10d: Final[Any] = dist.distributed_c10d


def make_default_group() -> None:
    """Make torch's default group of all ranks that `ringfort run` has started, and let the program have no other kind.

    Raises as `ringfort.init`.
    """
    told = Environment.from_mapping()
    if torch.cuda.is_available() and told.local_rank is not None:
        torch.cuda.set_device(told.local_rank % torch.cuda.device_count())
    context = init(backend="tcp")
    store = RpcStore(context)
    keep(store, context.backend)
    dist.init_process_group(BACKEND, store=store, rank=context.rank, world_size=context.world_size)
    _take_over(context)


def _take_over(context: DistributedContext) -> None:
    """Change the functions of torch that make groups."""
    rank, size, machines = context.rank, context.world_size, len(set(context.group.hosts))
    made = dist.group.WORLD
    is_taken, owner = False, os.getpid()

    def hand_out(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init_process_group(*given: Any, **keywords: Any) -> None:
            nonlocal is_taken
            asked = signature.bind(*given, **keywords).arguments
            if os.getpid() != owner and dist.group.WORLD is made:  # a fork, to which that group is of no use
                dist.destroy_process_group()
            if is_taken or dist.group.WORLD is not made:  # the second default group of this program, or an error
                original(*given, **keywords)
                return
            for name, value in (("rank", rank), ("world_size", size)):
                if asked.get(name, -1) not in (-1, value):
                    why = f"this process is rank {rank} of {size} in the group that {_OPTION} has made; leave it out"
                    raise ConfigError(name, asked[name], why)
            is_taken = True
            if asked.get("timeout") is not None:
                made.set_timeout(asked["timeout"])
            if rank == 0:
                where = "one machine" if machines == 1 else f"{machines} machines"
                _log.info(
                    "Using the group that %s has made for init_process_group(%s): %d ranks on %s",
                    _OPTION, repr(asked["backend"]) if asked.get("backend") else "", size, where,
                )  # fmt: skip

        return init_process_group

    make_ours()
    tell_children()
    _c10d.init_process_group = dist.init_process_group = hand_out(_c10d.init_process_group)
