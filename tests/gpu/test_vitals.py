"""What the driver of NVIDIA GPUs tells, against nvidia-smi."""

from __future__ import annotations

import subprocess

from ringfort.telemetry.nvml import Nvml

_MIB = 1 << 20


def test_memory_and_temperature_are_those_of_nvidia_smi() -> None:
    query = "--query-gpu=memory.total,memory.used,temperature.gpu"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    told = [[float(value) for value in line.split(",")] for line in done.stdout.splitlines()]
    nvml = Nvml()
    found = nvml.read()
    nvml.close()
    assert len(found) == len(told)
    for gpu, (total, used, degrees) in zip(found, told, strict=True):
        assert gpu.load is not None
        assert gpu.memory is not None
        assert gpu.memory_total is not None
        assert gpu.temperature is not None
        assert 0 <= gpu.load <= 1
        assert abs(gpu.memory_total / _MIB - total) < 1024
        assert abs(gpu.memory / _MIB - used) < 2048  # one of them counts what the driver keeps for itself
        assert abs(gpu.temperature - degrees) < 10
