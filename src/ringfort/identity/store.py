"""The clusters that this machine belongs to, one secret file each, and which of them a process uses."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Final

from ringfort.config import Environment
from ringfort.errors import ConfigError, IdentityError, InvalidArgumentError, JoinCodeError
from ringfort.identity import files, join_codes, typos
from ringfort.identity.namespace import NetworkNamespace

DEFAULT_CLUSTER: Final = "default"
FOLDER: Final = "clusters"
PASSPHRASE_PREFIX: Final = "passphrase:"


class Added(Enum):
    """What `ClusterStore.add` found under the name: nothing, the same cluster, or another one."""

    NEW = "new"
    KNOWN = "known"
    REPLACED = "replaced"


class ClusterStore:
    """The secrets in a home folder. The file of a cluster has its name and contains its join code."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._folder = home / FOLDER

    def path(self, name: str) -> Path:
        """Return the file for the secret of `name`, which need not exist.

        Raises `InvalidArgumentError` for an invalid name, and `IdentityError` if other users can access the folder.
        """
        files.check_folder(self._home)
        return self._folder / join_codes.check_name(name)

    def names(self) -> list[str]:
        """Return the names of all clusters, sorted. Raises `IdentityError` if other users can access the folder."""
        files.check_folder(self._home)
        return [name for name in files.names(self._folder) if typos.NAME.match(name)]

    def load(self, name: str) -> NetworkNamespace:
        """Return a cluster. Raises `IdentityError` if its secret does not exist or cannot be used."""
        path = self.path(name)
        data = files.read(path)
        if data is None:
            # Not created here: a typo in a name would create a cluster of one machine that waits for ever.
            raise IdentityError(
                path,
                f"this machine is not in a cluster {name!r}",
                f"ringfort key join (with the code of `ringfort key show {name}` on a machine that is), "
                f"or ringfort key new {name}",
            )
        return _decode(data, name, path)

    def load_or_create(self, name: str = DEFAULT_CLUSTER) -> NetworkNamespace:
        """Return a cluster, or create it. If several processes do so at once, all get the same."""
        path = self.path(name)
        return _decode(files.load_or_create(path, lambda: _encode(NetworkNamespace.generate(name))), name, path)

    def create(self, name: str) -> NetworkNamespace:
        """Create a cluster. Raises `InvalidArgumentError` if there is one of this name."""
        path = self.path(name)
        namespace = NetworkNamespace.generate(name)
        files.ensure_folder(path.parent)
        if not files.create(path, _encode(namespace)):
            raise InvalidArgumentError(
                "cluster", name, f"already exists; show it with: ringfort key show {name}; "
                f"give it a new secret with: ringfort key rotate {name}"
            )  # fmt: skip
        return namespace

    def add(self, namespace: NetworkNamespace) -> Added:
        """Store a cluster that was created elsewhere.

        A secret that it replaces is not kept: it may be damaged, and otherwise the other members still have it.
        """
        path = self.path(namespace.name)
        data = files.read(path)
        with suppress(IdentityError):  # damaged: it is replaced
            if data is not None and _decode(data, namespace.name, path) == namespace:
                return Added.KNOWN
        files.replace(path, _encode(namespace))
        return Added.NEW if data is None else Added.REPLACED

    def rotate(self, name: str) -> NetworkNamespace:
        """Give a cluster a new secret. The old one is deleted: a former member has it too."""
        self.load(name)
        namespace = NetworkNamespace.generate(name)
        files.replace(self.path(name), _encode(namespace))
        return namespace


def current_namespace(environment: Environment | None = None) -> NetworkNamespace:
    """Return the cluster of this process: that of `RINGFORT_KEY`, else that in the file `RINGFORT_KEY_FILE`, else the
    one that `RINGFORT_CLUSTER` names, else `default`, which is created on first use.

    Raises `JoinCodeError`, `InvalidKeyError`, `ConfigError` or `IdentityError`, never with a secret in the message.
    """
    environment = Environment.from_mapping() if environment is None else environment
    if environment.key is not None:
        return _from_key(environment.key, environment.cluster)
    if environment.key_file is not None:
        path = Path(environment.key_file)
        data = files.read_mounted(path)
        try:
            return _from_key(data.decode("utf-8").strip(), environment.cluster, f"the file {path}")
        except UnicodeDecodeError:
            raise IdentityError(path, "is not text", "ringfort key show > FILE, on a machine of the cluster") from None
    store = ClusterStore(environment.home_folder)
    if environment.cluster in (None, DEFAULT_CLUSTER):
        return store.load_or_create(DEFAULT_CLUSTER)
    return store.load(environment.cluster)


def _from_key(key: str, cluster: str | None, source: str = "RINGFORT_KEY") -> NetworkNamespace:
    if key.startswith(PASSPHRASE_PREFIX):
        return NetworkNamespace.from_passphrase(cluster or DEFAULT_CLUSTER, key[len(PASSPHRASE_PREFIX) :])
    namespace = NetworkNamespace(*join_codes.decode(key, source=source))
    if cluster is not None and cluster != namespace.name:
        raise ConfigError(
            "RINGFORT_CLUSTER", cluster, f"{source} belongs to the cluster {namespace.name!r}; unset one of the two"
        )
    return namespace


def _encode(namespace: NetworkNamespace) -> bytes:
    return f"{namespace.join_code()}\n".encode("ascii")


def _decode(data: bytes, name: str, path: Path) -> NetworkNamespace:
    """Raises `IdentityError` for a damaged file. Its content is in no error, not even as a cause."""
    mend = f"rm {files.quoted(path)}, then ringfort key join with the code of another member"
    try:
        found, secret = join_codes.decode(data.decode("ascii"))
    except (JoinCodeError, UnicodeDecodeError):
        raise IdentityError(path, "is damaged" if data else "is empty", mend) from None
    if found != name:
        raise IdentityError(path, f"contains the secret of another cluster, {found!r}", mend)
    return NetworkNamespace(name, secret)
