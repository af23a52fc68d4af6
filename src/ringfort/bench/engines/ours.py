"""This library as an engine: with its defaults, over TCP only, and over TCP without encryption."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np

from ringfort.backends.group import BARRIER_CALL
from ringfort.backends.tcp import TcpBackend
from ringfort.bench.engines.base import Bound, Engine, Seat
from ringfort.bench.options import STRATEGIES, Case
from ringfort.bench.patterns import Array
from ringfort.collectives import channels, cost_model, parallel
from ringfort.compression import auto
from ringfort.compression.strategy import CompressionStrategy
from ringfort.config import Shape, format_address
from ringfort.context import DistributedContext
from ringfort.transport import tcp

SHARED_MEMORY = "shared memory"
"""What AUTO takes if all ranks share memory: not a strategy, and unknown to the cost model."""


class RingfortEngine(Engine):
    """This library, through the context that users have."""

    name = "ringfort"
    about = "this library with its defaults: shared memory between ranks of one host where possible, encrypted"
    packages = ("ringfort",)
    settings: ClassVar[dict[str, str]] = {}
    """Settings that this engine fixes, whatever the options say."""

    def setup(self, seat: Seat) -> None:
        """Rank 0 listens at a free port and tells the others."""
        if seat.options.dtype in ("float16", "bfloat16") and find_spec("torch") is not None:
            # As in a process that trains with 16-bit floats: where torch is loaded, it may add them.
            import_module("torch").set_num_threads(1)
        listener = tcp.listen(seat.address, 0) if seat.rank == 0 else None
        address = format_address(*listener.getsockname()[:2]) if listener is not None else ""
        master = seat.share(address)[0]
        config = seat.options.settings(**self.settings)
        backend = TcpBackend(seat.rank, seat.world_size, master, config=config, listener=listener)
        self._ctx = DistributedContext(backend)

    def bind(self, case: Case, source: Array | None) -> Bound:
        """See `Engine.bind`."""
        ctx, x = self._ctx, source
        if case.op == "barrier":
            return Bound(ctx.barrier, lambda: None)
        method: Callable[..., Any] = getattr(ctx, case.op)
        chosen = STRATEGIES[case.op].parse(case.strategy) if case.op in STRATEGIES else None
        returned: list[Any] = [None]

        # Without a choice, call it as users do.
        has_choice = chosen is not None and chosen.shape is not Shape.AUTO
        call = partial(method, x, strategy=chosen) if has_choice else partial(method, x)

        def run() -> None:
            returned[0] = call()

        return Bound(run, lambda: None if returned[0] is None else np.asarray(returned[0]))

    def explain(self, case: Case) -> dict[str, Any]:
        """What AUTO predicts for `case`, and what it chooses; times in microseconds. See `explain.Explained`."""
        group = self._ctx.group
        model, kind = cost_model.model_of(group), STRATEGIES[case.op]
        candidates = model.candidates(kind)
        predicted = {str(one): model.predict(one, case.nbytes, case.dtype) * 1e6 for one in candidates}
        chosen = SHARED_MEMORY if group.shares_memory else str(model.choose(kind, case.nbytes, case.dtype))
        compression: dict[str, Any] = {}
        if case.op == "all_reduce" and case.dtype == "float32":
            choice = auto.choose(group, CompressionStrategy.AUTO, [(case.count,)])
            compression["compression"] = f"auto takes {choice.strategy}: {choice.why}"
            compression["compressed"] = {str(one): seconds * 1e6 for one, seconds in choice.predicted.items()}
        connections = len(group.connections) if parallel.may_split(group, case.nbytes) else 1
        if case.op == "all_reduce" and not group.shares_memory and case.nbytes >= channels.LEAST:
            channels.channels_of(group, case.nbytes, BARRIER_CALL, None)  # which a large all-reduce would open
            connections = channels.count_for(group, case.nbytes)
        return {"predicted": predicted, "chosen": chosen, "connections": connections, **compression}

    def barrier(self) -> object:
        """See `Engine.barrier`."""
        return self._ctx.barrier()

    def teardown(self) -> None:
        """Leave the group."""
        self._ctx.close()


class TcpEngine(RingfortEngine):
    """This library over TCP: the difference is what shared memory saves."""

    name = "tcp"
    about = "this library over TCP, encrypted: what two hosts would use"
    settings: ClassVar[dict[str, str]] = {"encryption": "on", "shared_memory": "off"}


class PlainEngine(RingfortEngine):
    """This library over TCP with encryption off: the difference is what encryption costs."""

    name = "plain"
    about = "this library over TCP with encryption off"
    settings: ClassVar[dict[str, str]] = {"encryption": "off", "shared_memory": "off"}
