"""How torch comes to know of Ringfort, and that nothing in Ringfort can keep torch from being imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.source import PACKAGE

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

SAY = (
    "import sys, json, torch; "
    "plugins, modules = torch.distributed.Backend._plugins, sys.modules; "
    "print(json.dumps([sorted(plugins), sorted(m for m in modules if m.split('.')[0] == 'ringfort')]))"
)


def in_new_interpreter(code: str, path: Path = PACKAGE.parent) -> list[list[str]]:
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_importing_torch_registers_the_backend_and_loads_next_to_nothing() -> None:
    plugins, modules = in_new_interpreter(SAY)
    assert plugins == ["RINGFORT"]
    assert modules == ["ringfort", "ringfort.autoload", "ringfort.errors", "ringfort.torch"]


def test_a_fault_in_ringfort_does_not_break_the_import_of_torch(tmp_path: Path) -> None:
    (tmp_path / "ringfort" / "torch").mkdir(parents=True)
    for name in ("__init__.py", "__init__.pyi", "autoload.py"):
        shutil.copy(PACKAGE / name, tmp_path / "ringfort" / name)
    (tmp_path / "ringfort" / "torch" / "__init__.py").write_text("this is no Python")
    plugins, modules = in_new_interpreter(SAY, tmp_path)
    assert plugins == []
    assert modules == ["ringfort", "ringfort.autoload"]


def test_torchrun_and_torch_2_14_find_their_entry_points() -> None:
    for group, name in (
        ("torch.backends", "register"),
        ("torch.distributed.backends", "register"),
        ("torchrun.handlers", "torchrun_handler"),
    ):
        found = [point for point in entry_points(group=group) if point.name == "ringfort"]
        assert [point.value for point in found] == [f"ringfort.autoload:{name}"]
        assert callable(found[0].load())
