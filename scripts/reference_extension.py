"""What the API reference shows beside what griffe reads: plain defaults, inherited docstrings, and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import griffe


class ReferenceExtension(griffe.Extension):
    """Show defaults of settings as people write them, `60.0` in place of `setting(TIMEOUT, positive)`. Let a member
    without a docstring have that of the class which its own overrides, as `help()` does. Link public names."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Replace the call, before the signature of its class is made."""
        value = attr.value
        if isinstance(value, griffe.ExprCall) and str(value.function) == "setting":
            default = value.arguments[0]
            if isinstance(default, griffe.ExprName):
                constant = getattr(import_module(attr.module.path), default.name)
                default = repr(constant) if isinstance(constant, float) else default  # GIB says more than its number
            attr.value = default

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Complete the docstrings, when all classes are known."""
        public = "|".join(sorted(name for name, member in pkg.members.items() if member.is_alias))
        name = re.compile(rf"(?<!\[)`({public})`(?!\])")
        seen: set[int] = set()
        for parent, member in _members(pkg):
            if isinstance(parent, griffe.Class) and member.docstring is None and not member.name.startswith("_"):
                bases = [base.members[member.name] for base in parent.mro() if member.name in base.members]
                member.docstring = next((base.docstring for base in bases if base.docstring), None)
            if member.docstring is not None and id(member.docstring) not in seen:
                seen.add(id(member.docstring))
                member.docstring.value = name.sub(rf"[`\1`][{pkg.path}.\1]", member.docstring.value)


def _members(parent: Any) -> Iterator[tuple[Any, Any]]:
    for member in parent.members.values():
        if not member.is_alias:
            yield parent, member
            if isinstance(member, (griffe.Module, griffe.Class)):
                yield from _members(member)
