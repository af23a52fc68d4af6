"""Machines without logind. The rest is in tests/cluster/test_elastic_absence.py."""

from __future__ import annotations

import logging
import sys

import pytest

from ringfort.training.elastic.sleep_watch import SleepWatch


@pytest.mark.parametrize("reason", ["no bus", "no jeepney"])
def test_without_logind_nothing_happens_and_nothing_is_said(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nowhere/at/all")
    if reason == "no jeepney":
        monkeypatch.setitem(sys.modules, "jeepney", None)
        monkeypatch.setitem(sys.modules, "jeepney.io.blocking", None)
    called = list[str]()
    with caplog.at_level(logging.INFO):
        watch = SleepWatch(lambda: called.append("sleep"), lambda: called.append("wake"))
        watch.close()
        watch.close()
    assert watch._thread is None or not watch._thread.is_alive()
    assert (called, caplog.records, capfd.readouterr()) == ([], [], ("", ""))
