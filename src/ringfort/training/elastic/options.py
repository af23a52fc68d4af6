"""`Options`: the arguments of `ringfort.elastic`, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from ringfort.config import AutoDiscoveryConfig, DistributedConfig, HealthConfig
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
    checkpoint: str | None
    every: int
    keep: int
    patience: float | None
    nonfinite: Nonfinite
    config: AutoDiscoveryConfig | None
    group: DistributedConfig | None
    machine_class: str = ""

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
        _node_range(self.nodes)

    @property
    def fewest(self) -> int:
        """The least number of members with which a step begins."""
        return _node_range(self.nodes)[0]

    @property
    def most(self) -> int | None:
        """The largest number of members; None for no limit."""
        return _node_range(self.nodes)[1]

    @property
    def join_timeout(self) -> float:
        """Seconds after which a program that only sees another run of this name gives up."""
        return (self.config or AutoDiscoveryConfig()).timeout

    @property
    def group_config(self) -> DistributedConfig:
        """The settings of the groups of its epochs."""
        group = self.group or DistributedConfig()
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


def _node_range(nodes: str | int) -> tuple[int, int | None]:
    first, colon, last = str(nodes).partition(":")
    try:
        fewest = int(first)
        most = (int(last) if last else None) if colon else fewest
    except ValueError:
        raise InvalidArgumentError("nodes", nodes, "must be MIN:MAX, such as 2:8, or one number") from None
    if fewest < 1 or (most is not None and most < fewest):
        raise InvalidArgumentError("nodes", nodes, "must be MIN:MAX with 1 <= MIN <= MAX")
    return fewest, most
