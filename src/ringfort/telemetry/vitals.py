"""`Vitals`: how this machine is, in the units of `Report.vitals`: processor, memory, GPU, temperature, battery.

What the system does not tell is left out, and nothing here raises: a display must never stop anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ringfort.telemetry.nvml import Gpu, Nvml

DRM: Final = Path("/sys/class/drm")
SLOW_EVERY: Final = 5.0
"""Seconds between two looks at temperatures and the battery, which change slowly and whose drivers may take
milliseconds to answer."""
_PROCESSORS: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "acpitz")
"""The sensors of processors, by the name of their driver; the first that is there is read."""
_PLAUSIBLE: Final = (1.0, 130.0)
"""Degrees Celsius. Some drivers report 0 or 255 for a sensor that is not connected."""


class Vitals:
    """Reads the state of this machine. For one thread at a time."""

    def __init__(self, drm: Path = DRM, clock: Callable[[], float] = time.monotonic) -> None:
        """Start. The load of the processor is measured from now on."""
        self._drm, self._clock = drm, clock
        self._psutil: Any = None
        self._nvml: Nvml | None = None
        self._slow: dict[str, float] = {}
        self._slow_at: float | None = None
        with suppress(Exception):
            import psutil  # not at the top: the command line starts without it

            self._psutil = psutil
            psutil.cpu_percent()
        with suppress(Exception):
            self._nvml = Nvml()

    def read(self) -> dict[str, float]:
        """Return what is known now, as in `Report.vitals`."""
        found: dict[str, float] = {}
        with suppress(Exception):
            found["cpu"] = self._psutil.cpu_percent() / 100
        with suppress(Exception):
            memory = self._psutil.virtual_memory()
            found["memory"], found["memory_total"] = float(memory.total - memory.available), float(memory.total)
        gpus: list[Gpu] = []
        with suppress(Exception):
            gpus = self._nvml.read() if self._nvml is not None else read_amd(self._drm)
        found |= summary(gpus)
        found |= self._read_slow()
        degrees = [gpu.temperature for gpu in gpus if gpu.temperature is not None]
        if degrees:
            found["temperature"] = max(found.get("temperature", 0.0), *degrees)
        return found

    def _read_slow(self) -> dict[str, float]:
        now = self._clock()
        if self._slow_at is None or now - self._slow_at >= SLOW_EVERY:
            self._slow_at, self._slow = now, {}
            with suppress(Exception):
                degrees = processor_temperature(self._psutil.sensors_temperatures())
                if degrees is not None:
                    self._slow["temperature"] = degrees
            with suppress(Exception):
                battery = self._psutil.sensors_battery()
                if battery is not None:
                    self._slow["battery"] = battery.percent / 100
                    if battery.power_plugged is not None:
                        self._slow["plugged"] = float(battery.power_plugged)
        return self._slow

    def close(self) -> None:
        """Let go of the drivers. Idempotent."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with suppress(Exception):
                nvml.close()


def summary(gpus: Iterable[Gpu]) -> dict[str, float]:
    """Return the mean load of all GPUs, and their memory added up."""
    found: dict[str, float] = {}
    loads = [gpu.load for gpu in gpus if gpu.load is not None]
    if loads:
        found["gpu"] = sum(loads) / len(loads)
    memory = [(gpu.memory, gpu.memory_total) for gpu in gpus if gpu.memory is not None and gpu.memory_total]
    if memory:
        found["gpu_memory"] = float(sum(used for used, _ in memory))
        found["gpu_memory_total"] = float(sum(total for _, total in memory))
    return found


def processor_temperature(sensors: dict[str, list[Any]]) -> float | None:
    """Return the highest temperature of the processor, of what `psutil.sensors_temperatures()` returned."""
    for driver in _PROCESSORS:
        degrees = [one.current for one in sensors.get(driver, ()) if _PLAUSIBLE[0] <= one.current <= _PLAUSIBLE[1]]
        if degrees:
            return float(max(degrees))
    return None


def read_amd(drm: Path) -> list[Gpu]:
    """Return the AMD GPUs in the folder of the kernel's graphics drivers. Others have no such files there."""
    found: list[Gpu] = []
    for busy in sorted(drm.glob("card[0-9]*/device/gpu_busy_percent")):
        device = busy.parent
        load = _number(busy)
        sensor = next(iter(sorted(device.glob("hwmon/hwmon*/temp1_input"))), None)
        millidegrees = None if sensor is None else _number(sensor)
        found.append(
            Gpu(
                None if load is None else load / 100,
                _number(device / "mem_info_vram_used"),
                _number(device / "mem_info_vram_total"),
                None if millidegrees is None else millidegrees / 1000,
            )
        )
    return found


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None
