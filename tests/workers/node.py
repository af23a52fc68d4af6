"""A process with a cluster node, told what to do by JSON lines on its input; it says what happens in JSON lines.

{"do": "start", ...}    a new node; the rest are fields of AutoDiscoveryConfig. Says {"started": peer, "addresses": ...}
{"do": "stop"}          closes it. Says {"stopped": true}
{"do": "look"}          says {"peers": [...]}
{"do": "wait", "n": n, "timeout": s}    says {"waited": number} or {"failed": text}
{"do": "establish"}     forms the ring over the epoch. Says {"rank": r, "of": n} or {"failed": text}
{"do": "reduce", "size": n, "rounds": k}   all-reduces. Says {"sum": first element} or {"failed": text}
{"do": "compress", "size": n, "rounds": k, "is_even": b}    all-reduces with int8, in equal shares or as the links are.
                        Says {"compressed": checksum, "seconds": of each, "shares": ..., "rank": r}

Every event of the cluster is a line {"event": its class, "text": ..., "at": seconds}, an epoch's with "number" and
"peers". Times are of the machine's monotonic clock, which all processes share. Commands run one after the other.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from typing import Any
from zlib import crc32

import numpy as np

from ringfort.cluster.backend import AutoDiscoveryBackend
from ringfort.cluster.core.events import ClusterEvent, EpochEnded, EpochStarted
from ringfort.cluster.node import ClusterNode
from ringfort.compression.uneven import Shares
from ringfort.config import AutoDiscoveryConfig, DistributedConfig
from ringfort.context import DistributedContext
from ringfort.errors import DistributedError

_printing = threading.Lock()


def say(**what: Any) -> None:
    with _printing:
        print(json.dumps({"at": time.monotonic(), **what}), flush=True)


def tell(event: ClusterEvent) -> None:
    more: dict[str, Any] = {}
    if isinstance(event, (EpochStarted, EpochEnded)):
        more = {"number": event.epoch.number, "peers": event.epoch.peers, "key": list(event.epoch.key)}
    say(event=type(event).__name__, text=str(event), **more)


class Worker:
    node: ClusterNode | None = None
    backend: AutoDiscoveryBackend | None = None

    def start(self, **settings: Any) -> None:
        try:
            self.node = ClusterNode(AutoDiscoveryConfig(**settings))
            self.node.subscribe(tell)
            self.node.start()
        except DistributedError as exc:
            say(failed=f"{type(exc).__name__}: {exc}")
            return
        say(started=self.node.peer_id, addresses=self.node.addresses)

    def stop(self) -> None:
        if self.backend is not None:
            self.backend.close()
        if self.node is not None:
            self.node.close()
        self.node = self.backend = None
        say(stopped=True)

    def look(self) -> None:
        say(
            peers=[
                {
                    "peer": view.peer, "address": view.address, "interface": view.interface, "role": view.role,
                    "self": view.is_self, "round_trip": view.round_trip, "bandwidth": view.bandwidth,
                    "health": view.health.value, "ranks": view.ranks, "version": view.version,
                }
                for view in self.node.snapshot()
            ],
            leader=self.node.leader,
        )  # fmt: skip

    def wait(self, n: int, timeout: float) -> None:
        say(waited=self.node.wait_for_peers(n, timeout).number)

    def establish(self, timeout: float = 30.0) -> None:
        if self.backend is None:
            self.backend = AutoDiscoveryBackend(node=self.node, group=DistributedConfig(timeout=timeout))
        self.backend.establish_ring(timeout)
        say(rank=self.backend.rank, of=self.backend.world_size)

    def reduce(self, size: int = 4096, rounds: int = 1, pause: float = 0.0) -> None:
        context = DistributedContext(self.backend)
        for _ in range(rounds):
            array = np.full(size // 4, context.rank + 1, np.float32)
            context.all_reduce(array)
            time.sleep(pause)
        say(sum=float(array[0]))

    def compress(self, size: int, rounds: int, is_even: bool) -> None:
        context = DistributedContext(self.backend)
        if is_even:
            context.group.part(Shares)
        array = np.random.default_rng(context.rank).standard_normal(size, np.float32)
        context.all_reduce(array.copy(), compression="int8")
        context.barrier()
        begun = time.perf_counter()
        for _ in range(rounds):
            total = context.all_reduce(array.copy(), compression="int8")
        seconds = (time.perf_counter() - begun) / rounds
        say(compressed=crc32(total), seconds=seconds, shares=context.group.part(Shares).weights, rank=context.rank)

    def busy(self, seconds: float) -> None:
        """Holds the interpreter lock, as a long call of a C library does."""
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        say(was_busy=True)

    def fork(self) -> None:
        """A child that has copies of all descriptors and does nothing, as a data loader's worker."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                self.node.snapshot()
            except DistributedError as exc:
                os.write(writer, str(exc).encode())
            while True:
                signal.pause()
        say(child=child, forked=os.read(reader, 4096).decode())

    def control(self) -> None:
        say(control=self.node._host._process.pid)

    def hold(self, holding: bool) -> None:
        self.node.hold(holding)
        say(holds=holding)


def main(worker: Worker) -> None:
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            getattr(worker, do)(**command)
        except (DistributedError, AssertionError) as exc:
            say(failed=f"{type(exc).__name__}: {exc}")
    worker.stop()


if __name__ == "__main__":
    main(Worker())
