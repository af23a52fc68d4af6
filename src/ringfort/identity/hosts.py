"""Which machine a file belongs to, and where a home that several machines share keeps the key of each.

A home may be copied to another machine (rsync, a cloned image) or shared between several (NFS). The key of a machine
and the votes of its processes must not be used by another machine. Everything here is hashed: the files reveal nothing
about the machine.
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
"""The file that identifies the machine whose key is in the same folder."""
FOLDER: Final = "hosts"
"""The folder with one folder for every further machine that uses the same home."""

_BOOT_ID: Final = "proc/sys/kernel/random/boot_id"
_MACHINE_IDS: Final = ("etc/machine-id", "var/lib/dbus/machine-id")
_SERIALS: Final = ("sys/class/dmi/id/product_uuid", "proc/device-tree/serial-number")
"""Of the mainboard; only root can read the first."""
_INTERFACES: Final = "sys/class/net"


class HostMarks(msgspec.Struct, frozen=True):
    """What identifies a machine."""

    machine: str = ""
    """Of the installation: the same after a reboot, and on a clone of the disk. Empty if there is none."""
    hardware: tuple[str, ...] = ()
    """Of each network adapter and of the mainboard. A clone of the disk has others; an adapter may be removed."""
    boot: str = ""
    """Of the current boot."""

    def is_same(self, other: HostMarks) -> bool:
        """Whether both are certainly one machine, rebooted or not."""
        same_machine = bool(self.machine) and self.machine == other.machine
        return same_machine and not set(self.hardware).isdisjoint(other.hardware)

    def is_other(self, other: HostMarks) -> bool:
        """Whether both are certainly two machines. Neither `is_same` nor `is_other` may be certain."""
        if not self.machine or not other.machine:
            return False
        if self.machine != other.machine:
            return True
        return bool(self.hardware and other.hardware) and set(self.hardware).isdisjoint(other.hardware)


@cache
def this_host() -> HostMarks:
    """What identifies this machine."""
    return _of_a_mac() if sys.platform == "darwin" else of_linux(Path("/"))


def of_linux(root: Path) -> HostMarks:
    """What identifies a Linux machine with the file system `root`."""
    machine = next((text for text in (_text(root / name) for name in _MACHINE_IDS) if text), "")
    hardware = {*(_text(root / name) for name in _SERIALS), *_adapters(root / _INTERFACES)} - {""}
    return HostMarks(_hashed(machine), tuple(sorted(map(_hashed, hardware))), _hashed(_text(root / _BOOT_ID)))


def key_folder(home: Path, marks: HostMarks | None = None, *, make: bool = True) -> Path:
    """Return the folder for the key of this machine: `home` itself for the first machine that uses it, and for one that
    cannot be told from the first; otherwise a folder in it. With `make`, it belongs to this machine from now on. Raises
    `IdentityError`."""
    mine = this_host() if marks is None else marks
    if not mine.machine:
        return home
    first = _read(home)
    if first is None and make:
        with suppress(IdentityError):  # a read-only home is used as well
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
    """Whose key is in `folder`: None if that is not recorded, and empty marks if the record is damaged."""
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
    """macOS has one hardware id."""
    found, wait = ctypes.create_string_buffer(16), (ctypes.c_long * 2)()
    with suppress(OSError, AttributeError):
        if ctypes.CDLL(None).gethostuuid(found, wait) == 0:
            own = _hashed(found.raw.hex())
            return HostMarks(own, (own,), _hashed(f"{found.raw.hex()} {int(psutil.boot_time())}"))
    return HostMarks()


def _adapters(interfaces: Path) -> Iterable[str]:
    """The addresses of hardware network adapters. Bridges, tunnels and interfaces of containers have no device, and
    random addresses."""
    with suppress(OSError):
        for interface in interfaces.iterdir():
            if (interface / "device").exists():
                yield _text(interface / "address")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip("\0\n ")
    except (OSError, UnicodeDecodeError):
        return ""


def _hashed(text: str) -> str:
    return blake2b(text.encode(), digest_size=8, person=b"ringfort host").hexdigest() if text else ""
