"""`Setup`: the identity and the settings of this process in its cluster. Made once for each node."""

from __future__ import annotations

import platform
import secrets
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from ringfort.cluster.core.contacts import node_of
from ringfort.cluster.core.peer_messages import Member
from ringfort.cluster.core.topology import Accelerator
from ringfort.cluster.discovery.mdns import TOKEN_BYTES
from ringfort.cluster.net.host import host_id
from ringfort.cluster.net.profile import from_torch, own_version
from ringfort.config import CLUSTER_PATIENCE, AutoDiscoveryConfig, Environment, choose_encryption, patience_of
from ringfort.errors import HandshakeError, InvalidArgumentError
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import KnownKeys

MAX_SLOTS = 4096
"""The limit of `Member.slots`."""


@dataclass(frozen=True)
class Setup:
    """It travels to the control process, with its secrets, over a socket that no other process has (`ipc.py`): never in
    arguments or in the environment. Its `repr` shows no secret."""

    config: AutoDiscoveryConfig
    credentials: Credentials
    token: str
    """Random, new in every process: its name in announcements, and the last part of its peer id."""
    slots: int
    home: Path
    name: str
    version: str
    accelerators: tuple[Accelerator, ...] = ()
    """Those that the program's torch has found; empty if none or without torch."""
    telemetry: Path | None = None
    """The folder with the traces of the ranks that a launcher has started."""
    listens: bool = True
    """Whether others can connect to it, and hear of it. A viewer only connects to others."""

    @classmethod
    def make(
        cls,
        config: AutoDiscoveryConfig | None,
        slots: int,
        credentials: Credentials | None,
        encryption: str | None = None,
        telemetry: Path | None = None,
        *,
        listens: bool = True,
    ) -> Setup:
        """Take what is not given from the environment: `RINGFORT_INTERFACES`, `RINGFORT_PEERS`, `RINGFORT_PATIENCE`,
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
            telemetry=telemetry,
            listens=listens,
        )

    def with_accelerators(self) -> Setup:
        """Return this setup with the accelerators that the program's torch has found."""
        return replace(self, accelerators=self.accelerators or from_torch(sys.modules.get("torch")))

    @cached_property
    def _known_keys(self) -> KnownKeys:
        return KnownKeys()

    @property
    def peer(self) -> str:
        """This peer's id."""
        return f"{self.credentials.identity.peer_id}.{self.token}"

    @property
    def network_id(self) -> bytes:
        """The public id of the cluster."""
        return self.credentials.namespace.network_id

    @property
    def vote_scope(self) -> str:
        """The prefix of this run's files of durable votes: a run is bound by the votes of its own processes, not by
        those of another run. What follows the digest in the name of an elastic run may change when it is started again
        (run_note.py), and the votes bind all the same: otherwise half of the machines could continue without the
        rest."""
        network, run = self.network_id.hex(), self.config.run
        if self.config.elastic:
            name, _, digest = run.rpartition("/")
            run = f"{name}/{digest.partition('#')[0]}"
        return f"{network}.{sha256(run.encode()).hexdigest()[:16]}" if run else network

    @property
    def wall(self) -> Credentials | None:
        """The credentials for connections; None with encryption off."""
        return None if self.config.encryption == "off" else self.credentials

    def proved(self, identity: bytes) -> str:
        """Return the node whose key the other side of a connection has proved; empty with encryption off.

        Raises `HandshakeError` if another key has shown the same id before.
        """
        return self._known_keys.name(identity) if identity else ""

    def other_identity(self, identity: bytes, peer: str) -> str:
        """Return a complaint if a connection proved another identity than that of `peer`; empty if it is the same. With
        encryption off there is none to compare."""
        try:
            proved = self.proved(identity)
        except HandshakeError as exc:
            return str(exc)
        is_right = self.wall is None or proved == node_of(peer)
        return "" if is_right else f"it proved to be {proved}, not {peer}"

    def member(self) -> Member:
        """Return this peer as a member, without addresses."""
        is_witness = self.slots == 0 and self.config.elastic
        return Member(self.peer, host_id(self.network_id), self.slots, name=self.name, witness=is_witness)


def _completed(
    config: AutoDiscoveryConfig, told: Environment, encryption: str | None, *, is_observer: bool
) -> AutoDiscoveryConfig:
    health = config.health
    if health.patience is None:
        health = replace(health, patience=patience_of(None, CLUSTER_PATIENCE))
    return replace(
        config,
        program=config.program or ("" if is_observer else Path(sys.argv[0] if sys.argv else "").name),
        interfaces=config.interfaces or told.interfaces,
        peers=config.peers or told.contacts,
        restart_without=config.restart_without or told.restart_without,
        health=health,
        encryption=choose_encryption(encryption, config.encryption, told.encryption),
    )
