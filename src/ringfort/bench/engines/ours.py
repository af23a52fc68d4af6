"""This library as an engine: as users have it by default, over TCP alone, and over TCP without encryption."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np

from ringfort.backends.tcp import TcpBackend
from ringfort.bench.engines.base import Bound, OneByOne, Seat
from ringfort.bench.options import STRATEGIES, Case, Options
from ringfort.bench.patterns import Array
from ringfort.config import DistributedConfig, Shape, format_address
from ringfort.context import DistributedContext
from ringfort.transport import tcp


class RingfortEngine(OneByOne):
    """This library, through the context that users have."""

    name: ClassVar[str] = "ringfort"
    about: ClassVar[str] = "this library as it comes: shared memory between ranks of one host where it can, encrypted"
    packages: ClassVar[tuple[str, ...]] = ("ringfort",)
    install: ClassVar[str] = "pip install ringfort"

    @classmethod
    def available(cls) -> bool:
        """Always."""
        return True

    def config(self, options: Options) -> DistributedConfig:
        """What was asked for."""
        return options.settings()

    def setup(self, seat: Seat) -> None:
        """Rank 0 listens at a free port and tells the others."""
        if seat.options.dtype in ("float16", "bfloat16") and find_spec("torch") is not None:
            # As in any process that trains with 16-bit floats: where torch is loaded, it may add them.
            torch: Any = import_module("torch")
            torch.set_num_threads(1)
        listener = tcp.listen(seat.address, 0) if seat.rank == 0 else None
        address = format_address(*listener.getsockname()[:2]) if listener is not None else ""
        master = seat.share(address)[0]
        config = self.config(seat.options)
        backend = TcpBackend(seat.rank, seat.world_size, master, config=config, listener=listener)
        self._ctx = DistributedContext(backend)
        self._strategy = seat.options.strategy

    def bind(self, case: Case, source: Array | None) -> Bound:
        """See `Engine.bind`."""
        ctx, x = self._ctx, source
        if case.op == "barrier":
            return Bound(ctx.barrier, lambda: None)
        method: Callable[..., Any] = getattr(ctx, case.op)
        chosen = STRATEGIES[case.op].parse(self._strategy) if case.op in STRATEGIES else None
        returned: list[Any] = [None]

        if chosen is not None and chosen.shape is not Shape.AUTO:  # else as anybody calls it

            def run() -> None:
                returned[0] = method(x, strategy=chosen)
        else:

            def run() -> None:
                returned[0] = method(x)

        return Bound(run, lambda: None if returned[0] is None else np.asarray(returned[0]))

    def barrier(self) -> object:
        """See `Engine.barrier`."""
        return self._ctx.barrier()

    def teardown(self) -> None:
        """Leave the group."""
        self._ctx.close()


class TcpEngine(RingfortEngine):
    """This library between hosts: what shared memory saves on one."""

    name: ClassVar[str] = "tcp"
    about: ClassVar[str] = "this library over TCP, encrypted: what two hosts would use"

    def config(self, options: Options) -> DistributedConfig:
        """TCP by name."""
        return options.settings(encryption="on", shared_memory="off")


class PlainEngine(RingfortEngine):
    """This library over TCP with encryption off: what the wall costs."""

    name: ClassVar[str] = "plain"
    about: ClassVar[str] = "this library over TCP with encryption off"

    def config(self, options: Options) -> DistributedConfig:
        """TCP by name, and no encryption."""
        return options.settings(encryption="off", shared_memory="off")
