"""What a program says in `elastic(...)`, together with what `ringfort run --elastic` has told it."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from ringfort.config import (
    DEFAULT_PATIENCE,
    MAX_ELASTIC_NAME,
    Environment,
    check_timeout,
    elastic_name,
    member_range,
    patience_of,
)
from ringfort.errors import ConfigError
from ringfort.telemetry.log_handler import show_lines

NODES: Final = "1:"
"""Unless somebody says how many members a run has: at least this one, and no limit."""
NAME: Final = "elastic"
"""The name of a run whose program has no script, such as an interactive one."""
MEMBER: Final = b"1"
"""The mark for the launcher: this rank is a member."""
MACHINE: Final = b"m"
"""The mark that replaces it if all ranks of the machine are one member."""

T = TypeVar("T")


class Told(NamedTuple):
    """The settings of a run, from the program, its launcher and the defaults."""

    nodes: str | int
    name: str
    patience: float


def with_launcher(nodes: str | int | None, name: str | None, patience: float | None) -> Told:
    """Complete the arguments of `elastic()` with those of the launcher, and tell the launcher of the call.

    Raises `ConfigError` for an invalid argument, and for one that contradicts the launcher's: neither the person who
    wrote the program nor the one who started it may be overruled silently.
    """
    told = Environment.from_mapping()
    if told.elastic_file is not None:
        _leave_mark(told.elastic_file, MEMBER)
        if not told.local_rank:  # the other ranks of the machine would print the same lines
            show_lines("ringfort.elastic")
        _same("patience", patience, told.patience, "--patience", "RINGFORT_PATIENCE")
    option = told.elastic_nodes
    if nodes is not None and member_range(nodes) != member_range(option or nodes):
        raise _contradiction("nodes", nodes, option, "--nodes", "RINGFORT_ELASTIC_NODES")
    if name is not None and (why := elastic_name(name)):
        raise ConfigError("name", name, why)
    _same("name", name, told.elastic_name, "--name", "RINGFORT_ELASTIC_NAME")
    if patience is not None:
        check_timeout(patience, "patience")
    return Told(
        (option or NODES) if nodes is None else nodes,
        name or told.elastic_name or _script_name(),
        patience_of(patience, DEFAULT_PATIENCE),
    )


def tell_of_machine() -> None:
    """Tell the launcher, after `with_launcher`, that all ranks of this machine are one member: they end and start
    together."""
    file = Environment.from_mapping().elastic_file
    if file is not None:
        _leave_mark(file, MACHINE)


def _leave_mark(path: str, mark: bytes) -> None:
    with suppress(OSError), Path(path).open("r+b") as file:  # gone with its launcher: nobody asks
        file.write(mark)


def _same(name: str, given: T | None, told: T | None, option: str, variable: str) -> None:
    if given is not None and told is not None and given != told:
        raise _contradiction(name, given, told, option, variable)


def _contradiction(name: str, given: object, told: object, option: str, variable: str) -> ConfigError:
    why = f"contradicts {variable}={told}, which `ringfort run --elastic {option}` sets; leave one of the two out"
    return ConfigError(name, given, why)


def _script_name() -> str:
    """Return the name of the script without its folder, which may differ between machines; of a package its name."""
    path = Path(sys.argv[0] if sys.argv else "")
    name = path.parent.name if path.name == "__main__.py" else path.name
    is_script = name.isprintable() and not name.startswith("-")  # `python -c` and `-m` put their letter here
    return name[:MAX_ELASTIC_NAME] or NAME if is_script else NAME
