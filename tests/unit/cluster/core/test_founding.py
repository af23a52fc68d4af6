"""A member is killed while a run is founded: the others go on, whoever of them has the first state. In virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from ringfort.training.elastic.protocol import Gather, Result, Share
from tests.helpers.elastic_network import Program, World
from tests.helpers.elastic_numbers import DATA, Saved, expected

WITHIN = 5.0
"""Virtual seconds for what takes one."""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("owner", range(3), ids=["lowest id", "middle", "highest id"])
@pytest.mark.parametrize("has_word", [True, False], ids=["killed", "silent"])
def test_a_run_is_founded_although_only_one_of_two_survivors_has_its_first_state(
    seed: int, owner: int, has_word: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two is needed for the majority, and the law knows those without a state only as members."""
    victims = list[Program]()
    arrive = Program.arrive

    def hear(self: Program, *where: Any) -> None:
        if victims or not isinstance(where[-1], Result):  # otherwise it is the first state, which comes to nobody
            arrive(self, *where)

    monkeypatch.setattr(Program, "arrive", hear)
    world = World(seed, 3)
    samples = DATA.span(0).samples
    world.disks[owner] = Saved(1, samples, expected(samples), "x#1@1")  # with which the run begins
    for host in range(3):
        world.start(host)
    while not all(isinstance(p.doing, Gather if p.peer.host == owner else Share) for p in world.living()):
        world.network.run_until(world.network.now + 0.001)
        assert world.network.now < WITHIN
    victims += [p for p in world.living() if p.peer.host != owner][:1]
    world.network.kill(victims[0].peer.host, word=has_word)
    end = world.network.now + (WITHIN if has_word else 3 * WITHIN)
    while min(p.replica.mark.step for p in world.living()) < 4:
        world.network.run_until(world.network.now + 0.1)
        assert world.network.now < end
