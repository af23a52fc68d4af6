"""Libraries that are missing or too old are named in one line, with the command."""

from __future__ import annotations

import pytest

from ringfort.errors import BackendUnavailableError
from ringfort.integrations import versions


def test_a_library_that_fits_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("2.4", "2.4.0", "2.10", "3", "2.4.1rc1+cpu"):
        monkeypatch.setattr(versions, "version", lambda _, found=found: found)
        versions.require("lightning", "2.4")


def test_one_that_is_too_old_or_missing_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("2.3.9", "1.10", "2"):
        monkeypatch.setattr(versions, "version", lambda _, found=found: found)
        with pytest.raises(BackendUnavailableError) as caught:
            versions.require("lightning", "2.4")
        expected = f"lightning 2.4 or later is not available here: this is {found}; pip install 'lightning>=2.4'"
        assert str(caught.value) == expected
    monkeypatch.undo()
    with pytest.raises(BackendUnavailableError) as caught:
        versions.require("no-such-library", "2.51", install="no-such-library[all]")
    command = "pip install 'no-such-library[all]>=2.51'"
    assert str(caught.value) == f"no-such-library 2.51 or later is not available here: it is not installed; {command}"
