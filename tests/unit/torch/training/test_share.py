"""Which samples of a micro-batch each local rank computes."""

from __future__ import annotations

from hypothesis import given, strategies as st

from ringfort.torch.training.share import Share


@given(st.integers(1, 50), st.integers(1, 9))
def test_the_shares_of_all_ranks_are_the_micro_batch_and_differ_by_one_sample_at_most(count: int, ranks: int) -> None:
    shares = [Share(rank, ranks) for rank in range(ranks)]
    sizes = [share.samples(count) for share in shares]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    loaded = [range(count)[share.loaded(count)] for share in shares]
    assert [index for part, size in zip(loaded, sizes, strict=True) if size for index in part] == list(range(count))


@given(st.integers(1, 8), st.integers(1, 9))
def test_a_rank_without_a_share_loads_a_sample_all_the_same(count: int, ranks: int) -> None:
    for rank in range(ranks):
        share = Share(rank, ranks)
        assert len(range(count)[share.loaded(count)]) == max(1, share.samples(count))


def test_the_ranks_have_random_keys_of_their_own_and_the_first_that_of_an_unsharded_machine() -> None:
    keys = [Share(rank, 3).key(7) for rank in range(3)]
    assert keys[0] == Share().key(7) == 7
    assert len(set(keys)) == 3
