"""`Terms`: what every part of a bootstrap needs to know: by when, with which credentials, on which machine."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import cache

from ringfort.bootstrap.connection import Connection
from ringfort.config import DistributedConfig, check_world_size
from ringfort.errors import InvalidRankError
from ringfort.identity.credentials import Credentials
from ringfort.transport.machine import Machine, this_machine

_log = logging.getLogger(__name__)

Connections = dict[int, Connection]
"""By rank."""
Address = tuple[str, int]


@dataclass(frozen=True)
class Terms:
    """The deadline of a bootstrap, this process's credentials (None with encryption off), and its machine."""

    timeout: float
    deadline: float
    credentials: Credentials | None
    machine: Machine

    @classmethod
    def begin(cls, timeout: float, credentials: Credentials | None, machine: Machine) -> Terms:
        """Return terms whose time starts now."""
        return cls(timeout, time.monotonic() + timeout, credentials, machine)

    @classmethod
    def of(cls, config: DistributedConfig, credentials: Credentials | None) -> Terms:
        """Return the terms that `config` sets, starting now. `credentials` default to this user's own."""
        return cls.begin(config.timeout, credentials_for(config, credentials), machine_for(config))

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline


def machine_for(config: DistributedConfig) -> Machine:
    """Return what this process tells other ranks about its machine."""
    return this_machine(shares=config.shared_memory == "on")


def credentials_for(config: DistributedConfig, given: Credentials | None) -> Credentials | None:
    """Return `given`, or this user's own credentials; None with encryption off."""
    if config.encryption == "off":
        warn_once("Encryption is off: anyone on the network can read and change what the ranks send")
        return None
    return given or Credentials.load()


@cache
def warn_once(message: str) -> None:
    """Log a warning, once per process: that something does not encrypt."""
    _log.warning(message)


def check_place(rank: int, world_size: int) -> None:
    """Raise `InvalidWorldSizeError` or `InvalidRankError` if `rank` is not one of `world_size` ranks."""
    check_world_size(world_size)
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < world_size:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRankError(rank, world_size)
