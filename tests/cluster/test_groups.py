"""Groups that follow each other in one process: nothing of the one is left in the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pytest

from ringfort import AutoDiscoveryBackend, DistributedContext, EpochEndedError, NotEstablishedError
from ringfort.cluster.node import ClusterNode
from ringfort.config import AutoDiscoveryConfig, DistributedConfig, ElectionConfig, HealthConfig
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.namespace import NetworkNamespace
from ringfort.training.gradients import average_gradients

PATIENCE = 20.0
"""Seconds for something that takes one on an idle machine."""
LOCAL = AutoDiscoveryConfig(
    interfaces=["127.0.0.1"],
    settle=0.15,
    election=ElectionConfig(settle=0.1),
    health=HealthConfig(patience=PATIENCE),
)
OVER_TCP = DistributedConfig(timeout=PATIENCE, shared_memory="off")


class Peers:
    """Processes that come and go, each a thread of the test: a backend and its one context."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._namespace = NetworkNamespace.generate("test")
        self.here: list[DistributedContext] = []

    def come(self) -> DistributedContext:
        credentials = Credentials(NodeIdentity.ephemeral(), self._namespace)
        backend = AutoDiscoveryBackend(LOCAL, group=OVER_TCP, credentials=credentials)
        self._stack.callback(backend.close)
        self.here.append(DistributedContext(backend))
        return self.here[-1]

    def go(self, place: int) -> None:
        self.here.pop(place).close()

    def form(self) -> list[DistributedContext]:
        """All who are here form a group; returns them in the order of their ranks."""
        run([lambda ctx=ctx: _form(ctx, len(self.here)) for ctx in self.here])
        return sorted(self.here, key=lambda ctx: ctx.rank)


def _form(ctx: DistributedContext, n: int) -> None:
    while True:
        backend_of(ctx).join_group(n - 1, PATIENCE)
        if ctx.world_size == n:
            return


def backend_of(ctx: DistributedContext) -> AutoDiscoveryBackend:
    assert isinstance(ctx.backend, AutoDiscoveryBackend)
    return ctx.backend


def node_of(ctx: DistributedContext) -> ClusterNode:
    return backend_of(ctx).node


def run(actions: Sequence[Callable[[], object]]) -> list[object]:
    """All at once; what they return, or the first thing that one raises."""
    found: list[object] = [None] * len(actions)

    def act(place: int) -> None:
        try:
            found[place] = actions[place]()
        except BaseException as exc:
            found[place] = exc

    threads = [threading.Thread(target=act, args=(place,)) for place in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


@pytest.fixture
def peers() -> Iterator[Peers]:
    with ExitStack() as stack:
        yield Peers(stack)


def check_everything(group: list[DistributedContext], step: int) -> None:
    """Every kind of collective whose way is kept from one call to the next."""
    n = len(group)

    def work(ctx: DistributedContext) -> None:
        for count in (1, 1024, 1024, 64 << 10, 256 << 10):  # up to 1 MiB: each way that AUTO knows, and kept ready
            x = ctx.all_reduce(np.full(count, ctx.rank + step, np.float32))
            assert set(x.tolist()) == {n * (n - 1) / 2 + n * step}
        average(ctx)
        average_gradients(ctx, [np.ones(10)], compression="int8")
        y = ctx.all_reduce(np.full(5000, 1.0, np.float32), compression="auto")
        assert abs(float(y[0]) - n) < 0.1
        works = [ctx.all_reduce(np.full(count, 1.0), async_op=True) for count in (10, 20000, 10)]
        assert [float(work.wait()[0]) for work in works] == [n] * 3
        pair = ctx.sub_group([0, 1])
        if pair is not None:
            assert float(pair.all_reduce(np.full(40000, 1.0))[0]) == 2.0
        average(ctx)  # and first in the next group: what is agreed here must not hold there

    def average(ctx: DistributedContext) -> None:
        tree = {"a": np.full(1000, float(ctx.rank)), "b": [np.full(10, 1.0)]}
        average_gradients(ctx, tree)
        assert (tree["a"][0], tree["b"][0][0]) == ((n - 1) / 2, 1.0)

    run([lambda ctx=ctx: work(ctx) for ctx in group])


def test_contexts_compute_right_while_members_come_are_replaced_and_go(peers: Peers) -> None:
    peers.come()
    for step, (coming, going) in enumerate([(1, None), (1, None), (1, 0), (0, 0)]):
        if going is not None:
            peers.go(going)
        for _ in range(coming):
            peers.come()
        check_everything(peers.form(), step)


def test_only_the_group_of_now_can_be_used_and_what_was_made_before_is_refused_by_all(peers: Peers) -> None:
    one, _ = peers.come(), peers.come()
    # A real world of one works, and leaves nothing behind that the ranks of the next group would not know of.
    assert float(one.all_reduce(np.ones(1024, np.float32))[0]) == 1.0
    kept = [one.sub_group([0])]
    backend_of(one).wait_for_peers(1, PATIENCE)
    for call in (
        lambda: one.all_reduce(np.ones(3)),
        one.barrier,
        lambda: one.send(np.ones(3), 1),
        backend_of(one).barrier,
        lambda: one.sub_group([0]),
        lambda: average_gradients(one, [np.ones(3, np.float32)]),
    ):
        with pytest.raises(NotEstablishedError, match=r"epoch \d+ of 2.*establish_ring\(\)"):
            call()
    two = peers.form()
    sums = run([lambda ctx=ctx: float(ctx.all_reduce(np.ones(1024, np.float32))[0]) for ctx in two])
    assert sums == [2.0, 2.0]
    refuses(kept, "the group of one rank before the first epoch")
    epoch = str(backend_of(one).epoch)
    pairs = [ctx.sub_group([0, 1]) for ctx in two]
    kept = [*pairs, *(ctx.sub_group([ctx.rank]) for ctx in two)]
    run([lambda pair=pair: pair and pair.all_reduce(np.ones(8)).sum() for pair in pairs])
    peers.come()
    assert peers.form()[0].world_size == 3
    refuses(kept, epoch)
    for pair in pairs:
        assert pair is not None
        for call in (pair.send, pair.recv):
            with pytest.raises(EpochEndedError, match=epoch):
                call(np.ones(1), 1 - pair.rank)


def refuses(kept: Sequence[DistributedContext | None], epoch: str) -> None:
    for ctx in kept:
        assert ctx is not None
        for call in (lambda c=ctx: c.all_reduce(np.ones(8)), ctx.barrier, lambda c=ctx: c.sub_group([0])):
            with pytest.raises(EpochEndedError, match=f"{epoch} has ended") as raised:
                call()
            assert raised.value.epoch == epoch
