"""A model that does not fit is refused with the numbers, which include the limits of containers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from ringfort.errors import InvalidArgumentError  # noqa: E402
from ringfort.torch.training import host_memory, memory, sharded_sum  # noqa: E402
from ringfort.torch.training.run import _class_of, elastic  # noqa: E402
from ringfort.training.elastic.memory_needs import MemoryNeeds  # noqa: E402

MB = 1_000_000


def needs(gradients: int, state: int, copies: int) -> MemoryNeeds:
    return MemoryNeeds(gradients * MB, state * MB, 0, copies)


def test_a_model_whose_sums_do_not_fit_on_the_host_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 2900 * MB)
    memory.check_memory(needs(900, 50, 3), {})
    words = r"1 GB of gradients.*needs 3\.05 GB \(3 x 1 GB of gradients and 50 MB of recent.* which has 2\.9 GB"
    with pytest.raises(InvalidArgumentError, match=words):
        memory.check_memory(needs(1000, 50, 3), {})
    with pytest.raises(InvalidArgumentError, match=r"needs 2\.91 GB"):  # up to 256 MiB of recent results
        memory.check_memory(needs(880, 900, 3), {})
    assert not caplog.records
    memory.check_memory(needs(500, 2000, 3), {})
    assert "2 GB more while a machine joins" in caplog.text


def test_a_model_whose_sums_do_not_fit_on_the_gpu_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 10**12)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (500 * MB, 10**9))
    device = torch.device("cuda", 0)
    memory.check_memory(needs(500, 0, 2), {device: 500 * MB})
    with pytest.raises(InvalidArgumentError, match=r"needs 600 MB on cuda:0.*has 500 MB"):
        memory.check_memory(needs(600, 0, 2), {device: 600 * MB})


def group(folder: Path, limit: str, used: int, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if files else ("memory.max", "memory.current")
    for name, text in zip(names, (limit, f"{used}"), strict=True):
        (folder / name).write_text(text + "\n")
    cached = "total_inactive_file" if files else "inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{cached} 300\n")


def test_the_tightest_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    own = tmp_path / "own"
    assert host_memory.available_memory(tmp_path, own) == 5000  # not Linux
    own.write_text("3:cpu:/x\n0::/a/b\n")
    assert host_memory.available_memory(tmp_path, own) == 5000
    group(tmp_path / "a" / "b", "max", 100)
    assert host_memory.available_memory(tmp_path, own) == 5000
    group(tmp_path / "a", "4000", 3000)
    assert host_memory.available_memory(tmp_path, own) == 4000 - 3000 + 300
    own.write_text("4:cpu,memory:/not/visible/here\n")
    group(tmp_path / "memory", "2000", 1900, version="1")
    assert host_memory.available_memory(tmp_path, own) == 400
    group(tmp_path / "memory", "2000", 3000, version="1")
    assert host_memory.available_memory(tmp_path, own) == 0


def test_a_run_says_what_it_takes_before_it_begins() -> None:
    model = torch.nn.Linear(500, 500, bias=False)
    with elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=4) as run:
        assert "3 x 1 MB of gradients, and up to 1 MB of recent results" in str(run.memory)
        assert run.memory.device == 0


def test_shards_on_a_device_count_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_sum, "local_part", lambda one: one)
    kinds = (torch.float64, torch.bfloat16, torch.float32)
    shards = [torch.empty(10, dtype=kind, device="meta") for kind in kinds]
    sums = SimpleNamespace(parameters=[*shards, torch.empty(10)])
    found = sharded_sum.ShardedSum._on_devices(sums, torch.device("cpu"))
    assert found == {torch.device("meta"): 10 * (8 + 4 + 4)}


def test_threads_are_part_of_the_class_where_they_change_the_result() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    sums = SimpleNamespace(parameters=[parameter])
    words = f"{torch.get_num_threads()} threads"
    assert words not in _class_of(sums, torch.optim.AdamW([parameter]))
    assert words in _class_of(sums, torch.optim.Adafactor([parameter]))
