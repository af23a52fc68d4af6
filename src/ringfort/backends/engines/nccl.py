"""`NcclBackend`: NCCL for tensors on GPUs, our links for everything else: messages, agreement, and tensors of the CPU.

NCCL comes by torch; its default group is not touched. **NCCL does not encrypt** what it sends between hosts;
`HybridBackend` keeps it inside a host.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ringfort.backends.engines.torch_groups import TorchNative, c10d_with, may_have
from ringfort.backends.group import COLLECTIVE_TAG, Group
from ringfort.backends.tcp import TcpBackend
from ringfort.bootstrap.terms import warn_once
from ringfort.errors import BackendUnavailableError
from ringfort.transport.messages import Envelope

_WARNING = (
    "NCCL does not encrypt: anyone on the network between the hosts can read and change what the ranks send. "
    "HybridBackend keeps NCCL inside each host."
)
_HOW = (
    "it needs an NVIDIA GPU and a torch built for CUDA (pip install torch, on Linux); for tensors on the CPU, use "
    "TcpBackend or HybridBackend"
)
_PATH_BYTES = 256
"""Room for the place where the ranks of a group meet, which the first tells the others."""


class NcclBackend(TcpBackend):
    """A rank of a group over TCP whose collectives on CUDA tensors are NCCL's.

    Raises as `TcpBackend` does, and `BackendUnavailableError` without CUDA or without NCCL in torch.
    """

    def _check_engine(self) -> None:
        c10d_with("ProcessGroupNCCL", "nccl", _HOW)
        if not sys.modules["torch"].cuda.is_available():
            raise BackendUnavailableError("nccl", _HOW)

    def _start_engine(self, master: str | Sequence[str] | None) -> None:
        first = master if isinstance(master, str) else next(iter(master or ()), "")
        self._nccl = self.group.native = NcclNative(self.group, first.rpartition(":")[0].strip("[]"))

    @classmethod
    def is_available(cls) -> bool:
        # The driver's own file, here and under WSL: to ask CUDA would start it.
        has_driver = any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/dxg"))
        return has_driver and may_have("ProcessGroupNCCL", "libtorch_cuda.so")

    def close(self) -> None:
        super().close()
        self._nccl.close()


class NcclNative(TorchNative):
    """NCCL's collectives, on the GPU that is current when the first of them begins."""

    name = "nccl"
    collectives = frozenset({"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"})
    sums = frozenset(
        {"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "uint32", "uint64"}
    )
    orders = frozenset({"int8", "uint8", "int32", "int64", "uint32", "uint64"})
    tensors_on = "cuda"
    eager = 0.05

    def __init__(self, group: Group, host: str) -> None:
        """`host` is where the others reach rank 0, if they are not all on one machine."""
        super().__init__(group, self._connect, lambda: None)
        self._host = host
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def _connect(self) -> Any:
        options = self._c10d.ProcessGroupNCCL.Options()
        # Ours come first; this one only ends what nobody waits for any more.
        options._timeout = timedelta(seconds=10 * self._group.config.timeout)
        return self._c10d.ProcessGroupNCCL(self._open_store(), self._group.rank, self._group.world_size, options)

    def _open_store(self) -> Any:
        """Return the store in which NCCL's ranks meet: a file that only this user can open, or between hosts a port."""
        group, c10d = self._group, self._c10d
        if group.world_size == 1:
            return c10d.HashStore()
        is_local = len(set(group.hosts)) == 1
        timeout = timedelta(seconds=group.config.timeout)
        seconds = group.config.timeout
        envelope = Envelope(group.comm_id, COLLECTIVE_TAG + 1, timeout=seconds, deadline=group.now() + seconds)
        told = bytearray(_PATH_BYTES)
        store: Any = None
        if group.rank == 0:
            if is_local:
                self._folder = tempfile.TemporaryDirectory(prefix="ringfort-nccl-")
                place = str(Path(self._folder.name, "store"))
            else:
                warn_once(_WARNING)
                store = c10d.TCPStore(self._host, 0, None, True, timeout, wait_for_workers=False)
                place = str(store.port)
            told = place.encode().ljust(_PATH_BYTES, b"\0")
            for peer in range(1, group.world_size):
                group.send(told, peer, envelope)
        else:
            group.recv(told, 0, envelope)
        place = bytes(told).rstrip(b"\0").decode()
        if is_local:
            return c10d.FileStore(place, group.world_size)
        return store or c10d.TCPStore(self._host, int(place), None, False, timeout, wait_for_workers=False)

    def abandon(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.abort()  # ends the kernels that wait for the others

    def close(self) -> None:
        """Release the GPU."""
        group, self.group = self.group, None
        if group is not None:
            group.shutdown()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()
