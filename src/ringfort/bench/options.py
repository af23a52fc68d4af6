"""What a benchmark run is asked to do: parsed from text, and checked before anything starts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

import msgspec

from ringfort.config import (
    GIB,
    KIB,
    MIB,
    AllReduceStrategy,
    BroadcastStrategy,
    CollectiveConfig,
    DistributedConfig,
    ReduceStrategy,
    Strategy,
)
from ringfort.errors import InvalidArgumentError

OPS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
)
STRATEGIES: dict[str, type[Strategy]] = {
    "all_reduce": AllReduceStrategy,
    "broadcast": BroadcastStrategy,
    "reduce": ReduceStrategy,
}
"""The operations that can be told which way their data takes."""

DTYPES = {
    **{f"{kind}{bits}": bits // 8 for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
}
"""Bytes an element."""

SIZES = "4,4K,64K,1M,16M,64M,256M"
RANKS = "2,4"
MIN_TIME = 1.0
"""Seconds of calls per engine and size, if that is more than `MIN_ROUNDS`: the default run ends in 3 minutes."""
MIN_ROUNDS = 5
"""Turns of each engine at a size at the least: below that a median says little."""
MAX_ROUNDS = 40
"""At the most."""
LARGEST = 64 * GIB
"""Bytes. Beyond any buffer that several ranks of one machine can hold; catches a slip of the suffix."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. Raises `InvalidArgumentError` for a value that cannot work."""

    op: str = "all_reduce"
    sizes: tuple[int, ...] = field(default_factory=lambda: parse_sizes(SIZES))
    ranks: tuple[int, ...] = field(default_factory=lambda: parse_ranks(RANKS))
    dtype: str = "float32"
    strategy: str = "auto"
    against: tuple[str, ...] = ()
    repeat: int | None = None
    """Calls per engine and size; None means as many as fit in `min_time`."""
    min_time: float = MIN_TIME
    encryption: str = "on"
    shared_memory: str = "on"
    connections: int | Literal["auto"] = 1
    """Connections between every two ranks that do not share memory."""

    def __post_init__(self) -> None:
        _check_choice("op", self.op, OPS)
        _check_choice("dtype", self.dtype, tuple(DTYPES))
        for name in ("encryption", "shared_memory"):
            _check_choice(name, getattr(self, name), ("on", "off"))
        if self.op in STRATEGIES:
            STRATEGIES[self.op].parse(self.strategy)
        elif self.strategy != "auto":
            raise InvalidArgumentError("strategy", self.strategy, f"{self.op} has no strategies to choose from")
        if self.repeat is not None and self.repeat < 1:
            raise InvalidArgumentError("repeat", self.repeat, "must be at least 1")
        if not (isfinite(self.min_time) and self.min_time > 0):
            raise InvalidArgumentError("min_time", self.min_time, "must be a positive number of seconds")
        CollectiveConfig(connections=self.connections)  # raises where it cannot be

    def settings(self, **changes: str) -> DistributedConfig:
        """The configuration of our ranks, but for `changes`."""
        named: dict[str, Any] = {"encryption": self.encryption, "shared_memory": self.shared_memory, **changes}
        return DistributedConfig(**named, collective=CollectiveConfig(connections=self.connections))

    def cases(self, world_size: int) -> list[Case]:
        """What to measure among `world_size` ranks, in order, without repeats."""
        if self.op == "barrier":
            return [Case("barrier", 0, self.dtype, world_size)]
        return list(dict.fromkeys(Case.of(self.op, size, self.dtype, world_size) for size in self.sizes))

    def to_json(self) -> str:
        """For the command line of a rank."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Options:
        """What `to_json` wrote."""
        return msgspec.json.decode(text, type=cls)


@dataclass(frozen=True)
class Case:
    """One operation at one size among some ranks."""

    op: str
    count: int
    """Elements of the largest buffer on a rank: the output of a gather, the input of a scatter."""
    dtype: str
    world_size: int

    @classmethod
    def of(cls, op: str, nbytes: int, dtype: str, world_size: int) -> Case:
        """The case of at least `nbytes`: whole elements, and equal parts where the operation has parts."""
        count = -(-nbytes // DTYPES[dtype])
        if op not in STRATEGIES:
            count = -(-count // world_size) * world_size
        return cls(op, count, dtype, world_size)

    @property
    def nbytes(self) -> int:
        """Of the largest buffer on a rank."""
        return self.count * DTYPES[self.dtype]

    @property
    def part(self) -> int:
        """Elements of one rank's part, where the operation has parts."""
        return self.count // self.world_size


def parse_sizes(text: str) -> tuple[int, ...]:
    """`4,4K,64KiB,1M` into bytes. K, M and G are powers of 1024."""
    return tuple(parse_size(item) for item in _items("sizes", text))


def parse_size(text: str) -> int:
    """One size into bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise InvalidArgumentError("sizes", text, "must be bytes such as 4, 64K, 1M or 1G")
    value = float(match[1]) * {"": 1, "K": KIB, "M": MIB, "G": GIB}[match[2]]
    if value != int(value) or not 1 <= value <= LARGEST:
        raise InvalidArgumentError("sizes", text, "must be a whole number of bytes from 1 to 64G")
    return int(value)


def parse_ranks(text: str) -> tuple[int, ...]:
    """`2,4` into world sizes."""
    found: list[int] = []
    for item in _items("ranks", text):
        if not item.strip().isdecimal() or int(item) < 1:
            raise InvalidArgumentError("ranks", item, "must be a whole number of at least 1")
        found.append(int(item))
    return tuple(dict.fromkeys(found))


def parse_connections(text: str) -> int | Literal["auto"]:
    """`auto` or a number; which ones can be is said by `CollectiveConfig`."""
    if text.strip() == "auto":
        return "auto"
    if not text.strip().isdecimal():
        raise InvalidArgumentError("connections", text, "must be auto or a whole number of at least 1")
    return int(text)


def _items(name: str, text: str) -> list[str]:
    items = [item for item in text.split(",") if item.strip()]
    if not items:
        raise InvalidArgumentError(name, text, "name at least one, separated by commas")
    return items


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgumentError(name, value, f"choose one of: {', '.join(choices)}")
