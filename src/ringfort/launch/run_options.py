"""The options of `ringfort run`, checked before anything starts: `RunOptions`, or with --elastic `ElasticOptions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringfort.config import (
    DEFAULT_PATIENCE,
    MAX_RUN_NAME,
    Settings,
    elastic_name,
    member_range,
    patience_of,
    positive,
    setting,
    whole,
)
from ringfort.errors import InvalidArgumentError

TIMEOUT = 300.0
"""Seconds to wait for the other machines: long enough to walk to them and type the command there."""
MAX_LOCAL = 4096
"""Ranks per machine; the limit per member of an epoch (cluster/core/peer_messages.py)."""
MAX_RESTARTS = 1_000_000
"""Per run."""
ELASTIC_RESTARTS = 3
"""Per rank of this machine, with `--elastic`."""
MAX_NODES = 256
"""Machines per run; the limit per epoch (cluster/core/peer_messages.py)."""


def _name(value: str) -> str:
    """For the name of a run."""
    is_valid = value.isprintable() and 1 <= len(value) <= MAX_RUN_NAME
    return "" if is_valid else f"must be 1 to {MAX_RUN_NAME} printable characters"


@dataclass(frozen=True, kw_only=True)
class Program(Settings):
    """Which program to run, and in how many ranks on this machine."""

    script: str
    """A file, or with `module` the name of a module."""
    arguments: Sequence[str] = ()
    module: bool = False
    local: int = setting(1, whole(1, MAX_LOCAL))
    """Ranks on this machine."""
    peers: Sequence[str] = ()
    interfaces: Sequence[str] = ()
    restart_without: Sequence[str] = ()
    """Machines, by name or peer id, that will not come back."""
    patience: float | None = setting(None, positive)
    """Seconds without an answer after which a machine is lost; by default `RINGFORT_PATIENCE`, or 10."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.module and not Path(self.script).is_file():
            there = "is a folder" if Path(self.script).is_dir() else "file not found"
            raise InvalidArgumentError("script", self.script, f"{there}; name a Python file, or a module after -m")

    @property
    def command(self) -> list[str]:
        """What each rank runs, after the interpreter's name."""
        return [*(["-m"] if self.module else []), self.script, *self.arguments]

    @property
    def title(self) -> str:
        """The script without its folder, which may differ between machines."""
        return f"-m {self.script}" if self.module else Path(self.script).name


@dataclass(frozen=True, kw_only=True)
class RunOptions(Program):
    """How a program is run on several machines that start together."""

    nodes: str = "1"
    """`MIN` or `MIN:MAX` machines."""
    timeout: float = setting(TIMEOUT, positive)
    name: str | None = setting(None, _name)
    """The name of the run; by default that of the script."""
    max_restarts: int = setting(0, whole(0, MAX_RESTARTS))
    """How often the run is restarted after a failure."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.node_range

    @property
    def node_range(self) -> tuple[int, int]:
        """The fewest and the most machines. Raises `InvalidArgumentError` if `nodes` is invalid."""
        fewest, colon, most = self.nodes.partition(":")
        try:
            found = int(fewest), int(most if colon else fewest)
        except ValueError as exc:
            raise InvalidArgumentError("nodes", self.nodes, "must be a number of machines, or MIN:MAX") from exc
        if not 1 <= found[0] <= found[1] <= MAX_NODES:
            why = f"MIN must be at least 1, and MAX at least MIN and at most {MAX_NODES}"
            raise InvalidArgumentError("nodes", self.nodes, why)
        return found

    @property
    def is_alone(self) -> bool:
        """Whether the run needs only this machine."""
        return self.node_range[1] == 1

    @property
    def run_name(self) -> str:
        """The name that the machines of one run have in common."""
        return self.title[:MAX_RUN_NAME] if self.name is None else self.name

    @property
    def patience_seconds(self) -> float:
        """`patience`, or its default."""
        return patience_of(self.patience, DEFAULT_PATIENCE)


@dataclass(frozen=True, kw_only=True)
class ElasticOptions(Program):
    """How a program is run as members of an elastic run, which find the other members by themselves.

    What is None here is left to the program: see `training/elastic/launched.py`.
    """

    nodes: str | None = None
    """The least and the largest number of members, as `MIN:MAX`, `MIN:` or one number."""
    name: str | None = setting(None, elastic_name)
    """The name of the run."""
    max_restarts: int = setting(ELASTIC_RESTARTS, whole(0, MAX_RESTARTS))
    """How often each rank of this machine is started again after a crash."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes is not None:
            _, most = member_range(self.nodes)
            if most is not None and self.local > most:
                why = f"each rank is a member, and --nodes {self.nodes} allows {most}; start fewer, or allow more"
                raise InvalidArgumentError("local", self.local, why)
        for name in ("peers", "interfaces", "restart_without"):
            for value in getattr(self, name):
                if "," in value:  # it separates them in the environment
                    raise InvalidArgumentError(name, value, "must not contain a comma; repeat the option instead")
