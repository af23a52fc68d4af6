"""What nodes say beside their cores: read back whole, bounded, and refused when it is nonsense."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, strategies as st

from ringfort.cluster.core import gossip
from ringfort.cluster.core.gossip import MAX_NOTE_BYTES, LinkReport, MachineReport, Note
from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.peer_messages import MAX_MESSAGE_BYTES, Beat, Hello, Member
from ringfort.cluster.core.topology import Accelerator, ConnectionProfile, NodeProfile
from ringfort.errors import ProtocolError

figures = st.none() | st.floats(1e-9, 1e12)
links = st.builds(
    ConnectionProfile, kind=st.sampled_from(LinkKind), latency=figures, bandwidth_out=figures, bandwidth_in=figures
)
texts = st.text(max_size=256)
profiles = st.builds(
    NodeProfile,
    peer=texts,
    platform=texts,
    cores=st.integers(0, 9),
    memory=st.integers(0, 2**50),
    accelerators=st.tuples(st.builds(Accelerator, texts)),
)
messages = st.one_of(
    st.builds(Note, texts, st.binary(max_size=200)),
    st.builds(LinkReport, st.dictionaries(st.text(min_size=1, max_size=64), links, max_size=5)),
    st.builds(MachineReport, profiles, st.none() | st.floats(0, 1e9)),
)


@given(messages)
def test_what_is_said_is_understood(message: gossip.Gossip) -> None:
    assert gossip.decode(gossip.encode(message)) == message


def test_what_cores_say_is_understood_too() -> None:
    assert gossip.decode(gossip.encode(Beat(1.5))) == Beat(1.5)


@given(st.binary(max_size=300))
def test_nonsense_is_refused_and_nothing_else_happens(data: bytes) -> None:
    with suppress(ProtocolError):
        gossip.decode(data)


@pytest.mark.parametrize(
    "said",
    [
        {"type": "note", "topic": "x", "body": bytes(MAX_NOTE_BYTES + 1)},
        {"type": "links", "links": {"p": {"bandwidth_in": -1.0}}},
        {"type": "links", "links": {"p": {"bandwidth_in": float("nan")}}},
        {"type": "links", "links": {"p": {"latency": float("inf")}}},
        {"type": "links", "links": {"": {}}},
        {"type": "links", "links": {f"p{number}": {} for number in range(1000)}},
        {"type": "machine", "profile": {"peer": "p", "cores": -1}},
        {"type": "machine", "profile": {"peer": "p", "platform": "x" * 257}},
        {"type": "machine", "profile": {"peer": "p", "accelerators": [{"name": "gpu"}] * 65}},
        {"type": "machine", "profile": {"peer": "p"}, "uptime": -1.0},
        {"type": "machine", "profile": {"peer": "p"}, "more": 1},
        {"type": "nothing"},
    ],
)
def test_what_breaks_a_limit_is_refused(said: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        gossip.decode(msgspec.msgpack.encode(said))


def test_a_message_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match=f"at most {MAX_MESSAGE_BYTES} bytes"):
        gossip.decode(bytes(MAX_MESSAGE_BYTES + 1))


def test_a_profile_is_told_and_read_back() -> None:
    own = NodeProfile(
        peer="n.1", host="h", name="mac", platform="Darwin arm64", cores=8, memory=2**34,
        accelerators=(Accelerator("GPU", 2**33),), version="1", program="train.py", started=4.0,
    )  # fmt: skip
    hello = Hello(Member("n.1", "h"), "mac", "1")
    report = gossip.decode(gossip.encode(MachineReport.of(own, 10.0)))
    assert isinstance(report, MachineReport)
    assert report.read(hello, 10.0) == own
    assert report.read(hello, 1000.0).started == 994.0  # by the clock of the reader


def test_who_a_machine_belongs_to_is_read_from_the_hello() -> None:
    false = MachineReport.of(NodeProfile(peer="other.1", host="elsewhere", name="bank", version="9"), 0.0)
    true = false.read(Hello(Member("n.1", "h"), "mac", "1"), 5.0)
    assert (true.peer, true.host, true.name, true.version) == ("n.1", "h", "mac", "1")
