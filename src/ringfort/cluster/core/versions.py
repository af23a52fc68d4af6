"""Compares the versions of Ringfort on the machines of a cluster, and says which to upgrade. Pure."""

from __future__ import annotations

import re

UPGRADE = "pip install --upgrade ringfort"


def numbers_of(version: str) -> tuple[int, ...]:
    """Return a version as numbers: (2, 13, 0) for `2.13.0+cpu`."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def differ(own: str, other: str) -> bool:
    """Return whether both versions are known and differ. Code that runs from a folder, not installed, has no
    version."""
    return bool(own and other) and own != other


def upgrade_advice(own: str, other: str, version: str) -> tuple[str, str]:
    """Return what differs and what to do: this machine has version `own`, the machine `other` has `version`."""
    what = f"{other} has Ringfort {version}, this machine has {own}"
    if numbers_of(own) == numbers_of(version):
        return what, f"{UPGRADE}, on both"
    return what, f"{UPGRADE}, on {'this machine' if numbers_of(own) < numbers_of(version) else other}"
