"""Run the suite on every Python that this machine has: `make matrix`.

Each interpreter gets a virtual environment of its own below build/matrix. `--dependencies lowest` installs the lowest
versions that pyproject.toml allows. Options that are not listed by `--help` go to pytest.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
LOWEST_EXTRAS = ("ui", "metrics", "suspend", "export")
"""The extras that users install, whose lowest versions count as well as those of the package itself."""
OF_THEIR_TIME = ("click<8.3",)
"""Required by the lowest versions, and its newest versions deprecate what these use: warnings are errors here."""
REQUIREMENT = re.compile(r"^\s*\"(?P<name>[\w.-]+)(?:\[[\w,-]+\])?>=(?P<version>[\w.]+)(?P<marker>\s*;[^\"]*)?\"")


def answers(python: str, version: str) -> bool:
    """Whether `python` can be started and has this version. A shim of pyenv exists for versions that are not chosen."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.strip() == version


def candidates(version: str, roots: Sequence[Path]) -> Iterator[str]:
    """Where a Python of this version may be: this one, the search path, and the versions of pyenv and uv."""
    yield sys.executable
    if found := shutil.which(f"python{version}"):
        yield found
    for root in roots:
        yield from sorted(map(str, root.glob(f"*{version}.*/bin/python{version}")), reverse=True)


def interpreters(only: Sequence[str] = ()) -> dict[str, str]:
    """The Pythons of this machine, by version."""
    home = Path.home()
    roots = (Path(os.environ.get("PYENV_ROOT", home / ".pyenv")) / "versions", home / ".local/share/uv/python")
    found: dict[str, str] = {}
    for version in only or VERSIONS:
        for python in candidates(version, roots):
            if answers(python, version):
                found[version] = python
                break
    return found


def lowest(text: str) -> list[str]:
    """The constraints that pin each requirement of the package, and of `LOWEST_EXTRAS`, to its lowest version."""
    found: list[str] = []
    is_wanted = False
    for line in text.splitlines():
        if heading := re.match(r"^([\w-]+) = \[", line):
            is_wanted = heading[1] in ("dependencies", *LOWEST_EXTRAS)
            line = line[heading.end() :]  # noqa: PLW2901  # the first requirement may follow on the same line
        elif line.startswith("["):
            is_wanted = False
        if is_wanted and (requirement := REQUIREMENT.match(line)):
            found.append(f"{requirement['name']}=={requirement['version']}{requirement['marker'] or ''}")
    return found


def run(version: str, python: str, options: argparse.Namespace, arguments: Sequence[str]) -> bool:
    """Make the environment of one interpreter, and run the suite in it. Returns whether it passed."""
    folder = ROOT / "build" / "matrix" / f"{version}-{options.dependencies}"
    inside = folder / "bin" / "python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    install = [str(inside), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    extras = "dev,examples" if options.torch else "dev"
    wanted = ["--editable", f"{ROOT}[{extras}]", *([options.torch] if options.torch else [])]
    if options.dependencies == "lowest":
        pins = folder / "lowest.txt"
        found = lowest((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        pins.write_text("\n".join((*found, *OF_THEIR_TIME)) + "\n", encoding="utf-8")
        wanted += ["--constraint", str(pins)]
    if subprocess.run([*install, *wanted], check=False).returncode:
        print(f"Python {version}: the dependencies cannot be installed", flush=True)
        return False
    suite = ["tests", "-m", "not stress", "--ignore=tests/integration", "-n", str(options.workers)]
    suite += ["--dist", "loadfile", "--no-loadscope-reorder", *arguments]
    return subprocess.run([str(inside), "-m", "pytest", *suite], cwd=ROOT, check=False).returncode == 0


def main() -> int:
    """Return the exit code: 0 if the suite passed everywhere."""
    parser = argparse.ArgumentParser(description="Run the suite on every Python that this machine has.")
    parser.add_argument("--only", action="append", default=[], metavar="VERSION", help="e.g. 3.12; may be repeated")
    parser.add_argument("--dependencies", choices=("highest", "lowest"), default="highest")
    parser.add_argument("--torch", default="torch==2.13.0", help="requirement; empty leaves torch out")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--list", action="store_true", help="print the interpreters, and run nothing")
    options, arguments = parser.parse_known_args()
    found = interpreters(options.only)
    for version in options.only or VERSIONS:
        print(f"Python {version}: {found.get(version, 'not found; its tests are left out')}", flush=True)
    if options.list:
        return 0
    outcomes = {version: run(version, python, options, arguments) for version, python in found.items()}
    for version, passed in outcomes.items():
        print(f"Python {version}, {options.dependencies} dependencies: {'passed' if passed else 'FAILED'}", flush=True)
    missing = [version for version in options.only if version not in found]
    return 0 if outcomes and all(outcomes.values()) and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
