"""The public names, each with its module. `__init__.py` reads this file: there is no other list of them."""

from .backends.base import Backend as Backend
from .backends.engines.gloo import GlooBackend as GlooBackend
from .backends.engines.hybrid import HybridBackend as HybridBackend
from .backends.engines.mpi import MpiBackend as MpiBackend
from .backends.engines.nccl import NcclBackend as NcclBackend
from .backends.ring import RingBackend as RingBackend
from .backends.simulated import SimulatedBackend as SimulatedBackend
from .backends.sub import SubBackend as SubBackend
from .backends.tcp import TcpBackend as TcpBackend
from .cluster.backend import AutoDiscoveryBackend as AutoDiscoveryBackend
from .cluster.core.election import (
    ElectionEvent as ElectionEvent,
    ElectionManager as ElectionManager,
    ElectionState as ElectionState,
)
from .cluster.core.health import (
    HealthEvent as HealthEvent,
    HealthMonitor as HealthMonitor,
    HealthStatus as HealthStatus,
    HealthSummary as HealthSummary,
)
from .cluster.core.topology import (
    ClusterTopology as ClusterTopology,
    ConnectionProfile as ConnectionProfile,
    NodeProfile as NodeProfile,
)
from .collectives.ops import ReduceOp as ReduceOp
from .collectives.work import Work as Work
from .compression.compressor import GradientCompressor as GradientCompressor
from .compression.strategy import CompressionStrategy as CompressionStrategy, QuantizationType as QuantizationType
from .config import (
    AllReduceStrategy as AllReduceStrategy,
    AutoDiscoveryConfig as AutoDiscoveryConfig,
    BroadcastStrategy as BroadcastStrategy,
    CollectiveConfig as CollectiveConfig,
    DistributedConfig as DistributedConfig,
    ElectionConfig as ElectionConfig,
    HealthConfig as HealthConfig,
    ReduceStrategy as ReduceStrategy,
    RpcConfig as RpcConfig,
)
from .context import DistributedContext as DistributedContext
from .errors import (
    AbortedError as AbortedError,
    BackendUnavailableError as BackendUnavailableError,
    ChannelClosedError as ChannelClosedError,
    CheckpointError as CheckpointError,
    CollectiveMismatchError as CollectiveMismatchError,
    ConfigError as ConfigError,
    ControlLostError as ControlLostError,
    DistributedError as DistributedError,
    DivergedError as DivergedError,
    EncryptionMismatchError as EncryptionMismatchError,
    EpochEndedError as EpochEndedError,
    FunctionNotFoundError as FunctionNotFoundError,
    GradientLayoutError as GradientLayoutError,
    GradientMismatchError as GradientMismatchError,
    HandshakeError as HandshakeError,
    IdentityError as IdentityError,
    InboxFullError as InboxFullError,
    InvalidArgumentError as InvalidArgumentError,
    InvalidKeyError as InvalidKeyError,
    InvalidMessageError as InvalidMessageError,
    InvalidRankError as InvalidRankError,
    InvalidWorldSizeError as InvalidWorldSizeError,
    JoinCodeError as JoinCodeError,
    LocalRankLostError as LocalRankLostError,
    LocalRunError as LocalRunError,
    NamespaceMismatchError as NamespaceMismatchError,
    NoConnectionError as NoConnectionError,
    NonFiniteError as NonFiniteError,
    NonFiniteStepError as NonFiniteStepError,
    NotEstablishedError as NotEstablishedError,
    ObjectTooLargeError as ObjectTooLargeError,
    OperationTimeoutError as OperationTimeoutError,
    PeerLostError as PeerLostError,
    ProtocolError as ProtocolError,
    RankTakenError as RankTakenError,
    RefusedError as RefusedError,
    RemoteError as RemoteError,
    RendezvousError as RendezvousError,
    RendezvousTimeoutError as RendezvousTimeoutError,
    RpcError as RpcError,
    RpcNoConnectionError as RpcNoConnectionError,
    RpcOverloadedError as RpcOverloadedError,
    RpcPeerLostError as RpcPeerLostError,
    RpcTimeoutError as RpcTimeoutError,
    SelfSendError as SelfSendError,
    SizeMismatchError as SizeMismatchError,
    StateTransferError as StateTransferError,
    TamperedError as TamperedError,
    TransportError as TransportError,
    UnsupportedArrayError as UnsupportedArrayError,
    UnsupportedOpError as UnsupportedOpError,
    VersionMismatchError as VersionMismatchError,
    WorldSizeMismatchError as WorldSizeMismatchError,
)
from .identity.keypair import NodeIdentity as NodeIdentity
from .identity.namespace import NetworkNamespace as NetworkNamespace
from .launch.local_group import LocalGroup as LocalGroup, local as local
from .rpc.agent import RpcAgent as RpcAgent
from .rpc.references import RRef as RRef
from .startup import init as init, join as join
from .telemetry.log import loading as loading, log as log, log_to as log_to
from .telemetry.metrics import DistributedMetrics as DistributedMetrics, MetricsSnapshot as MetricsSnapshot
from .training.elastic.run import ElasticRun as ElasticRun, elastic as elastic
from .training.elastic.step import Step as Step
from .training.local_steps.run import LocalSteps as LocalSteps
