"""What a person asks of `ringfort run`, checked before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringfort.config import check_timeout
from ringfort.errors import InvalidArgumentError

TIMEOUT = 300.0
"""Seconds to wait for the other machines: long enough to walk to them and type the command there."""
MAX_LOCAL = 4096
"""Ranks of one machine; what a member of an epoch may bring (cluster/messages.py)."""
MAX_NODES = 256
"""Machines of one run; the members that an epoch may have (cluster/messages.py)."""


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

    def __post_init__(self) -> None:
        if not 1 <= self.local <= MAX_LOCAL:
            raise InvalidArgumentError("local", self.local, f"must be 1 to {MAX_LOCAL} ranks on this machine")
        check_timeout(self.timeout)
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
        """What each rank runs."""
        return [sys.executable, *(["-m"] if self.module else []), self.script, *self.arguments]

    @property
    def title(self) -> str:
        """What is run, so that launchers can see that they mean the same: folders may differ between machines."""
        return f"-m {self.script}" if self.module else Path(self.script).name
