"""What the doctor asks of a machine's own tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfort.cluster.diagnosis import checks


def test_only_tools_that_are_here_and_answer_this_user_are_heard(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tools = {
        "answers": ("echo", "all is open"),
        "refuses": ("sh", "-c", "echo you must be root; exit 1"),
        "is not here": (str(tmp_path / "nothing"),),
        "hangs": ("sleep", "60"),
    }
    monkeypatch.setattr(checks, "FIREWALL_TOOLS", tools)
    monkeypatch.setattr(checks, "_TOOL_TIMEOUT", 0.5)
    monkeypatch.setattr(checks, "_UFW_SETTINGS", tmp_path / "ufw.conf")
    assert checks._firewall() == ({"answers": "all is open\n"}, ("refuses", "hangs"))


def test_ufw_is_asked_by_its_settings_where_it_answers_root_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = tmp_path / "ufw.conf"
    settings.write_text("ENABLED=yes\n", encoding="utf-8")
    monkeypatch.setattr(checks, "_UFW_SETTINGS", settings)
    monkeypatch.setattr(checks, "FIREWALL_TOOLS", {"ufw": ("false",)})
    assert checks._firewall() == ({"ufw": "ENABLED=yes\n"}, ())
    monkeypatch.setattr(checks, "FIREWALL_TOOLS", {"ufw": ("echo", "Status: active")})
    assert checks._firewall() == ({"ufw": "Status: active\n"}, ())


def test_a_firewall_that_says_it_is_off_was_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "FIREWALL_TOOLS", {"firewalld": ("sh", "-c", "echo not running; exit 252")})
    monkeypatch.setattr(checks, "_UFW_SETTINGS", tmp_path / "ufw.conf")
    assert checks._firewall() == ({"firewalld": "not running\n"}, ())


def test_torch_is_known_from_its_own_file() -> None:
    text = "from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"
    assert checks.parse_torch_version(text) == ("2.13.0+cpu", "")
    assert checks.parse_torch_version(text.replace("None", "'12.6'")) == ("2.13.0+cpu", "12.6")
    assert checks.parse_torch_version("") == ("", "")
