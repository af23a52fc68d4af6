"""What people type does not change by accident: see tests/helpers/surface.py."""

from __future__ import annotations

from importlib import import_module, util

import pytest

from ringfort.errors import BackendUnavailableError
from tests.helpers.surface import KEPT, surface


def test_what_people_type_is_what_they_typed_before() -> None:
    kept, now = KEPT.read_text().splitlines(), surface()
    changes = [f"- {line}" for line in kept if line not in now] + [f"+ {line}" for line in now if line not in kept]
    advice = "If this is meant: say it in CHANGELOG.md, and run `python -m tests.helpers.surface`."
    assert not changes, "\n".join((*changes, advice))


@pytest.mark.parametrize("line", [line for line in KEPT.read_text().splitlines() if line.startswith("from ")])
def test_what_the_documents_import_is_there(line: str) -> None:
    module, _, name = line.removeprefix("from ").partition(" import ")
    if module == "ringfort.torch" and util.find_spec("torch") is None:
        pytest.skip("needs torch")
    try:
        found = import_module(module)
    except BackendUnavailableError as exc:  # Ray and Dask are installed by `make integration`
        pytest.skip(str(exc))
    assert hasattr(found, name)
