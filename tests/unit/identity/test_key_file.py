"""`RINGFORT_KEY_FILE`: the secret of the cluster in a file that a container engine has mounted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfort.config import Environment
from ringfort.errors import ConfigError, IdentityError
from ringfort.identity.namespace import NetworkNamespace
from ringfort.identity.store import current_namespace


def told(path: Path, **more: str) -> Environment:
    return Environment.from_mapping({"RINGFORT_KEY_FILE": str(path), **more})


@pytest.fixture
def cluster() -> NetworkNamespace:
    return NetworkNamespace.generate("pods")


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640])
def test_a_mounted_secret_is_taken(tmp_path: Path, cluster: NetworkNamespace, mode: int) -> None:
    real = tmp_path / "..data"
    real.write_text(f"{cluster.join_code()}\n")
    real.chmod(mode)
    (tmp_path / "key").symlink_to(real.name)  # as Kubernetes mounts secrets
    assert current_namespace(told(tmp_path / "key")) == cluster


def test_a_passphrase_may_be_in_it_and_the_variable_wins(tmp_path: Path, cluster: NetworkNamespace) -> None:
    path = tmp_path / "key"
    path.write_text("passphrase:correct horse battery staple")
    path.chmod(0o400)
    assert current_namespace(told(path, RINGFORT_CLUSTER="home")).name == "home"
    assert current_namespace(told(path, RINGFORT_KEY=cluster.join_code())) == cluster


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_who_may_not_read_it_is_told_whose_it_must_be(tmp_path: Path, cluster: NetworkNamespace) -> None:
    path = Path("/tmp", f"ringfort-key-{os.getpid()}")  # in a folder that everybody can enter
    path.write_text(cluster.join_code())
    path.chmod(0o400)
    os.seteuid(12345)
    try:
        with pytest.raises(IdentityError, match=r"this user cannot read it.*chgrp \d+ .*fsGroup"):
            current_namespace(told(path))
    finally:
        os.seteuid(0)
        path.unlink()


def test_what_is_wrong_with_it_is_said_with_the_remedy(tmp_path: Path, cluster: NetworkNamespace) -> None:
    path = tmp_path / "key"
    with pytest.raises(IdentityError, match="is not there"):
        current_namespace(told(path))
    path.write_text(" \n")
    path.chmod(0o440)
    with pytest.raises(IdentityError, match="is empty"):
        current_namespace(told(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(IdentityError, match="is not text"):
        current_namespace(told(path))
    with pytest.raises(IdentityError, match="is not a file"):
        current_namespace(told(tmp_path))
    path.write_text(cluster.join_code())
    path.chmod(0o444)
    with pytest.raises(IdentityError, match=r"everybody can access this secret \(mode 0444\)") as raised:
        current_namespace(told(path))
    assert "defaultMode: 0440" in str(raised.value)
    path.chmod(0o440)
    with pytest.raises(ConfigError, match=r"the file .*key belongs to the cluster 'pods'"):
        current_namespace(told(path, RINGFORT_CLUSTER="other"))
    assert cluster.join_code() not in str(raised.value)
