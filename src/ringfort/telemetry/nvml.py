"""`Nvml`: load, memory and temperature of NVIDIA GPUs, from the library of their driver.

Starting nvidia-smi takes a second; a call of its library takes microseconds. The library comes with the driver, so
nothing has to be installed. https://docs.nvidia.com/deploy/nvml-api/ describes the functions.
"""

from __future__ import annotations

from ctypes import CDLL, Structure, byref, c_uint, c_ulonglong, c_void_p
from typing import Final, NamedTuple

_LIBRARY: Final = "libnvidia-ml.so.1"
_TEMPERATURE_GPU: Final = 0
"""NVML_TEMPERATURE_GPU: the sensor on the chip."""


class _Utilization(Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _Memory(Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class Gpu(NamedTuple):
    """One GPU at one moment. What its driver does not tell is None."""

    load: float | None = None
    """From 0 to 1: the part of the last moments in which a kernel ran."""
    memory: int | None = None
    """Bytes in use."""
    memory_total: int | None = None
    temperature: float | None = None
    """Degrees Celsius."""


class Nvml:
    """The GPUs of this machine. Raises `OSError` if there is no driver."""

    def __init__(self) -> None:
        self._library = CDLL(_LIBRARY)
        if self._library.nvmlInit_v2():
            raise OSError("the driver of the NVIDIA GPUs does not answer")
        count = c_uint()
        self._library.nvmlDeviceGetCount_v2(byref(count))
        self._gpus: list[c_void_p] = []
        for index in range(count.value):
            handle = c_void_p()
            if not self._library.nvmlDeviceGetHandleByIndex_v2(index, byref(handle)):
                self._gpus.append(handle)

    def read(self) -> list[Gpu]:
        """Return all GPUs."""
        return [self._read(handle) for handle in self._gpus]

    def _read(self, handle: c_void_p) -> Gpu:
        library = self._library
        load, memory, degrees = _Utilization(), _Memory(), c_uint()
        has_load = library.nvmlDeviceGetUtilizationRates(handle, byref(load)) == 0
        has_memory = library.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == 0
        has_degrees = library.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU, byref(degrees)) == 0
        return Gpu(
            load.gpu / 100 if has_load else None,
            memory.used if has_memory else None,
            memory.total if has_memory else None,
            float(degrees.value) if has_degrees else None,
        )

    def close(self) -> None:
        """Let go of the driver."""
        self._library.nvmlShutdown()
