"""The ciphers: as published, and never silent about a change."""

from __future__ import annotations

import pytest
from cryptography.exceptions import InvalidTag

from ringfort.transport.ciphers import CIPHERS, LARGEST_TAG, Aegis, AesGcm, Cipher, agree, preferred

HERE = [CIPHERS[number] for number in sorted(preferred())]


def test_aegis_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first vector with data of draft-irtf-cfrg-aegis-aead, appendix A.2."""
    if Aegis not in HERE:
        pytest.skip("AEGIS needs PyNaCl and a processor with AES instructions")
    cipher = Aegis(bytes(32))
    monkeypatch.setattr(cipher, "_key", bytes.fromhex("10010000000000000000000000000000"))
    nonce = int.from_bytes(bytes.fromhex("10000200000000000000000000000000"), "little")
    out = bytearray(64)
    cipher.seal(nonce, bytes(range(32)), memoryview(bytes(range(8))), memoryview(out))
    assert out[:32].hex() == "79d94593d8c2119d7e8fd9b8fc77845c5c077a05b2528b6ac54b563aed8efe84"
    assert out[32:].hex() == "022cb796fe7e0ae1197525ff67e309484cfbab6528ddef89f17d74ef8ecd82b3"


@pytest.mark.parametrize("kind", HERE)
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 5000])
def test_what_was_sealed_opens_with_the_same_key_count_and_head_and_with_no_other(
    kind: type[Cipher], size: int
) -> None:
    data, key, head = bytes(index & 255 for index in range(size)), bytes(range(32)), memoryview(b"head")
    body, into = memoryview(bytearray(size + kind.tag_bytes)), memoryview(bytearray(size))
    kind(key).seal(7, data, head, body)
    kind(key).open(7, body, head, into)
    assert into == data
    for other, count, vouched in ((key[::-1], 7, head), (key, 8, head), (key, 7, memoryview(b"hand"))):
        with pytest.raises(InvalidTag):
            kind(other).open(count, body, vouched, into)
    assert kind.tag_bytes <= LARGEST_TAG


def test_sides_agree_on_what_both_like_best_and_else_on_what_all_can_do() -> None:
    assert agree((2, 1), (2, 1)) == 2
    assert agree((2, 1), (1,)) == agree((1,), (2, 1)) == agree((1,), (1,)) == agree((2, 1), ()) == 1
    assert agree((2, 1), (9, 2, 1)) == 1
    assert CIPHERS[1] is AesGcm
