"""What a person asks of `ringfort run`, checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringfort.config import DEFAULT_PATIENCE, MAX_RUN_NAME, check_timeout, patience_of
from ringfort.errors import InvalidArgumentError

TIMEOUT = 300.0
"""Seconds to wait for the other machines: long enough to walk to them and type the command there."""
MAX_LOCAL = 4096
"""Ranks of one machine; what a member of an epoch may bring (cluster/core/peer_messages.py)."""
MAX_RESTARTS = 1_000_000
"""Of one run."""
MAX_NODES = 256
"""Machines of one run; the members that an epoch may have (cluster/core/peer_messages.py)."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Which program, how many times, and with whom."""

    script: str
    """A file, or with `module` the name of a module."""
    arguments: Sequence[str] = ()
    module: bool = False
    local: int = 1
    """Ranks on this machine."""
    nodes: str = "1"
    """`MIN` or `MIN:MAX` machines."""
    peers: Sequence[str] = ()
    interfaces: Sequence[str] = ()
    restart_without: Sequence[str] = ()
    """Machines, by name or peer id, that are gone for good."""
    timeout: float = TIMEOUT
    name: str | None = None
    """Of the run; the script's unless given."""
    patience: float | None = None
    """Seconds of silence that a machine is forgiven; `RINGFORT_PATIENCE`, else 10, where it is not given."""
    max_restarts: int = 0
    """How often the whole run starts again after a failure."""

    def __post_init__(self) -> None:
        if not 1 <= self.local <= MAX_LOCAL:
            raise InvalidArgumentError("local", self.local, f"must be 1 to {MAX_LOCAL} ranks on this machine")
        check_timeout(self.timeout)
        if self.patience is not None:
            check_timeout(self.patience, "patience")
        if not 0 <= self.max_restarts <= MAX_RESTARTS:
            raise InvalidArgumentError("max_restarts", self.max_restarts, f"must be 0 to {MAX_RESTARTS}")
        if self.name is not None and (not self.name.isprintable() or not 1 <= len(self.name) <= MAX_RUN_NAME):
            why = f"must be 1 to {MAX_RUN_NAME} characters that can be printed"
            raise InvalidArgumentError("name", self.name, why)
        _ = self.node_range
        if not self.module and not Path(self.script).is_file():
            there = "is a folder" if Path(self.script).is_dir() else "there is no such file"
            raise InvalidArgumentError("script", self.script, f"{there}; name a Python file, or a module after -m")

    @property
    def node_range(self) -> tuple[int, int]:
        """The fewest and the most machines. Raises `InvalidArgumentError` if the text is no such thing."""
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
        """Whether this machine is all that is asked for."""
        return self.node_range[1] == 1

    @property
    def command(self) -> list[str]:
        """What each rank runs, after the interpreter's name."""
        return [*(["-m"] if self.module else []), self.script, *self.arguments]

    @property
    def title(self) -> str:
        """What is run, without its folder, which may differ between machines."""
        return f"-m {self.script}" if self.module else Path(self.script).name

    @property
    def run_name(self) -> str:
        """What machines must have in common to be of one run."""
        return self.title[:MAX_RUN_NAME] if self.name is None else self.name

    @property
    def patience_seconds(self) -> float:
        """How long silence is forgiven, wherever that was said."""
        return patience_of(self.patience, DEFAULT_PATIENCE)
