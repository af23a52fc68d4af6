"""`Setup`: who this process is in its cluster and how it was told to behave. Made once, when a node is made."""

from __future__ import annotations

import platform
import secrets
import sys
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfort.cluster.core.peer_messages import Member
from ringfort.cluster.core.topology import Accelerator
from ringfort.cluster.discovery.mdns import TOKEN_BYTES
from ringfort.cluster.net.host import host_id
from ringfort.cluster.net.profile import from_torch, own_version
from ringfort.config import CLUSTER_PATIENCE, AutoDiscoveryConfig, Environment, choose_encryption, patience_of
from ringfort.errors import InvalidArgumentError
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.known import KnownKeys
from ringfort.identity.namespace import NetworkNamespace
from ringfort.transport.handshake import Handshake

MAX_SLOTS = 4096
"""As `messages.Member` has it."""


class SetupState(msgspec.Struct, frozen=True):
    """A `Setup` for the control process. Holds secrets: it goes over a socket that nobody else has, never in arguments
    or the environment."""

    config: AutoDiscoveryConfig
    identity: bytes
    cluster: str
    static: bytes
    token: str
    slots: int
    home: str
    name: str
    version: str
    accelerators: tuple[Accelerator, ...]


@dataclass(frozen=True)
class Setup:
    """Nothing in its `repr` is secret."""

    config: AutoDiscoveryConfig
    credentials: Credentials
    token: str
    """New in every process: its name in announcements, and the last part of its peer id."""
    slots: int
    home: Path
    name: str
    version: str
    accelerators: tuple[Accelerator, ...] = ()
    """Those that the program's torch knows of; empty where it knows none or is not there."""
    keys: KnownKeys = field(default_factory=KnownKeys, compare=False, repr=False)

    @classmethod
    def make(
        cls,
        config: AutoDiscoveryConfig | None,
        slots: int,
        credentials: Credentials | None,
        encryption: str | None = None,
    ) -> Setup:
        """What is not given comes from the environment: `RINGFORT_INTERFACES`, `RINGFORT_PEERS`, `RINGFORT_PATIENCE`,
        `RINGFORT_RESTART_WITHOUT`, `RINGFORT_ENCRYPTION`, and this user's own key and cluster.

        Raises `ConfigError`, `InvalidArgumentError` and `IdentityError`.
        """
        if not isinstance(slots, int) or isinstance(slots, bool) or not 0 <= slots <= MAX_SLOTS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("slots", slots, f"must be a whole number from 0 to {MAX_SLOTS}")
        told = Environment.from_mapping()
        return cls(
            _completed(config or AutoDiscoveryConfig(), told, encryption, is_observer=slots == 0),
            credentials or Credentials.load(told),
            secrets.token_hex(TOKEN_BYTES),
            slots,
            told.home_folder,
            platform.node()[:64],
            own_version(),
        )

    @property
    def state(self) -> SetupState:
        """All of it, for `resume` in another process of this user."""
        credentials = self.credentials
        return SetupState(
            self.config,
            credentials.identity.private_bytes(),
            credentials.namespace.join_code(),
            credentials.static.private_bytes_raw(),
            self.token,
            self.slots,
            str(self.home),
            self.name,
            self.version,
            self.accelerators or from_torch(sys.modules.get("torch")),
        )

    @classmethod
    def resume(cls, state: SetupState) -> Setup:
        """The setup that `state` was taken of."""
        credentials = Credentials(
            NodeIdentity.from_private_bytes(state.identity),
            NetworkNamespace.from_join_code(state.cluster),
            X25519PrivateKey.from_private_bytes(state.static),
        )
        home = Path(state.home)
        return cls(
            state.config, credentials, state.token, state.slots, home, state.name, state.version, state.accelerators
        )

    @property
    def peer(self) -> str:
        """This peer's id."""
        return f"{self.credentials.identity.peer_id}.{self.token}"

    @property
    def network_id(self) -> bytes:
        """What the cluster is known by in public."""
        return self.credentials.namespace.network_id

    @property
    def vote_scope(self) -> str:
        """Names the epochs that may follow each other, for the files of `standings.py`: a run is bound by what its own
        processes have promised, not by those of another run."""
        network, run = self.network_id.hex(), self.config.run
        return f"{network}.{sha256(run.encode()).hexdigest()[:16]}" if run else network

    @property
    def wall(self) -> Credentials | None:
        """What connections are opened with; None with encryption off."""
        return None if self.config.encryption == "off" else self.credentials

    def proved(self, handshake: Handshake) -> str:
        """Return the node that the other side of an open connection proved to be; empty with encryption off.

        Raises `HandshakeError` if another key has shown the same id before.
        """
        return self.keys.name(handshake.identity) if handshake.identity else ""

    def member(self) -> Member:
        """This peer before it has an address."""
        return Member(self.peer, host_id(self.network_id), self.slots, name=self.name)


def _completed(
    config: AutoDiscoveryConfig, told: Environment, encryption: str | None, *, is_observer: bool
) -> AutoDiscoveryConfig:
    if not config.program and not is_observer:
        config = replace(config, program=Path(sys.argv[0] if sys.argv else "").name)
    if not config.interfaces and told.interfaces:
        config = replace(config, interfaces=_listed(told.interfaces))
    if not config.peers and told.peers:
        config = replace(config, peers=_listed(told.peers))
    if not config.restart_without and told.restart_without:
        config = replace(config, restart_without=_listed(told.restart_without))
    if config.health.patience is None:
        config = replace(config, health=replace(config.health, patience=patience_of(None, CLUSTER_PATIENCE)))
    return replace(config, encryption=choose_encryption(encryption, config.encryption, told.encryption))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
