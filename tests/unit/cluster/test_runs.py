"""Runs of one cluster go on side by side: their peers see each other, and are never in one epoch."""

from __future__ import annotations

import pytest

from ringfort.cluster.core.events import EpochEnded, EpochStarted, Instruction, Notify, PeerJoined, PeerLost
from ringfort.testing.network import SimulatedNetwork, SimulatedPeer

ONE, OTHER = (0, 1, 2), (3, 4)
OBSERVER = 5


class Runs:
    """Two runs on five machines, and what each peer was told since they have formed."""

    def __init__(self, seed: int = 1) -> None:
        self.told: dict[int, list[object]] = {host: [] for host in range(6)}
        self.network = SimulatedNetwork(seed, 6, observer=self._saw)
        for host in ONE:
            self.network.start(host, run="one")
        for host in OTHER:
            self.network.start(host, run="other")
        self.network.run_until(5.0)

    def _saw(self, peer: SimulatedPeer, instruction: Instruction) -> None:
        if isinstance(instruction, Notify) and isinstance(
            instruction.event, (EpochStarted, EpochEnded, PeerJoined, PeerLost)
        ):
            self.told[peer.host].append(instruction.event)

    def ids(self, hosts: tuple[int, ...]) -> set[str]:
        return {self.network.peers[host].id for host in hosts}


@pytest.mark.parametrize("seed", range(5))
def test_peers_form_an_epoch_with_those_of_their_own_run_alone(seed: int) -> None:
    runs = Runs(seed)
    for hosts in (ONE, OTHER):
        for host in hosts:
            epoch = runs.network.peers[host].core.epoch
            assert epoch is not None
            assert set(epoch.peers) == runs.ids(hosts)
            joined = {event.peer for event in runs.told[host] if isinstance(event, PeerJoined)}
            assert joined == runs.ids(hosts) - {runs.network.peers[host].id}
    assert len(list(runs.network.peers[0].core.contacts)) == 4, "those of the other run are in sight"


@pytest.mark.parametrize("end", ["leave", "kill", "power_off"])
def test_a_run_that_ends_is_missed_by_no_other(end: str) -> None:
    runs = Runs()
    for told in runs.told.values():
        told.clear()
    for host in OTHER:
        getattr(runs.network, end)(host)
    runs.network.run_until(20.0)
    assert [runs.told[host] for host in ONE] == [[], [], []]


def test_a_peer_of_another_run_is_no_help_to_those_who_are_too_few() -> None:
    runs = Runs()
    runs.network.partition([2, *OTHER])
    runs.network.run_until(20.0)
    assert runs.network.peers[2].core.epoch is None
    assert runs.network.peers[3].core.epoch is not None


def test_an_observer_sees_the_epoch_of_each_run() -> None:
    runs = Runs()
    core = runs.network.start(OBSERVER, slots=0).core
    runs.network.run_until(10.0)
    for hosts in (ONE, OTHER):
        for peer in runs.ids(hosts):
            epoch = core.epoch_of(peer)
            assert epoch is not None
            assert set(epoch.peers) == runs.ids(hosts)
