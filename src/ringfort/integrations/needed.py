"""Which versions of other libraries the integrations need: one line that names the library and how to get it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from ringfort.errors import BackendUnavailableError


def check_version(package: str, least: str, install: str) -> None:
    """Raise `BackendUnavailableError` unless `package` is installed in version `least` or later."""
    command = f"pip install '{install}>={least}'"
    try:
        found = version(package)
    except PackageNotFoundError as exc:
        raise BackendUnavailableError(package, f"it is not installed: {command}") from exc
    if _numbers(found) < _numbers(least):
        raise BackendUnavailableError(package, f"version {found} is too old, {least} is needed: {command}")


def _numbers(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
