"""What a process proves itself with: the identity of the node, the cluster, and a Noise key of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfort.config import Environment
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.namespace import NetworkNamespace
from ringfort.identity.store import current_namespace


@dataclass(frozen=True)
class Credentials:
    """The identity, cluster and Noise key of this process. Its `repr` contains no secret."""

    identity: NodeIdentity
    namespace: NetworkNamespace
    static: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    """New for each process, so that a stranger who begins a handshake learns nothing permanent."""

    @classmethod
    def load(cls, environment: Environment | None = None) -> Credentials:
        """Load the credentials of this user, or create them. Raises `IdentityError` with the command that fixes it."""
        namespace = current_namespace(environment)
        return cls(NodeIdentity.load_or_generate(), namespace)

    @property
    def static_public(self) -> bytes:
        """The public half of `static`."""
        return self.static.public_key().public_bytes_raw()
