"""Which modules of the package a call enters, in order, and who calls whom: for the tables in ARCHITECTURE.md."""

from __future__ import annotations

import os
import re
import sys
from types import FrameType
from typing import Any, NamedTuple

from tests.helpers.documents import ROOT
from tests.helpers.source import PACKAGE

_INSIDE = str(PACKAGE) + os.sep


class Walk:
    """Traces this thread inside a `with`. Imports are not part of a walk."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        """In the order in which they were first entered, such as `transport/engine.py`."""
        self.calls: set[tuple[str, str]] = set()
        """Module that calls, module that is called."""

    def __enter__(self) -> Walk:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(_INSIDE) or frame.f_code.co_name == "<module>":
            return
        module, caller = name.removeprefix(_INSIDE), frame.f_back
        if module not in self.modules:
            self.modules.append(module)
        while caller is not None and not caller.f_code.co_filename.startswith(_INSIDE):
            caller = caller.f_back
        if caller is not None:
            self.calls.add((caller.f_code.co_filename.removeprefix(_INSIDE), module))


class Hop(NamedTuple):
    """A row of a walk's table."""

    module: str
    caller: str
    """Empty where the walk begins."""


def documented(title: str) -> list[Hop]:
    """The table below the heading `title` of ARCHITECTURE.md."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.split(f"### {title}\n", 1)[1].split("\n#", 1)[0]
    return [Hop(*found) for found in re.findall(r"^\| `([\w/]+\.py)` \|\s*`?([\w/.]*)`?\s*\|", section, re.MULTILINE)]
