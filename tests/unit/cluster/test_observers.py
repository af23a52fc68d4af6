"""An observer sees the cluster and changes nothing in it."""

from __future__ import annotations

import pytest

from ringfort.cluster.core.election import ElectionState
from ringfort.cluster.core.events import EpochEnded, EpochStarted, Instruction, Notify
from ringfort.testing.network import SimulatedNetwork, SimulatedPeer

MEMBERS = (0, 1, 2)
OBSERVER = 3


class Watched:
    """Three members that have an epoch, room for an observer, and the epochs that started and ended."""

    def __init__(self, seed: int = 1) -> None:
        self.changes: list[str] = []
        self.network = SimulatedNetwork(seed, 4, observer=self._saw)

    def _saw(self, peer: SimulatedPeer, instruction: Instruction) -> None:
        if isinstance(instruction, Notify) and isinstance(instruction.event, (EpochStarted, EpochEnded)):
            self.changes.append(f"{peer.host}: {instruction.event}")

    def form(self) -> None:
        for host in MEMBERS:
            self.network.start(host)
        self.network.run_until(5.0)
        assert self.network.agreed
        self.changes.clear()


def test_an_observer_sees_the_epoch_and_all_peers_and_is_in_none() -> None:
    watched = Watched()
    watched.form()
    core = watched.network.start(OBSERVER, slots=0).core
    watched.network.run_until(10.0)
    assert core.epoch is None
    epoch = watched.network.peers[0].core.epoch
    assert epoch is not None
    assert {contact.peer for contact in core.contacts} == set(epoch.peers)
    assert all(core.epoch_of(peer) == epoch for peer in epoch.peers)
    assert core.election.state is ElectionState.IDLE
    assert watched.changes == []


@pytest.mark.parametrize("end", ["leave", "kill", "freeze", "power_off"])
def test_an_observer_that_goes_is_missed_by_nobody(end: str) -> None:
    watched = Watched()
    watched.form()
    watched.network.start(OBSERVER, slots=0)
    watched.network.run_until(10.0)
    getattr(watched.network, end)(OBSERVER)
    watched.network.run_until(20.0)
    assert watched.changes == []


def test_an_observer_is_no_help_to_those_who_are_too_few() -> None:
    watched = Watched()
    watched.form()
    watched.network.start(OBSERVER, slots=0)
    watched.network.run_until(10.0)
    watched.network.partition([2, OBSERVER])
    watched.network.run_until(20.0)
    assert watched.network.peers[2].core.epoch is None
    core = watched.network.peers[0].core
    assert core.epoch is not None
    assert len(core.epoch.members) == 2


def test_an_observer_that_came_first_does_not_keep_the_others_from_an_epoch() -> None:
    watched = Watched()
    watched.network.start(OBSERVER, slots=0)
    watched.network.run_until(5.0)
    assert not list(watched.network.peers[OBSERVER].core.contacts)
    for host in MEMBERS:
        watched.network.start(host)
    watched.network.run_until(10.0)
    epochs = {watched.network.peers[host].core.epoch for host in MEMBERS}
    assert len(epochs) == 1
    assert len(watched.network.peers[0].core.epoch.members) == 3  # pyright: ignore[reportOptionalMemberAccess]
