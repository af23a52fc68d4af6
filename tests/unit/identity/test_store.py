"""The clusters of a machine, and which of them a process uses."""

from __future__ import annotations

import stat
import traceback
from pathlib import Path

import pytest

from ringfort import ConfigError, IdentityError, InvalidArgumentError, InvalidKeyError, JoinCodeError, NetworkNamespace
from ringfort.config import Environment
from ringfort.identity.store import Added, ClusterStore, current_namespace
from tests.workers.identity import all_at_once


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> ClusterStore:
    return ClusterStore(home)


def refused(store: ClusterStore, name: str = "default") -> IdentityError:
    with pytest.raises(IdentityError) as caught:
        store.load(name)
    return caught.value


# --- on disk ----------------------------------------------------------------------------------------------------------


def test_the_first_use_makes_a_cluster_that_stays(store: ClusterStore) -> None:
    assert store.names() == []
    assert store.load_or_create() == store.load_or_create() == store.load("default")
    assert store.names() == ["default"]


def test_files_and_folders_are_their_owners_alone(home: Path, store: ClusterStore) -> None:
    store.create("lab")
    modes = {str(path.relative_to(home)): stat.S_IMODE(path.stat().st_mode) for path in [home, *home.rglob("*")]}
    assert modes == {".": 0o700, "clusters": 0o700, "clusters/lab": 0o600}


def test_ten_processes_at_once_get_one_cluster(home: Path) -> None:
    code = (
        "from ringfort.config import Environment\n"
        "from ringfort.identity.store import current_namespace\n"
        "environment = Environment(home=sys.argv[1])\n"
        "go()\n"
        "print(current_namespace(environment).network_id.hex())"
    )
    assert set(all_at_once(code, str(home))) == {ClusterStore(home).load("default").network_id.hex()}
    assert [path.name for path in (home / "clusters").iterdir()] == ["default"]


def test_a_cluster_that_exists_is_not_made_again(store: ClusterStore) -> None:
    cluster = store.create("lab")
    with pytest.raises(InvalidArgumentError, match="ringfort key rotate lab"):
        store.create("lab")
    assert store.load("lab") == cluster


def test_a_cluster_that_is_not_here_is_an_error_with_the_command_to_join_it(store: ClusterStore) -> None:
    error = refused(store, "lab")
    assert "not in a cluster 'lab'" in str(error)
    assert "ringfort key join" in error.mend
    assert store.names() == []


def test_adding_says_what_it_found(store: ClusterStore) -> None:
    first, second = NetworkNamespace.generate("lab"), NetworkNamespace.generate("lab")
    assert [store.add(cluster) for cluster in (first, first, second)] == [Added.NEW, Added.KNOWN, Added.REPLACED]
    assert store.load("lab") == second


def test_adding_mends_a_damaged_file(store: ClusterStore) -> None:
    cluster = store.create("lab")
    store.path("lab").write_text("rubbish")
    assert store.add(cluster) is Added.REPLACED
    assert store.load("lab") == cluster


def test_rotating_gives_a_new_secret_and_forgets_the_old(home: Path, store: ClusterStore) -> None:
    old = store.create("lab")
    new = store.rotate("lab")
    assert store.load("lab") == new != old
    kept = "".join(path.read_text() for path in home.rglob("*") if path.is_file())
    assert old.join_code() not in kept
    assert new.join_code() in kept
    assert not new.matches(old.network_id)


def test_only_a_cluster_that_is_here_can_be_rotated(store: ClusterStore) -> None:
    with pytest.raises(IdentityError, match="not in a cluster"):
        store.rotate("lab")


def test_the_list_is_in_order_and_leaves_out_what_is_no_cluster(home: Path, store: ClusterStore) -> None:
    for name in ("lab", "attic"):
        store.create(name)
    (home / "clusters" / ".lab.0123.new").touch()
    (home / "clusters" / "NOTES.txt").touch()
    assert store.names() == ["attic", "lab"]


@pytest.mark.parametrize("name", ["", "..", "../node_keypair", "a/b", "Lab", "x" * 33])
def test_a_name_that_is_none_touches_no_file(store: ClusterStore, home: Path, name: str) -> None:
    for call in (store.load, store.create, store.rotate, store.load_or_create, store.path):
        with pytest.raises(InvalidArgumentError, match="must have 1 to 32 characters"):
            call(name)
    assert not home.exists()


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "mode", "mend"), [(".", 0o755, 700), ("clusters", 0o750, 700), ("clusters/lab", 0o640, 600)]
)
def test_loose_permissions_are_refused_with_the_command_that_mends_them(
    home: Path, store: ClusterStore, place: str, mode: int, mend: int
) -> None:
    store.create("lab")
    (home / place).chmod(mode)
    assert refused(store, "lab").mend == f"chmod {mend} {home / place}"


def test_a_folder_that_others_may_use_is_not_even_listed(home: Path, store: ClusterStore) -> None:
    store.create("lab")
    for place in (home, home / "clusters"):
        place.chmod(0o755)
        with pytest.raises(IdentityError, match="chmod 700"):
            store.names()
        place.chmod(0o700)


@pytest.mark.parametrize("keep", [0, 1, 30, -10])
def test_a_damaged_file_is_refused_without_showing_what_is_in_it(store: ClusterStore, keep: int) -> None:
    code = store.create("lab").join_code()
    store.path("lab").write_text(code[:keep])
    error = refused(store, "lab")
    assert error.mend.startswith(f"rm {store.path('lab')}, ")
    trace = "".join(traceback.format_exception(error))
    assert not [group for group in code.split("-")[2:] if group in trace]


def test_a_file_under_another_name_is_refused(home: Path, store: ClusterStore) -> None:
    store.create("lab")
    (home / "clusters" / "lab").rename(home / "clusters" / "attic")
    assert "contains the secret of another cluster, 'lab'" in str(refused(store, "attic"))


# --- which one is used ------------------------------------------------------------------------------------------------


def test_the_cluster_is_default_unless_something_is_said(home: Path) -> None:
    assert current_namespace(Environment(home=str(home))) == ClusterStore(home).load("default")


def test_ringfort_cluster_names_another(home: Path, store: ClusterStore) -> None:
    cluster = store.create("lab")
    assert current_namespace(Environment(home=str(home), cluster="lab")) == cluster


def test_a_slip_in_ringfort_cluster_founds_no_cluster(home: Path, store: ClusterStore) -> None:
    store.create("lab")
    with pytest.raises(IdentityError, match="not in a cluster 'lap'"):
        current_namespace(Environment(home=str(home), cluster="lap"))
    assert store.names() == ["lab"]


def test_ringfort_key_needs_no_files(home: Path) -> None:
    cluster = NetworkNamespace.generate("lab")
    assert current_namespace(Environment(home=str(home), key=cluster.join_code())) == cluster
    assert current_namespace(Environment(home=str(home), key=cluster.join_code(), cluster="lab")) == cluster
    assert not home.exists()


def test_ringfort_key_may_be_a_passphrase_under_the_name_of_ringfort_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfort.identity.namespace._SCRYPT_N", 2)
    words = "three blue kettles sing"
    for cluster, name in ((None, "default"), ("lab", "lab")):
        found = current_namespace(Environment(key=f"passphrase:{words}", cluster=cluster))
        assert found == NetworkNamespace.from_passphrase(name, words)


def test_a_key_of_another_cluster_than_was_named_is_refused() -> None:
    key = NetworkNamespace.generate("lab").join_code()
    with pytest.raises(ConfigError, match="RINGFORT_KEY belongs to the cluster 'lab'"):
        current_namespace(Environment(key=key, cluster="attic"))


def test_a_bad_key_is_refused_by_the_name_of_its_variable() -> None:
    with pytest.raises(JoinCodeError, match=r"^RINGFORT_KEY: group 15"):
        current_namespace(Environment(key=NetworkNamespace.generate("lab").join_code()[:-1]))
    with pytest.raises(InvalidKeyError, match="at least 15 characters"):
        current_namespace(Environment(key="passphrase:short"))


def test_the_environment_is_read_when_none_is_given(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = NetworkNamespace.generate("lab")
    monkeypatch.setenv("RINGFORT_HOME", str(home))
    monkeypatch.setenv("RINGFORT_KEY", cluster.join_code())
    assert current_namespace() == cluster


# --- the environment itself -------------------------------------------------------------------------------------------


def test_the_variables_are_read_by_their_names() -> None:
    found = Environment.from_mapping(
        {"RINGFORT_HOME": "/h", "RINGFORT_KEY": "k", "RINGFORT_CLUSTER": "c", "RINGFORT_ENCRYPTION": "off"}
    )
    assert (found.home, found.key, found.cluster, found.encryption) == ("/h", "k", "c", "off")


def test_the_key_is_in_no_text_of_the_environment() -> None:
    assert "hunter2" not in f"{Environment(key='hunter2')} {Environment(key='hunter2')!r}"


def test_encryption_is_on_or_off() -> None:
    with pytest.raises(ConfigError, match="RINGFORT_ENCRYPTION='no': must be on or off"):
        Environment.from_mapping({"RINGFORT_ENCRYPTION": "no"})


def test_a_user_without_a_home_is_told_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(ConfigError, match="RINGFORT_HOME"):
        _ = Environment().home_folder
