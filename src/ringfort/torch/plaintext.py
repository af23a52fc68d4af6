"""Warn a program of `ringfort run` that opens a torch group of another engine between machines: Gloo, NCCL and MPI send
plaintext.

`autoload.py` installs this in programs that the launcher started on several machines, nowhere else.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ringfort.torch import BACKEND

_log = logging.getLogger(__name__)


def watch(local_ranks: str) -> None:
    """Report, once, the first group from now on that leaves this machine unencrypted.

    `local_ranks` are the ranks on this machine, as `FIRST:END`. The launcher passes them as the interpreter's option
    `-X ringfort-local-ranks`, not as an environment variable: `import torch` has to be quick, and only config.py reads
    those.
    """
    first, _, end = local_ranks.partition(":")
    here = range(int(first), int(end))
    dist: Any = import_module("torch.distributed")
    is_reported = False

    def check(group: Any) -> None:
        nonlocal is_reported
        if is_reported or group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        # A configuration such as `cpu:gloo,cuda:nccl`.
        config = dist.get_backend_config(group).lower().split(",")
        engines = [engine for engine in (part.rpartition(":")[2] for part in config) if engine not in ("", BACKEND)]
        if engines and not all(rank in here for rank in dist.get_process_group_ranks(group)):
            is_reported = True
            _log.warning(
                "ringfort: %s sends plaintext between the machines: anyone on the network can read and change data. "
                'Write init_process_group("%s") instead.',
                ", ".join(dict.fromkeys(engines)),
                BACKEND,
            )

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **keywords: Any) -> Any:
            group = original(*arguments, **keywords)
            try:
                check(group)
            except Exception:  # a warning must not end a program that works
                _log.debug("Could not check a process group for plaintext", exc_info=True)
            return group

        return call

    for name in ("init_process_group", "new_group"):
        function = checked(getattr(dist.distributed_c10d, name))
        setattr(dist.distributed_c10d, name, function)
        setattr(dist, name, function)
