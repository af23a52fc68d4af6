"""`Options`: the arguments of `ringfort.elastic`, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from ringfort.config import (
    AutoDiscoveryConfig,
    DistributedConfig,
    Environment,
    HealthConfig,
    group_config_of,
    member_range,
)
from ringfort.errors import InvalidArgumentError

PATIENCE: Final = 10.0
"""Seconds of silence after which a machine is lost, by default."""
_STUCK: Final = 3600.0
"""Seconds for which members wait in a step for a program whose machine is alive: it may evaluate, or be in a debugger.
A machine that is silent is lost after its `patience`."""
Nonfinite = Literal["error", "skip"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a program takes part in a run. Raises `InvalidArgumentError` for an invalid value."""

    name: str
    nodes: str | int
    checkpoint: str | os.PathLike[str] | None
    every: int
    keep: int
    patience: float | None
    nonfinite: Nonfinite
    config: AutoDiscoveryConfig | None
    group: DistributedConfig | None
    machine_class: str = ""
    clip_norm: float | None = None
    scheduler_per: str = "step"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= 128:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("name", self.name, "must be a text of 1 to 128 characters")
        for name, value in (("checkpoint_every", self.every), ("keep", self.keep)):
            if type(value) is not int or value < 1:
                raise InvalidArgumentError(name, value, "must be a whole number of at least 1")
        if self.nonfinite not in ("error", "skip"):
            raise InvalidArgumentError("nonfinite", self.nonfinite, "must be error or skip")
        if not isinstance(self.machine_class, str) or len(self.machine_class) > 1024:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("machine_class", self.machine_class, "must be a text of up to 1024 characters")
        if self.checkpoint is not None and (
            not isinstance(self.checkpoint, (str, os.PathLike))  # pyright: ignore[reportUnnecessaryIsInstance]
            or not str(self.checkpoint)
            or "\0" in str(self.checkpoint)
        ):
            raise InvalidArgumentError("checkpoint", self.checkpoint, "must be the path of a folder on this machine")
        for name, value, kind in (
            ("config", self.config, AutoDiscoveryConfig),
            ("group", self.group, DistributedConfig),
        ):
            if value is not None and not isinstance(value, kind):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgumentError(name, value, f"must be a ringfort.config.{kind.__name__}")
        member_range(self.nodes)

    @property
    def rules(self) -> dict[str, str]:
        """What all members must do alike with each step: a run may be started again with others."""
        clip_norm = None if self.clip_norm is None else float(self.clip_norm)
        return {"nonfinite": self.nonfinite, "clip_norm": f"{clip_norm}", "scheduler_per": self.scheduler_per}

    @cached_property
    def fewest(self) -> int:
        """The least number of members with which a step begins."""
        return member_range(self.nodes)[0]

    @cached_property
    def most(self) -> int | None:
        """The largest number of members; None for no limit."""
        return member_range(self.nodes)[1]

    @cached_property
    def join_timeout(self) -> float:
        """Seconds after which a program that only sees another run of this name gives up."""
        return (self.config or AutoDiscoveryConfig()).timeout

    @property
    def group_config(self) -> DistributedConfig:
        """The settings of the groups of its epochs."""
        group = group_config_of(self.group, Environment.from_mapping())
        return replace(group, timeout=max(group.timeout, _STUCK))

    def discovery(self, run: str) -> AutoDiscoveryConfig:
        """Return the settings of its node."""
        return replace(
            self.config or AutoDiscoveryConfig(),
            elastic=True,
            min_peers=self.fewest - 1,
            max_peers=None if self.most is None else self.most - 1,
            run=run,
            health=HealthConfig(patience=self.patience or PATIENCE),
        )
