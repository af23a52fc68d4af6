"""MLX's ring over TCP, as `mlx.launch` sets it up."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import numpy as np

from ringfort.bench.engines.base import Bound, Engine, Plan, Seat
from ringfort.bench.options import Case
from ringfort.bench.patterns import Array
from ringfort.config import format_address


class MlxEngine(Engine):
    """`mlx.core.distributed` with its ring backend."""

    name = "mlx"
    about = "MLX's ring backend over TCP, on the CPU; its arrays are immutable, so each call makes one"
    module = "mlx"
    packages = ("mlx",)

    @classmethod
    def variables(cls, plan: Plan, rank: int | None) -> Mapping[str, str]:
        """The rank, and a file with the addresses of all ranks."""
        path = plan.folder / "hosts.json"
        if not path.exists():
            path.write_text(json.dumps([[address] for address in _free_addresses(plan)]), encoding="utf-8")
        return {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(path)}

    def setup(self, seat: Seat) -> None:
        """MLX connects the ring."""
        self._seat = seat
        self._mx: Any = import_module("mlx.core")
        self._group = self._mx.distributed.init(strict=True, backend="ring")

    def bind(self, case: Case, source: Array | None) -> Bound:
        """See `Engine.bind`. Its ring has sums and gathers."""
        mx, group = self._mx, self._group
        if case.op not in ("all_reduce", "all_gather"):
            raise NotImplementedError(f"MLX's ring has no {case.op}")
        if source is None or source.dtype.name == "bfloat16":
            raise NotImplementedError("bfloat16 does not pass from NumPy to MLX")
        x = mx.array(source)
        mx.eval(x)
        call: Callable[..., Any] = mx.distributed.all_sum if case.op == "all_reduce" else mx.distributed.all_gather
        returned: list[Any] = [None]

        def run() -> None:
            returned[0] = call(x, group=group, stream=mx.cpu)
            mx.eval(returned[0])

        return Bound(run, lambda: np.array(returned[0]))

    def barrier(self) -> object:
        """A sum of one number."""
        mx = self._mx
        return mx.eval(mx.distributed.all_sum(mx.zeros(1), group=self._group, stream=mx.cpu))


def _free_addresses(plan: Plan) -> list[str]:
    """Ports for MLX to listen on. A port that was free a moment ago is the best that it can get."""
    if any(host.prefix for host in plan.hosts):  # separate hosts, where nothing else listens
        return [format_address(plan.host(rank).address, 29600 + rank) for rank in range(plan.ranks)]
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server((plan.host(0).address, 0))) for _ in range(plan.ranks)]
        return [format_address(*sock.getsockname()[:2]) for sock in sockets]
