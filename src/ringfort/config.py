"""Settings: frozen dataclasses, each field documented; the only reader of the environment.

There is one `timeout`. It bounds the forming of a group and every call on it, and a single call may be given another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from ringfort.errors import ConfigError, InvalidRankError, InvalidWorldSizeError

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_TIMEOUT = 60.0
"""Seconds. Long enough for a laptop to wake up, short enough that a person still watches (torch waits 30 minutes)."""

DEFAULT_PATIENCE = 10.0
"""Seconds of silence that groups with fixed ranks forgive a machine: a cable is plugged in again, a Wi-Fi roams."""

CLUSTER_PATIENCE = 1.0
"""The same for peers that find each other, which go on without the lost one and let it in again when it is back."""

DEFAULT_HOME = "~/.ringfort"
"""The folder of this node's key and of the clusters' secrets."""

MAX_RUN_NAME = 64
"""Characters of a run's name: it is shown in one line beside others, and every peer says it in its hello."""

MAX_CONNECTIONS = 16
"""Connections between two ranks. Each is a thread in a large collective; more than the cores of a machine only wait."""

Encryption = Literal["on", "off"]

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


class Shape(Enum):
    """Which way the data takes. The values are the wire's codes and never change."""

    AUTO = 0
    RING = 1
    TREE = 2
    DIRECT = 3
    HALVING_DOUBLING = 4
    HIERARCHICAL = 5


@dataclass(frozen=True)
class Strategy:
    """A shape, and for a tree the number of children of each node. The children say which shapes they allow."""

    shape: Shape
    arity: int = 2

    _allowed: ClassVar[frozenset[Shape]] = frozenset(Shape)

    def __post_init__(self) -> None:
        if self.shape not in self._allowed:
            raise ConfigError("strategy", self.shape.name, f"{type(self).__name__} has no such shape")
        if not 2 <= self.arity <= 255:
            raise ConfigError("arity", self.arity, "a tree has 2 to 255 children a node")

    def __str__(self) -> str:
        return f"tree({self.arity})" if self.shape is Shape.TREE else self.shape.name.lower()

    @classmethod
    def tree(cls, arity: int = 2) -> Self:
        """A tree whose nodes have `arity` children."""
        return cls(Shape.TREE, arity)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From a command line: `auto`, `ring`, `tree`, `tree(4)`, `direct`, `halving-doubling`, `hierarchical`."""
        name, _, arity = text.strip().lower().rstrip(")").partition("(")
        try:
            return cls(Shape[name.replace("-", "_").upper()], int(arity or 2))
        except (KeyError, ValueError) as exc:
            known = ", ".join(sorted(shape.name.lower() for shape in cls._allowed))
            raise ConfigError(
                "strategy", text, f"choose one of: {known} (a tree may have an arity, as tree(4))"
            ) from exc


class AllReduceStrategy(Strategy):
    """How an all-reduce moves its data."""

    AUTO: ClassVar[AllReduceStrategy]
    RING: ClassVar[AllReduceStrategy]
    TREE: ClassVar[AllReduceStrategy]
    DIRECT: ClassVar[AllReduceStrategy]
    HALVING_DOUBLING: ClassVar[AllReduceStrategy]
    HIERARCHICAL: ClassVar[AllReduceStrategy]
    """Inside each host first, then between hosts: each byte crosses the network once each way."""


class _RootedStrategy(Strategy):
    _allowed = frozenset({Shape.AUTO, Shape.RING, Shape.TREE, Shape.DIRECT, Shape.HIERARCHICAL})


class ReduceStrategy(_RootedStrategy):
    """How a reduce moves its data to the root. RING is a pipelined chain that ends there."""

    AUTO: ClassVar[ReduceStrategy]
    RING: ClassVar[ReduceStrategy]
    TREE: ClassVar[ReduceStrategy]
    DIRECT: ClassVar[ReduceStrategy]
    HIERARCHICAL: ClassVar[ReduceStrategy]
    """Every host is left once: by one rank, with what all of the host make together."""


class BroadcastStrategy(_RootedStrategy):
    """How a broadcast moves its data from the root. RING is a pipelined chain that starts there."""

    AUTO: ClassVar[BroadcastStrategy]
    RING: ClassVar[BroadcastStrategy]
    TREE: ClassVar[BroadcastStrategy]
    DIRECT: ClassVar[BroadcastStrategy]
    HIERARCHICAL: ClassVar[BroadcastStrategy]
    """Every host is entered once: by one rank, which passes it on to the others."""


for _kind in (AllReduceStrategy, ReduceStrategy, BroadcastStrategy):
    for _shape in _kind._allowed:  # pyright: ignore[reportPrivateUsage]
        setattr(_kind, _shape.name, _kind(_shape))


@dataclass(frozen=True, kw_only=True)
class CollectiveConfig:
    """How collectives choose and cut. Must be the same on every rank of a group."""

    all_reduce: AllReduceStrategy = AllReduceStrategy.AUTO
    reduce: ReduceStrategy = ReduceStrategy.AUTO
    broadcast: BroadcastStrategy = BroadcastStrategy.AUTO
    latency: float | None = None
    """Seconds that one message costs however small: what AUTO weighs against bandwidth. By default each link is
    measured when a group first has to choose, which takes milliseconds; with both given nothing is."""
    bandwidth: float | None = None
    """Bytes a second that one link carries, likewise."""
    connections: int | Literal["auto"] = 1
    """Connections between every two ranks, over which large arrays are moved in as many parts at once: for networks on
    which one connection does not fill the wire, and rings of cables, whose both directions they use. With `auto` a
    group opens four and finds out in its first large collectives whether they are quicker than one."""

    native_bytes: int | None = MIB
    """From how many bytes on a backend's own collectives (Gloo's, MPI's) take the place of ours; None for never. Before
    each of them the ranks agree on the call, in as many messages as a small array takes our way: below a MiB that cost
    more than the engine saved, over Gloo and over MPI."""

    def __post_init__(self) -> None:
        if self.native_bytes is not None and not (_is_whole(self.native_bytes) and self.native_bytes >= 0):
            raise ConfigError("native_bytes", self.native_bytes, "must be a whole number of bytes, 0 or more, or None")
        if self.connections != "auto" and not (
            _is_whole(self.connections) and 1 <= self.connections <= MAX_CONNECTIONS
        ):
            raise ConfigError(
                "connections", self.connections, f"must be auto or a whole number from 1 to {MAX_CONNECTIONS}"
            )
        for name in ("latency", "bandwidth"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """What a backend needs to know beside its place in the group."""

    nodes: Sequence[str | Sequence[str]] = ()
    """For `RingBackend`: the address of each rank as `host:port`, or several to be tried in turn."""
    rank: int | None = None
    """For `RingBackend`: which of `nodes` this process is."""
    timeout: float = DEFAULT_TIMEOUT
    """Seconds that bound the forming of the group and every call that is given no timeout of its own."""
    patience: float | None = None
    """Seconds for which a machine may answer nothing before its ranks are lost (`PeerLostError`). A rank that only
    computes is not silent. `RINGFORT_PATIENCE`, else 10, where it is not given."""
    encryption: Encryption | None = None
    """Off only by name, on all ranks: for wires that nobody else can reach, and for measuring. None says nothing: it is
    on, unless `RINGFORT_ENCRYPTION` turns it off where `init` reads the environment (see `choose_encryption`)."""
    shared_memory: Literal["on", "off"] = "on"
    """Whether to move data through memory between ranks of one host where both sides are willing and can. Off for
    measuring, and where even that memory may not hold what is sent."""
    inbox_bytes: int = 64 * MIB
    """How much a peer may send ahead of a receive, in all, before a receive of something else gives up."""
    max_object_bytes: int = GIB
    """The largest encoded object that `broadcast_object` and `all_gather_object` accept."""
    collective: CollectiveConfig = field(default_factory=CollectiveConfig)

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        if self.patience is not None:
            _check_positive("patience", self.patience)
        _check_encryption(self.encryption)
        if self.shared_memory not in ("on", "off"):
            raise ConfigError("shared_memory", self.shared_memory, "must be on or off")
        for name in ("inbox_bytes", "max_object_bytes"):
            if getattr(self, name) < MIB:
                raise ConfigError(name, getattr(self, name), "must be at least 1 MiB (1048576)")
        if self.nodes:
            if isinstance(self.nodes, str):
                raise ConfigError("nodes", self.nodes, 'must be a list such as ["host:port", "host:port"]')
            if self.rank is None:
                raise ConfigError("rank", None, "say which of nodes this process is")
            if not 0 <= self.rank < len(self.nodes):
                raise InvalidRankError(self.rank, len(self.nodes))
            flat = [self.nodes[i] for i in range(len(self.nodes))]
            repeated = [node for i, node in enumerate(flat) if node in flat[:i]]
            if repeated:
                raise ConfigError("nodes", repeated[0], "is named twice; every rank needs an address of its own")


@dataclass(frozen=True, kw_only=True)
class RpcConfig:
    """What an `RpcAgent` may use. Each rank may have its own."""

    workers: int = 8
    """Threads that run functions. With 0 none are run until the program calls `handle_request`."""
    max_message_bytes: int = GIB + MIB
    """The largest request that this rank accepts, and the largest response: an array of 1 GiB and what goes with it."""
    max_in_flight: int = 4096
    """Calls from this rank to one other that have not ended."""
    max_queued: int = 4096
    """Requests that wait here for a worker, from all ranks together."""
    max_held_bytes: int = 2 * (GIB + MIB)
    """Bytes of requests and responses that this rank holds for one other."""
    max_references: int = 65536
    """Values that this rank keeps for the `RRef`s that one other rank has asked for. Each costs about 2 KB beside the
    value."""

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("max_in_flight", 1), ("max_queued", 1), ("max_references", 1)):
            value = getattr(self, name)
            if not _is_whole(value) or value < least:
                raise ConfigError(name, value, f"must be a whole number of at least {least}")
        for name in ("max_message_bytes", "max_held_bytes"):
            if not _is_whole(getattr(self, name)) or getattr(self, name) < KIB:
                raise ConfigError(name, getattr(self, name), "must be a whole number of at least 1 KiB (1024)")
        if self.max_held_bytes < self.max_message_bytes:
            raise ConfigError("max_held_bytes", self.max_held_bytes, "must have room for one message")


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """How peers watch each other. `lan()` is the default; `wifi()` forgives more and so notices later."""

    interval: float = 0.2
    """Seconds between two heartbeats on a control link."""
    patience: float | None = None
    """Seconds of silence that are forgiven; a link with jitter is given up to one second more. Everything else that
    decides when a peer is lost is derived from it. `RINGFORT_PATIENCE`, else 1, where it is not given."""
    caution: float = 6.0
    """How many times a link's own jitter is added to its usual pause before silence counts as loss."""
    slow_round_trip: float = 0.25
    """Seconds of smoothed round trip from which on a peer is degraded."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) is not None:
                _check_positive(item.name, getattr(self, item.name))
        if self.patience is not None and self.patience < 2 * self.interval:
            raise ConfigError("patience", self.patience, "must be at least two intervals: one beat may be late")

    @classmethod
    def lan(cls) -> HealthConfig:
        """For cables and good Wi-Fi: a silent peer is lost after one to two seconds."""
        return cls()

    @classmethod
    def wifi(cls) -> HealthConfig:
        """For bad Wi-Fi: pauses of seconds are forgiven."""
        return cls(interval=0.5, patience=5.0, slow_round_trip=1.0)


@dataclass(frozen=True, kw_only=True)
class ElectionConfig:
    """How a leader is found."""

    settle: float = 0.3
    """Seconds without a leader before a peer stands for election: links that are coming up are waited for."""
    timeout: float = 0.5
    """Seconds that a candidate waits for votes before it tries again, or goes on with those it has."""

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_positive(item.name, getattr(self, item.name))


@dataclass(frozen=True, kw_only=True)
class AutoDiscoveryConfig:
    """How peers find each other and when they are a group."""

    min_peers: int = 0
    """Peers beside this one, as in `join`, that an epoch has at least. Fewer wait."""
    max_peers: int | None = None
    """Peers beside this one that an epoch has at most; the rest wait. None for no limit."""
    timeout: float = 30.0
    """Seconds that `wait_for_peers` and `establish_ring` wait unless told otherwise."""
    settle: float = 0.5
    """Seconds that nobody new must have come before newcomers are admitted, so that many make one epoch. They are
    admitted after three times as long in any case."""
    on_partition: Literal["majority", "stop", "continue"] = "majority"
    """What a group does that has lost contact with members which may be alive: go on with more than half of the last
    epoch, or exactly half and its lowest peer id; stop until all are back; or go on in any case, and risk that the run
    splits in two. Must be the same on all peers."""
    run: str = ""
    """Which of the cluster's runs this peer belongs to. Only peers of one run form an epoch; those of other runs are
    seen, introduce each other, and are otherwise ignored. `ringfort run` sets its `--name` here."""
    restart_without: Sequence[str] = ()
    """Machines, by name or peer id, that are gone for good: a process that starts again on a machine which was in a
    group with them does not wait for them. One that is still at work elsewhere then goes on beside the new group."""
    peers: Sequence[str] = ()
    """Addresses `host` or `host:port` of peers, for networks that block multicast. One is enough: it knows the rest."""
    multicast: bool = True
    """Whether to look for peers by mDNS."""
    interfaces: Sequence[str] = ()
    """Interfaces to be found on, by name, address or network; empty for all useful ones."""
    port: int = 0
    """Where this peer accepts connections; 0 for the usual port or, where that is taken, any that is free."""
    encryption: Encryption | None = None
    """Off only by name, on all peers: for wires that nobody else can reach, and for measuring. None says nothing: it is
    on, unless `RINGFORT_ENCRYPTION` turns it off (see `choose_encryption`)."""
    program: str = ""
    """What this process is called in `ringfort peers`; empty for the name of its script."""
    health: HealthConfig = field(default_factory=HealthConfig)
    election: ElectionConfig = field(default_factory=ElectionConfig)

    def __post_init__(self) -> None:
        for name in ("timeout", "settle"):
            _check_positive(name, getattr(self, name))
        if not _is_whole(self.min_peers) or self.min_peers < 0:
            raise ConfigError("min_peers", self.min_peers, "must be a whole number of at least 0")
        if self.max_peers is not None and (not _is_whole(self.max_peers) or self.max_peers < self.min_peers):
            raise ConfigError("max_peers", self.max_peers, f"must be a whole number of at least {self.min_peers}")
        if self.on_partition not in ("majority", "stop", "continue"):
            raise ConfigError("on_partition", self.on_partition, "must be majority, stop or continue")
        if not isinstance(self.run, str) or len(self.run) > MAX_RUN_NAME:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError("run", self.run, f"must be a text of at most {MAX_RUN_NAME} characters")
        if not _is_whole(self.port) or not 0 <= self.port <= 65535:
            raise ConfigError("port", self.port, "must be a number from 0 to 65535")
        _check_encryption(self.encryption)
        for name in ("peers", "interfaces", "restart_without"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(name, getattr(self, name), 'must be a list, such as ["..."]')


@dataclass(frozen=True)
class Environment:
    """What the process was told by its launcher. Read once, by `from_mapping`."""

    rank: int | None = None
    world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    master: str | None = None
    """Where Ringfort's ranks meet, as `host:port`: `ringfort run` keeps MASTER_PORT free for torch's own store."""
    timeout: float | None = None
    patience: float | None = None
    """Seconds of silence that a machine is forgiven."""
    listen_fd: int | None = None
    """A listening socket that the launcher opened for rank 0, so that no port has to be guessed."""
    home: str | None = None
    """The folder that stands in for `~/.ringfort`."""
    key: str | None = field(default=None, repr=False)
    """A join code, or `passphrase:` and a passphrase. A secret: it is in no `repr` and in no error."""
    cluster: str | None = None
    """The name of the cluster whose secret is used; `default` if it is not said."""
    encryption: str | None = None
    """`on` or `off`."""
    shared_memory: str | None = None
    """`on` or `off`."""
    interfaces: str | None = None
    """The interfaces to be found on, by name, address or network, with commas between them."""
    peers: str | None = None
    """Addresses of peers, `host` or `host:port`, with commas between them."""
    restart_without: str | None = None
    """Machines that a restart does not wait for, by name or peer id, with commas between them."""
    backend: str | None = None
    """What `init` makes: `tcp` if it is not said."""
    cuda_wait: str | None = None
    """`host` (the default) or `stream`, which is ignored with a warning: the host waits for CUDA tensors either way."""
    gloo_interface: str | None = None
    """The network interface that Gloo listens on, by name, where the person knows better than we."""

    # The first variable that is set wins. torchrun's names come first: they are what people type by hand.
    SOURCES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "rank": ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"),
        "world_size": ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
        "master_addr": ("MASTER_ADDR",),
        "master_port": ("MASTER_PORT",),
        "master": ("RINGFORT_MASTER",),
        "timeout": ("RINGFORT_TIMEOUT",),
        "patience": ("RINGFORT_PATIENCE",),
        "listen_fd": ("RINGFORT_LISTEN_FD",),
        "home": ("RINGFORT_HOME",),
        "key": ("RINGFORT_KEY",),
        "cluster": ("RINGFORT_CLUSTER",),
        "encryption": ("RINGFORT_ENCRYPTION",),
        "shared_memory": ("RINGFORT_SHM",),
        "interfaces": ("RINGFORT_INTERFACES",),
        "peers": ("RINGFORT_PEERS",),
        "restart_without": ("RINGFORT_RESTART_WITHOUT",),
        "backend": ("RINGFORT_BACKEND",),
        "cuda_wait": ("RINGFORT_CUDA_WAIT",),
        "gloo_interface": ("GLOO_SOCKET_IFNAME",),
    }

    def __post_init__(self) -> None:
        if self.patience is not None:
            _check_positive("RINGFORT_PATIENCE", self.patience)
        for name in ("encryption", "shared_memory"):
            if getattr(self, name) not in (None, "on", "off"):
                raise ConfigError(self.SOURCES[name][0], getattr(self, name), "must be on or off")
        if self.cuda_wait not in (None, "host", "stream"):
            raise ConfigError("RINGFORT_CUDA_WAIT", self.cuda_wait, "must be host or stream")

    @property
    def home_folder(self) -> Path:
        """Where this node's key and the clusters' secrets are. Raises `ConfigError` where no user has a home."""
        try:
            return Path(self.home or DEFAULT_HOME).expanduser().absolute()
        except RuntimeError as exc:
            raise ConfigError("RINGFORT_HOME", self.home, "this user has no home folder; set it to a folder") from exc

    @classmethod
    def from_mapping(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """From `variables`, by default the process's own. Raises `ConfigError` for a value that is no number."""
        variables = os.environ if variables is None else variables
        found: dict[str, str | int | float] = {}
        for item in fields(cls):
            for name in cls.SOURCES[item.name]:
                if variables.get(name):
                    found[item.name] = _parse(name, variables[name], str(item.type))
                    break
        return cls(**found)  # pyright: ignore[reportArgumentType]  # each was parsed to its field's type


def patience_of(given: float | None, default: float) -> float:
    """`given`, else `RINGFORT_PATIENCE`, else `default`."""
    told = Environment.from_mapping().patience if given is None else given
    return default if told is None else told


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `variables` in it, for a process that it starts."""
    return {**os.environ, **variables}


def is_set(variable: str) -> bool:
    """Whether the person has set an environment variable, to anything but nothing: a launcher does not change it."""
    return bool(os.environ.get(variable))


STEP_FILE: Final = "RINGFORT_STEP_FILE"
"""Names the file in which a launcher's ranks write how many steps they have done."""


def step_file() -> str | None:
    """The one of this process's launcher, if it has one."""
    return os.environ.get(STEP_FILE) or None


def is_dumb_terminal() -> bool:
    """Whether the terminal, if there is one, cannot move its cursor."""
    return os.environ.get("TERM", "") in ("dumb", "unknown")


def _parse(name: str, text: str, kind: str) -> str | int | float:
    try:
        return float(text) if kind.startswith("float") else int(text) if kind.startswith("int") else text
    except ValueError as exc:
        raise ConfigError(name, text, "must be a number") from exc


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_world_size(world_size: int) -> None:
    """Raises `InvalidWorldSizeError` unless `world_size` is a whole number of at least 1."""
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidWorldSizeError(world_size)


def check_timeout(timeout: float, name: str = "timeout") -> None:
    """Raises `ConfigError` unless `timeout` is a positive, finite number of seconds."""
    _check_positive(name, timeout)


def choose_encryption(keyword: str | None, configured: Encryption | None, told: str | None) -> Encryption:
    """Return whether to encrypt, by what was said: a keyword of the call wins; then the configuration and the
    environment, which must not contradict each other; where nothing was said, it is on.

    Raises `ConfigError` if the keyword is neither on nor off, and where the configuration and `RINGFORT_ENCRYPTION` say
    different things: neither may silently turn off what the other asked for.
    """
    _check_encryption(keyword)
    if keyword is None and None not in (configured, told) and configured != told:
        why = f"but RINGFORT_ENCRYPTION={told} in the environment; remove one of them, or pass encryption= to the call"
        raise ConfigError("encryption", configured, why)
    return "off" if (keyword or configured or told) == "off" else "on"


def _check_encryption(value: str | None) -> None:
    if value not in (None, "on", "off"):
        raise ConfigError("encryption", value, "must be on or off")


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (isfinite(value) and value > 0):
        raise ConfigError(name, value, "must be a positive, finite number")


def parse_address(text: str, name: str = "address") -> tuple[str, int]:
    """`host:port` or `[v6]:port` into its parts. Raises `ConfigError` with what is wrong."""
    host, colon, port = text.strip().rpartition(":")
    if not colon:
        raise ConfigError(name, text, "must be host:port, such as 192.168.1.20:29500")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(name, text, "put an IPv6 address in brackets, such as [fe80::1]:29500")
    if not host:
        raise ConfigError(name, text, "has no host before the colon")
    if not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigError(name, text, "its port must be a number from 0 to 65535")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The text that `parse_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
