"""A library that is missing or too old: one line that names it and the command that gets it."""

from __future__ import annotations

import importlib.metadata

import pytest

from ringfort.errors import BackendUnavailableError
from ringfort.integrations import needed


def test_a_missing_library_is_named_with_the_command() -> None:
    with pytest.raises(BackendUnavailableError) as raised:
        needed.check_version("no-such-library", "2.51", "no-such-library[train]")
    expected = "no-such-library is not available here: it is not installed: pip install 'no-such-library[train]>=2.51'"
    assert str(raised.value) == expected


@pytest.mark.parametrize(
    ("found", "is_enough"), [("2.9.3", False), ("2.51", True), ("2.51.0rc1", True), ("10.0", True)]
)
def test_a_version_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch, found: str, is_enough: bool) -> None:
    assert importlib.metadata.version("numpy")
    monkeypatch.setattr(needed, "version", lambda package: found)
    if is_enough:
        needed.check_version("ray", "2.51", "ray[train]")
    else:
        with pytest.raises(BackendUnavailableError, match=r"version 2\.9\.3 is too old, 2\.51 is needed: pip install"):
            needed.check_version("ray", "2.51", "ray[train]")
