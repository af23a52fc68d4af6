"""`Setup`: who this process is in its cluster and how it was told to behave. Made once, when a node is made."""

from __future__ import annotations

import platform
import secrets
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ringfort.cluster.discovery.mdns import TOKEN_BYTES
from ringfort.cluster.host import host_id
from ringfort.cluster.messages import Member
from ringfort.cluster.profile import own_version
from ringfort.config import CLUSTER_PATIENCE, AutoDiscoveryConfig, Environment, patience_of
from ringfort.errors import InvalidArgumentError
from ringfort.identity.credentials import Credentials

MAX_SLOTS = 4096
"""As `messages.Member` has it."""


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

    @classmethod
    def make(cls, config: AutoDiscoveryConfig | None, slots: int, credentials: Credentials | None) -> Setup:
        """What is not given comes from the environment: `RINGFORT_INTERFACES`, `RINGFORT_PEERS`, `RINGFORT_PATIENCE`,
        `RINGFORT_ENCRYPTION`, and this user's own key and cluster.

        Raises `ConfigError`, `InvalidArgumentError` and `IdentityError`.
        """
        if not isinstance(slots, int) or isinstance(slots, bool) or not 0 <= slots <= MAX_SLOTS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError("slots", slots, f"must be a whole number from 0 to {MAX_SLOTS}")
        told = Environment.from_mapping()
        return cls(
            _completed(config or AutoDiscoveryConfig(), told, is_observer=slots == 0),
            credentials or Credentials.load(told),
            secrets.token_hex(TOKEN_BYTES),
            slots,
            told.home_folder,
            platform.node()[:64],
            own_version(),
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
    def wall(self) -> Credentials | None:
        """What connections are opened with; None with encryption off."""
        return None if self.config.encryption == "off" else self.credentials

    def member(self) -> Member:
        """This peer before it has an address."""
        return Member(self.peer, host_id(self.network_id), self.slots)


def _completed(config: AutoDiscoveryConfig, told: Environment, *, is_observer: bool) -> AutoDiscoveryConfig:
    if not config.program and not is_observer:
        config = replace(config, program=Path(sys.argv[0] if sys.argv else "").name)
    if not config.interfaces and told.interfaces:
        config = replace(config, interfaces=_listed(told.interfaces))
    if not config.peers and told.peers:
        config = replace(config, peers=_listed(told.peers))
    health = config.health
    if health.patience is None:
        config = replace(config, health=replace(health, patience=patience_of(None, CLUSTER_PATIENCE)))
    if config.encryption == "on" and told.encryption == "off":
        config = replace(config, encryption="off")
    return config


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
