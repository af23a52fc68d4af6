"""A process that trains with whoever is there, for as long as its input is open, and says in JSON lines how it goes.

{"started": peer}                    it looks for others
{"event": ..., "text": ..., ...}     every event of the cluster, as tests.workers.node says it
{"ok": n, "epoch": number, ...}      an all-reduce of n ranks ended with the right sum; with its descriptors and threads
{"wrong": text}                      it ended with another sum
{"failed": text}                     it raised; the group is formed anew
"""

from __future__ import annotations

import sys
import threading
import time
from itertools import cycle

import numpy as np
import psutil

from ringfort.cluster.backend import AutoDiscoveryBackend
from ringfort.config import AutoDiscoveryConfig, DistributedConfig
from ringfort.context import DistributedContext
from ringfort.errors import DistributedError
from tests.workers.node import say, tell

SIZES = (2, 1024, 16384)
"""float32s of the all-reduces, in turn."""
STEP = 0.01
"""Seconds of a step beside its all-reduce."""
FORM_WITHIN = 30.0
"""Seconds: a host that is cut off waits for longer, and tries again."""


def main() -> None:
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    backend = AutoDiscoveryBackend(AutoDiscoveryConfig(), group=DistributedConfig(timeout=20.0))
    backend.node.subscribe(tell)
    say(started=backend.peer_id)
    while not over.is_set():
        try:
            backend.establish_ring(FORM_WITHIN)
            backend.node.hold(False)  # whoever comes is let in, and the group formed anew
            train(backend, over)
        except DistributedError as exc:
            say(failed=f"{type(exc).__name__}: {exc}"[:300])
    backend.close()


def train(backend: AutoDiscoveryBackend, over: threading.Event) -> None:
    context, epoch = DistributedContext(backend), backend.epoch
    number = 0 if epoch is None else epoch.number
    for size in cycle(SIZES):
        array = np.full(size, context.rank + 1, np.float32)
        context.all_reduce(array)
        n = context.world_size
        if not (array == n * (n + 1) / 2).all():
            say(wrong=f"{array[:4]} of {n}")
        say(ok=n, epoch=number, descriptors=psutil.Process().num_fds(), threads=threading.active_count())
        if over.is_set() or (n == 1 and backend.node.epoch != epoch):  # alone, nothing could be aborted
            return
        time.sleep(STEP)


if __name__ == "__main__":
    main()
