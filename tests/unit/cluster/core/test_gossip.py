"""What nodes say beside their cores: read back whole, bounded, and refused when it is nonsense."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, strategies as st

from ringfort.cluster.core import gossip
from ringfort.cluster.core.gossip import MAX_NOTE_BYTES, About, Gpu, Note, Way, Ways
from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.peer_messages import MAX_MESSAGE_BYTES, Beat
from ringfort.cluster.core.topology import Accelerator, NodeProfile
from ringfort.errors import ProtocolError

speeds = st.none() | st.floats(1e-9, 1e12)
ways = st.builds(Way, st.text(min_size=1, max_size=64), st.sampled_from(LinkKind), speeds, speeds, speeds)
texts = st.text(max_size=256)
messages = st.one_of(
    st.builds(Note, texts, st.binary(max_size=200)),
    st.builds(Ways, st.lists(ways, max_size=5).map(tuple)),
    st.builds(About, texts, st.integers(0, 9), st.integers(0, 2**50), st.tuples(st.builds(Gpu, texts))),
)


@given(messages)
def test_what_is_said_is_understood(message: gossip.NodeMessage) -> None:
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
        {"type": "ways", "ways": [{"peer": "p", "bandwidth_in": -1.0}]},
        {"type": "ways", "ways": [{"peer": "p", "bandwidth_in": float("nan")}]},
        {"type": "ways", "ways": [{"peer": "p"}] * 1000},
        {"type": "about", "cores": -1},
        {"type": "about", "more": 1},
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
    assert gossip.profile("n.1", "h", "mac", "1", gossip.about(own, 10.0), 10.0) == own
    later = gossip.profile("n.1", "h", "mac", "1", gossip.about(own, 10.0), 1000.0)
    assert later.started == 994.0  # by the clock of who reads it
