"""An elastic run with planned rounds on a network that becomes slow in the middle, and fast again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.elastic_programs import Program, programs
from tests.helpers.namespaces import Lan, lan, needs_namespaces

FAST, SLOW = 1000, 20
"""Mbit/s."""
TOTAL = 150


def planned(program: Program, since: int) -> tuple[int, str]:
    """Wait for a new plan, in lines after the first `since`. Return the round that was sealed last, and the plan."""
    line = program.until(lambda line: "reduce every" in line.get("log", ""), since)
    place = program.lines.index(line)
    return max(line.get("step", 0) for line in program.lines[:place]), line["log"].partition(": ")[2]


@needs_namespaces
def test_the_rounds_follow_a_network_that_drops_to_a_fiftieth_and_comes_back(tmp_path: Path) -> None:
    with lan(2) as net, programs("tests.workers.elastic_rounds", tmp_path / "home") as start:

        def on(net: Lan, number: int) -> Callable[..., Any]:
            return lambda arguments, **options: net.hosts[number].start(
                *arguments, variables=options.pop("env"), **options
            )

        def limit(megabits: int) -> int:
            for host in net.hosts:
                net.limit(host, megabits)
            return len(first.lines)

        for host in net.hosts:
            net.limit(host, FAST)
        given = {"nodes": 2, "total": TOTAL, "sync": "auto", "every": None, "ballast": 300_000, "pause": 0.02}
        key = NetworkNamespace.generate("home").join_code()
        homes = [tmp_path / host.namespace for host in net.hosts]
        for home in homes:
            home.mkdir(0o700)
        first, second = (
            start({"RINGFORT_HOME": str(home), "RINGFORT_KEY": key}, on(net, number), interfaces=["eth0"], **given)
            for number, home in enumerate(homes)
        )
        _, fast = planned(first, 0)
        begun = first.members(2)["step"]
        since = limit(SLOW)
        heard, slow = planned(first, since)
        assert heard - begun <= 20
        assert slow != fast
        first.step(heard + 5, members=2)
        begun, since = first.last_step, limit(FAST)
        heard, again = planned(first, since)
        assert heard - begun <= 21
        assert again != slow
        ends = [program.end() for program in (first, second)]
        assert [program.process.returncode for program in (first, second)] == [0, 0]
        assert [end["done"] for end in ends] == [TOTAL, TOTAL]
        assert ends[0]["w"] == ends[1]["w"]
        assert ends[0]["error"] < 0.05  # learned as well as anywhere
        print(f"{fast}; then {slow}; then {again}")
