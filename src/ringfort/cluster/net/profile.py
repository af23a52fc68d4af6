"""Describes this machine: cores, memory, accelerators, system."""

from __future__ import annotations

import platform
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ringfort.cluster.core.topology import Accelerator, NodeProfile
from ringfort.cluster.discovery.system import run_tool
from ringfort.config import MIB
from ringfort.transport.machine import cores

NVIDIA_FOLDER: Final = Path("/proc/driver/nvidia/gpus")
_TOOL_TIMEOUT: Final = 2.0
"""Seconds for nvidia-smi, which takes about one if the driver is not loaded yet."""
_MAX_NAME: Final = 64
"""Characters of a name that are sent to others."""


def this_machine(peer: str, host: str, accelerators: tuple[Accelerator, ...], version: str) -> NodeProfile:
    """Return the profile of this machine. Detect its accelerators if none are given. This takes milliseconds, or up to
    two seconds if nvidia-smi has to be called."""
    import psutil  # not at the top: the command line starts without it

    memory = psutil.virtual_memory().total
    return NodeProfile(
        peer=peer,
        host=host,
        name=platform.node()[:_MAX_NAME],
        platform=f"{platform.system()} {platform.machine()}",
        cores=cores(),
        memory=memory,
        accelerators=accelerators or find_accelerators(memory),
        version=version,
    )


def own_version() -> str:
    """Return Ringfort's version; empty if it runs from a folder and was not installed."""
    from importlib.metadata import PackageNotFoundError, version  # not at the top: it takes 20 ms

    try:
        return version("ringfort")
    except PackageNotFoundError:
        return ""


def find_accelerators(memory: int) -> tuple[Accelerator, ...]:
    """Return the GPUs of this machine. `memory` is its main memory, which Apple's chips share with the GPU."""
    if sys.platform == "darwin":
        return (Accelerator("Apple GPU", memory),) if platform.machine() == "arm64" else ()
    # torch is asked only if the program has imported it: importing it takes seconds.
    return from_torch(sys.modules.get("torch")) or _from_nvidia_smi() or from_driver(NVIDIA_FOLDER)


def from_torch(torch: Any) -> tuple[Accelerator, ...]:
    """Return the GPUs that torch has initialised. Otherwise it is not asked, because that would initialise them."""
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return ()
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return tuple(Accelerator(str(one.name)[:_MAX_NAME], int(one.total_memory)) for one in found)


def parse_nvidia_smi(text: str) -> tuple[Accelerator, ...]:
    """Return the GPUs in lines such as `NVIDIA H200, 143771`: a name, and MiB of memory. Other lines are ignored."""
    found = re.findall(r"^(.+), *(\d+)$", text, re.MULTILINE)
    return tuple(Accelerator(name.strip()[:_MAX_NAME], int(memory) * MIB) for name, memory in found)


def from_driver(folder: Path) -> tuple[Accelerator, ...]:
    """Return the GPUs in the folder of the kernel driver, which has only their names."""
    names: list[str] = []
    for path in sorted(folder.glob("*/information")):
        with suppress(OSError):
            text = path.read_text(encoding="utf-8", errors="replace")
            names += re.findall(r"^Model:\s*(.+)", text, re.MULTILINE)[:1]
    return tuple(Accelerator(name.strip()[:_MAX_NAME]) for name in names)


def _from_nvidia_smi() -> tuple[Accelerator, ...]:
    options = "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"
    done = run_tool("nvidia-smi", *options, timeout=_TOOL_TIMEOUT)
    return () if done is None or done.returncode else parse_nvidia_smi(done.stdout)
