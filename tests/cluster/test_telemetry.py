"""Ranks on real hosts, and a viewer on another one."""

from __future__ import annotations

import time

from tests.helpers.namespaces import lan, needs_namespaces
from tests.helpers.nodes import Node, nodes_on

pytestmark = needs_namespaces


class Traced(Node):
    module = "tests.workers.traced"


def test_a_viewer_sees_the_steps_of_all_ranks_and_who_was_killed() -> None:
    with lan(3) as net, nodes_on(list(net.hosts), kind=Traced) as ((viewer, *ranks),):
        viewer.do("view")
        for node in ranks:
            node.start()
        for rank, node in enumerate(ranks):
            node.do("train", rank=rank, of=2, pause=0.02)
        begun = max(node.next("training")["at"] for node in ranks)
        viewer.next("viewing")
        viewer.do("see", ranks=2, state="training", step=3)
        seen = viewer.next("seen")
        print(f"steps were seen {seen['at'] - begun:.2f} s after both trained")
        assert seen["at"] - begun < 3
        # It only connects to others: no port is open where somebody looks, but the one on which mDNS is heard.
        assert viewer.host.run("ss", "-Hltn") == ""
        udp = viewer.host.run("ss", "-Hlun").splitlines()
        assert {line.split()[3].rpartition(":")[2] for line in udp} == {"5353"}
        at = time.monotonic()
        ranks[1].kill()
        viewer.do("see", ranks=1, state="lost")
        lost = viewer.next("seen")["at"] - at
        print(f"the kill was seen after {lost:.2f} s")
        assert lost < 2
        viewer.do("see", ranks=1, state="training", step=seen["step"] + 10)
        viewer.next("seen")
