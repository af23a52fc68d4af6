"""An elastic run with planned rounds on a network that becomes slow in the middle, and fast again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
@pytest.mark.timeout(900)
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
        given = {
            "nodes": 2, "total": TOTAL, "sync": "auto", "every": None, "ballast": 300_000, "pause": 0.02, "noise": 0.5
        }  # fmt: skip

        def pair(name: str) -> list[Program]:
            """Start a run of its own."""
            key, found = NetworkNamespace.generate(name).join_code(), list[Program]()
            for number, host in enumerate(net.hosts):
                home = tmp_path / f"{name}-{host.namespace}"
                home.mkdir(0o700)
                place = {"RINGFORT_HOME": str(home), "RINGFORT_KEY": key}
                found.append(start(place, on(net, number), interfaces=["eth0"], **given))
            return found

        def ends_of(*programs: Program) -> list[dict[str, Any]]:
            for number in range(programs[0].last_step, TOTAL, 10):  # each with a patience of its own
                programs[0].step(number)
            found = [program.end() for program in programs]
            assert [program.process.returncode for program in programs] == [0, 0]
            assert [end["done"] for end in found] == [TOTAL, TOTAL]
            assert found[0]["w"] == found[1]["w"]
            return found

        constant = ends_of(*pair("constant"))
        first, second = pair("changing")
        _, fast = planned(first, 0)
        begun = first.members(2)["step"]
        since = limit(SLOW)
        heard, slow = planned(first, since)
        followed = heard - begun
        assert followed <= 20
        assert slow != fast
        first.step(heard + 5, members=2)
        begun, since = first.last_step, limit(FAST)
        heard, again = planned(first, since)
        assert heard - begun <= 21
        assert again != slow
        ends = ends_of(first, second)
        assert ends[0]["loss"] == pytest.approx(constant[0]["loss"], rel=0.01)  # learned as well as on one network
        print(f"{fast}; then {slow}, after {followed} rounds; then {again}, after {heard - begun}")
        print(f"final loss {ends[0]['loss']:.5f}; on a network that stays at {FAST} Mbit/s {constant[0]['loss']:.5f}")
