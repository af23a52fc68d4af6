"""Warns a program of `ringfort run` that opens a torch group of another engine between machines: Gloo, NCCL and MPI
send plaintext. `autoload.py` installs this in programs that the launcher started on several machines, nowhere else.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from ringfort.torch import BACKEND

OPTION: Final = "ringfort-local-ranks"
"""The interpreter's `-X` option by which the launcher says which ranks are on this machine, as `FIRST:END`. Not an
environment variable: `import torch` has to be quick, and only config.py reads those."""

_log = logging.getLogger(__name__)


def watch(local_ranks: str) -> None:
    """From now on the first group that leaves this machine unencrypted is reported, once."""
    first, _, end = local_ranks.partition(":")
    here = range(int(first), int(end))
    dist: Any = import_module("torch.distributed")
    engine: Any = import_module("torch.distributed.distributed_c10d")
    said: list[str] = []

    def look(group: Any) -> None:
        if said or group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        engines = plaintext_engines(dist.get_backend_config(group))
        if engines and not all(rank in here for rank in dist.get_process_group_ranks(group)):
            said.append(engines)
            _log.warning(warning(engines))

    for name in ("init_process_group", "new_group"):
        watched = _watched(getattr(engine, name), look)
        setattr(engine, name, watched)
        setattr(dist, name, watched)


def _watched(original: Callable[..., Any], look: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        group = original(*arguments, **keywords)
        try:
            look(group)
        except Exception:  # a warning must not end a program that works
            _log.debug("could not look at a process group", exc_info=True)
        return group

    return call


def plaintext_engines(config: str) -> str:
    """Of a configuration such as `cpu:gloo,cuda:nccl`, the engines that do not encrypt, in its order."""
    engines = dict.fromkeys(part.rpartition(":")[2] for part in config.lower().split(","))
    return ", ".join(engine for engine in engines if engine and engine != BACKEND)


def warning(engines: str) -> str:
    """What the program is told."""
    return (
        f"ringfort: {engines} sends plaintext between the machines: anyone on the network can read and change it. "
        f'Write init_process_group("{BACKEND}") instead.'
    )
