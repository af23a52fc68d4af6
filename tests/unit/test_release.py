"""What a release is made of: versions that agree, placeholders that stop it, and the Pythons of the matrix."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.source import ROOT


def script(name: str) -> ModuleType:
    """A file of scripts/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RELEASE, MATRIX = script("check_release"), script("matrix")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the check of a release reads."""
    for name in RELEASE.FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_every_file_has_the_version_of_the_package() -> None:
    assert list(RELEASE.disagreements(ROOT, f"v{RELEASE.version(ROOT)}")) == []


def test_every_address_is_filled_in_or_marked_and_leads_nowhere() -> None:
    for line in (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines():
        assert (".invalid/" in line) == ("/FILL-IN" in line)


def test_a_release_is_refused_until_everything_is_filled_in(copy: Path) -> None:
    (copy / "SECURITY.md").write_text("Write to FILL-IN.\n", encoding="utf-8")
    assert "SECURITY.md:1: Write to FILL-IN." in list(RELEASE.placeholders(copy))
    for name in RELEASE.FILES:
        text = (copy / name).read_text(encoding="utf-8")
        (copy / name).write_text(text.replace("FILL-IN", "filled in"), encoding="utf-8")
    assert list(RELEASE.placeholders(copy)) == []


def test_a_tag_or_a_file_that_contradicts_the_version_is_named(copy: Path) -> None:
    (copy / "pyproject.toml").write_text('version = "9.8.7"\n', encoding="utf-8")
    (copy / "CHANGELOG.md").write_text("## Unreleased\n", encoding="utf-8")
    tag, citation, changes = RELEASE.disagreements(copy, "v0.2.0")
    assert tag.startswith("the tag is v0.2.0, but pyproject.toml has version 9.8.7")
    assert citation == "CITATION.cff has another version than 9.8.7"
    assert changes.startswith("CHANGELOG.md has no heading for 9.8.7")
    (copy / "CITATION.cff").write_text("version: 9.8.7\n", encoding="utf-8")
    (copy / "CHANGELOG.md").write_text("## 9.8.7 (2030-01-01)\n", encoding="utf-8")
    assert list(RELEASE.disagreements(copy, "v9.8.7")) == []


def test_the_lowest_versions_are_those_of_the_package_and_of_the_extras_of_users() -> None:
    pins = MATRIX.lowest(
        'dependencies = [\n  # why\n  "numpy>=1.26",\n  "aeg>=0.9; sys_platform == \'linux\'",\n]\n'
        '[project.optional-dependencies]\ntorch = ["torch>=2.7"]\nmetrics = ["prometheus-client>=0.20"]\n'
        'dev = [\n  "pytest>=8.3",\n]\nui = [\n  "textual>=1.0",\n]\n[project.scripts]\n"other>=1"\n'
    )
    assert pins == ["numpy==1.26", "aeg==0.9; sys_platform == 'linux'", "prometheus-client==0.20", "textual==1.0"]
    real = MATRIX.lowest((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {"numpy", "cryptography", "textual"} <= {pin.partition("==")[0] for pin in real}


def test_only_a_python_that_starts_and_has_the_version_counts(tmp_path: Path) -> None:
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    shim = tmp_path / "python9.9"
    shim.write_text("#!/bin/sh\nexit 127\n", encoding="utf-8")
    shim.chmod(0o755)
    assert MATRIX.answers(sys.executable, here)
    assert not MATRIX.answers(sys.executable, "9.9")
    assert not MATRIX.answers(str(shim), "9.9")
    assert not MATRIX.answers(str(tmp_path / "absent"), "9.9")
    assert MATRIX.interpreters([here, "9.9"]) == {here: sys.executable}


def test_the_workflows_test_the_pythons_of_the_matrix_and_of_the_classifiers() -> None:
    listed = ", ".join(f'"{version}"' for version in MATRIX.VERSIONS)
    assert f"python: [{listed}]" in (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"Programming Language :: Python :: {version}"' in project for version in MATRIX.VERSIONS)
