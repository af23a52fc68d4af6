"""What the doctor asks of a machine's own tools."""

from __future__ import annotations

from pathlib import Path

from ringfort.cluster.diagnosis.findings import look_at_firewalls, parse_torch_version


def test_only_tools_that_are_installed_and_answer_this_user_are_read(tmp_path: Path) -> None:
    tools = {
        "answers": ("echo", "all is open"),
        "refuses": ("sh", "-c", "echo you must be root; exit 1"),
        "is not here": (str(tmp_path / "nothing"),),
        "hangs": ("sleep", "60"),
    }
    found = look_at_firewalls(tools, tmp_path / "ufw.conf", timeout=0.5)
    assert found == ({"answers": "all is open\n"}, ("refuses", "hangs"))


def test_the_settings_of_ufw_are_read_if_it_answers_only_root(tmp_path: Path) -> None:
    settings = tmp_path / "ufw.conf"
    settings.write_text("ENABLED=yes\n", encoding="utf-8")
    assert look_at_firewalls({"ufw": ("false",)}, settings) == ({"ufw": "ENABLED=yes\n"}, ())
    assert look_at_firewalls({"ufw": ("echo", "Status: active")}, settings) == ({"ufw": "Status: active\n"}, ())


def test_a_firewall_that_says_it_is_off_was_examined(tmp_path: Path) -> None:
    tools = {"firewalld": ("sh", "-c", "echo not running; exit 252")}
    assert look_at_firewalls(tools, tmp_path / "ufw.conf") == ({"firewalld": "not running\n"}, ())


def test_torch_is_known_from_its_own_file() -> None:
    text = "from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"
    assert parse_torch_version(text) == ("2.13.0+cpu", "")
    assert parse_torch_version(text.replace("None", "'12.6'")) == ("2.13.0+cpu", "12.6")
    assert parse_torch_version("") == ("", "")
