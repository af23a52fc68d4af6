"""An image that is fetched from several donors is the exact image, whatever the donors do; or nobody is left."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ringfort.errors import ProtocolError, StateTransferError
from ringfort.training.elastic.state_tree import BLOCK, Entry, Image, Manifest, block_hash, hashed
from ringfort.training.elastic.transfer import MOST, Fetch, check_manifest


def image_of(blocks: int, *, seed: int = 0, tail: int = 0) -> Image:
    """An image of so many blocks, whose last one has `tail` bytes fewer. Blocks are cheap to make and differ."""
    nbytes = max(0, blocks * BLOCK - tail)
    data = np.zeros(nbytes, np.uint8)
    for index in range(blocks):
        data[index * BLOCK] = index + 1
        data[index * BLOCK + 1] = seed
    entry = Entry("state['w']", "uint8", (nbytes,), 0, nbytes)
    return hashed(Image(Manifest((entry,), nbytes), data))


def deliver(fetch: Fetch, donor: str, index: int, image: Image) -> bool:
    block = image.block(index)
    return fetch.take(donor, index, block, block_hash(block))


def finish(fetch: Fetch, image: Image, *donors: str) -> dict[str, int]:
    """Lets the donors answer in turn until all is there; returns how many blocks each sent."""
    sent = dict.fromkeys(donors, 0)
    while not fetch.is_complete:
        for donor in donors:
            for index in fetch.ask(donor):
                sent[donor] += 1
                assert deliver(fetch, donor, index, image)
    return sent


@settings(max_examples=100)
@given(st.data())
def test_any_order_of_losses_and_arrivals_ends_with_the_exact_image_or_without_a_donor(data: st.DataObject) -> None:
    blocks, tail = data.draw(st.integers(0, 7)), data.draw(st.integers(0, BLOCK - 2))
    image = image_of(blocks, tail=tail if blocks else 0)
    other = image_of(blocks, seed=1, tail=tail if blocks else 0)
    donors = [f"d{number}" for number in range(data.draw(st.integers(1, 4)))]
    fetch, alive, under_way = Fetch(image.manifest), set(donors), list[tuple[str, int]]()
    for donor in donors:
        fetch.add(donor, image.manifest.hashes)
    while not fetch.is_complete and not fetch.is_stuck:
        for donor in sorted(alive):
            under_way += [(donor, index) for index in fetch.ask(donor)]
        # Somebody can always move: nothing waits for a request that was never made.
        assert under_way
        match data.draw(st.sampled_from(["come"] * 8 + ["lose", "damage", "surprise"])):
            case "come":
                donor, index = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
                assert deliver(fetch, donor, index, image)
                continue
            case "lose":
                donor = data.draw(st.sampled_from(sorted(alive)))
                fetch.lose(donor, "reset")
            case "damage":
                donor, index = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
                assert not deliver(fetch, donor, index, other)
            case _:
                donor = data.draw(st.sampled_from(sorted(alive)))
                index = next(i for i in range(blocks + 1) if (donor, i) not in under_way)
                assert not fetch.take(donor, index, b"", b"")
        alive.discard(donor)
        under_way = [(who, index) for who, index in under_way if who in alive]
    assert fetch.is_complete != fetch.is_stuck
    if fetch.is_complete:
        assert np.array_equal(fetch.image.data, image.data)
    else:
        assert not alive
        with pytest.raises(StateTransferError, match="No member is left") as raised:
            _ = fetch.image
        assert set(raised.value.reasons) == set(donors)
        again = Fetch(image.manifest, [fetch.partial])
        assert again.missing == fetch.missing
        again.add("new", image.manifest.hashes)
        finish(again, image, "new")
        assert np.array_equal(again.image.data, image.data)


def test_a_faster_donor_sends_more() -> None:
    image = image_of(40)
    fetch = Fetch(image.manifest)
    sent, slow_under_way = {"fast": 0, "slow": 0}, list[int]()
    for donor in sent:
        fetch.add(donor, image.manifest.hashes)
    while not fetch.is_complete:
        for _ in range(3):
            for index in fetch.ask("fast"):
                sent["fast"] += deliver(fetch, "fast", index, image)
        slow_under_way += fetch.ask("slow")
        if slow_under_way:
            sent["slow"] += deliver(fetch, "slow", slow_under_way.pop(0), image)
    assert sent["fast"] > 5 * sent["slow"] > 0
    assert sum(sent.values()) <= 42  # the last blocks of the slow one may have come twice


def test_a_lone_donor_has_many_requests_under_way_but_not_all() -> None:
    image = image_of(40)
    fetch = Fetch(image.manifest)
    fetch.add("a", image.manifest.hashes)
    for index in fetch.ask("a"):
        deliver(fetch, "a", index, image)
    assert len(fetch.ask("a")) == MOST


def test_near_the_end_a_block_of_a_donor_that_hangs_is_asked_of_another() -> None:
    image = image_of(4)
    fetch = Fetch(image.manifest)
    for donor in ("hangs", "works"):
        fetch.add(donor, image.manifest.hashes)
    assert fetch.ask("hangs") == [0, 1]
    finish(fetch, image, "works")
    assert np.array_equal(fetch.image.data, image.data)
    assert deliver(fetch, "hangs", 0, image)  # late, and already known


def test_a_donor_whose_state_differs_sends_what_is_the_same() -> None:
    image, differs = image_of(4), image_of(4)
    differs.data[2 * BLOCK] = 77
    fetch = Fetch(image.manifest)
    fetch.add("differs", hashed(differs).manifest.hashes)
    fetch.add("same", image.manifest.hashes)
    finish(fetch, image, "differs", "same")
    assert np.array_equal(fetch.image.data, image.data)
    fetch = Fetch(image.manifest)
    fetch.add("differs", hashed(differs).manifest.hashes)
    fetch.add("same", image.manifest.hashes)
    fetch.lose("same", "reset")
    assert fetch.is_stuck
    assert fetch.ask("differs") == []


def test_blocks_that_are_known_are_not_asked_for() -> None:
    image = image_of(6)
    old = image_of(6)
    old.data[3 * BLOCK] = 99
    fetch = Fetch(image.manifest, [hashed(old)])
    assert fetch.missing == 1
    fetch.add("a", image.manifest.hashes)
    assert fetch.ask("a") == [3]
    assert deliver(fetch, "a", 3, image)
    assert np.array_equal(fetch.image.data, image.data)
    assert Fetch(image.manifest, [image]).is_complete


def test_a_manifest_that_contradicts_itself_is_refused_before_memory_is_taken() -> None:
    good = image_of(2).manifest
    check_manifest(good, 2 * BLOCK)
    entry, change = good.entries[0], msgspec.structs.replace
    for bad in (
        change(good, nbytes=1 << 60),
        change(good, nbytes=-1, hashes=()),
        change(good, hashes=good.hashes[:1]),
        change(good, hashes=(b"", b"")),
        change(good, entries=(change(entry, nbytes=entry.nbytes - 1),)),
        change(good, entries=(change(entry, offset=1),)),
        change(good, entries=(change(entry, offset=-64),)),
        change(good, entries=(change(entry, shape=(-1, -entry.nbytes)),)),
        change(good, entries=(change(entry, kind="object"),)),
        change(good, entries=(entry, entry)),
    ):
        with pytest.raises(ProtocolError, match="Invalid manifest"):
            check_manifest(bad, 2 * BLOCK)
