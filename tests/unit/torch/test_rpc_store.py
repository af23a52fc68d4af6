"""torch's store over calls between ranks, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from ringfort.config import DistributedConfig
from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError, OperationTimeoutError, PeerLostError
from ringfort.testing.groups import simulated_group
from ringfort.testing.ranks import results, run_ranks
from ringfort.torch.rpc_store import RpcStore

PATIENCE = 20.0


@contextmanager
def stores(world_size: int) -> Iterator[list[RpcStore]]:
    with simulated_group(world_size, DistributedConfig(timeout=PATIENCE)) as backends:
        made = results(run_ranks(backends, lambda backend: RpcStore(DistributedContext(backend)), timeout=2 * PATIENCE))
        try:
            yield made
        finally:
            for store in made:
                store.close()


def test_what_one_rank_sets_the_others_get() -> None:
    with stores(3) as (owner, first, second):
        first.set("key", "value")
        owner.set("other", b"\x00")
        assert [store.get("key") for store in (owner, first, second)] == 3 * [b"value"]
        assert (second.check(["key", "other"]), second.check(["key", "none"])) == (True, False)
        assert [store.add("sum", 2) for store in (owner, first, second)] == [2, 4, 6]
        assert second.compare_set("key", "value", "new") == b"new"
        assert second.num_keys() == 3
        assert (second.delete_key("key"), second.delete_key("key")) == (True, False)


def test_a_rank_waits_for_a_key_while_others_use_the_store() -> None:
    with stores(2) as (owner, other), ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(store.get, "late") for store in (owner, other, other)]
        assert other.add("busy", 1) == 1
        owner.set("late", "here")
        assert [one.result(PATIENCE) for one in waiting] == 3 * [b"here"]


def test_a_key_that_never_comes_is_a_timeout_and_the_store_goes_on() -> None:
    with stores(2) as (owner, other):
        for store in (owner, other):
            with pytest.raises(OperationTimeoutError, match="wait of never at the store"):
                store.wait(["never"], timedelta(seconds=0.05))
        owner.set("never", "now")  # those who gave up are not answered
        assert other.get("never") == b"now"


def test_adding_to_what_is_no_number_is_refused() -> None:
    with stores(2) as (owner, other):
        owner.set("word", "text")
        with pytest.raises(InvalidArgumentError, match="no number to add to"):
            other.add("word", 1)


def test_without_the_owner_there_is_no_store() -> None:
    with stores(2) as (owner, other), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(other.get, "late")
        other.add("asked", 1)  # the owner has got both
        owner.close()
        with pytest.raises(PeerLostError):
            waiting.result(PATIENCE)
