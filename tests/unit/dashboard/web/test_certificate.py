"""The certificate of `ringfort dash --lan`."""

from __future__ import annotations

import ssl
import stat
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ringfort.dashboard.web.certificate import DAYS, RENEW_DAYS, certificate_for
from ringfort.errors import IdentityError

NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    return folder / "dash-certificate.pem"


def test_a_certificate_is_kept_so_that_its_fingerprint_stays(path: Path) -> None:
    made = certificate_for(path, ["127.0.0.1", "192.168.1.20"], NOW)
    again = certificate_for(path, ["192.168.1.20"], NOW + timedelta(days=DAYS - RENEW_DAYS - 1))
    assert again.fingerprint == made.fingerprint
    assert len(made.fingerprint) == 95


def test_a_new_one_is_made_for_a_new_address_and_before_the_old_one_ends(path: Path) -> None:
    first = certificate_for(path, ["192.168.1.20"], NOW)
    moved = certificate_for(path, ["192.168.1.20", "fd00::1"], NOW)
    assert moved.fingerprint != first.fingerprint
    later = certificate_for(path, ["192.168.1.20"], NOW + timedelta(days=DAYS - RENEW_DAYS + 1))
    assert later.fingerprint != moved.fingerprint


def test_only_its_owner_can_read_it_and_a_server_can_use_it(path: Path) -> None:
    certificate_for(path, ["127.0.0.1"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path)


def test_one_that_others_can_read_is_refused_and_a_cut_one_replaced(path: Path) -> None:
    certificate_for(path, ["127.0.0.1"])
    path.write_bytes(path.read_bytes()[:100])
    certificate_for(path, ["127.0.0.1"])
    path.chmod(0o644)
    with pytest.raises(IdentityError):
        certificate_for(path, ["127.0.0.1"])
