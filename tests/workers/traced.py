"""A process of `tests.workers.node` that writes down steps, or looks at those of others. Further commands:

{"do": "train", "rank": r, "of": n, "pause": s}     marks a step every so many seconds, for ever. Says {"training": pid}
{"do": "view"}                                      looks, from now on. Says {"viewing": true}
{"do": "see", "ranks": n, "state": s, "step": k}    waits until n ranks in that state are at that step or further. Says
                                                    {"seen": their names, "step": the least}
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from ringfort.dashboard.source import LiveSource
from ringfort.telemetry.trace import own_trace
from tests.workers.node import Worker, main, say


class Traced(Worker):
    source: LiveSource | None = None

    def train(self, rank: int, of: int, pause: float) -> None:
        trace = own_trace()
        trace.describe(rank=rank, world_size=of, run="traced")

        def run() -> None:
            while True:
                time.sleep(pause)
                trace.log({"loss": 1 / (trace.step + 1)})
                trace.step_done(samples=8)

        threading.Thread(target=run, daemon=True).start()
        say(training=os.getpid())

    def view(self) -> None:
        self.source = LiveSource().__enter__()
        say(viewing=True)

    def see(self, ranks: int, state: str, step: int = 0) -> None:
        while True:
            found = [r for r in self.source.view("traced").ranks if r.state == state and r.step >= step]
            if len(found) == ranks:
                say(seen=[rank.name for rank in found], step=min(rank.step for rank in found))
                return
            time.sleep(0.02)

    def stop(self) -> None:
        if self.source is not None:
            self.source.close()
        super().stop()


if __name__ == "__main__":
    # Hosts of a test share a machine, and each is to see its own traces only.
    home = Path(os.environ["RINGFORT_HOME"])
    home.mkdir(mode=0o700, exist_ok=True)
    os.environ["XDG_RUNTIME_DIR"] = str(home)
    main(Traced())
