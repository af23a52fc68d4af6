"""A home that several machines use has a key for each of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringfort.errors import IdentityError
from ringfort.identity import hosts
from ringfort.identity.hosts import FOLDER, OWNER_FILE, HostMarks, key_folder, this_host
from ringfort.identity.keypair import NodeIdentity

DESK = HostMarks("desk", ("card", "wifi"), "boot 1")
SHED = HostMarks("shed", ("cable",), "boot 7")
UNKNOWN = HostMarks()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("other", "same", "different"),
    [
        (DESK, True, False),
        (HostMarks("desk", ("wifi", "dongle"), "boot 2"), True, False),
        (HostMarks("desk", ("other card",), "boot 1"), False, True),  # a cloned image
        (SHED, False, True),
        (HostMarks("desk", (), "boot 2"), False, False),  # a container, say: in doubt
        (UNKNOWN, False, False),
    ],
)
def test_machines_are_told_apart_where_that_is_sure(other: HostMarks, same: bool, different: bool) -> None:
    assert (DESK.is_same(other), DESK.is_other(other)) == (same, different)
    assert (other.is_same(DESK), other.is_other(DESK)) == (same, different)


def test_the_first_machine_has_its_key_in_the_home_itself_and_others_below(home: Path) -> None:
    assert key_folder(home, DESK) == home
    shed = key_folder(home, SHED)
    assert shed.parent == home / FOLDER
    assert shed.stat().st_mode & 0o777 == 0o700
    assert key_folder(home, DESK) == home
    assert key_folder(home, HostMarks("desk", ("wifi",), "boot 2")) == home
    assert key_folder(home, HostMarks("shed", ("cable", "dongle"), "boot 8")) == shed
    third = key_folder(home, HostMarks("desk", ("other card",)))
    assert third not in (home, shed)


def test_a_key_that_was_there_before_is_the_first_machines(home: Path) -> None:
    before = NodeIdentity.load_or_generate(home / "node_keypair")
    assert NodeIdentity.load_or_generate(key_folder(home, DESK) / "node_keypair") == before
    assert NodeIdentity.load_or_generate(key_folder(home, SHED) / "node_keypair") != before


@pytest.mark.parametrize("marks", [UNKNOWN, HostMarks("desk")])
def test_a_machine_that_cannot_be_told_from_the_first_uses_its_key(home: Path, marks: HostMarks) -> None:
    key_folder(home, DESK)
    assert key_folder(home, marks) == home


def test_a_machine_without_marks_claims_nothing(home: Path) -> None:
    assert key_folder(home, UNKNOWN) == home
    assert not home.exists()


def test_to_look_makes_nothing(home: Path) -> None:
    assert key_folder(home, DESK, make=False) == home
    assert not home.exists()
    key_folder(home, DESK)
    assert not key_folder(home, SHED, make=False).exists()


def test_a_damaged_owner_file_is_nobodys(home: Path) -> None:
    key_folder(home, DESK)
    (home / OWNER_FILE).write_bytes(b"{")
    assert key_folder(home, SHED) == home


def test_a_home_that_may_only_be_read_is_used_as_it_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, data: bytes) -> bool:
        raise IdentityError(path, "this user can keep no file there", "export RINGFORT_HOME=...")

    monkeypatch.setattr(hosts.files, "create", fails)
    assert key_folder(home, DESK) == home


def test_the_file_says_nothing_to_those_who_do_not_know_the_machine(home: Path) -> None:
    key_folder(home)
    known = json.loads((home / OWNER_FILE).read_text()) if (home / OWNER_FILE).exists() else {}
    machine = Path("/etc/machine-id")
    if machine.exists():
        assert machine.read_text().strip() not in str(known)
    assert this_host() == this_host()


def test_the_marks_of_a_linux_machine(tmp_path: Path) -> None:
    machine_id = tmp_path / "var/lib/dbus/machine-id"  # the second place that is looked at
    for path, text in (
        (machine_id, "m1\n"),
        (tmp_path / "proc/sys/kernel/random/boot_id", "b1\n"),
        (tmp_path / "proc/device-tree/serial-number", "s1\0"),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    for name, is_hardware in (("eth0", True), ("veth1", False)):
        interface = tmp_path / "sys/class/net" / name
        interface.mkdir(parents=True)
        (interface / "address").write_text(f"00:11:22:33:44:{name}\n")
        if is_hardware:
            (interface / "device").mkdir()
    marks = hosts.of_linux(tmp_path)
    wanted = {hosts._hashed("s1"), hosts._hashed("00:11:22:33:44:eth0")}
    assert (marks.machine, set(marks.hardware), marks.boot) == (hosts._hashed("m1"), wanted, hosts._hashed("b1"))
    machine_id.unlink()
    assert hosts.of_linux(tmp_path).machine == ""
