"""What a machine is, read from what systems print."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringfort.cluster.core.topology import Accelerator
from ringfort.cluster.net import profile
from ringfort.cluster.net.profile import from_driver, from_torch, own_version, parse_nvidia_smi, this_machine
from ringfort.config import GIB, MIB


def test_this_machine_has_cores_and_memory_and_a_name() -> None:
    node = this_machine("peer", "host", (), own_version())
    assert (node.peer, node.host) == ("peer", "host")
    assert node.cores >= 1
    assert node.memory > 64 * MIB
    assert node.platform
    assert node.version


def test_asking_for_it_does_not_load_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    this_machine("peer", "host", (), own_version())
    assert "torch" not in sys.modules


def test_what_nvidia_smi_prints_is_understood_and_what_it_warns_of_is_not_a_gpu() -> None:
    text = "NVIDIA H200, 143771\nNVIDIA GeForce RTX 4090, 24564\nNo devices were found\nWARNING: x, y\n\n"
    assert parse_nvidia_smi(text) == (
        Accelerator("NVIDIA H200", 143771 * MIB),
        Accelerator("NVIDIA GeForce RTX 4090", 24564 * MIB),
    )


def test_the_drivers_folder_names_the_gpus(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"0000:0{number}").mkdir()
        (tmp_path / f"0000:0{number}" / "information").write_text(f"Model: \t NVIDIA A{number}\nIRQ: 1\n")
    (tmp_path / "empty").mkdir()
    assert from_driver(tmp_path) == (Accelerator("NVIDIA A1"), Accelerator("NVIDIA A2"))
    assert from_driver(tmp_path / "none") == ()


def test_torch_is_asked_only_when_it_holds_a_gpu_already() -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda _: SimpleNamespace(name="GPU", total_memory=7),
    )
    assert from_torch(SimpleNamespace(cuda=cuda)) == (Accelerator("GPU", 7),)
    assert from_torch(SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))) == ()
    assert from_torch(SimpleNamespace()) == ()
    assert from_torch(None) == ()


def test_a_mac_with_its_own_chip_shares_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile.sys, "platform", "darwin")
    monkeypatch.setattr(profile.platform, "machine", lambda: "arm64")
    assert profile.find_accelerators(32 * GIB) == (Accelerator("Apple GPU", 32 * GIB),)
    monkeypatch.setattr(profile.platform, "machine", lambda: "x86_64")
    assert profile.find_accelerators(32 * GIB) == ()
