"""What a program says in `elastic(...)`, together with what `ringfort run --elastic` has told it."""

from __future__ import annotations

import logging
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

NODES: Final = "1:"
"""Unless somebody says how many members a run has: at least this one, and no limit."""
NAME: Final = "elastic"
"""The name of a run whose program has no script, such as an interactive one."""

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
        with suppress(OSError), Path(told.elastic_file).open("r+b") as file:  # gone with its launcher: nobody asks
            file.write(b"1")
        if not told.local_rank:
            _show_events()
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


def _show_events() -> None:
    """Print who comes, who goes and what it costs, unless the program has a logging setup of its own. One rank of each
    machine does it, because all of them would print the same."""
    events = logging.getLogger("ringfort.elastic")
    if events.handlers or events.level != logging.NOTSET:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.addFilter(lambda _: not logging.getLogger().handlers)  # the program may set up logging later
    events.addHandler(handler)
    events.setLevel(logging.INFO)


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
