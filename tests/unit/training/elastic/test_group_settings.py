"""The settings of the groups of an elastic run: its own, or the environment's."""

from __future__ import annotations

import pytest

from ringfort.config import DistributedConfig
from ringfort.training.elastic.options import Options


@pytest.mark.parametrize(
    ("told", "group", "expected"),
    [
        (None, None, "on"),
        ("off", None, "off"),
        ("off", DistributedConfig(timeout=50), "off"),
        (None, DistributedConfig(shared_memory="off"), "off"),
    ],
)
def test_shared_memory_can_be_turned_off_from_outside(
    monkeypatch: pytest.MonkeyPatch, told: str | None, group: DistributedConfig | None, expected: str
) -> None:
    monkeypatch.delenv("RINGFORT_SHM", raising=False)
    if told is not None:
        monkeypatch.setenv("RINGFORT_SHM", told)
    options = Options(
        name="run",
        nodes="1:",
        checkpoint=None,
        every=1,
        keep=1,
        patience=None,
        nonfinite="error",
        config=None,
        group=group,
    )
    assert options.group_config.shared_memory == expected
