"""A rank that adds up a few arrays with the compression that is its argument, and says what that was and why: RANK,
WORLD_SIZE and so on are in the environment."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import numpy as np

import ringfort

ELEMENTS = 500_000


def main() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("ringfort.compression")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    with ringfort.init() as ctx:
        compressor = ringfort.GradientCompressor(sys.argv[1])
        total: Any = np.zeros(ELEMENTS)
        for step in range(3):
            x = np.random.default_rng([ctx.rank, step]).standard_normal(ELEMENTS).astype(np.float32)
            total += ctx.all_reduce(x, compression=compressor, name="w")
        chosen = ctx.metrics_snapshot().compression
        sent, hosts = ctx.group.sent()[0], ctx.group.hosts
        away = sum(nbytes for peer, nbytes in sent.items() if hosts[peer] != hosts[ctx.rank])
    print(json.dumps({"chosen": list(chosen), "said": said, "sum": float(np.abs(total).sum()), "away": away}))


if __name__ == "__main__":
    main()
