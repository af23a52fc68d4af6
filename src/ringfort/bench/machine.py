"""The machine on which a measurement was made: without it a number means little."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from ringfort.config import GIB


def describe_machine(packages: Iterable[str]) -> dict[str, Any]:
    """Describe processor, cores, memory, load, system, and the versions of Python and `packages`."""
    return {
        "processor": processor_name(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        "threads": psutil.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "load_at_start": round(psutil.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **_versions(packages)},
    }


def processor_name() -> str:
    """The model of the processor, or its architecture if the system does not name it."""
    with suppress(OSError):  # only Linux has this file
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
