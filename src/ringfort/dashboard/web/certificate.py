"""The certificate of `ringfort dash --lan`: made by this machine, for its own addresses, and kept."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ringfort.identity import files

DAYS: Final = 365
"""How long a certificate is valid. Phones refuse those that are valid for more than 825 days."""
RENEW_DAYS: Final = 30
"""A certificate that ends sooner than this is made again."""


class Certificate:
    """A certificate and its key, in one file that only this user can read."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path = path
        self._certificate = x509.load_pem_x509_certificate(data)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the certificate, as browsers show it."""
        return sha256(self._certificate.public_bytes(serialization.Encoding.DER)).digest().hex(":").upper()

    def serves(self, addresses: Sequence[str], now: datetime) -> bool:
        """Return whether it is valid for all addresses, now and for some time."""
        names = self._certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        known = {str(ip) for ip in names.get_values_for_type(x509.IPAddress)}
        ends = self._certificate.not_valid_after_utc
        return set(addresses) <= known and now + timedelta(days=RENEW_DAYS) < ends


def certificate_for(path: Path, addresses: Sequence[str], now: datetime | None = None) -> Certificate:
    """Return the certificate in `path`, or a new one if that does not serve the addresses. A certificate is kept, so
    that people confirm its fingerprint once. Raises `IdentityError` if other users could read it."""
    now = now or datetime.now(timezone.utc)
    data = files.read(path)
    if data is not None:
        try:
            found = Certificate(path, data)
        except ValueError:  # not a certificate, or cut
            found = None
        if found is not None and found.serves(addresses, now):
            return found
    made = _make(addresses, now)
    files.replace(path, made)
    return Certificate(path, made)


def _make(addresses: Sequence[str], now: datetime) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ringfort dash on this machine")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address)) for address in addresses])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # The clock of a phone may be behind this one.
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM) + secret
