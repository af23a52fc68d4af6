"""An elastic run's part in the cluster, with its own control process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ringfort.cluster.backend import AutoDiscoveryBackend
from ringfort.cluster.core.events import ClusterEvent, EpochStarted
from ringfort.config import AutoDiscoveryConfig, DistributedConfig, ElectionConfig
from ringfort.training.elastic import membership as membership_module
from ringfort.training.elastic.membership import Membership
from ringfort.training.elastic.protocol import Standstill
from ringfort.transport.locks import Event
from tests.helpers.agents import until

PATIENCE = 20.0
"""Seconds for something that takes one on an idle machine."""


@contextmanager
def membership(on_event: Callable[[ClusterEvent], None]) -> Iterator[Membership]:
    config = AutoDiscoveryConfig(
        interfaces=["127.0.0.1"], settle=0.15, election=ElectionConfig(settle=0.1), elastic=True, min_peers=0, run="r"
    )
    made = Membership(
        config, DistributedConfig(), lambda *_: Standstill(), lambda _peer, stream: stream.close(), on_event
    )
    try:
        made.open()
        yield made
    finally:
        made.close()


def test_a_group_is_formed_when_the_program_has_heard_of_its_epoch_and_of_all_before() -> None:
    """Otherwise a step could be sealed, and its line written, before the reason why a member left is known."""
    order = list[str]()

    def on_event(event: ClusterEvent) -> None:
        if isinstance(event, EpochStarted):
            backend = members.context.backend
            assert isinstance(backend, AutoDiscoveryBackend)
            until(lambda: backend.epoch == event.epoch, "the group is there")
            order.append("heard")

    with membership(on_event) as members:
        until(lambda: members.epoch is not None, "an epoch has begun")
        assert members.epoch is not None
        members.form(members.epoch, PATIENCE)
        order.append("formed")
    assert order == ["heard", "formed"]


def test_a_group_does_not_wait_for_ever_for_a_program_that_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "_HEARD", 0.05)
    is_over, is_stuck = Event(), Event()

    def on_event(event: ClusterEvent) -> None:
        if isinstance(event, EpochStarted):
            is_stuck.set()
            assert is_over.wait(PATIENCE)

    with membership(on_event) as members:
        assert is_stuck.wait(PATIENCE)
        assert members.epoch is not None
        members.form(members.epoch, PATIENCE)
        is_over.set()
