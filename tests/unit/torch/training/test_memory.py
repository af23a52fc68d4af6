"""A model that does not fit is refused with the numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from ringfort.errors import InvalidArgumentError  # noqa: E402
from ringfort.torch.training import memory  # noqa: E402


def test_a_model_whose_sums_do_not_fit_on_the_host_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=2_900_000_000))
    device = torch.device("cpu")
    memory.check_memory(900_000_000, 3, device)
    with pytest.raises(InvalidArgumentError, match=r"1 GB of gradients.*needs 3 GB on this machine.*has 2\.9 GB"):
        memory.check_memory(1_000_000_000, 3, device)


def test_a_model_whose_sums_do_not_fit_on_the_gpu_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=10**12))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (500_000_000, 10**9))
    device = torch.device("cuda", 0)
    memory.check_memory(500_000_000, 2, device)
    with pytest.raises(InvalidArgumentError, match=r"needs 600 MB on cuda:0.*has 500 MB"):
        memory.check_memory(600_000_000, 2, device)
