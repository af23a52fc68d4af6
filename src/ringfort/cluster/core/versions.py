"""Different versions of Ringfort on the machines of a cluster: which is the older, and what to do. Pure."""

from __future__ import annotations

import re

UPGRADE = "pip install --upgrade ringfort"


def numbers_of(version: str) -> tuple[int, ...]:
    """For comparing: `2.13.0+cpu` is (2, 13, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def differ(own: str, other: str) -> bool:
    """Whether both are known and not the same. One that runs from a folder, never installed, has none."""
    return bool(own and other) and own != other


def upgrade_advice(own: str, other: str, version: str) -> tuple[str, str]:
    """What differs, and what to do: this machine has the version `own`, and the one called `other` has `version`."""
    what = f"{other} has Ringfort {version}, this machine has {own}"
    if numbers_of(own) == numbers_of(version):
        return what, f"{UPGRADE}, on both"
    return what, f"{UPGRADE}, on {'this machine' if numbers_of(own) < numbers_of(version) else other}"
