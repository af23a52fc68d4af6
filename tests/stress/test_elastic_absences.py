"""Random histories in virtual time in which members also say goodbye and come back as other peers with their state."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.helpers.elastic_network import History

HISTORIES = 400

pytestmark = pytest.mark.timeout(3600)


def be_away(world: Any, random: Random, until: float) -> None:
    """Have a member be away for a moment, at any point of the protocol, and the next one later."""
    network = world.network
    members = [program for program in world.living() if not program.peer.frozen and program.replica.mark.branch]
    if members:
        old = random.choice(members)
        old.end()
        network.kill(old.peer.host)  # for the others that is how one leaves that comes back: its votes stay
        peer = network.start(old.peer.host)
        new = world.programs[peer.id] = type(old)(peer, world)
        new.state, new.replica = old.state, old.replica
        new.replica._found = new.found
        new.replica.leave()
        world.call(peer, "set_run_state", new.run_state())
        world.later(new, 0.3, 0.5, new.copying.look)
    if network.now < until:
        network._at(network.now + random.expovariate(1.5), be_away, world, random, until)


@pytest.mark.parametrize("part", range(4))
def test_members_that_come_and_go_among_all_other_faults_never_have_two_results_of_a_step(part: int) -> None:
    wrong = list[str]()
    for seed in range(part, HISTORIES, 4):
        history = History(seed)
        history.world.network._at(1.0, be_away, history.world, Random(seed), history.duration)
        why = history.run()
        wrong += [why] if why else []
    assert not wrong
