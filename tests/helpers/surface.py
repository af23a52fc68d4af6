"""What people type: names, members, keywords, fields, commands, options, variables, and the imports that the documents
show. `python -m tests.helpers.surface` writes it to surface.txt, which tests/unit/test_surface.py compares with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import ringfort
from ringfort.cluster.core.peer_messages import Epoch
from ringfort.cluster.node import ClusterNode
from ringfort.cluster.view import PeerView
from tests.helpers.source import PACKAGE

ROOT: Final = Path(__file__).resolve().parents[2]
KEPT: Final = ROOT / "tests" / "helpers" / "surface.txt"
BESIDE: Final = (ClusterNode, PeerView, Epoch)
"""Classes that people meet, and that have no name in `ringfort` itself."""
_PLAIN: Final = (type(None), bool, int, float, str, bytes, tuple)


def surface() -> list[str]:
    """All of it, a line each, in order."""
    found = {*_names(), *_variables(), *_commands(), *_imports()}
    return sorted(found)


def _names() -> Iterator[str]:
    for name in ringfort.__all__:
        yield from _named(f"ringfort.{name}", getattr(ringfort, name))
    for cls in BESIDE:
        yield from _named(f"{cls.__module__}.{cls.__qualname__}", cls)


def _named(path: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{path}{_arguments(value)}" if callable(value) else path
        return
    if issubclass(value, Enum):
        yield from (f"{path}.{name}" for name in value.__members__)
    else:
        yield f"{path}{_arguments(value)}"
    for name in dir(value):
        member = inspect.getattr_static(value, name)
        if name.startswith("_") or not _is_its_own(value, name) or isinstance(member, Enum):
            continue
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        yield f"{path}.{name}{_arguments(function)}" if isinstance(function, FunctionType) else f"{path}.{name}"


def _is_its_own(cls: type, name: str) -> bool:
    """Whether Ringfort defines it, and not in a class that is listed by itself."""
    home = next((base for base in cls.__mro__ if name in vars(base)), object)
    is_listed = home is not cls and getattr(ringfort, home.__name__, None) is home
    return home.__module__.startswith("ringfort") and not is_listed


def _arguments(function: Any) -> str:
    """Names, kinds and plain defaults; not types, which may be said in other words."""
    found: list[str] = []
    is_keyword = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            found.append("*")
            is_keyword = True
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        is_keyword = is_keyword or parameter.kind is parameter.VAR_POSITIONAL
        found.append(f"{star}{parameter.name}{_default(parameter.default)}")
    return f"({', '.join(found)})"


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, Enum):
        return f"={type(value).__name__}.{value.name}"
    return f"={value!r}" if isinstance(value, _PLAIN) else "=..."


def _variables() -> Iterator[str]:
    for path in PACKAGE.rglob("*.py"):
        yield from re.findall(r"\bRINGFORT_[A-Z_]+[A-Z]\b", path.read_text())


def _commands() -> Iterator[str]:
    import typer.main

    from ringfort.cli.app import app

    def options(path: str, command: Any) -> Iterator[str]:
        yield f"$ {path}"
        for parameter in command.params:
            opts = [*parameter.opts, *parameter.secondary_opts]
            name = "/".join(opts) if parameter.param_type_name == "option" else f"<{parameter.name}>"
            yield f"$ {path} {name}"
        for name, inner in getattr(command, "commands", {}).items():
            yield from options(f"{path} {name}", inner)

    yield from options("ringfort", typer.main.get_command(app))


def _imports() -> Iterator[str]:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))):
        for line in re.findall(r"^\s*(?:from ringfort[\w.]* import .+|import ringfort[\w.]*)$", path.read_text(), re.M):
            module, _, names = line.strip().removeprefix("from ").partition(" import ")
            if not names:
                yield f"import {module.removeprefix('import ')}"
            yield from (f"from {module} import {name.strip()}" for name in names.strip("()").split(",") if name.strip())


if __name__ == "__main__":
    KEPT.write_text("\n".join(surface()) + "\n")
