"""Four hosts, one with the uplink of a home: it owns less of a compressed reduction, which is then sooner done."""

from __future__ import annotations

from tests.helpers.namespaces import lan, needs_namespaces
from tests.helpers.nodes import Node, agree, nodes_on

MEGABITS = 10
SIZE = 1_200_000
ROUNDS = 3


@needs_namespaces
def test_a_host_with_a_slow_uplink_owns_less_and_all_are_done_sooner() -> None:
    with lan(4) as net, nodes_on(list(net.hosts)) as (nodes,):
        net.hosts[2].run(
            "tc", "qdisc", "add", "dev", "eth0", "root", "tbf",
            "rate", f"{MEGABITS}mbit", "burst", "16k", "latency", "50ms",
        )  # fmt: skip
        for node in nodes:
            node.start()
        agree(nodes)
        for node in nodes:
            node.until("until all links are measured", lambda node=node: all_measured(node))
        equal, _ = reduced(nodes, is_even=True)
        unequal, shares = reduced(nodes, is_even=False)
    slow = nodes[2].lines[-1]["rank"]
    print(f"equal shares: {equal:.2f} s; shares {shares}: {unequal:.2f} s")
    assert shares[slow] == min(shares) < max(shares) / 10
    assert unequal < 0.85 * equal


def all_measured(node: Node) -> bool:
    node.do("look")
    others = [peer for peer in node.next("peers")["peers"] if not peer["self"]]
    return len(others) == 3 and all(peer["bandwidth"] is not None for peer in others)


def reduced(nodes: list[Node], *, is_even: bool) -> tuple[float, list[int]]:
    """Form a group and reduce. Return the seconds of a reduction, and what its ranks owned."""
    for node in nodes:
        node.do("establish")
    for node in nodes:
        node.next("rank")
    for node in nodes:
        node.do("compress", size=SIZE, rounds=ROUNDS, is_even=is_even)
    found = [node.next("compressed") for node in nodes]
    assert len({one["compressed"] for one in found}) == 1  # the same bits
    return max(one["seconds"] for one in found), found[0]["shares"]
