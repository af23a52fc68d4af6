"""The timeout of a group that met by `ringfort://`."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("torch")

from torch.distributed.distributed_c10d import default_pg_timeout

from ringfort.torch.init_method import group_seconds


def test_the_environment_bounds_calls_where_the_program_leaves_torchs_half_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert group_seconds(default_pg_timeout) == 1800.0
    monkeypatch.setenv("RINGFORT_TIMEOUT", "60")
    assert group_seconds(None) == group_seconds(default_pg_timeout) == 60.0
    assert group_seconds(timedelta(seconds=7)) == 7.0
