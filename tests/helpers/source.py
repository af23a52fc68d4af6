"""Reading Python source without importing it, for the tests that hold the package to its own rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "ringfort"


class Import(NamedTuple):
    """`module` is absolute. `name` is what `from module import name` takes from it, None for `import module`."""

    module: str
    name: str | None
    line: int


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path, root: Path) -> str:
    """`root` is the package's folder: root/a/b.py is `root.a.b`, and a package is called by its folder."""
    parts = [root.name, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, root: Path) -> Iterator[Import]:
    """Every import of a file: at the top, in a function, under TYPE_CHECKING, or by `import_module("a.b")`."""
    package = module_name(path, root).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(parse(path)):
        match node:
            case ast.Import(names=names):
                yield from (Import(alias.name, None, node.lineno) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                absolute = ".".join([*base, *([module] if module else [])])
                yield from (Import(absolute, alias.name, node.lineno) for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(module, None, node.lineno)
            case _:
                pass
