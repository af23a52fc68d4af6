"""The options of a benchmark run: parsed from text, and checked before anything starts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from ringfort import config
from ringfort.config import GIB, KIB, MIB, CollectiveConfig, DistributedConfig, on_off, one_of, positive, setting, whole
from ringfort.errors import InvalidArgumentError

STRATEGIES: dict[str, type[config.Strategy]] = {
    "all_reduce": config.AllReduceStrategy,
    "broadcast": config.BroadcastStrategy,
    "reduce": config.ReduceStrategy,
}
"""The operations that have strategies."""
OPS = (*STRATEGIES, "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier")

DTYPES = {
    **{f"{kind}{bits}": bits // 8 for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
}
"""Bytes per element."""

SIZES = "4,4K,64K,1M,16M,64M,256M"
RANKS = "2,4"
MIN_TIME = 1.0
"""Seconds of calls per engine and size, if that is more than `MIN_ROUNDS`: the default run ends in 3 minutes."""
MIN_ROUNDS = 5
"""Bursts per engine and size, at least: a median of fewer says little."""
MAX_ROUNDS = 40
"""Bursts per engine and size, at most."""
LARGEST = 64 * GIB
"""Bytes. More than several ranks of one machine can hold; catches a wrong suffix."""


@dataclass(frozen=True, kw_only=True)
class Options(config.Settings):
    """The options of one run. Raises `InvalidArgumentError` for an invalid value."""

    op: str = setting("all_reduce", one_of(*OPS))
    sizes: tuple[int, ...] = field(default_factory=lambda: parse_sizes(SIZES))
    ranks: tuple[int, ...] = field(default_factory=lambda: parse_ranks(RANKS))
    dtype: str = setting("float32", one_of(*DTYPES))
    strategy: str = "auto"
    against: tuple[str, ...] = ()
    repeat: int | None = setting(None, whole(1))
    """Calls per engine and size; None means as many as fit into `min_time`."""
    min_time: float = setting(MIN_TIME, positive)
    encryption: str = setting("on", on_off)
    shared_memory: str = setting("on", on_off)
    connections: int | Literal["auto"] = "auto"
    """As in `CollectiveConfig`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.op in STRATEGIES:
            STRATEGIES[self.op].parse(self.strategy)
        elif self.strategy != "auto":
            raise InvalidArgumentError("strategy", self.strategy, f"{self.op} has no strategies to choose from")
        CollectiveConfig(connections=self.connections)  # raises for an invalid value

    def settings(self, **changes: str) -> DistributedConfig:
        """The configuration of our ranks, with `changes`."""
        named: dict[str, Any] = {"encryption": self.encryption, "shared_memory": self.shared_memory, **changes}
        return DistributedConfig(**named, collective=CollectiveConfig(connections=self.connections))

    def cases(self, world_size: int) -> list[Case]:
        """The cases to measure among `world_size` ranks, in order and without repeats."""
        sizes = (0,) if self.op == "barrier" else self.sizes
        return list(dict.fromkeys(Case.of(self.op, size, self.dtype, world_size, self.strategy) for size in sizes))


@dataclass(frozen=True)
class Case:
    """One operation at one size among `world_size` ranks."""

    op: str
    count: int
    """Elements of the largest buffer on a rank: the output of a gather, the input of a scatter."""
    dtype: str
    world_size: int
    strategy: str = "auto"

    @classmethod
    def of(cls, op: str, nbytes: int, dtype: str, world_size: int, strategy: str = "auto") -> Case:
        """The case of at least `nbytes`: whole elements, and equal parts if the operation has parts."""
        count = -(-nbytes // DTYPES[dtype])
        if op not in STRATEGIES:
            count = -(-count // world_size) * world_size
        return cls(op, count, dtype, world_size, strategy)

    @property
    def nbytes(self) -> int:
        """Bytes of the largest buffer on a rank."""
        return self.count * DTYPES[self.dtype]

    @property
    def part(self) -> int:
        """Elements of one rank's part, if the operation has parts."""
        return self.count // self.world_size


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse `4,4K,64KiB,1M` into bytes. K, M and G are powers of 1024."""
    return tuple(parse_size(item) for item in _items("sizes", text))


def parse_size(text: str) -> int:
    """Parse one size into bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise InvalidArgumentError("sizes", text, "must be bytes such as 4, 64K, 1M or 1G")
    value = float(match[1]) * {"": 1, "K": KIB, "M": MIB, "G": GIB}[match[2]]
    if value != int(value) or not 1 <= value <= LARGEST:
        raise InvalidArgumentError("sizes", text, "must be a whole number of bytes from 1 to 64G")
    return int(value)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse `2,4` into world sizes."""
    return tuple(dict.fromkeys(_whole_number("ranks", item) for item in _items("ranks", text)))


def parse_connections(text: str) -> int | Literal["auto"]:
    """Parse `auto` or a number; `CollectiveConfig` knows the largest."""
    return "auto" if text.strip() == "auto" else _whole_number("connections", text, "auto or ")


def _whole_number(name: str, text: str, others: str = "") -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise InvalidArgumentError(name, text, f"must be {others}a whole number of at least 1")
    return int(text)


def _items(name: str, text: str) -> list[str]:
    items = [item for item in text.split(",") if item.strip()]
    if not items:
        raise InvalidArgumentError(name, text, "name at least one, separated by commas")
    return items
