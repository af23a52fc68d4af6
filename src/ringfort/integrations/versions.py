"""`require`: one line that names a library that is missing or too old, and the command to get it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from ringfort.errors import BackendUnavailableError


def require(package: str, lowest: str, install: str = "") -> None:
    """Raise `BackendUnavailableError` unless `package` is installed in version `lowest`, such as `2.4`, or later.
    `install` is what pip is asked for, if that is not the package itself: `ray[train]`."""
    command = f"pip install '{install or package}>={lowest}'"
    try:
        found = version(package)
    except PackageNotFoundError:
        raise BackendUnavailableError(f"{package} {lowest} or later", f"it is not installed; {command}") from None
    if _numbers(found) < _numbers(lowest):
        raise BackendUnavailableError(f"{package} {lowest} or later", f"this is {found}; {command}")


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version: 2, 6 and 1 of `2.6.1rc0+cpu`."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number) for number in found[0].split(".")) if found else ()
