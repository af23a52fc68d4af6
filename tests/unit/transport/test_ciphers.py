"""The ciphers: as published, and never silent about a change."""

from __future__ import annotations

import hmac
from types import SimpleNamespace

import pytest
from cryptography.exceptions import InvalidTag

from ringfort.transport import records as ciphers
from ringfort.transport.records import (
    CIPHERS,
    LARGEST_TAG,
    Aegis128L,
    Aegis128X2,
    Aegis128X4,
    AesGcm,
    Cipher,
    agree,
    preferred,
)

HERE = [CIPHERS[number] for number in sorted(preferred())]


def published(kind: type[Cipher], key: str, nonce: str, head: bytes, data: bytes) -> str:
    if kind not in HERE:
        pytest.skip(f"{kind.name} needs a processor with AES instructions, and the packages pynacl and aeg")
    cipher = kind(bytes(32))
    cipher._key = bytes.fromhex(key)  # pyright: ignore[reportAttributeAccessIssue]
    record = bytearray(head + bytes(len(data) + 32))
    cipher.seal(int.from_bytes(bytes.fromhex(nonce), "little"), data, memoryview(record), len(head))
    return record[len(head) :].hex()


def test_aegis_128l_is_the_published_one() -> None:
    """The first vector with data of draft-irtf-cfrg-aegis-aead for it."""
    key, nonce = "10010000000000000000000000000000", "10000200000000000000000000000000"
    assert published(Aegis128L, key, nonce, bytes(range(8)), bytes(range(32))) == (
        "79d94593d8c2119d7e8fd9b8fc77845c5c077a05b2528b6ac54b563aed8efe84"
        "022cb796fe7e0ae1197525ff67e309484cfbab6528ddef89f17d74ef8ecd82b3"
    )


@pytest.mark.parametrize(
    ("kind", "tag"),
    [
        (Aegis128X2, "b92c71fdbd358b8a4de70b27631ace90cffd9b9cfba82028412bac41b4f53759"),
        (Aegis128X4, "a4b25437f4be93cfa856a2f27e4416b42cac79fd4698f2cdbe6af25673e10a68"),
    ],
)
def test_aegis_side_by_side_is_the_published_one(kind: type[Cipher], tag: str) -> None:
    """The first vectors of draft-irtf-cfrg-aegis-aead for them."""
    key, nonce = "000102030405060708090a0b0c0d0e0f", "101112131415161718191a1b1c1d1e1f"
    assert published(kind, key, nonce, b"", b"") == tag


@pytest.mark.parametrize("kind", HERE)
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 5000])
def test_what_was_sealed_opens_with_the_same_key_count_and_head_and_with_no_other(
    kind: type[Cipher], size: int
) -> None:
    data, key = bytes(index & 255 for index in range(size)), bytes(range(32))
    record, into = memoryview(bytearray(b"head" + bytes(size + kind.tag_bytes))), memoryview(bytearray(size))
    kind(key).seal(7, data, record, 4)
    kind(key).open(7, record, 4, into)
    assert into == data
    assert record[:4] == b"head"
    for other, count, vouched in ((key[::-1], 7, b"head"), (key, 8, b"head"), (key, 7, b"hand")):
        with pytest.raises(InvalidTag):
            kind(other).open(count, vouched + record[4:], 4, into)
    assert kind.tag_bytes <= LARGEST_TAG


@pytest.mark.parametrize("kind", [kind for kind in HERE if kind is not AesGcm])
def test_every_cipher_has_a_key_of_its_own(kind: type[Cipher]) -> None:
    """HKDF-Expand, of which a key this short takes one block."""
    key = bytes(range(32))
    block = hmac.digest(key, b"ringfort records " + kind.name.encode() + b"\x01", "sha256")
    assert kind(key)._key == block[:16]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("order", [(4, 3, 2), (2, 3, 4), (3, 4, 2)])
def test_a_machine_likes_best_what_it_seals_fastest_with(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(HERE) < len(CIPHERS):
        pytest.skip("AEGIS needs a processor with AES instructions, and the packages pynacl and aeg")
    monkeypatch.setattr(ciphers, "_seconds", order.index)
    assert preferred.__wrapped__() == (*order, 1)
    monkeypatch.setattr(ciphers, "_libaegis", None)
    assert preferred.__wrapped__() == (2, 1)


def test_aegis_is_for_processors_with_aes_instructions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = SimpleNamespace(crypto_aead_aes256gcm_is_available=lambda: 0)
    monkeypatch.setattr(ciphers, "_sodium", SimpleNamespace(lib=lib))
    assert preferred.__wrapped__() == (1,)
    monkeypatch.setattr(ciphers, "_sodium", None)
    assert preferred.__wrapped__() == (1,)


def test_sides_agree_on_what_both_like_best_and_else_on_what_all_can_do() -> None:
    assert agree((2, 1), (2, 1)) == 2
    assert agree((3, 2, 1), (3, 2, 1)) == agree((3, 2, 1), (2, 3, 1)) == agree((2, 3, 1), (3, 2, 1)) == 3
    assert agree((3, 2, 1), (2, 1)) == agree((2, 1), (3, 2, 1)) == agree((2, 1), (9, 2, 1)) == 2
    assert agree((2, 1), (1,)) == agree((1,), (2, 1)) == agree((1,), (1,)) == agree((2, 1), ()) == 1
    assert CIPHERS[1] is AesGcm
