"""The generators that data sets draw from: seeded together, and put back."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from ringfort.torch.training import generators
from ringfort.torch.training.generators import OwnGenerators, seed_generators, seed_model, undisturbed

KEY = 0xFEDC_BA98_7654_3210


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.random()  # noqa: NPY002


def seed_and_fail() -> None:
    seed_generators(2)
    raise KeyError


def test_a_key_decides_what_all_three_give() -> None:
    with undisturbed():
        seed_generators(KEY)
        first = draw()
        seed_generators(KEY)
        assert draw() == first
        seed_generators(KEY + (1 << 40))
        other = draw()
        assert other[1:] != first[1:]
        seed_generators(KEY + 1)
        assert not set(draw()) & set(first)


def test_random_and_numpy_do_not_give_the_same_numbers() -> None:
    with undisturbed():
        seed_generators(KEY)
        _, python, numpy = draw()
        assert python != numpy


def test_what_a_block_draws_and_seeds_is_undone_even_after_an_error() -> None:
    with undisturbed():
        expected = draw()
        seed_generators(1)
        with undisturbed():
            following = draw()
        with pytest.raises(KeyError), undisturbed():
            seed_and_fail()
        assert draw() == following
        assert following != expected


def test_own_generators_continue_where_they_were() -> None:
    with undisturbed():
        seed_generators(KEY)
        expected = [draw(), draw()]
        seed_generators(KEY)
        own = OwnGenerators()
        with own.active():
            assert draw() == expected[0]
        seed_generators(7)
        with own.active():
            assert draw() == expected[1]


def test_the_model_draws_what_it_would_after_torchs_own_seeding(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_model(KEY)
    first = torch.rand(3)
    torch.manual_seed(KEY)
    assert torch.equal(torch.rand(3), first)
    seeded: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    generators._has_other_devices.cache_clear()
    seed_model(KEY)
    generators._has_other_devices.cache_clear()
    assert seeded == [KEY]  # which knows all kinds of devices
