"""How this machine is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ringfort.telemetry.nvml import Gpu
from ringfort.telemetry.vitals import SLOW_EVERY, Vitals, processor_temperature, read_amd, summary


def test_this_machine_has_memory_and_a_processor(tmp_path: Path) -> None:
    vitals = Vitals(tmp_path)
    found = vitals.read()
    vitals.close()
    vitals.close()
    assert 0 <= found["cpu"] <= 1
    assert 0 < found["memory"] < found["memory_total"] == psutil.virtual_memory().total


def test_a_system_that_tells_nothing_leaves_nothing_and_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such thing here")

    for name in ("cpu_percent", "virtual_memory", "sensors_temperatures", "sensors_battery"):
        monkeypatch.setattr(psutil, name, fail, raising=False)
    vitals = Vitals(tmp_path)
    monkeypatch.setattr(vitals, "_nvml", SimpleNamespace(read=fail, close=fail))
    assert vitals.read() == {}
    vitals.close()


def test_temperature_and_battery_are_looked_at_only_every_few_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = [0.0], [0]

    def sensors() -> dict[str, list[Any]]:
        looks[0] += 1
        return {"k10temp": [SimpleNamespace(current=40.0 + looks[0])]}

    monkeypatch.setattr(psutil, "sensors_temperatures", sensors, raising=False)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(percent=80, power_plugged=False))
    vitals = Vitals(tmp_path, clock=lambda: now[0])
    monkeypatch.setattr(vitals, "_nvml", None)
    for second in range(int(SLOW_EVERY)):
        now[0] = float(second)
        found = vitals.read()
        assert (found["temperature"], found["battery"], found["plugged"]) == (41.0, 0.8, 0.0)
    now[0] = SLOW_EVERY
    assert vitals.read()["temperature"] == 42.0
    vitals.close()


def test_the_processors_sensor_counts_and_not_a_broken_one() -> None:
    sensors = {
        "nvme": [SimpleNamespace(current=90.0)],
        "coretemp": [SimpleNamespace(current=degrees) for degrees in (0.0, 51.0, 55.5, 255.0)],
        "acpitz": [SimpleNamespace(current=70.0)],
    }
    assert processor_temperature(sensors) == 55.5
    assert processor_temperature({"nvme": sensors["nvme"]}) is None
    assert processor_temperature({"k10temp": [], **sensors}) == 55.5


def test_gpus_of_amd_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    for card, busy in ((0, "30\n"), (1, "broken")):
        device = tmp_path / f"card{card}" / "device"
        (device / "hwmon" / "hwmon3").mkdir(parents=True)
        (device / "gpu_busy_percent").write_text(busy)
        (device / "mem_info_vram_used").write_text("1000\n")
        (device / "mem_info_vram_total").write_text("8000\n")
        (device / "hwmon" / "hwmon3" / "temp1_input").write_text("61000\n")
    (tmp_path / "card2" / "device").mkdir(parents=True)  # of another maker
    gpus = read_amd(tmp_path)
    assert gpus == [Gpu(0.3, 1000, 8000, 61.0), Gpu(None, 1000, 8000, 61.0)]
    assert summary(gpus) == {"gpu": 0.3, "gpu_memory": 2000.0, "gpu_memory_total": 16000.0}
    assert summary([Gpu()]) == summary([]) == {}
