"""What the world does to elastic runs: the long and the random cases of tests/cluster/test_elastic_cases.py."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.elastic_programs import Program, Start, check_end, programs
from tests.helpers.namespaces import ROOT, Host, lan, needs_namespaces
from tests.workers.elastic import plain_loop, plain_steps

pytestmark = pytest.mark.timeout(1200)

ROUNDS = 50
"""Interrupts for each seed. Each takes a second or two."""
BOUND = 10.0
"""Seconds from an interrupt to the end of the round, and between two steps of the others. Both take less than one on an
idle machine."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with programs("tests.workers.elastic_cases", tmp_path / "home") as begin:
        yield begin


def left_with(program: Program) -> int:
    """Ask a member to leave, check that its state is that of a plain loop, and return its last step."""
    program.process.send_signal(signal.SIGTERM)
    end = program.end()
    assert program.process.returncode == 143, program.lines[-5:]
    assert end["w"] == plain_loop(end["left"])["w"].tolist()
    return end["left"]


def longest_gap(program: Program) -> float:
    """The longest time between two steps of a program, in seconds."""
    times = [line["at"] for line in program.lines if "step" in line]
    return max(later - earlier for earlier, later in pairwise(times))


@pytest.mark.parametrize("seed", range(4))
def test_interrupts_at_random_instructions_end_a_member_and_harm_nobody_else(
    start: Start, tmp_path: Path, seed: int
) -> None:
    stay = [start(total=10**6, patience=20, nodes="2:4") for _ in range(2)]
    for member in stay:
        member.step(3, members=2)
    with programs("tests.workers.elastic_interrupts", tmp_path / "home") as begin:
        victim = begin(rounds=ROUNDS, seed=seed)
        for number in range(ROUNDS):
            victim.until(lambda line, number=number: line["round"] == number)
        victim.end()
    assert victim.process.returncode == 0, victim.lines[-3:]
    for line in victim.lines:
        assert line["closing"] < BOUND, line
        assert not line["left_behind"], line
        assert line.get("ended_by") != "nothing", line
    print(f"{sum(bool(line.get('begun')) for line in victim.lines)} rounds came to a step")
    gaps = [longest_gap(member) for member in stay]
    print(f"longest gaps of the others: {gaps}")
    left = [left_with(member) for member in stay]
    assert max(gaps) < BOUND
    # Those who had time to finish their step have the state of that step, to the bit.
    whole = {
        line["applied"]: line["w"]
        for line in victim.lines
        if line["kind"] in ("SIGINT", "SIGTERM") and line["is_whole"]
    }
    for number, state in enumerate(islice(plain_steps(), max(left))):
        assert whole.pop(number, state["w"].tolist()) == state["w"].tolist()
    assert not whole


def test_a_member_that_holds_its_interpreter_lock_for_longer_than_the_patience_is_waited_for(
    start: Start, tmp_path: Path
) -> None:
    hurry = tmp_path / "hurry"
    busy, other, killed = [
        start(total=100, hurry=str(hurry), patience=1.0, at=6, do={"hold": {"seconds": 4}} if number == 0 else {})
        for number in range(3)
    ]
    busy.step(1, members=3)
    busy.until(lambda line: "holds" in line)
    killed.process.kill()  # those who are left cannot agree on the next epoch before it returns
    hurry.touch()
    ends = [check_end(program, 100) for program in (busy, other)]
    gap = longest_gap(other)
    print(f"longest gap {gap:.1f} s")
    for end in ends:
        print(end["events"])
        assert not any("Copied the state" in line for line in end["events"][1:])


def test_a_group_of_which_every_founder_was_replaced_ends_with_the_same_bits(start: Start, tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    members = [start(total=400, hurry=str(hurry)) for _ in range(3)]
    for member in members:
        member.step(1, members=3)
    for _ in range(7):
        oldest, *members = members
        oldest.process.kill()
        newest = start(total=400, hurry=str(hurry))
        members.append(newest)
        for member in members:
            at = member.last_step
            member.until(lambda line, at=at: line.get("step", 0) > at and line["members"] == 3)
    hurry.touch()
    for member in members:
        check_end(member, 400)


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file system of its own, of this size."""
    folder.mkdir()
    options = ["-o", f"size={nbytes}"]
    made = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"cannot mount a small file system: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_a_warning_and_a_slow_one_makes_nobody_wait(start: Start, tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    with small_disk(tmp_path / "small", 256 << 10) as disk:
        common = {"total": 200, "hurry": str(hurry), "every": 4}
        full = start(**common, checkpoint=str(disk / "run"), at=20, do={"full_disk": {"path": str(disk / "rubbish")}})
        slow = start(**common, checkpoint=str(tmp_path / "slow"), slow_disk=5.0)
        full.until(lambda line: "was not saved; training continues" in line.get("log", ""))
        warned = [line for line in full.lines if "was not saved" in line.get("log", "")]
        assert "no space left on device" in warned[0]["log"]
        assert warned[0]["level"] == "WARNING"
        at = full.last_step
        full.step(at + 20)
        assert len([line for line in full.lines if "was not saved" in line.get("log", "")]) == 1
        (disk / "rubbish").unlink()
        full.until(lambda line: "Checkpoints are written again" in line.get("log", ""))
        hurry.touch()
        check_end(full, 200)
        assert longest_gap(full) < 2
        assert longest_gap(slow) < 2
        check_end(slow, 200)
        saved = sorted(disk.glob("run/*.ringfort"))
        assert re.match(r"step-000000200-", saved[-1].name)


@needs_namespaces
@pytest.mark.parametrize("addresses", ["ipv6", "link-local"])
def test_machines_with_ipv6_only_lose_one_and_take_it_back(start: Start, tmp_path: Path, addresses: Any) -> None:
    hurry = tmp_path / "hurry"
    with lan(3, addresses=addresses) as net:
        key = {"RINGFORT_KEY": NetworkNamespace.generate("home").join_code()}
        arguments = {"total": 400, "hurry": str(hurry), "interfaces": []}
        homes = [{**key, "RINGFORT_HOME": str(tmp_path / f"home {host.number}")} for host in net.hosts]
        members = [start(home, _on(host), **arguments) for home, host in zip(homes, net.hosts, strict=True)]
        try:
            for member in members:
                member.step(1, members=3)
            members[2].process.kill()
            members[0].until(lambda line: line.get("step", 0) > 3 and line["members"] == 2)
            members[2] = start(homes[2], _on(net.hosts[2]), **arguments)
            members[2].step(1, members=3)
            hurry.touch()
            for member in members:
                check_end(member, 400)
        finally:
            for member in members:
                member.kill()


def _on(host: Host) -> Callable[..., Any]:
    def launch(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[Any]:
        return host.start(*command, variables=env, **options)

    return launch


def test_a_program_of_another_protocol_version_is_refused_in_words_and_harms_nobody(
    start: Start, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "src" / "ringfort", tmp_path / "other" / "ringfort")
    frames = tmp_path / "other" / "ringfort" / "transport" / "frames.py"
    text = frames.read_text()
    changed = re.sub(
        r"^(PROTOCOL_VERSION\b[^=]*= )(\d+)", lambda found: f"{found[1]}{int(found[2]) + 1}", text, flags=re.M
    )
    assert changed != text
    frames.write_text(changed)
    hurry = tmp_path / "hurry"
    key = {"RINGFORT_KEY": NetworkNamespace.generate("home").join_code()}
    members = [start(key, total=200, hurry=str(hurry)) for _ in range(2)]
    for member in members:
        member.step(1, members=2)
    newer = start(
        {**key, "PYTHONPATH": f"{tmp_path / 'other'}:{ROOT}", "RINGFORT_HOME": str(tmp_path / "another home")},
        total=200, hurry=str(hurry), timeout=6.0,
    )  # fmt: skip
    told = newer.until(lambda line: "Still waiting" in line.get("log", ""))
    print(told["log"])
    assert "--upgrade ringfort` on" in told["log"]
    at = members[0].last_step
    members[0].step(at + 10)
    assert newer.process.poll() is None
    hurry.touch()
    for member in members:
        check_end(member, 200)
    print([line["log"] for member in members for line in member.lines if "version" in line.get("log", "")])
