"""The clusters that this machine belongs to: one secret file each, and which of them a process uses."""

from __future__ import annotations

import shlex
from enum import Enum
from pathlib import Path
from typing import Final

from ringfort.config import Environment
from ringfort.errors import ConfigError, IdentityError, InvalidArgumentError, JoinCodeError
from ringfort.identity import codes, files, typed
from ringfort.identity.namespace import NetworkNamespace

DEFAULT_CLUSTER: Final = "default"
FOLDER: Final = "clusters"
PASSPHRASE_PREFIX: Final = "passphrase:"


class Added(Enum):
    """What `ClusterStore.add` found: nothing of that name, the same cluster, or another one."""

    NEW = "new"
    KNOWN = "known"
    REPLACED = "replaced"


class ClusterStore:
    """The secrets under a home folder. A cluster's file has its name and holds its join code."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._folder = home / FOLDER

    def path(self, name: str) -> Path:
        """Where the secret of `name` is or would be. Raises `InvalidArgumentError` for what is no name.

        Raises `IdentityError` if other users may use the folder that all is under.
        """
        files.check_folder(self._home)
        return self._folder / codes.check_name(name)

    def names(self) -> list[str]:
        """The clusters whose secrets are here, in order. Raises `IdentityError` if other users may use the folder."""
        files.check_folder(self._home)
        return [name for name in files.names(self._folder) if typed.NAME.match(name)]

    def load(self, name: str) -> NetworkNamespace:
        """Raises `IdentityError` if it is not here or cannot be used."""
        path = self.path(name)
        data = files.read(path)
        if data is None:
            # Not made in passing: a slip in a name would found a cluster of one that waits for ever.
            raise IdentityError(
                path,
                f"this machine is not in a cluster {name!r}",
                f"ringfort key join (with the code of `ringfort key show {name}` on a machine that is), "
                f"or ringfort key new {name}",
            )
        return _decode(data, name, path)

    def load_or_create(self, name: str = DEFAULT_CLUSTER) -> NetworkNamespace:
        """The cluster, made now if it is not here. Any number of processes may do this at once: all get the same."""
        path = self.path(name)
        return _decode(files.load_or_create(path, lambda: _encode(NetworkNamespace.generate(name))), name, path)

    def create(self, name: str) -> NetworkNamespace:
        """A new cluster. Raises `InvalidArgumentError` if there is one of this name."""
        path = self.path(name)
        namespace = NetworkNamespace.generate(name)
        files.ensure_folder(path.parent)
        if not files.create(path, _encode(namespace)):
            raise InvalidArgumentError(
                "cluster", name, f"is there already; see it with: ringfort key show {name}; "
                f"give it a new secret with: ringfort key rotate {name}"
            )  # fmt: skip
        return namespace

    def add(self, namespace: NetworkNamespace) -> Added:
        """Store a cluster that was made elsewhere.

        What it replaces is not kept: it may be damaged, and otherwise the other members of that cluster still have it.
        """
        path = self.path(namespace.name)
        data = files.read(path)
        if data is not None and _is_same(data, namespace):
            return Added.KNOWN
        files.replace(path, _encode(namespace))
        return Added.NEW if data is None else Added.REPLACED

    def rotate(self, name: str) -> NetworkNamespace:
        """A new secret for a cluster that is here. The old one is gone: if it still opened the listener, a former
        member's would too."""
        self.load(name)
        namespace = NetworkNamespace.generate(name)
        files.replace(self.path(name), _encode(namespace))
        return namespace


def current_namespace(environment: Environment | None = None) -> NetworkNamespace:
    """The cluster that this process belongs to: that of `RINGFORT_KEY`, else the one named by `RINGFORT_CLUSTER`, else
    `default`, which the first use on a machine makes.

    Raises `JoinCodeError`, `InvalidKeyError`, `ConfigError` or `IdentityError`, never with a secret in it.
    """
    environment = Environment.from_mapping() if environment is None else environment
    if environment.key is not None:
        return _from_key(environment.key, environment.cluster)
    store = ClusterStore(environment.home_folder)
    if environment.cluster in (None, DEFAULT_CLUSTER):
        return store.load_or_create(DEFAULT_CLUSTER)
    return store.load(environment.cluster)


def _from_key(key: str, cluster: str | None) -> NetworkNamespace:
    if key.startswith(PASSPHRASE_PREFIX):
        return NetworkNamespace.from_passphrase(cluster or DEFAULT_CLUSTER, key[len(PASSPHRASE_PREFIX) :])
    namespace = NetworkNamespace(*codes.decode(key, source="RINGFORT_KEY"))
    if cluster is not None and cluster != namespace.name:
        raise ConfigError("RINGFORT_CLUSTER", cluster, f"RINGFORT_KEY is of the cluster {namespace.name!r}; unset one")
    return namespace


def _encode(namespace: NetworkNamespace) -> bytes:
    return f"{namespace.join_code()}\n".encode("ascii")


def _decode(data: bytes, name: str, path: Path) -> NetworkNamespace:
    """Raises `IdentityError` for a file that is not whole. What is in it is in no error, not even as a cause."""
    mend = f"rm {shlex.quote(str(path))}, then ringfort key join with the code of another member"
    try:
        found, secret = codes.decode(data.decode("ascii"))
    except (JoinCodeError, UnicodeDecodeError):
        raise IdentityError(path, "is damaged" if data else "is empty", mend) from None
    if found != name:
        raise IdentityError(path, f"holds the secret of another cluster, {found!r}", mend)
    return NetworkNamespace(name, secret)


def _is_same(data: bytes, namespace: NetworkNamespace) -> bool:
    try:
        return NetworkNamespace(*codes.decode(data.decode("ascii"))) == namespace
    except (JoinCodeError, UnicodeDecodeError):
        return False
