"""The options of `ringfort run`, checked before anything starts: `RunOptions`, or with --elastic `ElasticOptions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ringfort.config import (
    DEFAULT_PATIENCE,
    MAX_RUN_NAME,
    Settings,
    elastic_name,
    member_range,
    parse_address,
    patience_of,
    positive,
    setting,
    whole,
)
from ringfort.errors import BackendUnavailableError, InvalidArgumentError

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
MAX_WORLD_SIZE = MAX_NODES * MAX_LOCAL
"""Ranks per run."""
TORCH_BACKEND = "ringfort"
"""The choice of `--torch-backend`."""
METRICS_ADDRESS = "127.0.0.1"
"""Where metrics are served by default: programs on this machine can read them, and no others."""


def _name(value: str) -> str:
    """For the name of a run."""
    is_valid = value.isprintable() and 1 <= len(value) <= MAX_RUN_NAME
    return "" if is_valid else f"must be 1 to {MAX_RUN_NAME} printable characters"


@cache
def parse_ranks(text: str) -> tuple[range, ...]:
    """Parse a list of ranks: `0,2-3`, `all` or `none`. Raises `InvalidArgumentError`."""
    words = {"all": (range(MAX_WORLD_SIZE),), "none": ()}
    if text in words:
        return words[text]
    found: list[range] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < MAX_WORLD_SIZE):
            why = f"must be ranks such as 0,2-3, each below {MAX_WORLD_SIZE:,}; or all, or none"
            raise InvalidArgumentError("tee", text, why)
        found.append(range(int(first), int(last) + 1))
    return tuple(found)


def parse_endpoint(text: str) -> tuple[str, int]:
    """Parse where metrics are served: `PORT` or `ADDRESS:PORT`. Raises `ConfigError`."""
    return parse_address(f"{METRICS_ADDRESS}:{text}" if text.isdecimal() else text, "metrics_port")


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
    log_dir: str | None = None
    """The folder in which the output of each rank is kept."""
    tee: str = "all"
    """The ranks whose output is printed."""
    status: bool = True
    """Whether a terminal shows a line about the run."""
    metrics: str | None = None
    """Where metrics are served for Prometheus: `PORT` or `ADDRESS:PORT`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_ranks(self.tee)
        if self.metrics is not None:
            parse_endpoint(self.metrics)
        if not self.module and not Path(self.script).is_file():
            there = "is a folder" if Path(self.script).is_dir() else "file not found"
            raise InvalidArgumentError("script", self.script, f"{there}; name a Python file, or a module after -m")

    def check_tee(self) -> None:
        """Check that there are ranks as `tee` names them, if all ranks are on this machine. Raises
        `InvalidArgumentError`."""
        ranks = parse_ranks(self.tee)
        if self.tee != "all" and any(part.stop > self.local for part in ranks):
            there = "the only rank is 0" if self.local == 1 else f"the ranks are 0 to {self.local - 1}"
            raise InvalidArgumentError("tee", self.tee, f"{there}; see -n")

    def is_printed(self, rank: int) -> bool:
        """Whether the output of `rank` is printed."""
        return any(rank in part for part in parse_ranks(self.tee))

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
    torch_backend: str | None = None
    """What the torch groups of the program are made of, whatever it says; None to leave that to the program."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_alone:
            self.check_tee()
        if self.torch_backend not in (None, TORCH_BACKEND):
            why = f"the only choice is {TORCH_BACKEND}; leave the option out for a program that names its own backend"
            raise InvalidArgumentError("torch_backend", self.torch_backend, why)
        if self.torch_backend is not None and find_spec("torch") is None:
            raise BackendUnavailableError("torch", "pip install 'ringfort[torch]'")

    @property
    def command(self) -> list[str]:
        """What each rank runs, after the interpreter's name."""
        command = super().command
        return command if self.torch_backend is None else ["-m", "ringfort.launch.torch_program", *command]

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
        self.check_tee()
        if self.nodes is not None:
            _, most = member_range(self.nodes)
            if most is not None and self.local > most:
                why = f"each rank is a member, and --nodes {self.nodes} allows {most}; start fewer, or allow more"
                raise InvalidArgumentError("local", self.local, why)
        for name in ("peers", "interfaces", "restart_without"):
            for value in getattr(self, name):
                if "," in value:  # it separates them in the environment
                    raise InvalidArgumentError(name, value, "must not contain a comma; repeat the option instead")
