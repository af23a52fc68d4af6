"""Clusters in virtual time: how soon they agree, what they survive, and that a history repeats itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringfort.cluster.core.peer import PeerCore
from ringfort.config import AutoDiscoveryConfig
from ringfort.errors import InvalidArgumentError
from ringfort.testing.histories import History, RuleBroken, Rules
from ringfort.testing.network import SimulatedNetwork, SimulatedPeer
from tests.helpers.histories import broken_law, first_violation, violations


def cluster(hosts: int, seed: int = 1, config: AutoDiscoveryConfig | None = None) -> SimulatedNetwork:
    network = SimulatedNetwork(seed, hosts, config, traced=True)
    network.observer = Rules(network)
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


def _reject(network: SimulatedNetwork, host: int) -> None:
    for other in set(range(network.hosts)) - {host}:
        network.reset(host, other)
    network.partition([host])


HURTS = {
    "killed": SimulatedNetwork.kill,
    "killed without a word": lambda network, host: network.kill(host, word=False),
    "reset": _reject,
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
    assert leads < (0.6 if hurt in ("killed", "killed without a word", "reset") else 1.9)
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


# --- resets -----------------------------------------------------------------------------------------------------------


def resets() -> None:
    """Somebody on the path resets the connections between one host and the others, and lets nothing new through."""
    network = agreed_cluster(4)
    for other in (1, 2, 3):
        network.reset(0, other)
        network.cut(0, other)
        network.cut(other, 0)
    rest = [network.peers[host] for host in (1, 2, 3)]
    until(network, lambda: are_agreed(rest), 1.0)
    network.run_until(network.now + 5.0)
    assert network.peers[0].core.epoch is None
    network.heal()
    until(network, lambda: network.agreed, 4.0)


def test_a_reset_is_no_death_and_one_side_goes_on_at_most() -> None:
    resets()
    with broken_law("every closed link is a death"), pytest.raises(RuleBroken, match=r"of one lineage|split in two"):
        resets()


def test_who_was_only_reset_is_back_within_a_second() -> None:
    network = agreed_cluster(4)
    for other in (1, 2, 3):
        network.reset(0, other)
    network.run_until(network.now + 0.1)
    assert not network.agreed
    assert until(network, lambda: network.agreed, 2.0) < 1.5


def test_a_word_of_death_lets_a_minority_go_on_and_a_lost_machine_does_not() -> None:
    for word, alone in ((True, True), (False, False)):
        network = agreed_cluster(3)
        for host in (0, 1):
            network.kill(host, word=word)
        network.run_until(network.now + 4.0)
        assert (network.peers[2].core.epoch is not None) is alone


# --- restarts ---------------------------------------------------------------------------------------------------------


def waits_of(network: SimulatedNetwork, host: int) -> list[str]:
    """What the latest peer of `host` said that it waits for, as in "host0, host1"."""
    said = [line for line in network.trace if f"{network.peers[host].id}: waiting: an earlier" in line]
    return [line.split("in a group with ")[1].split(", which may still")[0] for line in said]


def restarted_half(*, word: bool) -> SimulatedNetwork:
    """Two of four are cut off from the others, killed, and started again with the same disk."""
    network = agreed_cluster(4)
    network.partition([0, 1])
    network.run_until(network.now + 3.0)
    for host in (2, 3):
        network.kill(host, word=word)
    for host in (2, 3):
        network.start(host)
    network.run_until(network.now + 6.0)
    return network


@pytest.mark.parametrize("word", [True, False])
def test_a_half_that_was_cut_off_and_started_again_does_not_go_on_beside_the_other(word: bool) -> None:
    network = restarted_half(word=word)
    assert are_agreed([network.peers[host] for host in (0, 1)])
    assert [network.peers[host].core.epoch for host in (2, 3)] == [None, None]
    assert waits_of(network, 2) == waits_of(network, 3) == ["host0, host1"]
    network.heal()
    until(network, lambda: network.agreed, 4.0)
    with broken_law("forgets its earlier processes"), pytest.raises(RuleBroken, match="begins a new lineage beside"):
        restarted_half(word=word)


@pytest.mark.parametrize("told", [[2, 3], [3]])
def test_it_goes_on_where_a_person_says_who_is_gone_on_one_machine_at_least(told: list[int]) -> None:
    network = agreed_cluster(4)
    for host in range(4):
        network.power_off(host)
    for host in (2, 3):
        network.start(host, without=["host0", network.peers[1].id] if host in told else [])
    until(network, lambda: are_agreed(network.alive), 3.0)
    assert waits_of(network, told[0]) == []


def test_when_all_machines_are_here_again_nobody_waits_for_more() -> None:
    network = agreed_cluster(4)
    for host in (2, 3):
        network.kill(host)
    network.run_until(network.now + 3.0)
    for host in (2, 3):
        network.start(host)
    until(network, lambda: network.agreed, 0.5)  # which is how long newcomers that nobody knew are waited for
    network.kill(3)
    network.run_until(network.now + 3.0)
    network.start(3)
    network.run_until(network.now + 0.5)
    assert network.agreed


@pytest.mark.parametrize(("most", "soon"), [(2, True), (3, False)])
def test_as_many_as_there_may_be_begin_at_once(most: int, soon: bool) -> None:
    network = SimulatedNetwork(1, 3, AutoDiscoveryConfig(min_peers=2, max_peers=most, settle=5.0))
    for host in range(3):
        network.start(host)
    network.run_until(3.0)
    assert network.agreed == soon


def replaced_and_gone() -> SimulatedNetwork:
    """Host 0 was given a new disk while host 2 was off, worked with host 1, and is gone for good."""
    network = agreed_cluster(3)
    network.power_off(2)
    network.kill(0)
    network.wipe(0)
    network.start(0)
    until(network, lambda: network.agreed, 3.0)
    for host in (0, 1):
        network.power_off(host)
    network.wipe(0)
    return network


def test_a_name_stands_for_its_later_processes_too() -> None:
    network = replaced_and_gone()
    network.start(1)
    network.start(2, without=["host0"])
    until(network, lambda: are_agreed(network.alive), 3.0)


def test_who_waits_for_a_process_that_it_knows_from_the_departed_alone_says_so() -> None:
    network = replaced_and_gone()
    first = network.ended[1].id
    network.start(1)
    network.start(2, without=[first])
    network.run_until(network.now + 6.0)
    assert [network.peers[host].core.epoch for host in (1, 2)] == [None, None]
    assert waits_of(network, 2)[-1] == "host0"


def test_who_is_not_named_is_waited_for() -> None:
    network = agreed_cluster(4)
    for host in range(4):
        network.power_off(host)
    for host in (2, 3):
        network.start(host, without=["host0"])
    network.run_until(network.now + 6.0)
    assert [peer.core.epoch for peer in network.alive] == [None, None]
    assert waits_of(network, 2)[-1] == "host1"


def test_after_a_power_cut_all_go_on_at_once_and_all_but_one_wait_for_it() -> None:
    network = agreed_cluster(4)
    for host in range(4):
        network.power_off(host)
    for host in (0, 1, 2):
        network.start(host)
    network.run_until(network.now + 5.0)
    assert [peer.core.epoch for peer in network.alive] == [None, None, None]
    assert waits_of(network, 0)[-1] == "host3"
    network.start(3)
    assert until(network, lambda: network.agreed, 4.0) < 3.0


def test_a_run_that_ended_well_binds_nobody() -> None:
    network = agreed_cluster(4)
    for host in range(4):
        network.leave(host)
        network.run_until(network.now + 0.02)
    network.run_until(network.now + 1.0)
    for host in (2, 3):
        network.start(host)
    until(network, lambda: are_agreed(network.alive), 3.0)


def test_who_leaves_while_others_are_out_of_sight_is_bound_by_what_it_was_in() -> None:
    network = agreed_cluster(4)
    network.partition([0, 1])
    network.run_until(network.now + 3.0)
    for host in (2, 3):
        network.leave(host)
        network.start(host)
    network.run_until(network.now + 5.0)
    assert are_agreed([network.peers[host] for host in (0, 1)])
    assert [network.peers[host].core.epoch for host in (2, 3)] == [None, None]


def test_a_machine_whose_disk_was_wiped_is_a_newcomer() -> None:
    network = agreed_cluster(2)
    for host in (0, 1):
        network.power_off(host)
        network.wipe(host)
    network.start(1)
    until(network, lambda: network.agreed, 3.0)


def test_a_copied_disk_vouches_for_nobody() -> None:
    """Host 2 starts with a copy of the disk of host 0, whose process lives, cut off."""
    network = agreed_cluster(3)
    network.partition([0])
    network.kill(1, word=False)
    network.kill(2, word=False)
    copy = network.start(2, copy_of=0)
    network.run_until(network.now + 6.0)
    assert copy.core.epoch is None
    assert waits_of(network, 2)[-1] == "host0, host1, host2"


def test_a_hundred_random_histories_keep_every_rule() -> None:
    assert violations(range(100), duration=8.0) == []  # tests/stress has more


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
