"""`ringfort peers`: what its table and its JSON say. Real peers are in tests/cluster/test_run.py."""

from __future__ import annotations

import json
from dataclasses import replace

from ringfort.cli.peers import Seen, as_dict, document, drawn, lines, ranks, row, summary
from ringfort.cluster.core.health import HealthStatus, HealthSummary
from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.topology import ClusterTopology, ConnectionProfile, NodeProfile
from ringfort.cluster.view import PeerView

VIEW = PeerView(
    peer="rffd-337s-kdbs-x0ey.9d3fd927ecb70dd3",
    name="[red]mac[/red]",
    host="b44e",
    address="192.168.1.20:52415",
    interface="en0",
    kind=LinkKind.WIFI,
    round_trip=0.00216,
    bandwidth=31.25e6,
    health=HealthStatus.HEALTHY,
    is_leader=True,
    is_member=True,
    version="0.1.0",
    slots=2,
    ranks=(4, 5),
    run="train.py",
    program="train.py",
    step=1240,
    uptime=12 * 60.0,
    accelerators=("RTX 4090", "RTX 4090"),
)
NEW = PeerView(peer="rfab-1.2", slots=1)


def seen(*views: PeerView) -> Seen:
    health = HealthSummary(
        total=len(views), healthy=len(views), degraded=0, unhealthy=0, unknown=0, round_trip=None, uptime=1.0
    )
    return Seen(views, health, ClusterTopology(), here="b44e", version="0.1.0")


def test_a_row_says_who_where_how_far_and_how_well() -> None:
    words = lines(seen(VIEW), None)[1]
    for word in (
        "rffd-337.9d3f",
        "leader",
        "4-5",
        "192.168.1.20:52415",
        "en0 (wifi)",
        "2.16 ms",
        "250 Mbit/s",
        "0.1.0",
        "train.py",
        "1,240",
        "12 min",
        "2 x RTX 4090",
        "(here)",
    ):
        assert word in words


def test_eighty_columns_hold_every_value_whole_and_what_matters_most_comes_first() -> None:
    far = replace(VIEW, name="a-machine-with-a-long-name", address="[fe80::b4a7:3dff:fec7:d97f]:52415")
    narrow = lines(seen(VIEW, far), 80)
    assert all(len(line) <= 80 for line in narrow)
    assert narrow[0].startswith("host")
    text = "\n".join(narrow)
    for value in (*row(VIEW, "").values(), *row(far, "").values()):
        assert value in text
    assert [line[:4] for line in narrow[2:4]] == ["    ", "    "]


def test_the_name_of_a_run_is_shown_where_it_is_not_its_programs() -> None:
    assert "run" not in lines(seen(VIEW), None)[0].split()
    heading, words = lines(seen(replace(VIEW, run="night")), None)[:2]
    assert "run" in heading.split()
    assert "night" in words.split()
    assert (as_dict(VIEW)["run"], as_dict(VIEW)["step"], as_dict(NEW)["step"]) == ("train.py", 1240, None)


def test_in_a_file_each_peer_is_one_line() -> None:
    assert len(lines(seen(VIEW, NEW), None)) == 5  # heading, two peers, a space, the summary


def test_what_another_machine_calls_itself_is_shown_and_not_obeyed() -> None:
    assert "[red]mac[/red]" in lines(seen(VIEW), None)[1]
    assert "[red]mac[/red]" in drawn(seen(VIEW), 200).plain
    assert lines(seen(replace(VIEW, name="a\x1b[2J\nb")), None)[1].startswith("a?[2J?b")


def test_what_is_not_known_yet_is_left_out() -> None:
    assert lines(seen(NEW), None)[:2] == [
        "host      role     health   peer",
        "rfab-1.2  waiting  unknown  rfab-1.2",
    ]


def test_different_versions_are_told_with_the_command_that_upgrades() -> None:
    last = lines(seen(replace(VIEW, name="attic", version="0.2.0")), None)[-1]
    assert last == ("attic has Ringfort 0.2.0, this machine has 0.1.0; pip install --upgrade ringfort, on this machine")


def test_json_has_plain_units() -> None:
    found = json.loads(json.dumps(as_dict(VIEW)))
    assert found["round_trip_seconds"] == 0.00216
    assert found["bandwidth_bytes_per_second"] == 31.25e6
    assert (found["role"], found["ranks"], found["kind"], found["health"]) == ("leader", [4, 5], "wifi", "healthy")
    assert as_dict(NEW)["round_trip_seconds"] is None


def test_a_line_and_the_json_sum_up_how_all_are() -> None:
    health = HealthSummary(total=3, healthy=2, degraded=1, unhealthy=0, unknown=0, round_trip=0.0005, uptime=0.99)
    assert summary(health) == "3 peers: 2 healthy, 1 degraded; mean round trip 0.5 ms"
    topology = ClusterTopology()
    for peer in ("a.1", "b.1"):
        topology.add(NodeProfile(peer=peer), 0.0)
    topology.connect("a.1", "b.1", ConnectionProfile(kind=LinkKind.ETHERNET, latency=0.0002, bandwidth_out=1e8))
    found = document(Seen([VIEW], health, topology))
    assert (found["summary"]["degraded"], found["summary"]["uptime"]) == (1, 0.99)
    [link] = found["links"]
    assert (link["peer"], link["other"], link["kind"]) == ("a.1", "b.1", "ethernet")
    assert (link["latency_seconds"], link["bandwidth_out_bytes_per_second"]) == (0.0002, 1e8)
    assert [peer["peer"] for peer in found["peers"]] == [VIEW.peer]


def test_an_observer_is_called_one() -> None:
    assert PeerView(peer="a.1", slots=0).role == "observer"


def test_ranks_are_a_range() -> None:
    assert (ranks(()), ranks((7,)), ranks((4, 5))) == ("", "7", "4-5")
