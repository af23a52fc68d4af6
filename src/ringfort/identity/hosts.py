"""Which machine a file belongs to, and where a home that several machines share keeps the key of each.

A home may be copied to another machine (rsync, a cloned image) or shared between several (NFS). What names one machine
alone must not be used by another: its key, and the promises of its processes. Everything here is hashed: the files say
nothing about the machine to those who do not know it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec
import psutil

from ringfort.errors import IdentityError
from ringfort.identity import files

OWNER_FILE: Final = "host"
"""Names the machine whose key lies beside it."""
FOLDER: Final = "hosts"
"""Has a folder for every other machine that uses the same home."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MACHINE_IDS: Final = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_SERIALS: Final = (Path("/sys/class/dmi/id/product_uuid"), Path("/proc/device-tree/serial-number"))
"""Of the arena; the first may be read by root alone."""
_INTERFACES: Final = Path("/sys/class/net")


class HostMarks(msgspec.Struct, frozen=True):
    """What a machine is known by."""

    machine: str = ""
    """Of the installation; the same after a restart, and on a clone of the disk. Empty where it has none."""
    hardware: tuple[str, ...] = ()
    """Of each network adapter and of the arena. A clone of the disk has others; an adapter may come and go."""
    boot: str = ""
    """Since the last restart."""

    def is_same(self, other: HostMarks) -> bool:
        """Surely one machine, restarted or not."""
        return (
            bool(self.machine) and self.machine == other.machine and not set(self.hardware).isdisjoint(other.hardware)
        )

    def is_other(self, other: HostMarks) -> bool:
        """Surely two machines. Where neither is sure, they are in doubt."""
        if not self.machine or not other.machine:
            return False
        if self.machine != other.machine:
            return True
        return bool(self.hardware and other.hardware) and set(self.hardware).isdisjoint(other.hardware)


@cache
def this_host() -> HostMarks:
    """The marks of this machine."""
    if sys.platform == "darwin":
        return _of_a_mac()
    machine = next((text for text in map(_text, _MACHINE_IDS) if text), "")
    hardware = {*map(_text, _SERIALS), *_adapters()} - {""}
    return HostMarks(_hashed(machine), tuple(sorted(map(_hashed, hardware))), _hashed(_text(_BOOT_ID)))


def key_folder(home: Path, marks: HostMarks | None = None, *, make: bool = True) -> Path:
    """Where the key of this machine is: `home` itself for the first machine that uses it, and for one that cannot be
    told from the first; else a folder below. With `make`, it is this machine's from now on. Raises `IdentityError`."""
    mine = this_host() if marks is None else marks
    if not mine.machine:
        return home
    first = _read(home)
    if first is None and make:
        with suppress(IdentityError):  # a home that is only read is this machine's all the same
            files.ensure_folder(home)
            files.create(home / OWNER_FILE, _encode(mine))
        first = _read(home)
    if first is None or not first.is_other(mine):
        return home
    hosts = home / FOLDER
    for name in files.names(hosts):
        known = _read(hosts / name)
        if known is not None and not known.is_other(mine):
            return hosts / name
    folder = hosts / _hashed("\n".join((mine.machine, *mine.hardware)))
    if make:
        files.ensure_folder(folder)
        files.create(folder / OWNER_FILE, _encode(mine))
    return folder


def _read(folder: Path) -> HostMarks | None:
    """Whose key is in `folder`; None where that is not said, and unknown marks where it is damaged."""
    data = files.read(folder / OWNER_FILE)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=HostMarks)
    except msgspec.MsgspecError:
        return HostMarks()


def _encode(marks: HostMarks) -> bytes:
    return msgspec.json.encode(HostMarks(marks.machine, marks.hardware)) + b"\n"


def _of_a_mac() -> HostMarks:
    """macOS has one id, of the hardware."""
    found, wait = ctypes.create_string_buffer(16), (ctypes.c_long * 2)()
    with suppress(OSError, AttributeError):
        if ctypes.CDLL(None).gethostuuid(found, wait) == 0:
            own = _hashed(found.raw.hex())
            return HostMarks(own, (own,), _hashed(f"{found.raw.hex()} {int(psutil.boot_time())}"))
    return HostMarks()


def _adapters() -> Iterable[str]:
    """The addresses of network adapters that are hardware: bridges, tunnels and containers' interfaces have no device,
    and addresses that are made up when they are."""
    with suppress(OSError):
        for interface in _INTERFACES.iterdir():
            if (interface / "device").exists():
                yield _text(interface / "address")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip("\0\n ")
    except (OSError, UnicodeDecodeError):
        return ""


def _hashed(text: str) -> str:
    return blake2b(text.encode(), digest_size=8, person=b"ringfort host").hexdigest() if text else ""
