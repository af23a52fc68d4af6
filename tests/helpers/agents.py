"""Agents of a whole group in one process, for tests."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ringfort.config import DistributedConfig, RpcConfig
from ringfort.rpc.agent import RpcAgent
from ringfort.testing.groups import GroupFactory, simulated_group
from ringfort.testing.ranks import at_once, results, run_ranks

PATIENCE = 20.0
"""Seconds that a call may take before a test is taken to hang."""


@contextmanager
def agents(
    world_size: int,
    factory: GroupFactory = simulated_group,
    *,
    config: RpcConfig | None = None,
    names: Callable[[int], str | None] = lambda rank: None,
) -> Iterator[list[RpcAgent]]:
    """The agents of a new group, in order. On leaving nothing is under way: no call, message or byte."""
    with factory(world_size, DistributedConfig(timeout=PATIENCE)) as backends:
        made = results(
            run_ranks(
                backends,
                lambda backend: RpcAgent(backend, config=config, name=names(backend.rank)),
                timeout=2 * PATIENCE,
            )
        )
        try:
            yield made
            gc.collect()
            for agent in made:
                if agent.is_alive(agent.rank):
                    until(lambda agent=agent: not any(agent.stats()), f"{agent} has {agent.stats()}")
        finally:
            at_once(*(agent.close for agent in made))


def until(is_so: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Waits until something that nobody tells has come to be."""
    deadline = time.monotonic() + patience
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)
