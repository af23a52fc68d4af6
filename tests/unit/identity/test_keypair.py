"""A node's identity: made once, kept private, and refused when it could not be."""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import stat
import subprocess
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, strategies as st

from ringfort import IdentityError, NodeIdentity
from ringfort.identity import files
from ringfort.identity.keypair import peer_id_of
from tests.workers.identity import all_at_once


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def path(home: Path) -> Path:
    return home / "node_keypair"


def refused(path: Path) -> IdentityError:
    with pytest.raises(IdentityError) as caught:
        NodeIdentity.load_or_generate(path)
    assert caught.value.mend in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def run(mend: str) -> None:
    """The command that an error gave, up to its note in parentheses."""
    subprocess.run(shlex.split(mend.partition(" (")[0]), check=True)


@contextmanager
def an_ordinary_user() -> Iterator[Path]:
    """A folder of an ordinary user, as whom the block runs: root may write anywhere."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if os.geteuid() != 0:
            yield folder
            return
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(0)


# --- made once --------------------------------------------------------------------------------------------------------


def test_the_identity_stays_the_same(path: Path) -> None:
    assert NodeIdentity.load_or_generate(path) == NodeIdentity.load_or_generate(path)


def test_file_and_folder_are_its_owners_alone(path: Path) -> None:
    before = os.umask(0)
    try:
        NodeIdentity.load_or_generate(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [item.name for item in path.parent.iterdir()] == ["node_keypair"]


def test_folders_that_are_missing_above_are_private_too(tmp_path: Path) -> None:
    NodeIdentity.load_or_generate(tmp_path / "a" / "b" / "key")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_without_a_path_it_is_in_the_folder_of_ringfort_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFORT_HOME", str(home))
    identity = NodeIdentity.load_or_generate()
    assert NodeIdentity.load_or_generate(home / "node_keypair") == identity


def test_without_ringfort_home_it_is_in_the_users_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGFORT_HOME", raising=False)
    monkeypatch.setenv("HOME", str(home))
    NodeIdentity.load_or_generate()
    assert (home / ".ringfort" / "node_keypair").is_file()


def test_ten_processes_at_once_get_one_identity(path: Path) -> None:
    code = (
        "from ringfort import NodeIdentity\n"
        "NodeIdentity.ephemeral()\n"
        "go()\n"
        "print(NodeIdentity.load_or_generate(sys.argv[1]).peer_id)"
    )
    found = all_at_once(code, str(path))
    assert set(found) == {NodeIdentity.load_or_generate(path).peer_id}
    assert [item.name for item in path.parent.iterdir()] == ["node_keypair"]


def test_the_one_who_comes_second_takes_what_the_first_wrote(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The race itself, without luck: another process makes the file after this one has seen that there is none.
    other: list[NodeIdentity] = []
    link = os.link

    def link_late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        other.append(NodeIdentity.load_or_generate(path))
        link(source, target)

    monkeypatch.setattr(os, "link", link_late)
    assert NodeIdentity.load_or_generate(path) == other[0]


def test_a_file_that_is_removed_again_and_again_is_an_error_and_no_loop(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "create", lambda *_: False)
    assert "was removed" in str(refused(path))


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_belongs_to_another_user_is_refused_for_root_too_with_the_command_that_mends_it(
    path: Path, what: str
) -> None:
    identity = NodeIdentity.load_or_generate(path)
    place = path if what == "file" else path.parent
    os.chown(place, 54321, -1)
    error = refused(path)
    assert error.path == str(place)
    assert "belongs to another user (user id 54321)" in str(error)
    run(error.mend)
    assert NodeIdentity.load_or_generate(path) == identity


def test_what_belongs_to_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NodeIdentity.load_or_generate(path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert refused(path).mend == "export RINGFORT_HOME=/a/folder/of/your/own"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o601])
def test_a_file_that_others_may_use_is_refused_with_the_command_that_mends_it(path: Path, mode: int) -> None:
    identity = NodeIdentity.load_or_generate(path)
    path.chmod(mode)
    error = refused(path)
    assert error.mend == f"chmod 600 {path}"
    assert f"{mode:04o}" in str(error)
    run(error.mend)
    assert NodeIdentity.load_or_generate(path) == identity


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o720])
def test_a_folder_that_others_may_use_is_refused_with_the_command_that_mends_it(path: Path, mode: int) -> None:
    identity = NodeIdentity.load_or_generate(path)
    path.parent.chmod(mode)
    error = refused(path)
    assert error.mend == f"chmod 700 {path.parent}"
    run(error.mend)
    assert NodeIdentity.load_or_generate(path) == identity


def test_no_key_is_made_in_a_folder_that_others_may_use(path: Path) -> None:
    path.parent.mkdir(mode=0o755)
    assert refused(path).mend == f"chmod 700 {path.parent}"
    assert not path.exists()


def test_a_folder_that_is_everybodys_is_not_to_be_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert refused(tmp_path / "key").mend == "keep the key in a folder of your own"


def test_a_path_with_a_space_is_quoted_in_the_command(tmp_path: Path) -> None:
    path = tmp_path / "my home" / "key"
    identity = NodeIdentity.load_or_generate(path)
    path.chmod(0o644)
    run(refused(path).mend)
    assert NodeIdentity.load_or_generate(path) == identity


@pytest.mark.parametrize("size", [0, 1, 20, 60, 93])
def test_a_truncated_file_is_refused_with_the_command_that_mends_it(path: Path, size: int) -> None:
    identity = NodeIdentity.load_or_generate(path)
    content = path.read_bytes()
    assert size < len(content)
    path.write_bytes(content[:size])
    error = refused(path)
    assert error.mend.startswith(f"rm {path} ")
    run(error.mend)
    assert NodeIdentity.load_or_generate(path) != identity


def test_any_changed_character_of_the_file_is_noticed(path: Path) -> None:
    NodeIdentity.load_or_generate(path)
    content = path.read_bytes()
    for place, character in enumerate(content):
        path.write_bytes(content[:place] + bytes([character ^ 1]) + content[place + 1 :])
        assert "is damaged" in str(refused(path))


@given(content=st.binary(max_size=200))
def test_a_file_with_anything_in_it_is_refused_with_an_identity_error_and_nothing_else(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key"
        path.touch(mode=0o600)
        path.write_bytes(content)
        assert "is damaged" in str(refused(path)) or not content


def test_a_large_file_is_not_read_whole(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.touch(mode=0o600)
    os.truncate(path, 1 << 40)
    assert "is damaged" in str(refused(path))


def test_a_folder_in_its_place_is_refused_with_the_command_that_mends_it(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True)
    path.parent.chmod(0o700)
    error = refused(path)
    assert error.mend == f"mv {path} {path}.old"
    run(error.mend)
    NodeIdentity.load_or_generate(path)


def test_a_pipe_in_its_place_is_refused_and_not_waited_for(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    os.mkfifo(path, 0o600)
    assert refused(path).mend == f"mv {path} {path}.old"


def test_a_file_in_the_place_of_the_folder_is_refused_with_the_command_that_mends_it(path: Path) -> None:
    path.parent.touch()
    error = refused(path)
    assert error.mend == f"mv {path.parent} {path.parent}.old"
    run(error.mend)
    NodeIdentity.load_or_generate(path)


def test_a_home_that_may_not_be_written_to_is_refused_with_the_command_that_mends_it() -> None:
    with an_ordinary_user() as folder:
        folder.chmod(0o500)
        error = refused(folder / "home" / "node_keypair")
        assert error.mend == f"chmod u+rwx {folder}"
        run(error.mend)
        NodeIdentity.load_or_generate(folder / "home" / "node_keypair")


def test_a_file_that_its_owner_may_not_read_is_refused_with_the_command_that_mends_it() -> None:
    with an_ordinary_user() as folder:
        path = folder / "node_keypair"
        identity = NodeIdentity.load_or_generate(path)
        path.chmod(0)
        error = refused(path)
        assert error.mend == f"chmod 600 {path}"
        run(error.mend)
        assert NodeIdentity.load_or_generate(path) == identity


def test_a_folder_of_another_user_is_refused_with_where_else_to_go() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder of another user")
    with an_ordinary_user() as folder:
        os.seteuid(0)
        os.chown(folder, 0, 0)
        os.seteuid(65534)
        assert refused(folder / "home" / "node_keypair").mend == "export RINGFORT_HOME=/a/folder/of/your/own"


def test_a_full_disk_is_refused_and_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "df -h" in refused(path).mend
    assert list(path.parent.iterdir()) == []


def test_a_disk_that_is_really_full_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k,mode=700", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can only be mounted by root")
    try:
        (disk / "filler").write_bytes(bytes(4096))
        error = refused(disk / "node_keypair")
        assert "the disk is full" in str(error)
        assert error.mend == f"free some space (df -h {disk})"
        assert [item.name for item in disk.iterdir()] == ["filler"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- signing and naming -----------------------------------------------------------------------------------------------


def test_a_signature_holds_for_its_key_and_its_words_alone() -> None:
    identity, other = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    signature = identity.sign(b"words")
    assert NodeIdentity.verify(identity.public_key, signature, b"words")
    assert not NodeIdentity.verify(identity.public_key, signature, b"other words")
    assert not NodeIdentity.verify(other.public_key, signature, b"words")
    assert not NodeIdentity.verify(identity.public_key, other.sign(b"words"), b"words")


@pytest.mark.parametrize("size", [0, 31, 33])
def test_what_is_no_key_or_signature_verifies_nothing(size: int) -> None:
    identity = NodeIdentity.ephemeral()
    assert not NodeIdentity.verify(bytes(size), identity.sign(b""), b"")
    assert not NodeIdentity.verify(identity.public_key, bytes(size), b"")


def test_a_signature_is_that_of_rfc_8032() -> None:
    # Test 2 of its section 7.1.
    key = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    identity = NodeIdentity(Ed25519PrivateKey.from_private_bytes(key))
    assert identity.public_key.hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert identity.sign(b"\x72").hex().startswith("92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da")


def test_a_peer_id_is_four_groups_of_four_and_frozen() -> None:
    # It is written down and compared by eye: it must not change with a version.
    identity = NodeIdentity(Ed25519PrivateKey.from_private_bytes(bytes(32)))
    assert identity.peer_id == peer_id_of(identity.public_key) == "8wcz-fdpt-kspp-6evg"


def test_ephemeral_identities_differ_and_write_no_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFORT_HOME", str(home))
    assert NodeIdentity.ephemeral() != NodeIdentity.ephemeral()
    assert not home.exists()


def test_an_identity_is_shown_by_its_peer_id_alone_and_not_pickled() -> None:
    identity = NodeIdentity.ephemeral()
    assert repr(identity) == str(identity) == f"NodeIdentity({identity.peer_id})"
    assert not hasattr(identity, "__dict__")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(identity)


def test_no_error_shows_what_is_in_a_damaged_file(path: Path) -> None:
    NodeIdentity.load_or_generate(path)
    secret = path.read_text().split()[1]
    path.write_text(path.read_text()[:-2])
    trace = "".join(traceback.format_exception(refused(path)))
    assert secret not in trace
    assert not [at for at in range(56) if secret[at : at + 8] in trace]


@pytest.mark.parametrize("sign", [0, 0x80])
def test_a_key_for_which_anybody_can_sign_is_no_identity(sign: int) -> None:
    key = b"\1" + bytes(30) + bytes([sign])
    assert not NodeIdentity.verify(key, b"\1" + bytes(63), b"anything")
    assert not any(NodeIdentity.verify(bytes(32), bytes(64), bytes([number])) for number in range(100))
