"""The engines that a benchmark compares. To add one, derive a class from `base.Engine` and list it here."""

from __future__ import annotations

from typing import NamedTuple

from ringfort.bench.engines.base import Engine
from ringfort.bench.engines.gloo import GlooEngine
from ringfort.bench.engines.limits import MemcpyEngine, SocketsEngine
from ringfort.bench.engines.mlx import MlxEngine
from ringfort.bench.engines.mpi import MpichShmEngine, MpichTcpEngine, OpenMpiShmEngine, OpenMpiTcpEngine
from ringfort.bench.engines.ours import PlainEngine, RingfortEngine, TcpEngine
from ringfort.errors import InvalidArgumentError

ENGINES: dict[str, type[Engine]] = {
    engine.name: engine
    for engine in (
        RingfortEngine,
        TcpEngine,
        PlainEngine,
        GlooEngine,
        OpenMpiTcpEngine,
        OpenMpiShmEngine,
        MpichTcpEngine,
        MpichShmEngine,
        MlxEngine,
        SocketsEngine,
        MemcpyEngine,
    )
}
OTHERS = tuple(name for name in ENGINES if name != RingfortEngine.name)
DEFAULT = ("gloo",)
"""The engines to compare with by default, if they are installed."""


class Choice(NamedTuple):
    """The engines to compare with."""

    names: tuple[str, ...]
    missing: dict[str, str]
    """Engines that were asked for but are not installed, and how to install them."""


def choose_engines(text: str | None) -> Choice:
    """Choose the engines to compare with: names separated by commas, `all` or `none`; None means `DEFAULT`.

    Raises `InvalidArgumentError` for an unknown name.
    """
    if text is None:
        return Choice(tuple(name for name in DEFAULT if ENGINES[name].available()), {})
    if text in ("none", "all"):
        names = OTHERS if text == "all" else ()
    else:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in OTHERS:
            raise InvalidArgumentError("against", name, f"choose one of: {', '.join(OTHERS)}, all, none")
    missing = {name: ENGINES[name].install for name in names if not ENGINES[name].available()}
    return Choice(tuple(name for name in names if name not in missing), missing)
