"""Settings: frozen dataclasses, and the only reader of the environment.

Each field says with `setting` which values are valid, and with `variable` which environment variables it is read from.
There is one `timeout`: it bounds the creation of a group and every call on it, unless a call is given its own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeVar

from ringfort.errors import ConfigError, InvalidRankError, InvalidWorldSizeError
from ringfort.launchers import LAUNCHERS, expand_hosts, half_told, name_of, of_one_launcher, step_of

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_TIMEOUT = 60.0
"""Seconds. Long enough for a laptop to wake up, short enough that a person is still watching (torch: 30 minutes)."""

DEFAULT_PATIENCE = 10.0
"""Seconds of silence after which a machine is lost, in groups with fixed ranks. Time to plug a cable in again."""

CLUSTER_PATIENCE = 1.0
"""The same for peers that find each other: they continue without the lost peer and admit it again when it is back."""

DEFAULT_HOME = "~/.ringfort"
"""The folder of this node's key and of the cluster secrets."""

MAX_RUN_NAME = 64
"""Characters in the name of a run. It is shown in one line beside others, and every peer sends it in its hello."""

MAX_ELASTIC_NAME = MAX_RUN_NAME - 9
"""The same for an elastic run: a digest of its state and data follows the name, as `/` and eight digits."""

MARK = 9
"""Characters that may follow that digest: `#` and eight digits for rules that are not the usual ones."""

MAX_CONNECTIONS = 16
"""Connections between two ranks. Each is a thread in a large collective; more threads than cores only wait."""

Encryption = Literal["on", "off"]

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

T = TypeVar("T")
Check = Callable[[Any], str]
"""Returns what is wrong with a value; an empty string for a valid one."""


# --- checks -----------------------------------------------------------------------------------------------------------


def setting(default: T, check: Check) -> T:
    """A field whose values must pass `check`. None is valid if it is the default."""
    return field(default=default, metadata={"check": check})


def variable(*names: str, default: Any = None, check: Check | None = None, secret: bool = False) -> Any:
    """A field that is read from the first of these environment variables that is set."""
    return field(default=default, repr=not secret, metadata={"check": check, "variables": names})


def positive(value: object) -> str:
    """For a positive, finite number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value > 0:
        return ""
    return "must be a positive, finite number"


def whole(least: int, most: float = inf) -> Check:
    """For whole numbers from `least` to `most`."""
    span = f"of at least {least}" if most == inf else f"from {least} to {most}"

    def check(value: object) -> str:
        is_valid = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return "" if is_valid else f"must be a whole number {span}"

    return check


def one_of(*values: str) -> Check:
    """For one of a few words."""
    words = " or ".join((", ".join(values[:-1]), values[-1]))
    return lambda value: "" if value in values else f"must be {words}"


on_off: Final = one_of("on", "off")


def _several(value: object) -> str:
    """For a list of strings: a single string would be taken for a list of letters."""
    return 'must be a list, such as ["..."]' if isinstance(value, str) else ""


def _run_name(value: object) -> str:
    """For the name of a run."""
    is_valid = isinstance(value, str) and len(value) <= MAX_RUN_NAME + MARK
    return "" if is_valid else f"must be a string of at most {MAX_RUN_NAME} characters"


def elastic_name(value: object) -> str:
    """For the name of an elastic run."""
    is_valid = isinstance(value, str) and value.isprintable() and 1 <= len(value) <= MAX_ELASTIC_NAME
    return "" if is_valid else f"must be 1 to {MAX_ELASTIC_NAME} printable characters"


def _members(value: object) -> str:
    """For a range of members."""
    try:
        fewest, most = _split_range(value)
    except ValueError:
        return "must be MIN:MAX, such as 2:8, or one number"
    return "" if fewest >= 1 and (most is None or most >= fewest) else "must be MIN:MAX with 1 <= MIN <= MAX"


def _split_range(value: object) -> tuple[int, int | None]:
    first, colon, last = str(value).partition(":")
    return int(first), (int(last) if last else None) if colon else int(first)


def _connections(value: object) -> str:
    """For the number of connections between two ranks."""
    return "" if value == "auto" or not whole(1, MAX_CONNECTIONS)(value) else f"must be auto or 1 to {MAX_CONNECTIONS}"


class Settings:
    """Checks each field of a dataclass as its `setting` or `variable` says. Raises `ConfigError`."""

    def __post_init__(self) -> None:
        for item in fields(self):  # pyright: ignore[reportArgumentType]  # its children are dataclasses
            check, value = item.metadata.get("check"), getattr(self, item.name)
            if check is None or (value is None and item.default is None):
                continue
            if why := check(value):
                raise ConfigError(item.metadata.get("variables", (item.name,))[0], value, why)


# --- strategies -------------------------------------------------------------------------------------------------------


class Shape(Enum):
    """The route that the data of a collective takes. The values are the codes on the wire and never change."""

    AUTO = 0
    RING = 1
    TREE = 2
    DIRECT = 3
    HALVING_DOUBLING = 4
    HIERARCHICAL = 5


@dataclass(frozen=True)
class Strategy:
    """A shape and, for a tree, the number of children of each node. Subclasses restrict the shapes.

    AUTO chooses by a cost model. RING is a ring or, with a root, a pipelined chain. TREE and DIRECT take few steps.
    HIERARCHICAL reduces inside each host first, so that each byte crosses the network once.
    """

    shape: Shape
    arity: int = 2

    AUTO: ClassVar[Self]
    RING: ClassVar[Self]
    TREE: ClassVar[Self]
    DIRECT: ClassVar[Self]
    HIERARCHICAL: ClassVar[Self]
    _allowed: ClassVar[frozenset[Shape]] = frozenset(Shape)

    def __post_init__(self) -> None:
        if self.shape not in self._allowed:
            raise ConfigError("strategy", self.shape.name, f"invalid for {type(self).__name__}")
        if why := whole(2, 255)(self.arity):
            raise ConfigError("arity", self.arity, f"{why}; it is the number of children of each node of a tree")

    def __str__(self) -> str:
        return f"tree({self.arity})" if self.shape is Shape.TREE else self.shape.name.lower()

    @classmethod
    def tree(cls, arity: int = 2) -> Self:
        """A tree whose nodes have `arity` children."""
        return cls(Shape.TREE, arity)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a name: `auto`, `ring`, `tree`, `tree(4)`, `direct`, `halving-doubling`, `hierarchical`.

        Raises `ConfigError` for any other text.
        """
        name, _, arity = text.strip().lower().rstrip(")").partition("(")
        try:
            return cls(Shape[name.replace("-", "_").upper()], int(arity or 2))
        except (KeyError, ValueError) as exc:
            known = ", ".join(sorted(shape.name.lower() for shape in cls._allowed))
            raise ConfigError(
                "strategy", text, f"unknown strategy; use one of: {known} (a tree may have an arity: tree(4))"
            ) from exc


class AllReduceStrategy(Strategy):
    """How an all-reduce moves its data: AUTO, RING, TREE, DIRECT, HALVING_DOUBLING or HIERARCHICAL.

    With HIERARCHICAL each byte crosses the network once in each direction.
    """

    HALVING_DOUBLING: ClassVar[Self]


class _RootedStrategy(Strategy):
    _allowed = frozenset(Shape) - {Shape.HALVING_DOUBLING}


class ReduceStrategy(_RootedStrategy):
    """How a reduce moves its data to the root: AUTO, RING, TREE, DIRECT or HIERARCHICAL.

    RING is a pipelined chain that ends at the root. With HIERARCHICAL one rank per host sends the host's sum.
    """


class BroadcastStrategy(_RootedStrategy):
    """How a broadcast moves its data from the root: AUTO, RING, TREE, DIRECT or HIERARCHICAL.

    RING is a pipelined chain that starts at the root. With HIERARCHICAL one rank per host receives the data and passes
    it on to the others of the host.
    """


for _kind in (AllReduceStrategy, ReduceStrategy, BroadcastStrategy):
    for _shape in _kind._allowed:  # pyright: ignore[reportPrivateUsage]
        setattr(_kind, _shape.name, _kind(_shape))


# --- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CollectiveConfig(Settings):
    """How collectives choose a strategy and split their data. Must be the same on every rank of a group."""

    all_reduce: AllReduceStrategy = AllReduceStrategy.AUTO
    """How an all-reduce moves its data."""
    reduce: ReduceStrategy = ReduceStrategy.AUTO
    """How a reduce does."""
    broadcast: BroadcastStrategy = BroadcastStrategy.AUTO
    """How a broadcast does."""
    latency: float | None = setting(None, positive)
    """Seconds that one message costs, however small: AUTO weighs it against the bandwidth. By default each link is
    measured when a group first has to choose, which takes milliseconds; if both are given nothing is measured."""
    bandwidth: float | None = setting(None, positive)
    """Bytes per second that one link carries; see `latency`."""
    connections: int | Literal["auto"] = setting("auto", _connections)
    """Connections of large arrays. With `auto` an all-reduce of 2 MiB and more goes over as many as the cores of the
    hosts can drive, with two threads each, and with 1 over the ranks' first connections, in one thread. A larger number
    is used as it is, by all collectives: also for rings of cables, to use both directions."""
    native_bytes: int | None = setting(MIB, lambda value: "" if value is None else whole(0)(value))
    """The size in bytes from which a backend's own collectives (Gloo's, MPI's) replace ours; None for never. The ranks
    agree on the call before each of them, which costs as many messages as a small array does: below 1 MiB that cost
    more than the engine saved, over Gloo and over MPI."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Settings):
    """What a backend needs to know beside its place in the group.

    Raises `ConfigError` for an invalid value and `InvalidRankError` for a `rank` that is not in `nodes`.
    """

    nodes: Sequence[str | Sequence[str]] = setting((), _several)
    """For `RingBackend`: the address of each rank as `host:port`, or several addresses to be tried in turn."""
    rank: int | None = None
    """For `RingBackend`: the index in `nodes` of this process."""
    timeout: float = setting(DEFAULT_TIMEOUT, positive)
    """Seconds that bound the creation of the group, and every call without a timeout of its own."""
    patience: float | None = setting(None, positive)
    """Seconds of silence after which a machine's ranks are lost (`PeerLostError`). A rank that only computes is not
    silent. Default: `RINGFORT_PATIENCE`, else 10."""
    encryption: Literal["on", "off"] | None = setting(None, on_off)
    """`off` disables encryption, and must be set on all ranks: only for networks that nobody else can reach, and for
    measuring. None means on, unless `RINGFORT_ENCRYPTION` says otherwise where `init` reads the environment (see
    `choose_encryption`)."""
    shared_memory: Literal["on", "off"] = setting("on", on_off)
    """Whether ranks of one host exchange data through shared memory where both sides can. `off` for measuring, and
    where data must not be in shared memory."""
    inbox_bytes: int = setting(64 * MIB, whole(MIB))
    """Bytes that a peer may send before they are received; beyond that a receive of something else fails."""
    max_object_bytes: int = setting(GIB, whole(MIB))
    """The largest encoded object that `broadcast_object` and `all_gather_object` accept."""
    collective: CollectiveConfig = field(default_factory=CollectiveConfig)
    """Strategies and connections of the collectives."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes:
            if self.rank is None:
                raise ConfigError("rank", None, "missing; pass the index of this process in nodes")
            if not 0 <= self.rank < len(self.nodes):
                raise InvalidRankError(self.rank, len(self.nodes))
            repeated = [node for i, node in enumerate(self.nodes) if node in self.nodes[:i]]
            if repeated:
                raise ConfigError("nodes", repeated[0], "named twice; every rank needs its own address")


@dataclass(frozen=True, kw_only=True)
class RpcConfig(Settings):
    """The limits of an `RpcAgent`. Each rank may have its own. Raises `ConfigError` for an invalid value."""

    workers: int = setting(8, whole(0))
    """Threads that run functions. With 0 functions run only when the program calls `handle_request`."""
    max_message_bytes: int = setting(GIB + MIB, whole(KIB))
    """The largest request or response that this rank accepts: an array of 1 GiB and what goes with it."""
    max_in_flight: int = setting(4096, whole(1))
    """Calls from this rank to one other rank that have not ended."""
    max_queued: int = setting(4096, whole(1))
    """Requests that wait here for a worker, from all ranks together."""
    max_held_bytes: int = setting(2 * (GIB + MIB), whole(KIB))
    """Bytes of requests and responses that this rank holds for one other rank."""
    max_references: int = setting(65536, whole(1))
    """Values that this rank keeps for the `RRef`s that one other rank has asked for. Each costs about 2 KB beside the
    value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_held_bytes < self.max_message_bytes:
            raise ConfigError("max_held_bytes", self.max_held_bytes, "must be at least max_message_bytes")


@dataclass(frozen=True, kw_only=True)
class HealthConfig(Settings):
    """How peers watch each other. `lan()` is the default; `wifi()` tolerates more and so notices later."""

    interval: float = setting(0.2, positive)
    """Seconds between two heartbeats on a control link."""
    patience: float | None = setting(None, positive)
    """Seconds of silence after which a peer is lost; a link with jitter gets up to one second more. Everything else
    that decides when a peer is lost is derived from it. Default: `RINGFORT_PATIENCE`, else 1."""
    caution: float = setting(6.0, positive)
    """How many times a link's own jitter is added to its usual pause before silence counts as loss."""
    slow_round_trip: float = setting(0.25, positive)
    """Seconds of smoothed round-trip time from which a peer counts as degraded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience is not None and self.patience < 2 * self.interval:
            raise ConfigError(
                "patience", self.patience, "must be at least two intervals, because one heartbeat may be late"
            )

    @classmethod
    def lan(cls) -> HealthConfig:
        """Return settings for cables and good Wi-Fi: a silent peer is lost after one to two seconds."""
        return cls()

    @classmethod
    def wifi(cls) -> HealthConfig:
        """Return settings for bad Wi-Fi: pauses of several seconds are tolerated."""
        return cls(interval=0.5, patience=5.0, slow_round_trip=1.0)


@dataclass(frozen=True, kw_only=True)
class ElectionConfig(Settings):
    """How a leader is elected."""

    settle: float = setting(0.3, positive)
    """Seconds without a leader before a peer becomes a candidate, so that links have time to come up."""
    timeout: float = setting(0.5, positive)
    """Seconds that a candidate waits for votes before it tries again, or continues with the votes it has."""


@dataclass(frozen=True, kw_only=True)
class AutoDiscoveryConfig(Settings):
    """How peers find each other, and when they form a group. Raises `ConfigError` for an invalid value."""

    min_peers: int = setting(0, whole(0))
    """The least number of peers beside this one in an epoch, as in `join`. Fewer peers wait."""
    max_peers: int | None = setting(None, whole(0))
    """The largest number of peers beside this one in an epoch; the rest wait. None for no limit."""
    timeout: float = setting(30.0, positive)
    """Seconds that `wait_for_peers` and `establish_ring` wait unless they are given a timeout."""
    settle: float = setting(0.5, positive)
    """Seconds in which no new peer must have come before new peers are admitted, so that many join in one epoch. They
    are admitted after three times as long in any case."""
    on_partition: Literal["majority", "stop", "continue"] = setting("majority", one_of("majority", "stop", "continue"))
    """What a group does that has lost contact with members which may be alive. `majority`: continue with more than half
    of the last epoch, or with exactly half including its lowest peer id. `stop`: wait until all are back. `continue`:
    continue in any case, and risk that the run splits in two. Must be the same on all peers."""
    run: str = setting("", _run_name)
    """Which of the cluster's runs this peer belongs to. Only peers of one run form an epoch; peers of other runs
    introduce each other and are otherwise ignored. `ringfort run` sets its `--name` here."""
    elastic: bool = False
    """Whether the program is an elastic run, as `ringfort.elastic` sets it: members are seated only with the state of
    the run. Must be the same on all peers of a run."""
    restart_without: Sequence[str] = setting((), _several)
    """Machines, by name or peer id, that are gone for good: a process that starts again on a machine which was in a
    group with them does not wait for them. If one of them is still working elsewhere, two groups exist then."""
    peers: Sequence[str] = setting((), _several)
    """Addresses `host` or `host:port` of peers, for networks that block multicast. One is enough: it knows the rest."""
    multicast: bool = True
    """Whether to look for peers by mDNS."""
    interfaces: Sequence[str] = setting((), _several)
    """Network interfaces to be found on, by name, address or network; empty for all useful ones."""
    port: int = setting(0, whole(0, 65535))
    """Where this peer accepts connections; 0 for the usual port or, if that is taken, any free one."""
    encryption: Literal["on", "off"] | None = setting(None, on_off)
    """`off` disables encryption, and must be set on all peers: only for networks that nobody else can reach, and for
    measuring. None means on, unless `RINGFORT_ENCRYPTION` says otherwise (see `choose_encryption`)."""
    program: str = ""
    """The name of this process in `ringfort peers`; empty for the name of its script."""
    health: HealthConfig = field(default_factory=HealthConfig)
    """How peers watch each other."""
    election: ElectionConfig = field(default_factory=ElectionConfig)
    """How a leader is elected."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_peers is not None and self.max_peers < self.min_peers:
            raise ConfigError("max_peers", self.max_peers, f"must be at least min_peers={self.min_peers}")


# --- the environment --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment(Settings):
    """What the launcher or the user has told this process. Read by `from_mapping`.

    The first variable of a field that is set counts, and of several launchers the first that tells a place: see
    `ringfort.launchers`.
    """

    rank: int | None = variable(*(one.rank for one in LAUNCHERS))
    world_size: int | None = variable(*(one.world_size for one in LAUNCHERS))
    local_rank: int | None = variable(*(one.local_rank for one in LAUNCHERS))
    """The index of this process among those of its launcher on this machine."""
    local_world_size: int | None = variable(*(one.local_world_size for one in LAUNCHERS if one.local_world_size))
    """The number of processes of its launcher on this machine; None if the launcher does not tell."""
    launcher: str = field(default="", metadata={"found": name_of})
    """The launcher that has told the place; empty if there is none."""
    half_told: str = field(default="", metadata={"found": half_told})
    """What is missing if the launcher has told half a place; empty otherwise."""
    step: tuple[int, int] | None = field(default=None, metadata={"found": step_of})
    """The numbers of the Slurm job and of its step that `srun` has started this process in."""
    slurm_job: str | None = variable("SLURM_JOB_ID")
    """The Slurm job of this process, also of one that no `srun` has started."""
    slurm_hosts: str | None = variable("SLURM_STEP_NODELIST")
    mpi_job: str | None = variable("PMIX_NAMESPACE")
    """Open MPI's name of the `mpiexec` that has started this process."""
    master_addr: str | None = variable("MASTER_ADDR")
    master_port: int | None = variable("MASTER_PORT")
    master: str | None = variable("RINGFORT_MASTER")
    """Where the ranks meet, as `host:port`: `ringfort run` leaves MASTER_PORT to torch's own store."""
    timeout: float | None = variable("RINGFORT_TIMEOUT")
    patience: float | None = variable("RINGFORT_PATIENCE", check=positive)
    """Seconds of silence after which a machine is lost."""
    listen_fd: int | None = variable("RINGFORT_LISTEN_FD")
    """A listening socket that the launcher opened for rank 0, so that no port has to be guessed."""
    home: str | None = variable("RINGFORT_HOME")
    """The folder to use in place of `~/.ringfort`."""
    key: str | None = variable("RINGFORT_KEY", secret=True)
    """A join code, or `passphrase:` and a passphrase. A secret: it is in no `repr` and in no error."""
    key_file: str | None = variable("RINGFORT_KEY_FILE")
    """A file that contains what `RINGFORT_KEY` would: how containers are given secrets."""
    cluster: str | None = variable("RINGFORT_CLUSTER")
    """The name of the cluster whose secret is used; `default` if it is not set."""
    encryption: str | None = variable("RINGFORT_ENCRYPTION", check=on_off)
    shared_memory: str | None = variable("RINGFORT_SHM", check=on_off)
    interfaces: tuple[str, ...] = variable("RINGFORT_INTERFACES", default=())
    """The interfaces to be found on, by name, address or network, separated by commas."""
    peers: tuple[str, ...] = variable("RINGFORT_PEERS", default=())
    """Addresses of peers, `host` or `host:port`, separated by commas."""
    restart_without: tuple[str, ...] = variable("RINGFORT_RESTART_WITHOUT", default=())
    """Machines that a restart does not wait for, by name or peer id, separated by commas."""
    elastic_nodes: str | None = variable("RINGFORT_ELASTIC_NODES", check=_members)
    """`ringfort run --elastic --nodes`: the least and the largest number of members."""
    elastic_name: str | None = variable("RINGFORT_ELASTIC_NAME", check=elastic_name)
    """`ringfort run --elastic --name`: the name of the run."""
    elastic_file: str | None = variable("RINGFORT_ELASTIC_FILE")
    """A file of `ringfort run --elastic` in which `elastic()` leaves a mark, so that the launcher knows of the call."""
    backend: str | None = variable("RINGFORT_BACKEND")
    """What `init` creates; `tcp` if it is not set."""
    cuda_wait: str | None = variable("RINGFORT_CUDA_WAIT", check=one_of("host", "stream"))
    """What waits for a collective of CUDA tensors: the `host`, as with Gloo. `stream` is accepted, warns and means
    `host`."""
    gloo_interface: str | None = variable("GLOO_SOCKET_IFNAME")
    """The network interface that Gloo listens on, by name, to override our choice."""

    @property
    def home_folder(self) -> Path:
        """The folder of this node's key and of the cluster secrets. Raises `ConfigError` if the user has no home."""
        try:
            return Path(self.home or DEFAULT_HOME).expanduser().absolute()
        except RuntimeError as exc:
            raise ConfigError("RINGFORT_HOME", self.home, "this user has no home folder; name a folder") from exc

    @classmethod
    def from_mapping(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Read `variables`, by default the environment of this process. Raises `ConfigError` for an invalid value."""
        everything = os.environ if variables is None else variables
        variables = of_one_launcher(everything)
        found: dict[str, Any] = {}
        for item in fields(cls):
            if "found" in item.metadata:
                found[item.name] = item.metadata["found"](everything)
                continue
            name = next((name for name in item.metadata["variables"] if variables.get(name)), None)
            if name is not None:
                found[item.name] = _parse(name, variables[name], str(item.type))
        return cls(**found)

    @property
    def hosts(self) -> list[str]:
        """The names of the machines of the Slurm step that this process belongs to, in order; none outside of a step.
        Raises `ConfigError` for a list that Slurm does not write."""
        if self.step is None or self.slurm_hosts is None:
            return []
        try:
            return expand_hosts(self.slurm_hosts)
        except ValueError as exc:
            raise ConfigError("SLURM_STEP_NODELIST", self.slurm_hosts, "is not a list of hosts") from exc

    @property
    def contacts(self) -> tuple[str, ...]:
        """The addresses of peers: those of `RINGFORT_PEERS`, else the machines of the Slurm step, if it has several."""
        hosts = () if self.peers else tuple(self.hosts)
        return hosts if len(hosts) > 1 else self.peers


def _parse(name: str, text: str, kind: str) -> str | int | float | tuple[str, ...]:
    """`text` as the type of its field, whose annotation is `kind`."""
    if kind.startswith("tuple"):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return float(text) if kind.startswith("float") else int(text) if kind.startswith("int") else text
    except ValueError as exc:
        raise ConfigError(name, text, "must be a number") from exc


def patience_of(given: float | None, default: float) -> float:
    """`given`, else `RINGFORT_PATIENCE`, else `default`."""
    told = Environment.from_mapping().patience if given is None else given
    return default if told is None else told


def group_config_of(group: DistributedConfig | None, told: Environment) -> DistributedConfig:
    """Return the settings of the collectives. The environment decides what `group` leaves at its default."""
    usual = DistributedConfig()
    settings = {name: getattr(told, name) for name in ("timeout", "shared_memory")}
    said = {name: value for name, value in settings.items() if value is not None}
    if group is not None:
        said = {name: value for name, value in said.items() if getattr(group, name) == getattr(usual, name)}
    return replace(group or usual, **said)


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `variables` added, for a child process."""
    return {**os.environ, **variables}


def set_for_this_process(variables: Mapping[str, str]) -> None:
    """Set variables of this process's environment: a scheduler whose workers run already tells them their places so."""
    os.environ.update(variables)


def is_set(variable: str) -> bool:
    """Whether the user has set an environment variable to a non-empty value: a launcher does not change it then."""
    return bool(os.environ.get(variable))


@contextmanager
def hidden(*variables: str) -> Generator[None]:
    """Hide environment variables for a moment, from a library that would take them for its own."""
    kept = {name: os.environ.pop(name) for name in variables if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


TELEMETRY: Final = "RINGFORT_TELEMETRY"
"""The folder for the traces of this process, which its launcher has created; or `off`."""


def telemetry_folder() -> str | None:
    """The folder for traces that this process was told; None if it was told none. `off` turns them off."""
    return os.environ.get(TELEMETRY) or None


RUN: Final = "RINGFORT_RUN"
"""The name of the run, which a launcher tells its ranks. Those who watch see it."""


def launched_run() -> str:
    """The name of the run that the launcher of this process told; empty if there is none."""
    return os.environ.get(RUN, "")


def run_name() -> str:
    """The name of the run that a launcher has started this process for: `ringfort run --name`, or torchrun's
    `--rdzv-id`; empty if it has none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name  # torchrun's default


def runtime_folder() -> Path:
    """The folder for files of running programs of this user: in memory, where the system has such a place."""
    if (runtime := os.environ.get("XDG_RUNTIME_DIR")) and os.access(runtime, os.W_OK):
        return Path(runtime) / "ringfort"
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    return base / f"ringfort-{os.getuid()}"


def is_dumb_terminal() -> bool:
    """Whether the terminal, if there is one, cannot move its cursor."""
    return os.environ.get("TERM", "") in ("dumb", "unknown")


def has_screen() -> bool:
    """Whether a browser that this process opens is in front of the person who started it: not through ssh."""
    if os.environ.get("SSH_CONNECTION"):
        return False
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


# --- arguments of calls -----------------------------------------------------------------------------------------------


def check_world_size(world_size: int) -> None:
    """Raise `InvalidWorldSizeError` unless `world_size` is a whole number of at least 1."""
    if whole(1)(world_size):
        raise InvalidWorldSizeError(world_size)


def member_range(nodes: str | int) -> tuple[int, int | None]:
    """Parse the least and the largest number of members of an elastic run: `2:8`, `2:` without a limit (None), or `2`
    for both. Raises `ConfigError`."""
    if why := _members(nodes):
        raise ConfigError("nodes", nodes, why)
    return _split_range(nodes)


def check_timeout(timeout: float, name: str = "timeout") -> None:
    """Raise `ConfigError` unless `timeout` is a positive, finite number of seconds."""
    if why := positive(timeout):
        raise ConfigError(name, timeout, why)


def choose_encryption(keyword: str | None, configured: Encryption | None, told: str | None) -> Encryption:
    """Return whether to encrypt. A keyword of the call wins; then the configuration and the environment, which must not
    contradict each other; the default is on.

    Raises `ConfigError` if the keyword is neither on nor off, and if the configuration and `RINGFORT_ENCRYPTION`
    contradict each other: neither may silently turn off what the other asked for.
    """
    if keyword is not None and (why := on_off(keyword)):
        raise ConfigError("encryption", keyword, why)
    if keyword is None and None not in (configured, told) and configured != told:
        why = f"contradicts RINGFORT_ENCRYPTION={told}; remove one of the two, or pass encryption= to the call"
        raise ConfigError("encryption", configured, why)
    return "off" if (keyword or configured or told) == "off" else "on"


def parse_address(text: str, name: str = "address") -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`. Raises `ConfigError`."""
    host, colon, port = text.strip().rpartition(":")
    if not colon:
        raise ConfigError(name, text, "must be host:port, such as 192.168.1.20:29500")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(name, text, "must have its IPv6 address in brackets, such as [fe80::1]:29500")
    if not host:
        raise ConfigError(name, text, "must have a host before the colon, such as 192.168.1.20:29500")
    if not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigError(name, text, "must have a port from 0 to 65535")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The text that `parse_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
