"""Groups that grow and shrink, and whose members are replaced, under one context each: every sum is right."""

from __future__ import annotations

import random
from itertools import count

import pytest

from tests.helpers.namespaces import lan, needs_namespaces
from tests.helpers.nodes import Node, nodes_on
from tests.workers.growth import SIZES

pytestmark = needs_namespaces

ROUNDS = 20
"""Times that a group grows from two hosts to four and shrinks again."""
LARGEST_EVERY = 4
"""Rounds of which one also moves the largest arrays: on two cores they take most of the time."""
WORK = 60.0
"""Seconds for what takes two on an idle machine."""


class Grower(Node):
    """Does what `tests.workers.growth` can."""

    module = "tests.workers.growth"


def together(nodes: list[Grower], step: int, *, largest: int, connections: int | str) -> list[float]:
    """All of them form a ring and use it; returns the seconds that forming took each."""
    for node in nodes:
        node.do("form", n=len(nodes), connections=connections)
    formed = [node.next("formed", patience=WORK) for node in nodes]
    assert sorted(line["rank"] for line in formed) == list(range(len(nodes)))
    for node in nodes:
        node.do("battery", largest=largest, step=step)
    for node in nodes:
        node.next("right", patience=WORK)
    return [line["formed"] for line in formed]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("connections", [1, "auto"])
def test_a_group_that_grows_and_shrinks_computes_right(connections: int | str) -> None:
    chance, steps = random.Random(ROUNDS), count(1)
    took: list[float] = []
    with lan(4) as net, nodes_on(list(net.hosts), kind=Grower) as (nodes,):
        here = nodes[:2]
        for node in here:
            node.start()
        away = nodes[2:]
        for turn in range(ROUNDS):
            largest = SIZES[-1] if turn % LARGEST_EVERY == 0 else SIZES[-2]
            for grows in (True, True, False, False):
                if grows:
                    newcomer = away.pop(0)
                    newcomer.start()
                    here.append(newcomer)
                elif chance.random() < 0.5:
                    away.append(leave(here, chance))
                else:
                    away.append(die(here, chance))
                took += together(here, next(steps), largest=largest, connections=connections)
    print(
        f"{next(steps) - 1} groups; formed in {sorted(took)[len(took) // 2]:.2f} s (median), {max(took):.2f} s (most)"
    )


@pytest.mark.timeout(600)
def test_a_group_whose_every_member_is_replaced_in_turn_computes_right() -> None:
    chance, steps = random.Random(3), count(1)
    took: list[float] = []
    with lan(3) as net, nodes_on(list(net.hosts), kind=Grower) as (nodes,):
        for node in nodes:
            node.start()
        together(nodes, next(steps), largest=SIZES[-1], connections=1)
        for _ in range(5):
            for old in nodes:
                if chance.random() < 0.5:
                    old.ask("stop", "stopped")
                else:
                    old.kill()
                    old.restart()
                old.start()
                took += together(nodes, next(steps), largest=SIZES[-3], connections=1)
    print(
        f"{len(took) // 3} replaced; formed in {sorted(took)[len(took) // 2]:.2f} s (median), {max(took):.2f} s (most)"
    )


def test_the_links_are_priced_as_the_cluster_measured_them() -> None:
    """On 100 Mbit/s: two ranks on each of two hosts send little between the hosts, and that compressed."""
    with lan(2) as net, nodes_on([*net.hosts, *net.hosts], kind=Grower) as (nodes,):
        for host in net.hosts:
            net.limit(host, 100)
        for node in nodes:
            node.start()
        together(nodes, 1, largest=SIZES[4], connections=1)
        for node in nodes:
            node.do("price", size=4 << 20)
        prices = [node.next("mbit") for node in nodes]
        for compression in (None, "auto"):
            for node in nodes:
                node.do("clock", size=4 << 20, compression=compression)
            took = max(node.next("ms")["ms"] for node in nodes)
            print(f"4 MiB, compression={compression}: {took:.0f} ms; {prices[0]['strategy']} over {prices[0]['hosts']}")
    assert len({(price["mbit"], price["strategy"], price["compression"]) for price in prices}) == 1
    assert 20 < prices[0]["mbit"] < 100  # two ranks share each wire
    # Where the ranks of a host do not follow each other, halving sends no more between the hosts.
    assert prices[0]["strategy"] in ("hierarchical", "halving_doubling")
    assert prices[0]["hosts"] != [0, 0, 2, 2] or prices[0]["strategy"] == "hierarchical"
    assert prices[0]["compression"] == "int4"


def leave(here: list[Grower], chance: random.Random) -> Grower:
    """One of them says goodbye."""
    node = here.pop(chance.randrange(len(here)))
    node.ask("stop", "stopped")
    return node


def die(here: list[Grower], chance: random.Random) -> Grower:
    """One of them is killed; another process takes its place later."""
    node = here.pop(chance.randrange(len(here)))
    node.kill()
    node.restart()
    return node
