"""The group of `ringfort run --torch-backend ringfort`: which GPU a rank takes. The rest needs real processes
(tests/torch/test_default_group.py)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from ringfort.torch import default_group


@pytest.mark.parametrize(
    ("local_rank", "gpus", "chosen"),
    [("0", 2, [0]), ("1", 2, [1]), ("3", 2, [1]), ("1", 1, [0]), (None, 2, []), ("1", 0, [])],
)
def test_a_rank_takes_the_gpu_of_its_local_rank_before_the_group_is_made(
    local_rank: str | None, gpus: int, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def make(**_: Any) -> None:
        assert taken == chosen
        raise InterruptedError  # before anything is made

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", local_rank)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(default_group, "init", make)
    with pytest.raises(InterruptedError):
        default_group.make_default_group()
