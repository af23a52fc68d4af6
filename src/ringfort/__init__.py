"""Ringfort trains one model across the machines you already own.

The layers, top to bottom; each imports only those below it (tests/unit/test_layers.py):

    cli/          one file a verb: parse, call, print
    bench/ demo/  what the verbs `bench` and `demo` do, and launch/ what `run` does; local.py, children.py and
                  keeper.py start ranks on this machine and see them to their end
    torch/        process_group.py: the `torch.distributed` backend; rendezvous, store, torchrun; autoload.py is what
                  torch runs by itself
    testing/      shipped: conformance checks for any Backend, virtual clock, fault timetable, simulated network
    training/     average_gradients, for any framework
    rpc/          RpcAgent: functions of one rank that others call; inbound, outbound (pure), exchange, serving
    forming.py    init() and join(): how a process gets its context
    context.py    DistributedContext: any backend + collectives + metrics
    cluster/      discovery, health, election, membership (pure), peer.py (all of them as one), control.py (their I/O),
                  service.py (a process for it), node.py (this process as a peer),
                  backend.py (AutoDiscoveryBackend)
    compression/  codecs (pure: tensor to bytes and back), error feedback, the compressed all-reduce, auto
    collectives/  plan.py (pure: who sends which slice when), kernels (arithmetic), arrays (one door for all libraries)
    backends/     base.py (Backend), group.py (what is true for one set of ranks only) and tcp, ring, simulated, sub,
                  hybrid; native.py and gloo, mpi, nccl (other engines)
    transport/    frames, messages, inbound, outbound (pure: the protocol), engine (moves it), tcp, shm, memory
                  (streams), board (what ranks of one host share), opening, records (pure: the wall), door; locks,
                  finalisers and forks (what Ctrl-C, a dropped group and a forked child must not break)
    identity/     who a node is, the cluster secret and its join codes; noise.py (pure handshake)
    observe/      metrics; steps: how far a program is
    config.py     settings; the only reader of the environment
    errors.py     every exception

The names are fetched when first used (PEP 562), so that `import ringfort` costs nothing where only the command line or
a torch entry point is wanted: NumPy alone takes most of the 200 ms that the import may take.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringfort.backends.base import Backend
    from ringfort.backends.gloo import GlooBackend
    from ringfort.backends.hybrid import HybridBackend
    from ringfort.backends.mpi import MpiBackend
    from ringfort.backends.nccl import NcclBackend
    from ringfort.backends.ring import RingBackend
    from ringfort.backends.simulated import SimulatedBackend
    from ringfort.backends.sub import SubBackend
    from ringfort.backends.tcp import TcpBackend
    from ringfort.cluster.backend import AutoDiscoveryBackend
    from ringfort.cluster.election import ElectionEvent, ElectionManager, ElectionState
    from ringfort.cluster.health import HealthEvent, HealthMonitor, HealthStatus, HealthSummary
    from ringfort.cluster.topology import ClusterTopology, ConnectionProfile, NodeProfile
    from ringfort.collectives.ops import ReduceOp
    from ringfort.collectives.work import Work
    from ringfort.compression.compressor import GradientCompressor
    from ringfort.compression.strategy import CompressionStrategy, QuantizationType
    from ringfort.config import (
        AllReduceStrategy,
        AutoDiscoveryConfig,
        BroadcastStrategy,
        CollectiveConfig,
        DistributedConfig,
        ElectionConfig,
        HealthConfig,
        ReduceStrategy,
        RpcConfig,
    )
    from ringfort.context import DistributedContext
    from ringfort.errors import (
        AbortedError,
        BackendUnavailableError,
        ChannelClosedError,
        CollectiveMismatchError,
        ConfigError,
        ControlLostError,
        DistributedError,
        EncryptionMismatchError,
        EpochEndedError,
        FunctionNotFoundError,
        GradientMismatchError,
        HandshakeError,
        IdentityError,
        InboxFullError,
        InvalidArgumentError,
        InvalidKeyError,
        InvalidMessageError,
        InvalidRankError,
        InvalidWorldSizeError,
        JoinCodeError,
        NamespaceMismatchError,
        NoConnectionError,
        NonFiniteError,
        NotEstablishedError,
        ObjectTooLargeError,
        OperationTimeoutError,
        PeerLostError,
        ProtocolError,
        RankTakenError,
        RefusedError,
        RemoteError,
        RendezvousError,
        RendezvousTimeoutError,
        RpcError,
        RpcNoConnectionError,
        RpcOverloadedError,
        RpcPeerLostError,
        RpcTimeoutError,
        SelfSendError,
        SizeMismatchError,
        TamperedError,
        TransportError,
        UnsupportedArrayError,
        UnsupportedOpError,
        VersionMismatchError,
        WorldSizeMismatchError,
    )
    from ringfort.forming import init, join
    from ringfort.identity.keypair import NodeIdentity
    from ringfort.identity.namespace import NetworkNamespace
    from ringfort.observe.metrics import DistributedMetrics, MetricsSnapshot
    from ringfort.rpc.agent import RpcAgent
    from ringfort.rpc.references import RRef

_HOMES = {
    "backends.base": ("Backend",),
    "backends.gloo": ("GlooBackend",),
    "backends.hybrid": ("HybridBackend",),
    "backends.mpi": ("MpiBackend",),
    "backends.nccl": ("NcclBackend",),
    "backends.ring": ("RingBackend",),
    "backends.simulated": ("SimulatedBackend",),
    "backends.sub": ("SubBackend",),
    "backends.tcp": ("TcpBackend",),
    "cluster.backend": ("AutoDiscoveryBackend",),
    "cluster.election": ("ElectionEvent", "ElectionManager", "ElectionState"),
    "cluster.health": ("HealthEvent", "HealthMonitor", "HealthStatus", "HealthSummary"),
    "cluster.topology": ("ClusterTopology", "ConnectionProfile", "NodeProfile"),
    "collectives.ops": ("ReduceOp",),
    "collectives.work": ("Work",),
    "compression.compressor": ("GradientCompressor",),
    "compression.strategy": ("CompressionStrategy", "QuantizationType"),
    "config": (
        "AllReduceStrategy",
        "AutoDiscoveryConfig",
        "BroadcastStrategy",
        "CollectiveConfig",
        "DistributedConfig",
        "ElectionConfig",
        "HealthConfig",
        "ReduceStrategy",
        "RpcConfig",
    ),
    "context": ("DistributedContext",),
    "errors": (
        "AbortedError",
        "BackendUnavailableError",
        "ChannelClosedError",
        "CollectiveMismatchError",
        "ConfigError",
        "ControlLostError",
        "DistributedError",
        "EncryptionMismatchError",
        "EpochEndedError",
        "FunctionNotFoundError",
        "GradientMismatchError",
        "HandshakeError",
        "IdentityError",
        "InboxFullError",
        "InvalidArgumentError",
        "InvalidKeyError",
        "InvalidMessageError",
        "InvalidRankError",
        "InvalidWorldSizeError",
        "JoinCodeError",
        "NamespaceMismatchError",
        "NoConnectionError",
        "NonFiniteError",
        "NotEstablishedError",
        "ObjectTooLargeError",
        "OperationTimeoutError",
        "PeerLostError",
        "ProtocolError",
        "RankTakenError",
        "RefusedError",
        "RemoteError",
        "RendezvousError",
        "RendezvousTimeoutError",
        "RpcError",
        "RpcNoConnectionError",
        "RpcOverloadedError",
        "RpcPeerLostError",
        "RpcTimeoutError",
        "SelfSendError",
        "SizeMismatchError",
        "TamperedError",
        "TransportError",
        "UnsupportedArrayError",
        "UnsupportedOpError",
        "VersionMismatchError",
        "WorldSizeMismatchError",
    ),
    "forming": ("init", "join"),
    "identity.keypair": ("NodeIdentity",),
    "identity.namespace": ("NetworkNamespace",),
    "observe.metrics": (
        "DistributedMetrics",
        "MetricsSnapshot",
    ),
    "rpc.agent": ("RpcAgent",),
    "rpc.references": ("RRef",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ringfort' has no attribute {name!r}")
    value = getattr(import_module(f"ringfort.{_HOME_OF[name]}"), name)
    globals()[name] = value  # the next time it is found without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AbortedError",
    "AllReduceStrategy",
    "AutoDiscoveryBackend",
    "AutoDiscoveryConfig",
    "Backend",
    "BackendUnavailableError",
    "BroadcastStrategy",
    "ChannelClosedError",
    "ClusterTopology",
    "CollectiveConfig",
    "CollectiveMismatchError",
    "CompressionStrategy",
    "ConfigError",
    "ConnectionProfile",
    "ControlLostError",
    "DistributedConfig",
    "DistributedContext",
    "DistributedError",
    "DistributedMetrics",
    "ElectionConfig",
    "ElectionEvent",
    "ElectionManager",
    "ElectionState",
    "EncryptionMismatchError",
    "EpochEndedError",
    "FunctionNotFoundError",
    "GlooBackend",
    "GradientCompressor",
    "GradientMismatchError",
    "HandshakeError",
    "HealthConfig",
    "HealthEvent",
    "HealthMonitor",
    "HealthStatus",
    "HealthSummary",
    "HybridBackend",
    "IdentityError",
    "InboxFullError",
    "InvalidArgumentError",
    "InvalidKeyError",
    "InvalidMessageError",
    "InvalidRankError",
    "InvalidWorldSizeError",
    "JoinCodeError",
    "MetricsSnapshot",
    "MpiBackend",
    "NamespaceMismatchError",
    "NcclBackend",
    "NetworkNamespace",
    "NoConnectionError",
    "NodeIdentity",
    "NodeProfile",
    "NonFiniteError",
    "NotEstablishedError",
    "ObjectTooLargeError",
    "OperationTimeoutError",
    "PeerLostError",
    "ProtocolError",
    "QuantizationType",
    "RRef",
    "RankTakenError",
    "ReduceOp",
    "ReduceStrategy",
    "RefusedError",
    "RemoteError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "RingBackend",
    "RpcAgent",
    "RpcConfig",
    "RpcError",
    "RpcNoConnectionError",
    "RpcOverloadedError",
    "RpcPeerLostError",
    "RpcTimeoutError",
    "SelfSendError",
    "SimulatedBackend",
    "SizeMismatchError",
    "SubBackend",
    "TamperedError",
    "TcpBackend",
    "TransportError",
    "UnsupportedArrayError",
    "UnsupportedOpError",
    "VersionMismatchError",
    "Work",
    "WorldSizeMismatchError",
    "init",
    "join",
]
