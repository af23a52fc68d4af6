"""The engines a benchmark compares: each binds one case to buffers once, and is then called again and again.

To add one, write a class with the members of `Engine` and put it in `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from ringfort.backends.tcp import TcpBackend
from ringfort.bench.options import STRATEGIES, Case
from ringfort.bench.patterns import Array, element_type
from ringfort.config import format_address
from ringfort.context import DistributedContext
from ringfort.errors import BackendUnavailableError, InvalidArgumentError
from ringfort.transport import tcp


class Bound(NamedTuple):
    """One case, ready to run."""

    run: Callable[[], object]
    """Does the operation once; nothing else is timed."""
    result: Callable[[], Array | None]
    """What the last `run` gave this rank."""


class Engine(Protocol):
    """Collectives of one library, in the process of one rank. Made on every rank, used from its main thread."""

    name: ClassVar[str]
    package: ClassVar[str]
    """What has to be installed, as `importlib.metadata` knows it; its version is part of the report."""
    install: ClassVar[str]
    """How to get it."""

    @classmethod
    def available(cls) -> bool:
        """Whether it is installed. Must not import it: the parent asks too."""
        ...

    @classmethod
    def variables(cls) -> Mapping[str, str]:
        """Environment variables that the ranks' processes need."""
        ...

    def setup(self, ctx: DistributedContext, scratch: Path) -> None:
        """Form the group of `ctx`'s ranks. `scratch` is an empty folder that all ranks see, and removed afterwards."""
        ...

    def bind(self, case: Case, strategy: str, source: Array | None) -> Bound:
        """Prepare `case` with this rank's `source`, which in-place operations overwrite.

        Raises anything but a `DistributedError`, on every rank alike, if the engine has no such operation.
        """
        ...

    def teardown(self) -> None:
        """Leave the group."""
        ...


class RingfortEngine:
    """This library, through the context that users have."""

    name: ClassVar[str] = "ringfort"
    package: ClassVar[str] = "ringfort"
    install: ClassVar[str] = "pip install ringfort"

    @classmethod
    def available(cls) -> bool:
        """Always."""
        return True

    @classmethod
    def variables(cls) -> Mapping[str, str]:
        """None."""
        return {}

    def setup(self, ctx: DistributedContext, scratch: Path) -> None:
        """The group is there already."""
        del scratch
        self._ctx = ctx

    def bind(self, case: Case, strategy: str, source: Array | None) -> Bound:
        """See `Engine.bind`."""
        ctx, x = self._ctx, source
        if case.op == "barrier":
            return Bound(ctx.barrier, lambda: None)
        method: Callable[..., Any] = getattr(ctx, case.op)
        chosen = STRATEGIES[case.op].parse(strategy) if case.op in STRATEGIES else None
        returned: list[Any] = [None]

        if chosen is not None:

            def run() -> None:
                returned[0] = method(x, strategy=chosen)
        else:

            def run() -> None:
                returned[0] = method(x)

        return Bound(run, lambda: None if returned[0] is None else np.asarray(returned[0]))

    def teardown(self) -> None:
        """The worker closes the context."""


class PlainEngine(RingfortEngine):
    """This library with encryption off: what the wall costs."""

    name: ClassVar[str] = "plain"

    def setup(self, ctx: DistributedContext, scratch: Path) -> None:
        """A second group of the same ranks, at a port that rank 0 chooses and tells."""
        del scratch
        listener = tcp.listen("127.0.0.1", 0) if ctx.is_master else None
        address = format_address(*listener.getsockname()[:2]) if listener is not None else None
        config = replace(ctx.config, encryption="off")
        master = ctx.broadcast_object(address)
        self._ctx = DistributedContext(TcpBackend(ctx.rank, ctx.world_size, master, config=config, listener=listener))

    def teardown(self) -> None:
        """Leave the second group."""
        self._ctx.close()


class GlooEngine:
    """torch.distributed over Gloo, as people use it on CPUs today."""

    name: ClassVar[str] = "gloo"
    package: ClassVar[str] = "torch"
    install: ClassVar[str] = "pip install 'ringfort[torch]'"

    @classmethod
    def available(cls) -> bool:
        """Whether torch is installed."""
        return find_spec("torch") is not None

    @classmethod
    def variables(cls) -> Mapping[str, str]:
        """Loopback by name: left alone, Gloo takes the interface that the host's name resolves to."""
        import psutil

        for interface, addresses in psutil.net_if_addrs().items():
            if any(address.address == "127.0.0.1" for address in addresses):
                return {"GLOO_SOCKET_IFNAME": interface}
        return {}

    def setup(self, ctx: DistributedContext, scratch: Path) -> None:
        """Gather through a file, so that no port is guessed."""
        self._torch: Any = import_module("torch")
        self._dist: Any = import_module("torch.distributed")
        self._torch.set_num_threads(1)  # ranks share the cores, as ours do
        store = self._dist.FileStore(str(scratch / "gloo"), ctx.world_size)
        self._dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.world_size)
        self._rank = ctx.rank

    def bind(self, case: Case, strategy: str, source: Array | None) -> Bound:
        """See `Engine.bind`. Gloo chooses its own way, so `strategy` is not for it."""
        del strategy
        dist = self._dist
        out = self._output(case)
        x, y = self._tensor(source), self._tensor(out)
        rows = self._rows(case, x, y)
        # Gloo takes what has a part for every rank as one row.
        flat = {"all_gather": y, "reduce_scatter": x}.get(case.op)
        flat = None if flat is None else flat.view(-1)
        runs: dict[str, Callable[[], object]] = {
            "barrier": dist.barrier,
            "all_reduce": lambda: dist.all_reduce(x),
            "broadcast": lambda: dist.broadcast(x, 0),
            "reduce": lambda: dist.reduce(x, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(flat, x),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(y, flat),
            "all_to_all": lambda: dist.all_to_all_single(y, x),
            "gather": lambda: dist.gather(x, rows, 0),
            "scatter": lambda: dist.scatter(y, rows, 0),
        }
        return Bound(runs[case.op], lambda: source if out is None else out)

    def _rows(self, case: Case, x: Any, y: Any) -> list[Any] | None:
        """What torch wants as a list, and only at the root."""
        whole = {"gather": y, "scatter": x}.get(case.op)
        return list(whole.unbind(0)) if whole is not None and self._rank == 0 else None

    def _output(self, case: Case) -> Array | None:
        """Where the result goes, for operations that do not work in place."""
        if case.op in STRATEGIES or case.op == "barrier" or (case.op == "gather" and self._rank != 0):
            return None
        whole = (case.world_size, case.part)
        shape = (case.part,) if case.op in ("reduce_scatter", "scatter") else whole
        return np.zeros(shape, element_type(case.dtype))

    def _tensor(self, array: Array | None) -> Any:
        """A tensor of the same memory."""
        if array is None:
            return None
        if array.dtype.name == "bfloat16":  # torch does not know NumPy's, but reads the same bits
            return self._torch.from_numpy(array.view(np.dtype(np.int16))).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)

    def teardown(self) -> None:
        """Leave the group."""
        self._dist.destroy_process_group()


ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (RingfortEngine, GlooEngine, PlainEngine)}
DEFAULT = ("gloo",)
"""What is compared with if nothing is said, as far as it is installed."""


def choose_engines(text: str | None) -> tuple[str, ...]:
    """The engines to compare with: `gloo`, several with commas, `none`; None takes `DEFAULT`.

    Raises `InvalidArgumentError` for an unknown name, `BackendUnavailableError` for one that is not installed.
    """
    others = {name: engine for name, engine in ENGINES.items() if engine is not RingfortEngine}
    if text is None:
        return tuple(name for name in DEFAULT if others[name].available())
    if text == "none":
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in others:
            raise InvalidArgumentError("against", name, f"choose one of: {', '.join(others)}, none")
        if not others[name].available():
            raise BackendUnavailableError(name, others[name].install)
    return names
