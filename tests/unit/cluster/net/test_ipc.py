"""What a node and its control service say to each other arrives as it was said."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from ringfort import errors
from ringfort.cluster.core.election import ElectionEvent, ElectionEventKind
from ringfort.cluster.core.events import ClusterEvent, EpochStarted, Noted, OtherClusters, PeerJoined, PeerLost
from ringfort.cluster.core.health import HealthEvent, HealthStatus
from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.peer_messages import Epoch, Member, Term
from ringfort.cluster.core.topology import Accelerator, ClusterTopology, ConnectionProfile, NodeProfile, TopologyRecords
from ringfort.cluster.net import ipc, service
from ringfort.cluster.net.setup import Setup
from ringfort.cluster.node import ClusterNode
from ringfort.config import AutoDiscoveryConfig, HealthConfig
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.namespace import NetworkNamespace
from ringfort.transport.handshake import RecordReader, sealed

EPOCH = Epoch(7, "a.1", (Member("a.1", "host", 2, ("10.0.0.1:1",)), Member("b.2")), (1, 0), ("a.1#7",))


@given(st.lists(st.binary(max_size=50)), st.integers(1, 20))
def test_messages_are_cut_from_the_stream_however_it_arrives(notes: list[bytes], step: int) -> None:
    messages = [ipc.Ask(number, ipc.Call("tell", ("topic", note, None))) for number, note in enumerate(notes)]
    stream = b"".join(sealed(None, ipc.encode(message)) for message in messages)
    reader, received = RecordReader(None, ipc.MAX_MESSAGE), list[ipc.ToService]()
    for at in range(0, len(stream), step):
        reader.feed(stream[at : at + step])
        while (body := reader.next()) is not None:
            received.append(ipc.decode_for_service(body))
    assert received == messages


def test_a_length_that_no_message_has_is_refused() -> None:
    reader = RecordReader(None, ipc.MAX_MESSAGE)
    reader.feed(b"\xff\xff\xff\xff")
    with pytest.raises(errors.ProtocolError):
        reader.next()


@pytest.mark.parametrize(
    "event",
    [
        PeerJoined("a.1", "study", "0.2.0"),
        PeerLost("a.1", "silent", died=False),
        OtherClusters(("10.0.0.2", "10.0.0.3")),
        EpochStarted(EPOCH),
        Noted("a.1", "topic", b"\x00\xff"),
        ElectionEvent(ElectionEventKind.NEW_MASTER, Term(3, "a.1"), "a.1"),
        HealthEvent("a.1", HealthStatus.DEGRADED, HealthStatus.HEALTHY, 0.1, None, busy=True),
    ],
)
def test_events_arrive_as_they_were(event: ClusterEvent) -> None:
    message = ipc.decode_for_node(ipc.encode(ipc.happened(event)))
    assert isinstance(message, ipc.Happened)
    assert ipc.event_of(message) == event


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("interfaces", "nosuch0", "there is no such interface"),
        errors.TransportError("the port is in use"),
        errors.IdentityError("/a/file", "is damaged", "rm /a/file"),
        errors.AbortedError("epoch 3 has ended"),
        errors.RendezvousTimeoutError("waiting", 3.0, missing=(1, 2), state="nobody came"),
    ],
)
def test_errors_are_raised_as_they_were(error: errors.DistributedError) -> None:
    sent = ipc.decode_for_node(ipc.encode(ipc.failed(1, error)))
    assert isinstance(sent, ipc.Failed)
    raised = ipc.error_of(sent)
    assert type(raised) is type(error)
    assert str(raised) == str(error)
    assert raised.peer == error.peer


def test_a_fault_of_the_service_names_itself() -> None:
    raised = ipc.error_of(ipc.failed(1, ZeroDivisionError("division by zero")))
    assert str(raised) == "the control service failed: ZeroDivisionError: division by zero"


def test_a_setup_is_the_same_in_the_control_process() -> None:
    credentials = Credentials(NodeIdentity.ephemeral(), NetworkNamespace.generate("lab"))
    health = HealthConfig(interval=np.float64(0.5))
    config = AutoDiscoveryConfig(peers=("a:1",), timeout=np.float64(2.5), min_peers=1, health=health)
    setup = Setup.make(config, 2, credentials)
    sent = ipc.decode_for_service(ipc.encode(ipc.Ask(1, ipc.Start(setup, 10))))
    assert isinstance(sent, ipc.Ask)
    assert isinstance(sent.request, ipc.Start)
    again = sent.request.setup
    assert again.home == setup.home
    assert again.peer == setup.peer
    assert again.credentials.namespace == credentials.namespace
    assert again.credentials.static_public == credentials.static_public
    assert (again.config.timeout, again.config.min_peers, again.config.health.interval) == (2.5, 1, 0.5)
    assert list(again.config.peers) == ["a:1"]


def test_a_topology_arrives_as_it_was() -> None:
    topology = ClusterTopology()
    topology.add(NodeProfile(peer="b.1", host="h", accelerators=(Accelerator("gpu", 5),)), 3.0)
    topology.add(NodeProfile(peer="a.1"), 4.0)
    topology.connect("b.1", "a.1", ConnectionProfile(kind=LinkKind.WIFI, latency=0.1, bandwidth_out=2.0))
    records = msgspec.msgpack.decode(ipc.encode(topology.records), type=TopologyRecords)
    again = ClusterTopology.from_records(records)
    assert again.nodes == topology.nodes
    assert list(again.links()) == list(topology.links())
    assert again.prune(63.5) == ["b.1"]


def test_every_function_that_a_service_offers_is_a_method_of_the_node() -> None:
    assert all(hasattr(ClusterNode, name) for name in service.FUNCTIONS)
