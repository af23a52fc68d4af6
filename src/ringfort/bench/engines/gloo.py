"""torch.distributed over Gloo, as people use it on CPUs today."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ringfort.bench.engines.base import Bound, Engine, Plan, Seat, output
from ringfort.bench.options import Case
from ringfort.bench.patterns import Array
from ringfort.collectives.arrays import wrap_torch
from ringfort.collectives.reduction import element_type_named


class GlooEngine(Engine):
    """Gloo through `torch.distributed`."""

    name = "gloo"
    about = "torch.distributed over Gloo, plaintext TCP; GLOO_SOCKET_IFNAME names the interface"
    module = "torch"
    packages = ("torch",)
    install = "pip install 'ringfort[torch]'"

    @classmethod
    def variables(cls, plan: Plan, rank: int | None) -> Mapping[str, str]:
        """Name the interface: by default Gloo uses the one that the host's name resolves to."""
        name = plan.host(rank or 0).interface
        return {"GLOO_SOCKET_IFNAME": name} if name else {}

    def setup(self, seat: Seat) -> None:
        """Meet through a file, so that no port is guessed."""
        self._dist: Any = import_module("torch.distributed")
        import_module("torch").set_num_threads(1)  # ranks share the cores, as ours do
        store = self._dist.FileStore(str(seat.folder / "store"), seat.world_size)
        self._dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.world_size)
        self._rank = seat.rank

    def bind(self, case: Case, source: Array | None) -> Bound:
        """See `Engine.bind`."""
        dist = self._dist
        out = output(case, self._rank)
        kind = element_type_named(case.dtype)
        x, y = (None if array is None else wrap_torch(array, kind) for array in (source, out))
        # The parts that torch wants as a list, at the root only.
        whole = {"gather": y, "scatter": x}.get(case.op) if self._rank == 0 else None
        rows = None if whole is None else list(whole.unbind(0))
        # torch wants a flat tensor where we have one row per rank.
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

    def barrier(self) -> object:
        """See `Engine.barrier`."""
        return self._dist.barrier()

    def teardown(self) -> None:
        """Leave the group."""
        self._dist.destroy_process_group()
