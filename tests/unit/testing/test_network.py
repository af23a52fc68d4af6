"""Clusters in virtual time: how soon they agree, what they survive, and that a history repeats itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringfort.cluster.peer import PeerCore
from ringfort.config import AutoDiscoveryConfig
from ringfort.errors import InvalidArgumentError
from ringfort.testing.histories import History, RuleBroken, Rules
from ringfort.testing.network import SimulatedNetwork, SimulatedPeer
from tests.histories import broken_law, first_violation, violations


def cluster(hosts: int, seed: int = 1, config: AutoDiscoveryConfig | None = None) -> SimulatedNetwork:
    rules = Rules()
    network = SimulatedNetwork(seed, hosts, config, observer=rules, traced=True)
    rules.network = network
    for host in range(hosts):
        network.start(host)
    return network


def until(network: SimulatedNetwork, is_so: Callable[[], bool], seconds: float) -> float:
    """Lets time pass until it is so; returns how long that took. Fails, with the trace, after `seconds`."""
    start = network.now
    while not is_so():
        assert network.now - start < seconds, "\n".join(network.trace)
        network.run_until(network.now + 0.05)
    return network.now - start


def agreed_cluster(hosts: int, seed: int = 1) -> SimulatedNetwork:
    network = cluster(hosts, seed)
    until(network, lambda: network.agreed, 3.0)
    network.run_until(network.now + 3.0)
    assert network.agreed
    return network


def leader_of(network: SimulatedNetwork) -> SimulatedPeer:
    (leader,) = [peer for peer in network.alive if peer.core.leader == peer.id]
    return leader


def are_agreed(peers: list[SimulatedPeer]) -> bool:
    """These, and nobody else, are in one epoch."""
    first = peers[0].core.epoch
    return first is not None and all(p.core.epoch == first for p in peers) and len(first.members) == len(peers)


@pytest.mark.parametrize("worker", [0, 1])
def test_of_two_that_have_been_there_equally_long_the_one_that_did_more_follows_a_lost_leader(worker: int) -> None:
    network = cluster(3)
    until(network, lambda: network.agreed and len({m.joined for m in network.peers[0].core.epoch.members}) == 1, 3.0)
    lost = leader_of(network)
    followers = [peer for peer in network.alive if peer is not lost]
    followers[worker].work = 7
    network.kill(lost.host)
    until(network, lambda: are_agreed(followers), 3.0)
    assert leader_of(network) is followers[worker]


def test_a_leader_that_steps_down_is_followed_by_another_and_the_epoch_goes_on() -> None:
    network = agreed_cluster(3)
    before, epoch = leader_of(network), network.peers[0].core.epoch
    network.do(before.host, PeerCore.step_down)
    until(network, lambda: all(p.core.leader not in (None, before.id) for p in network.alive), 2.0)
    network.run_until(network.now + 3.0)
    assert {peer.core.epoch for peer in network.alive} == {epoch}


@pytest.mark.parametrize("works", [True, False])
def test_a_forced_election_is_won_against_a_leader_with_a_lesser_claim_alone(works: bool) -> None:
    network = agreed_cluster(3)
    network.kill(leader_of(network).host)
    until(network, lambda: are_agreed(network.alive), 3.0)
    leader = leader_of(network)
    (other,) = (peer for peer in network.alive if peer is not leader)
    assert leader.id < other.id
    other.work = 3 if works else 0
    network.start(next(host for host in range(3) if not network.peers[host].alive))
    until(network, lambda: network.agreed, 3.0)  # the epoch of two has ended: now all know what each has done
    assert leader_of(network) is leader
    network.do(other.host, PeerCore.force_election)
    network.run_until(network.now + 2.0)
    assert leader_of(network) is (other if works else leader)
    assert network.agreed


@pytest.mark.parametrize("seed", range(10))
def test_four_that_start_within_five_seconds_agree_within_three_of_the_last(seed: int) -> None:
    network = SimulatedNetwork(seed, 4, traced=True)
    for host in range(4):
        network.start(host)
        network.run_until(network.now + network.random.uniform(0.0, 1.6))
    until(network, lambda: network.agreed, 3.0)
    last = network.alive[0].core.epoch
    assert last is not None
    assert last.number <= 6


HURTS = {
    "killed": SimulatedNetwork.kill,
    "frozen": SimulatedNetwork.freeze,
    "off": SimulatedNetwork.power_off,
    "cut off": lambda network, host: network.partition([host]),
}


@pytest.mark.parametrize("hurt", HURTS)
@pytest.mark.parametrize("seed", range(5))
def test_a_lost_leader_is_followed_within_three_seconds_and_rejoins(hurt: str, seed: int) -> None:
    network = agreed_cluster(4, seed)
    lost = leader_of(network)
    HURTS[hurt](network, lost.host)
    rest = [peer for peer in network.alive if peer is not lost]
    leads = until(network, lambda: all(p.core.leader not in (None, lost.id) for p in rest), 2.0)
    assert leads < (0.6 if hurt == "killed" else 1.9)
    until(network, lambda: are_agreed(rest), 3.0 - leads)
    assert lost.core.epoch is None or lost.core.epoch.number < rest[0].core.epoch.number  # type: ignore[union-attr]
    network.heal()
    if hurt == "frozen":
        network.thaw(lost.host)
    elif not lost.alive:
        network.start(lost.host)
    until(network, lambda: network.agreed, 6.0)


def test_ranks_stay_where_they_can_when_one_is_lost() -> None:
    network = agreed_cluster(5)
    before = network.alive[0].core.epoch
    assert before is not None
    lost = before.peers[2]
    network.kill(next(p.host for p in network.alive if p.id == lost))
    until(network, lambda: network.agreed, 3.0)
    after = network.alive[0].core.epoch
    assert after is not None
    assert after.peers == (*before.peers[:2], before.peers[4], before.peers[3])


def test_the_smaller_side_waits_and_comes_back() -> None:
    network = agreed_cluster(5)
    network.partition([0, 1])
    big, small = [network.peers[h] for h in (2, 3, 4)], [network.peers[h] for h in (0, 1)]
    until(network, lambda: are_agreed(big), 3.0)
    network.run_until(network.now + 10.0)
    assert [peer.core.epoch for peer in small] == [None, None]
    network.heal()
    until(network, lambda: network.agreed, 4.0)


def test_of_two_halves_the_one_with_the_lowest_id_goes_on() -> None:
    network = agreed_cluster(4)
    network.partition([0, 1])
    halves = [[network.peers[h] for h in (0, 1)], [network.peers[h] for h in (2, 3)]]
    until(network, lambda: are_agreed(halves[0]), 4.0)
    network.run_until(network.now + 5.0)
    assert all(peer.core.epoch is None for peer in halves[1])


def test_the_last_survivor_goes_on_when_the_others_died_one_by_one_or_at_once() -> None:
    network = agreed_cluster(4)
    for host in (0, 1, 2):
        network.kill(host)
    until(network, lambda: network.agreed, 3.0)


@pytest.mark.parametrize(("policy", "groups"), [("stop", 0), ("continue", 2)])
def test_a_person_may_choose_what_a_partition_does(policy: str, groups: int) -> None:
    network = SimulatedNetwork(1, 5, AutoDiscoveryConfig(on_partition=policy))  # type: ignore[arg-type]
    for host in range(5):
        network.start(host)
    network.run_until(5.0)
    assert network.agreed
    network.partition([0, 1])
    network.run_until(12.0)
    sides = [[network.peers[h] for h in side] for side in ((0, 1), (2, 3, 4))]
    assert sum(are_agreed(side) for side in sides) == groups


def test_those_who_crashed_while_cut_off_are_vouched_for_when_they_start_again() -> None:
    network = agreed_cluster(3)
    network.partition([0])
    network.partition([1])
    network.run_until(network.now + 4.0)
    for host in (0, 1):
        network.power_off(host)
    network.run_until(network.now + 4.0)
    assert network.peers[2].core.epoch is None  # for all it knows the two went on without it
    network.heal()
    for host in (0, 1):
        network.start(host)
    until(network, lambda: network.agreed, 6.0)


def test_the_same_seed_is_the_same_history() -> None:
    traces = [agreed_cluster(4, seed=5).trace for _ in range(2)]
    assert traces[0] == traces[1]
    assert agreed_cluster(4, seed=6).trace != traces[0]


def test_a_host_has_one_peer_at_a_time() -> None:
    network = cluster(3)
    with pytest.raises(InvalidArgumentError, match="has a peer already"):
        network.start(0)


def sleepers_and_the_dead() -> None:
    """Of five, two sleep; the others go on without them, two of those die, and the last is cut off. Then the sleepers
    wake, and find links that were closed."""
    network = agreed_cluster(5)
    for host in (3, 4):
        network.freeze(host)
    until(network, lambda: are_agreed([network.peers[h] for h in (0, 1, 2)]), 4.0)
    network.partition([2])
    for host in (0, 1):
        network.kill(host)
    for host in (3, 4):
        network.thaw(host)
    network.run_until(network.now + 6.0)
    assert [network.peers[h].core.epoch for h in (3, 4)] == [None, None]


def seceders_and_the_dead() -> None:
    """Of five, the leader loses sight of two and proposes to go on without them. The other two, who see everyone, die
    before those two could learn what they had accepted."""
    network = agreed_cluster(5)
    assert leader_of(network) is network.peers[0]
    for host in (3, 4):
        network.cut(0, host)
        network.cut(host, 0)
    until(network, lambda: len(network.peers[0].core.sees) == 2, 2.0)
    for one in (1, 2):
        for other in (3, 4):
            network.cut(one, other)
    network.run_until(network.now + 0.4)
    for host in (1, 2):
        network.kill(host, loses=True)
    network.heal()
    network.partition([0])
    network.run_until(network.now + 6.0)


def test_sleepers_do_not_take_for_dead_those_who_went_on_without_them() -> None:
    sleepers_and_the_dead()
    with broken_law("every closed link is a death"), pytest.raises(RuleBroken, match=r"of one line|split in two"):
        sleepers_and_the_dead()


def test_nobody_leaves_a_companion_behind_before_the_lease_is_over() -> None:
    seceders_and_the_dead()
    with broken_law("goes at once"), pytest.raises(RuleBroken, match=r"of one line|split in two"):
        seceders_and_the_dead()


@pytest.mark.parametrize(
    ("seed", "duration"),
    [
        (23, 8.0),  # a proposal did not name the dead leader of an epoch in doubt, and was refused for ever
        (174, 8.0),  # the rule itself forgot those who die after they have accepted
        (50, 8.0),  # an epoch in doubt handed down a line that had gone on without it
        (2298, 12.0),  # two groups carried on a line when all of its last epoch were dead
        (5128, 20.0),  # the second of two links was closed, and that was taken for a death
    ],
)
def test_a_history_that_once_broke_a_rule_no_longer_does(seed: int, duration: float) -> None:
    assert str(History.violation_of(seed, duration)) == "None"


def test_two_hundred_random_histories_keep_every_rule() -> None:
    assert violations(range(200), duration=8.0) == []


@pytest.mark.parametrize("law", ["commits on a majority", "any group goes on", "votes twice"])
def test_the_rules_notice_a_law_that_lacks_one(law: str) -> None:
    with broken_law(law):
        assert first_violation(range(60)) is not None


def test_a_broken_history_tells_how_it_came_to_it() -> None:
    with broken_law("any group goes on"):
        found = next(v for v in (History(seed).run() for seed in range(60)) if v is not None)
    assert f"seed {found.seed}: " in str(found)
    assert any("starts" in line for line in found.trace)
    assert issubclass(RuleBroken, AssertionError)
