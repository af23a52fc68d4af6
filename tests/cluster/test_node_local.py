"""Cluster nodes of one process, on loopback: what they offer, and what they do with bad input."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import platform
import queue
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import ringfort
from ringfort.bootstrap.connection import Connection
from ringfort.cluster.backend import AutoDiscoveryBackend
from ringfort.cluster.core.election import ElectionEvent, ElectionEventKind, ElectionState
from ringfort.cluster.core.events import (
    CloneFound,
    ClusterEvent,
    DiskTrouble,
    EpochStarted,
    Instruction,
    Misbehaved,
    Noted,
    OtherClusters,
    PeerJoined,
    PeerLost,
)
from ringfort.cluster.core.gossip import MAX_NOTE_BYTES, Note, encode
from ringfort.cluster.core.health import HealthStatus
from ringfort.cluster.core.peer_messages import Beat, Hello, Member, Report, Votes
from ringfort.cluster.core.topology import STALE_AFTER
from ringfort.cluster.discovery.directory import Source
from ringfort.cluster.discovery.interfaces import Choice
from ringfort.cluster.net.control import Control as Inside
from ringfort.cluster.net.control_link import ControlLink, connect
from ringfort.cluster.net.epoch_connections import token_of
from ringfort.cluster.net.host import clock
from ringfort.cluster.net.peer_streams import MAX_PENDING
from ringfort.cluster.net.probing import MAX_PROBES, Measurement
from ringfort.cluster.net.service_host import ThreadHost
from ringfort.cluster.node import ClusterNode
from ringfort.config import AutoDiscoveryConfig, DistributedConfig, ElectionConfig, Environment
from ringfort.context import DistributedContext
from ringfort.errors import (
    ChannelClosedError,
    ConfigError,
    InvalidArgumentError,
    NoConnectionError,
    PeerLostError,
    RefusedError,
    RendezvousTimeoutError,
    TransportError,
    VersionMismatchError,
)
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.namespace import NetworkNamespace
from ringfort.telemetry.trace import own_trace
from ringfort.transport.frames import PROTOCOL_VERSION
from ringfort.transport.handshake import sealed
from ringfort.transport.hello import Control, Join, Meet, Probe, Refused
from tests.helpers.agents import until
from tests.helpers.handshakes import handshake_of

PATIENCE = 20.0
"""Seconds for something that takes one on an idle machine."""
LOCAL = AutoDiscoveryConfig(interfaces=["127.0.0.1"], settle=0.15, election=ElectionConfig(settle=0.1))
"""Processes of one machine hear of each other in milliseconds: no need to wait for more."""

ELSEWHERE = "127.77.77.77:9"
"""Where nobody is."""


class Cluster:
    """Nodes with one secret, closed in the end; and their events."""

    def __init__(self) -> None:
        self.namespace = NetworkNamespace.generate("test")
        self.nodes: list[ClusterNode] = []
        self.events: dict[str, queue.Queue[ClusterEvent]] = {}

    def credentials(self, identity: NodeIdentity | None = None) -> Credentials:
        return Credentials(identity or NodeIdentity.ephemeral(), self.namespace)

    def start(
        self,
        config: AutoDiscoveryConfig = LOCAL,
        *,
        identity: NodeIdentity | None = None,
        slots: int = 1,
        listens: bool = True,
    ) -> ClusterNode:
        # In a thread: tests look inside, and a process for each would take long.
        credentials = self.credentials(identity)
        node = ClusterNode(config, slots=slots, credentials=credentials, control="thread", listens=listens)
        events: queue.Queue[ClusterEvent] = queue.Queue()
        self.nodes.append(node)
        self.events[node.peer_id] = events
        node.subscribe(events.put)
        return node.start()

    def wait_for(self, node: ClusterNode, wanted: Callable[[ClusterEvent], bool]) -> ClusterEvent:
        deadline = time.monotonic() + PATIENCE
        seen: list[str] = []
        while True:
            try:
                event = self.events[node.peer_id].get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"it did not happen; what did: {seen}")
            if wanted(event):
                return event
            seen.append(str(event))

    def dial(
        self, node: ClusterNode, purpose: Control | Join | Meet | Probe, credentials: Credentials | None = None
    ) -> tuple[socket.socket, Connection]:
        """A connection of a member that is no node."""
        host, _, port = node.addresses[0].rpartition(":")
        opened = asyncio.run(connect(host, int(port), credentials or self.credentials(), purpose))
        opened.sock.settimeout(PATIENCE)
        return opened.sock, opened


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    for node in made.nodes:
        node.close()


@contextmanager
def together(*actions: Callable[[], object]) -> Iterator[None]:
    """Runs all at once, each in a thread; what one raises is raised here."""
    failures: list[BaseException] = []

    def run(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(2 * PATIENCE)
    if failures:
        raise failures[0]


def is_epoch_of(size: int) -> Callable[[ClusterEvent], bool]:
    return lambda event: isinstance(event, EpochStarted) and len(event.epoch.members) == size


# --- what a node offers -----------------------------------------------------------------------------------------------


def test_nodes_find_each_other_agree_and_know_the_others(cluster: Cluster) -> None:
    nodes = [cluster.start() for _ in range(3)]
    epochs = [node.wait_for_peers(2, PATIENCE) for node in nodes]
    assert len(set(epochs)) == 1
    assert {member.peer for member in epochs[0].members} == {node.peer_id for node in nodes}
    assert len({node.leader for node in nodes}) == 1
    views = nodes[0].snapshot()
    assert [view.ranks for view in views] == [(0,), (1,), (2,)]
    assert sum(view.is_self for view in views) == 1
    assert sum(view.role == "leader" for view in views) == 1
    assert all(view.interface == "lo" for view in views)


def test_a_node_tells_how_the_others_are_and_what_machines_and_links_there_are(cluster: Cluster) -> None:
    nodes = [cluster.start() for _ in range(3)]
    for node in nodes:
        node.wait_for_peers(2, PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while len(list(nodes[0].topology().links())) < 3 or nodes[0].health_summary().healthy < 2:
        assert time.monotonic() < deadline, (nodes[0].topology().nodes, nodes[0].health_summary())
        time.sleep(0.02)
    health, topology = nodes[0].health_summary(), nodes[0].topology()
    assert (health.total, health.is_sound, health.uptime) == (2, True, 1.0)
    assert health.round_trip > 0
    assert set(topology.nodes) == {node.peer_id for node in nodes}
    assert all(profile.memory > 0 and profile.version for profile in topology.nodes.values())
    # A copy: what a program does with it concerns nobody else.
    topology.remove(nodes[1].peer_id)
    assert nodes[1].peer_id in nodes[0].topology()


def test_machines_that_are_in_sight_stay_in_the_topology_however_long_ago_they_came(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = cluster.start(), cluster.start()
    one.wait_for_peers(1, PATIENCE)
    monkeypatch.setattr("ringfort.cluster.net.link_metrics.clock", lambda: clock() + 2 * STALE_AFTER)
    assert set(one.topology().nodes) == {one.peer_id, two.peer_id}


def test_of_two_nodes_that_came_together_the_one_that_did_more_leads_next(cluster: Cluster) -> None:
    nodes = [cluster.start(replace(LOCAL, min_peers=2)) for _ in range(3)]
    epoch = nodes[0].wait_for_peers(2, PATIENCE)
    nodes = [next(node for node in nodes if node.peer_id == peer) for peer in sorted(epoch.peers)]
    assert {member.joined for member in epoch.members} == {epoch.number}
    leader = next(node for node in nodes if node.peer_id == nodes[0].leader)
    *_, busy = followers = [node for node in nodes if node is not leader]
    busy.record_work(5)  # the higher id, which would not lead otherwise
    busy.health_summary()  # the count goes along with every question
    leader.close()
    for node in followers:
        cluster.wait_for(
            node,
            lambda event: (
                isinstance(event, ElectionEvent)
                and event.peer == busy.peer_id
                and event.kind in (ElectionEventKind.ELECTED_MASTER, ElectionEventKind.NEW_MASTER)
            ),
        )
    assert busy.election_state is ElectionState.MASTER
    with pytest.raises(InvalidArgumentError, match="amount=-1"):
        busy.record_work(-1)


def test_others_see_how_far_a_program_is(cluster: Cluster) -> None:
    one, _ = cluster.start(), cluster.start()
    one.wait_for_peers(1, PATIENCE)
    wanted = own_trace().step + 3
    for _ in range(wanted):
        own_trace().mark(cluster)
    until(lambda: [view.step for view in one.snapshot() if not view.is_self] == [wanted], "it is not told")


def test_a_leader_can_step_down_and_another_peer_stand(cluster: Cluster) -> None:
    one, two = cluster.start(), cluster.start()
    one.wait_for_peers(1, PATIENCE)
    two.wait_for_peers(1, PATIENCE)
    leader, other = (one, two) if one.leader == one.peer_id else (two, one)
    leader.step_down()
    wanted = (ElectionEventKind.NEW_MASTER, other.peer_id)
    cluster.wait_for(leader, lambda event: isinstance(event, ElectionEvent) and (event.kind, event.peer) == wanted)
    leader.force_election()  # its claim was the better one all the time
    wanted = (ElectionEventKind.NEW_MASTER, leader.peer_id)
    cluster.wait_for(other, lambda event: isinstance(event, ElectionEvent) and (event.kind, event.peer) == wanted)
    with pytest.raises(InvalidArgumentError, match="an observer or a witness cannot lead"):
        cluster.start(slots=0).force_election()


def test_a_node_that_leaves_is_done_without_and_the_rest_go_on(cluster: Cluster) -> None:
    nodes = [cluster.start() for _ in range(3)]
    epoch = nodes[0].wait_for_peers(2, PATIENCE)
    nodes[2].leave("its work is done")
    after = nodes[0].wait_for_epoch(epoch.number, PATIENCE)
    assert set(after.peers) == {nodes[0].peer_id, nodes[1].peer_id}


def test_a_process_that_starts_again_vouches_for_the_one_before(cluster: Cluster) -> None:
    identity = NodeIdentity.ephemeral()
    one, two = cluster.start(), cluster.start(identity=identity)
    epoch = one.wait_for_peers(1, PATIENCE)
    two.close()
    again = cluster.start(identity=identity)
    cluster.wait_for(one, lambda event: isinstance(event, EpochStarted) and again.peer_id in event.epoch.peers)
    assert one.epoch is not None
    assert one.epoch.number > epoch.number


def test_newcomers_wait_while_a_member_holds_and_come_when_it_does_not(cluster: Cluster) -> None:
    one, two = cluster.start(), cluster.start()
    one.wait_for_peers(1, PATIENCE)
    two.hold(True)
    three = cluster.start()
    with pytest.raises(RendezvousTimeoutError, match="seen:"):
        three.wait_for_peers(1, 1.5)
    assert one.epoch is not None
    assert len(one.epoch.members) == 2
    two.hold(False)
    assert len(three.wait_for_peers(2, PATIENCE).members) == 3


def test_programs_tell_each_other_notes(cluster: Cluster) -> None:
    one, two = cluster.start(), cluster.start()
    two.wait_for_peers(1, PATIENCE)
    one.wait_for_peers(1, PATIENCE)
    one.tell("port", b"29500")
    event = cluster.wait_for(two, lambda event: isinstance(event, Noted))
    assert event == Noted(one.peer_id, "port", b"29500")
    with pytest.raises(InvalidArgumentError, match="body="):
        one.tell("port", bytes(MAX_NOTE_BYTES + 1))


def test_programs_open_streams_to_each_other_outside_any_epoch(cluster: Cluster) -> None:
    nodes = [cluster.start(), cluster.start()]
    for node in nodes:
        node.wait_for_peers(1, PATIENCE)
    one, two = nodes
    with pytest.raises(RefusedError, match=f"{two.peer_id}: its program takes no streams"):
        one.open_stream(two.peer_id, "echo", PATIENCE)
    came: queue.Queue[tuple[str, str, Connection]] = queue.Queue()
    end = two.on_stream(lambda *stream: came.put(stream))
    with pytest.raises(InvalidArgumentError, match="callback"):
        two.on_stream(print)
    for number in range(2 * MAX_PENDING):  # each place is free again once the stream is taken
        ours = one.open_stream(two.peer_id, "echo", PATIENCE)
        peer, purpose, theirs = came.get(timeout=PATIENCE)
        assert (peer, purpose) == (one.peer_id, "echo")
        assert ours.identity == two.credentials.identity.public_key
        assert theirs.identity == one.credentials.identity.public_key
        said = Refused("group", str(number))
        ours.say(said, time.monotonic() + PATIENCE)
        with pytest.raises(RefusedError, match=f": {number}$"):  # sealed and opened with the session's keys
            theirs.hear(0, Join, time.monotonic() + PATIENCE)
        ours.close()
        theirs.close()
    end()
    with pytest.raises(RefusedError, match="takes no streams"):
        one.open_stream(two.peer_id, "echo", PATIENCE)
    with pytest.raises(NoConnectionError, match="nobody"):
        one.open_stream("nobody.here", "echo", PATIENCE)


def test_a_stream_whose_callback_fails_is_closed(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    one, two = cluster.start(), cluster.start()
    one.wait_for_peers(1, PATIENCE)
    two.wait_for_peers(1, PATIENCE)
    two.on_stream(lambda peer, purpose, connection: {}[purpose])
    stream = one.open_stream(two.peer_id, "echo", PATIENCE)
    with stream.sock, pytest.raises(NoConnectionError):
        stream.hear(0, Join, time.monotonic() + PATIENCE)
    assert "A callback failed for a stream" in caplog.text


def test_a_peer_that_is_named_introduces_the_rest_without_multicast(cluster: Cluster) -> None:
    quiet = replace(LOCAL, multicast=False)
    first = cluster.start(quiet)
    named = replace(quiet, peers=[first.addresses[0]])
    nodes = [first, cluster.start(named), cluster.start(named)]
    assert len({node.wait_for_peers(2, PATIENCE) for node in nodes}) == 1


@pytest.mark.parametrize("multicast", [True, False])
def test_a_viewer_opens_no_port_and_sees_all_and_one_that_comes_later(cluster: Cluster, multicast: bool) -> None:
    config = replace(LOCAL, multicast=multicast)
    first = cluster.start(config)
    named = replace(config, peers=[] if multicast else [first.addresses[0]])
    nodes = [first, cluster.start(named)]
    viewer = cluster.start(named, slots=0, listens=False)

    def sees(*wanted: ClusterNode) -> None:
        ids = {node.peer_id for node in wanted}
        until(lambda: {view.peer for view in viewer.snapshot() if not view.is_self} == ids, "it does not see all")

    sees(*nodes)
    nodes.append(cluster.start(named))
    sees(*nodes)
    assert viewer.addresses == ()
    views = {view.peer: view for view in first.snapshot()}
    assert views[viewer.peer_id].role == "observer"
    assert viewer.why_alone().count("this command looks on lo (127.0.0.1)") == 1
    in_loop(viewer, lambda control: control._moved(control.connector.choice))  # as after a change of the network
    assert viewer.addresses == ()


def test_only_an_observer_need_not_listen(cluster: Cluster) -> None:
    for config, slots in ((LOCAL, 1), (replace(LOCAL, elastic=True, run="night"), 0)):
        with pytest.raises(InvalidArgumentError, match="listens=False: ranks and witnesses must listen"):
            cluster.start(config, slots=slots, listens=False)


def test_with_encryption_off_on_all_it_works_and_with_it_off_on_one_both_say_so(cluster: Cluster) -> None:
    off = replace(LOCAL, encryption="off")
    one, two = cluster.start(off), cluster.start(off)
    assert one.wait_for_peers(1, PATIENCE) == two.wait_for_peers(1, PATIENCE)
    three = cluster.start()
    with pytest.raises(RendezvousTimeoutError, match="has encryption off, this side has it on"):
        three.wait_for_peers(1, 1.5)


def test_links_are_measured(cluster: Cluster) -> None:
    one, two = cluster.start(), cluster.start()
    one.wait_for_peers(1, PATIENCE)
    two.wait_for_peers(1, PATIENCE)
    deadline = time.monotonic() + PATIENCE
    found: list[tuple[float | None, float | None]] = []
    while time.monotonic() < deadline:
        found = [(v.round_trip, v.bandwidth) for n in (one, two) for v in n.snapshot() if not v.is_self]
        if all(trip and bandwidth for trip, bandwidth in found):
            break
        time.sleep(0.05)
    assert all(trip and 0 < trip < 1 and bandwidth and bandwidth > 1e5 for trip, bandwidth in found), found


def test_a_node_can_be_closed_twice_and_does_not_start_again(cluster: Cluster) -> None:
    node = cluster.start()
    node.close()
    node.close()
    with pytest.raises(ChannelClosedError):
        node.start()
    with pytest.raises(ChannelClosedError):
        node.snapshot()


def test_a_node_that_is_dropped_leaves_the_cluster(cluster: Cluster) -> None:
    one = cluster.start()
    two = ClusterNode(LOCAL, credentials=cluster.credentials(), control="thread").start()
    peer = two.peer_id
    one.wait_for_peers(1, PATIENCE)
    two.subscribe(two._callbacks.append)  # as a backend does, which holds its node
    del two
    gc.collect()
    event = cluster.wait_for(one, lambda event: isinstance(event, PeerLost))
    assert isinstance(event, PeerLost)
    assert (event.peer, event.left) == (peer, True)


def test_closing_wakes_those_who_wait(cluster: Cluster) -> None:
    node = cluster.start()

    def wait() -> None:
        with pytest.raises(ChannelClosedError):
            node.wait_for_peers(5, PATIENCE)

    with together(wait):
        node.close()


# --- the backend ------------------------------------------------------------------------------------------------------


def form(
    cluster: Cluster, nodes: list[ClusterNode], config: DistributedConfig | None = None
) -> list[AutoDiscoveryBackend]:
    backends = [AutoDiscoveryBackend(node=node, group=config) for node in nodes]
    for node in nodes:
        node.wait_for_peers(len(nodes) - 1, PATIENCE)
    with together(*(backend.establish_ring for backend in backends)):
        pass
    return backends


def test_a_ring_is_established_and_again_after_a_member_has_gone(cluster: Cluster) -> None:
    nodes = [cluster.start() for _ in range(3)]
    backends = form(cluster, nodes)
    try:
        assert sorted(backend.rank for backend in backends) == [0, 1, 2]
        assert {backend.world_size for backend in backends} == {3}
        arrays = [np.full(1000, 2.0**backend.rank, np.float32) for backend in backends]
        work = [node.work_done for node in nodes]
        reduce = [
            lambda b=backend, x=array: DistributedContext(b).all_reduce(x)
            for backend, array in zip(backends, arrays, strict=True)
        ]
        with together(*reduce):
            pass
        assert all(array[0] == 7 for array in arrays)
        assert [node.work_done > before for node, before in zip(nodes, work, strict=True)] == [True] * 3
        epoch = nodes[0].epoch
        assert epoch is not None
        backends[2].close()
        nodes[2].close()
        with pytest.raises((ChannelClosedError, PeerLostError)), together(*reduce[:2]):
            pass
        for node in nodes[:2]:
            node.wait_for_epoch(epoch.number, PATIENCE)
        with together(backends[0].establish_ring, backends[1].establish_ring):
            pass
        assert sorted(backend.rank for backend in backends[:2]) == [0, 1]
    finally:
        for backend in backends:
            backend.close()


@pytest.mark.parametrize("shared_memory", ["on", "off"])
def test_a_context_goes_on_in_the_next_ring(cluster: Cluster, shared_memory: Any) -> None:
    """Also with all-reduces like those that it has kept ready for the ranks of the ring before."""
    nodes = [cluster.start() for _ in range(2)]
    backends = form(cluster, nodes, DistributedConfig(timeout=PATIENCE, shared_memory=shared_memory))
    try:
        contexts = [DistributedContext(backend) for backend in backends]
        for left in (2, 1):
            for _ in range(3):
                arrays = [np.ones(4, np.float32) for _ in range(left)]
                with together(*(partial(c.all_reduce, x) for c, x in zip(contexts[:left], arrays, strict=True))):
                    pass
                assert [array.tolist() for array in arrays] == [[float(left)] * 4] * left
            if left == 1:
                return
            epoch = nodes[0].epoch
            assert epoch is not None
            backends[left - 1].close()
            nodes[left - 1].close()
            for node in nodes[: left - 1]:
                node.wait_for_epoch(epoch.number, PATIENCE)
            with together(*(backend.establish_ring for backend in backends[: left - 1])):
                pass
    finally:
        for backend in backends:
            backend.close()


def test_a_ring_that_is_dropped_is_left_at_once_and_its_node_lets_newcomers_in(cluster: Cluster) -> None:
    nodes = [cluster.start() for _ in range(2)]
    backends = form(cluster, nodes, DistributedConfig(timeout=PATIENCE))
    contexts = [DistributedContext(backend) for backend in backends]
    for backend in backends:
        backend.node.hold()
    try:
        gone = weakref.ref(backends[0])
        gc.disable()  # which might find it later: the peer must not wait for that
        try:
            del backends[0], contexts[0], backend
            assert gone() is None
        finally:
            gc.enable()
        with pytest.raises(PeerLostError, match="dropped the group"):
            contexts[0].all_reduce(np.ones(4, np.float32))
        backends[0].close()
        cluster.start()
        nodes[0].wait_for_peers(2, PATIENCE)
    finally:
        for backend in backends:
            backend.close()


def test_a_rank_that_never_comes_to_the_ring_is_named(cluster: Cluster) -> None:
    nodes = [cluster.start() for _ in range(2)]
    backends = [AutoDiscoveryBackend(node=node) for node in nodes]
    try:
        for node in nodes:
            node.wait_for_peers(1, PATIENCE)
        with pytest.raises(RendezvousTimeoutError, match=r"rank [01]: it ") as raised:
            backends[0].establish_ring(1.0)
        assert len(raised.value.missing) == 1
    finally:
        for backend in backends:
            backend.close()


def test_an_observer_with_a_key_of_its_own_does_not_get_a_members_data_link(cluster: Cluster) -> None:
    """It has the cluster's secret, so it is told of the epoch, and it comes before the member."""
    nodes = [cluster.start() for _ in range(2)]
    for node in nodes:
        node.wait_for_peers(1, PATIENCE)
    epoch = nodes[0].epoch
    assert epoch is not None
    lower = next(node for node in nodes if node.peer_id == epoch.peers[0])
    sock, _ = cluster.dial(lower, Meet(1, 2, token_of(epoch)), cluster.credentials())
    backends = form(cluster, nodes)
    with sock:
        assert sock.recv(1) == b""
    try:
        arrays = [np.ones(3, np.float32) for _ in backends]
        with together(*(partial(DistributedContext(b).all_reduce, x) for b, x in zip(backends, arrays, strict=True))):
            pass
        assert [array[0] for array in arrays] == [2, 2]
    finally:
        for backend in backends:
            backend.close()


def test_before_a_ring_is_established_it_is_a_world_of_one(cluster: Cluster) -> None:
    with AutoDiscoveryBackend(node=cluster.start()) as backend:
        context = DistributedContext(backend)
        assert (context.rank, context.world_size) == (0, 1)
        assert context.all_reduce(np.ones(3))[0] == 1


def test_join_says_who_was_seen_and_what_to_try_when_nobody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFORT_KEY", NetworkNamespace.generate("lonely").join_code())
    monkeypatch.setenv("RINGFORT_INTERFACES", "127.0.0.1")
    with pytest.raises(RendezvousTimeoutError, match=r"(?s)no other peer was seen.*ringfort doctor"):
        ringfort.join(min_peers=1, timeout=0.5)


def test_a_peer_that_left_was_seen(cluster: Cluster) -> None:
    node, other = cluster.start(), cluster.start()
    cluster.wait_for(node, lambda event: isinstance(event, PeerJoined))
    other.leave("its program is done")
    cluster.wait_for(node, lambda event: isinstance(event, PeerLost))
    first = node.why_alone().splitlines()[0]
    assert first == f"was here and is gone: {platform.node()} (its program is done)"


def test_a_program_that_waits_is_warned_of_machines_of_other_clusters(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    node = cluster.start()
    node._take(OtherClusters(("10.0.0.2",)))
    with pytest.raises(RendezvousTimeoutError):
        node.wait_for_peers(1, 0.1)
    [said] = [record.getMessage() for record in caplog.records if "another cluster" in record.getMessage()]
    assert said.startswith("waiting for 1 other peer: 1 machine of another cluster announces itself here (10.0.0.2).")


def test_join_refuses_what_is_no_setting() -> None:
    with pytest.raises(ConfigError, match=r"Unknown keyword 'colour' for join\(\); use one of: .*peers") as raised:
        ringfort.join(colour="red")
    assert (raised.value.name, raised.value.value) == ("colour", "red")
    with pytest.raises(ConfigError, match=r"Unknown keyword 'min_peer' for join\(\); did you mean 'min_peers'\?"):
        ringfort.join(min_peer=2)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_peer_with_another_key_is_passed_over_and_the_timeout_tells_of_it(cluster: Cluster) -> None:
    other = Cluster()
    stranger = other.start()
    try:
        node = cluster.start(replace(LOCAL, peers=[stranger.addresses[0]]))
        with pytest.raises(RendezvousTimeoutError) as raised:
            node.wait_for_peers(1, 1.5)
    finally:
        stranger.close()
    text = str(raised.value)
    assert "The other side belongs to another cluster" in text
    assert "ringfort key join" in text
    assert "of another cluster announces itself here (this machine)" in text


@pytest.mark.parametrize("interfaces", [["nosuch0"], ["203.0.113.7"]])
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(cluster: Cluster, interfaces: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"this machine has no such interface or address; there are .*lo"):
        cluster.start(replace(LOCAL, interfaces=interfaces))


def test_a_port_that_is_taken_is_refused_in_words(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(TransportError, match="the port is in use"):
        cluster.start(replace(LOCAL, port=taken.getsockname()[1]))


def test_a_bad_address_of_a_peer_is_refused_at_once(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="peer='a b'"):
        cluster.start(replace(LOCAL, peers=["a b"]))


def test_a_copied_identity_is_reported_and_the_others_go_on(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = NodeIdentity.ephemeral()
    one, two = cluster.start(), cluster.start(identity=identity)
    one.wait_for_peers(1, PATIENCE)
    two.wait_for_peers(1, PATIENCE)
    monkeypatch.setattr("ringfort.cluster.net.setup.host_id", lambda salt: "another machine")
    cluster.start(identity=identity)
    event = cluster.wait_for(one, lambda event: isinstance(event, CloneFound))
    assert "rm ~/.ringfort/node_keypair there" in str(event)
    assert one.epoch is not None
    assert set(one.epoch.peers) == {one.peer_id, two.peer_id}


@pytest.mark.parametrize(("version", "side"), [(PROTOCOL_VERSION - 1, "the other side"), (99, "this side")])
def test_another_version_is_refused_with_both_versions_and_the_upgrade_command(
    cluster: Cluster, version: int, side: str
) -> None:
    node = cluster.start()
    host, _, port = node.addresses[0].rpartition(":")
    handshake = handshake_of(version, cluster.credentials(), Control())
    with socket.create_connection((host, int(port)), PATIENCE) as sock:
        sock.sendall(handshake.outgoing)
        answer = b""
        while data := sock.recv(4096):
            answer += data
    with pytest.raises(VersionMismatchError, match=f"version {PROTOCOL_VERSION}, this side {version}; .*--upgrade"):
        handshake.feed(answer)
    words = f"version {version}, this side {PROTOCOL_VERSION}; run `pip install --upgrade ringfort` on {side}"
    with pytest.raises(RendezvousTimeoutError, match=words):
        node.wait_for_peers(1, 0.1)


def misbehaves(
    cluster: Cluster, node: ClusterNode, *bodies: bytes, credentials: Credentials | None = None
) -> Misbehaved:
    """What `node` reports of a member that says `bodies`; its link is closed."""
    sock, connection = cluster.dial(node, Control(), credentials)
    with sock:
        for body in bodies:
            try:
                sock.sendall(sealed(connection.sealer, body))
            except OSError:  # it was refused already
                break
        event = cluster.wait_for(node, lambda event: isinstance(event, Misbehaved))
        with suppress(OSError):  # a reset is an end too
            while sock.recv(1 << 16):
                pass
    assert isinstance(event, Misbehaved)
    return event


def test_a_peer_that_floods_lies_or_talks_nonsense_is_refused_and_the_others_go_on(cluster: Cluster) -> None:
    one, two = cluster.start(), cluster.start()
    epoch = one.wait_for_peers(1, PATIENCE)
    two.wait_for_peers(1, PATIENCE)
    nobody = encode(Hello(Member("somebody-else.1", "host")))
    assert "claims to be somebody-else.1" in misbehaves(cluster, one, nobody).why
    assert "malformed control message" in misbehaves(cluster, one, b"\xc1 nonsense").why
    assert "did not say who it is" in misbehaves(cluster, one, encode(Beat(1.0))).why
    for message in (encode(Beat(1.0)), encode(Note("x"))):
        flooder = cluster.credentials()
        hello = encode(Hello(Member(f"{flooder.identity.peer_id}.1", "host")))
        flood = (hello, encode(Report(Votes())), *[message] * 2000)
        assert "floods" in misbehaves(cluster, one, *flood, credentials=flooder).why
    assert one.epoch == two.epoch == epoch


def test_a_peer_whose_addresses_are_nonsense_harms_nobody(cluster: Cluster) -> None:
    one, two = cluster.start(), cluster.start()
    epoch = one.wait_for_peers(1, PATIENCE)
    two.wait_for_peers(1, PATIENCE)
    liar = cluster.credentials()
    me = Member(f"{liar.identity.peer_id}.1", "host", 1, ("nonsense", ":::", "1.2.3.4:0", "[fe80::1]:9", "x" * 128))
    sock, connection = cluster.dial(one, Control(), liar)
    with sock:
        for message in (Hello(me), Report(Votes(), holds=True)):
            sock.sendall(sealed(connection.sealer, encode(message)))
        cluster.wait_for(one, lambda event: isinstance(event, PeerJoined) and event.peer == me.peer)
        assert me.peer in {view.peer for view in one.snapshot()}
        cluster.wait_for(one, lambda event: isinstance(event, PeerLost) and event.peer == me.peer)  # it never beats
    assert one.wait_for_peers(1, PATIENCE) == two.wait_for_peers(1, PATIENCE)
    assert set(one.wait_for_peers(1, PATIENCE).peers) == set(epoch.peers)


def test_strangers_who_say_nothing_keep_nobody_out(cluster: Cluster) -> None:
    one = cluster.start()
    host, _, port = one.addresses[0].rpartition(":")
    crowd = [socket.create_connection((host, int(port)), PATIENCE) for _ in range(200)]
    try:
        two = cluster.start()
        assert len(two.wait_for_peers(1, PATIENCE).members) == 2
    finally:
        for sock in crowd:
            sock.close()


def test_no_more_are_measured_at_a_time_than_there_is_room_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfort.cluster.net.probing.PROBE_TIMEOUT", 10 * PATIENCE)
    node = cluster.start()
    probes = [cluster.dial(node, Probe())[0] for _ in range(MAX_PROBES + 1)]
    assert probes[-1].recv(1) == b""
    assert select.select(probes[:-1], [], [], 0)[0] == []
    for sock in probes:
        sock.close()


def test_one_that_never_says_who_it_is_does_not_keep_a_node_from_closing(cluster: Cluster) -> None:
    node = cluster.start()
    sock, _ = cluster.dial(node, Control())
    control = inside(node)
    until(lambda: len(control.links.open) > 0, "it has not come")
    closing = threading.Thread(target=node.close)
    closing.start()
    with sock, suppress(ConnectionResetError):  # which is an end too
        while sock.recv(1 << 16):
            pass
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_a_discovery_that_does_not_let_itself_be_ended_does_not_keep_a_node_from_closing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeroconf swallows a cancellation now and then; control processes stayed for ever, and at full speed."""
    monkeypatch.setattr("ringfort.cluster.net.control.STOP_WITHIN", 0.05)
    node = cluster.start()
    control, stopped = inside(node), threading.Event()
    close, stop = control.connector.close, control.stop

    async def close_when_stopped() -> None:
        while not stopped.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        await close()

    async def stop_and_tell(*args: Any, **kwargs: Any) -> None:
        await stop(*args, **kwargs)
        stopped.set()

    control.connector.close, control.stop = close_when_stopped, stop_and_tell  # type: ignore[method-assign]
    closing = threading.Thread(target=node.close)
    closing.start()
    try:
        assert stopped.wait(PATIENCE)
    finally:
        stopped.set()
        closing.join()


def test_a_fault_in_the_control_thread_does_not_stop_its_clock(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    node = cluster.start()
    control, ticked, failed = inside(node), threading.Event(), threading.Event()
    tick = control.core.tick

    def faulty(now: float) -> Sequence[Instruction]:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("a fault")
        ticked.set()
        return tick(now)

    control.core.tick = faulty  # type: ignore[method-assign]
    assert ticked.wait(PATIENCE)
    assert "A tick of the control service failed" in caplog.text


def test_a_process_vouches_at_once_for_another_of_its_node_that_is_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cluster.start()
    control, looked = inside(node), queue.Queue[str]()
    monkeypatch.setattr(control.votes.store, "ended", lambda: looked.put("looked") or [])
    sibling = f"{node.peer_id.rpartition('.')[0]}.sibling"
    for peer in ("elsewhere.1", sibling):
        in_loop(node, lambda control, peer=peer: control._on_event(PeerLost(peer, "silent", died=False)))
        cluster.wait_for(node, lambda event, peer=peer: isinstance(event, PeerLost) and event.peer == peer)
        if peer != sibling:
            assert looked.empty()
    assert looked.get(timeout=PATIENCE) == "looked"


def unattached_link(dialled: str) -> ControlLink:
    """A control link without a socket."""
    return ControlLink(cast("Connection", SimpleNamespace(opener=None)), print, print, dialled)


def test_a_link_that_never_ends_does_not_keep_a_node_from_closing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfort.cluster.net.control.STOP_WITHIN", 0.05)
    node = cluster.start(replace(LOCAL, multicast=False))
    endless = unattached_link(ELSEWHERE)
    in_loop(node, lambda control: control.links.open.update({999: endless}))
    node.close()
    assert not endless.ended.is_set()
    with pytest.raises(ChannelClosedError):
        node.snapshot()


def inside(node: ClusterNode) -> Inside:
    assert isinstance(node._host, ThreadHost)
    assert node._host.service.control is not None
    return node._host.service.control


def in_loop(node: ClusterNode, action: Callable[[Inside], object]) -> None:
    """Does something with a node's inside, in its own thread."""

    async def act() -> None:
        action(inside(node))

    assert isinstance(node._host, ThreadHost)
    asyncio.run_coroutine_threadsafe(act(), node._host.service._loop).result(PATIENCE)


def test_an_address_that_leads_to_the_node_itself_is_not_dialled_again(cluster: Cluster) -> None:
    def meet(control: Inside) -> None:
        directory, link = control.connector.directory, unattached_link(ELSEWHERE)
        directory.learn([ELSEWHERE], Source.STATIC, clock())
        control._on_first_message(link, Hello(control.core.me))
        directory.learn([ELSEWHERE], Source.STATIC, clock())
        assert ELSEWHERE not in directory._entries

    in_loop(cluster.start(), meet)


def test_an_address_whose_peer_was_refused_has_failed(cluster: Cluster) -> None:
    def meet(control: Inside) -> None:
        directory, link = control.connector.directory, unattached_link(ELSEWHERE)
        directory.learn([ELSEWHERE], Source.STATIC, clock())
        control._on_first_message(link, Hello(Member("refused.1", "host")))
        assert directory.troubles() == [(ELSEWHERE, "it was refused")]

    in_loop(cluster.start(), meet)


def test_a_measurement_that_comes_after_the_goodbye_is_dropped(cluster: Cluster) -> None:
    node, other = cluster.start(), cluster.start()
    cluster.wait_for(node, lambda event: isinstance(event, PeerJoined))

    def measured_late(control: Inside) -> None:
        control.driver.call(control.core.leave, "it is done")
        control._measured("127.0.0.1:9", Measurement(other.peer_id, 1e9, 1e9))

    in_loop(node, measured_late)


def test_a_node_does_not_move_to_interfaces_that_are_no_longer_the_current_ones(cluster: Cluster) -> None:
    node = cluster.start()
    addresses = node.addresses
    in_loop(node, lambda control: control._moved(Choice(())))
    assert node.addresses == addresses != ()


def test_what_is_reported_again_and_again_does_not_push_out_the_rest(cluster: Cluster) -> None:
    def report(control: Inside) -> None:
        for peer in ("one.1", *["two.1"] * 100):
            control._on_event(Misbehaved(peer, "it floods"))
        assert list(control.recent.refused) == ["one.1 was refused: it floods", "two.1 was refused: it floods"]

    in_loop(cluster.start(), report)


def test_while_the_disk_is_slow_or_full_a_node_lives_on_and_says_so_and_then_joins(cluster: Cluster) -> None:
    one, two = cluster.start(replace(LOCAL, min_peers=1)), cluster.start(replace(LOCAL, min_peers=1))
    may_end, has_room = threading.Event(), threading.Event()

    def fsync(handle: int) -> None:
        assert may_end.wait(PATIENCE)
        if not has_room.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    inside(two).votes.store.fsync = fsync
    slow = cluster.wait_for(two, lambda event: isinstance(event, DiskTrouble))
    assert "the disk has taken 1 s" in str(slow)
    assert all(view.health is HealthStatus.HEALTHY for view in one.snapshot() if not view.is_self)
    may_end.set()
    full = cluster.wait_for(two, lambda event: isinstance(event, DiskTrouble))
    assert "No space left on device" in str(full)
    with pytest.raises(RendezvousTimeoutError, match=f"cannot write .*{two.peer_id}: No space left on device"):
        two.wait_for_peers(1, 0.1)
    assert two.epoch is None
    has_room.set()
    assert two.wait_for_peers(1, PATIENCE) == one.wait_for_peers(1, PATIENCE)


def test_what_was_promised_to_others_outlives_a_process_and_what_concerns_nobody_does_not(cluster: Cluster) -> None:
    folder = Environment.from_mapping().home_folder / "votes"
    one, two = cluster.start(), cluster.start()
    one.wait_for_peers(1, PATIENCE)
    two.wait_for_peers(1, PATIENCE)
    one.close()
    assert list(folder.glob(f"*{one.peer_id}"))
    cluster.namespace = NetworkNamespace.generate("alone")
    alone = cluster.start()
    assert list(folder.glob(f"*{alone.peer_id}"))
    alone.close()
    assert not list(folder.glob(f"*{alone.peer_id}"))


def test_who_comes_for_a_group_with_fixed_ranks_is_told_that_this_is_none(cluster: Cluster) -> None:
    node = cluster.start()
    sock, _ = cluster.dial(node, Join(1, 2, "127.0.0.1", 1))
    with sock:
        while sock.recv(4096):
            pass
    with pytest.raises(RendezvousTimeoutError, match="this is a peer of a cluster"):
        node.wait_for_peers(1, 0.1)
