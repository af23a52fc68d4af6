"""A cluster: what its secret gives, and that the secret itself stays inside."""

from __future__ import annotations

import hashlib
import hmac
import io
import logging
import pickle
import traceback
import unicodedata

import pytest

from ringfort import NetworkNamespace
from ringfort.errors import InvalidArgumentError, InvalidKeyError

SECRET = bytes(range(100, 132))
PASSPHRASE = "three blue kettles sing at dawn"


@pytest.fixture(scope="module")
def stretched() -> NetworkNamespace:
    """Once, because it is slow on purpose."""
    return NetworkNamespace.from_passphrase("lab", PASSPHRASE)


def hkdf(secret: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869, for one block."""
    key = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(key, info + b"\1", "sha256")[:length]


def test_the_keys_are_hkdf_with_separate_labels_that_name_protocol_and_cluster() -> None:
    cluster = NetworkNamespace("lab", SECRET)
    assert cluster.network_id == hkdf(SECRET, b"ringfort 1 network id\0lab", 16)
    assert cluster.handshake_key == hkdf(SECRET, b"ringfort 1 handshake key Noise_XXpsk3_25519_AESGCM_SHA256\0lab", 32)


def test_another_name_or_secret_is_another_cluster() -> None:
    clusters = [NetworkNamespace("a", SECRET), NetworkNamespace("b", SECRET), NetworkNamespace("a", bytes(32))]
    assert len({cluster.network_id for cluster in clusters}) == 3
    assert len({cluster.handshake_key for cluster in clusters}) == 3
    assert len(set(clusters)) == 3


def test_the_same_name_and_secret_is_the_same_cluster() -> None:
    first, second = NetworkNamespace("a", SECRET), NetworkNamespace("a", SECRET)
    assert first == second
    assert hash(first) == hash(second)
    assert first.matches(second.network_id)


def test_a_generated_cluster_is_like_no_other() -> None:
    assert NetworkNamespace.generate() != NetworkNamespace.generate()


@pytest.mark.parametrize("network_id", [b"", bytes(16), bytes(17), NetworkNamespace("b", SECRET).network_id])
def test_another_network_id_does_not_match(network_id: bytes) -> None:
    assert not NetworkNamespace("a", SECRET).matches(network_id)


def test_network_ids_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: bool(seen.append((a, b))))
    cluster = NetworkNamespace("a", SECRET)
    cluster.matches(bytes(16))
    assert seen == [(cluster.network_id, bytes(16))]


def test_a_join_code_makes_the_same_cluster_elsewhere() -> None:
    cluster = NetworkNamespace.generate("lab")
    assert NetworkNamespace.from_join_code(cluster.join_code()) == cluster


def test_a_passphrase_is_stretched_with_scrypt_and_salted_with_the_name(stretched: NetworkNamespace) -> None:
    secret = hashlib.scrypt(
        PASSPHRASE.encode(),
        salt=b"ringfort 1 passphrase\0lab",
        n=2**17,
        r=8,
        p=1,
        maxmem=2**28,
        dklen=32,
    )
    assert stretched == NetworkNamespace("lab", secret)


def test_a_passphrase_is_the_same_however_the_keyboard_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfort.identity.namespace._SCRYPT_N", 2)
    accents = "caf\u00e9 cr\u00e8me br\u00fbl\u00e9e"
    apart = unicodedata.normalize("NFD", accents)
    assert apart != accents
    assert NetworkNamespace.from_passphrase("a", accents) == NetworkNamespace.from_passphrase("a", apart)


def test_a_short_passphrase_is_refused_without_showing_it() -> None:
    with pytest.raises(InvalidKeyError, match=r"^passphrase: must have at least 15 characters, not 8$"):
        NetworkNamespace.from_passphrase("lab", "sw0rdf1s")


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="Lab"):
        NetworkNamespace("Lab", SECRET)
    with pytest.raises(InvalidArgumentError, match="Lab"):
        NetworkNamespace.from_passphrase("Lab", PASSPHRASE)


def test_a_secret_of_another_size_is_refused_without_showing_it() -> None:
    with pytest.raises(InvalidKeyError, match=r"^secret: must have 32 bytes, not 5$"):
        NetworkNamespace("lab", b"abcde")


def test_no_text_of_a_cluster_shows_its_secret_or_its_keys(stretched: NetworkNamespace) -> None:
    cluster = NetworkNamespace("lab", SECRET)
    log = io.StringIO()
    logger = logging.getLogger("tests.namespace")
    logger.addHandler(logging.StreamHandler(log))
    logger.error("%s %r", cluster, [cluster])
    logger.handlers.clear()
    try:
        raise RuntimeError(cluster)
    except RuntimeError as exc:
        trace = "".join(traceback.TracebackException.from_exception(exc, capture_locals=True).format())
    shown = f"{cluster} {cluster!r} {[cluster]} {log.getvalue()} {trace}"
    assert "NetworkNamespace('lab'" in trace
    letters = cluster.join_code().removeprefix("ringfort-lab-")
    for secret in (SECRET, cluster.handshake_key):
        assert secret.hex() not in shown
        assert repr(secret) not in shown
        assert str(list(secret)) not in shown
    assert letters not in shown
    assert not hasattr(cluster, "__dict__")


def test_a_cluster_is_not_pickled() -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(NetworkNamespace("lab", SECRET))
