"""Say what a person must still fill in before a release, and check that the versions agree.

`make dist` prints the list; the release workflow refuses to publish while it is not empty.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "FILL-IN"
FILES = (
    "pyproject.toml",
    "CHANGELOG.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "CITATION.cff",
    ".github/ISSUE_TEMPLATE/config.yml",
)
"""Those with placeholders: an address, a contact or a date that nobody may invent."""


def placeholders(root: Path) -> Iterator[str]:
    """Each line that a person must fill in, with its place."""
    for name in FILES:
        for number, line in enumerate((root / name).read_text(encoding="utf-8").splitlines(), 1):
            if MARK in line:
                yield f"{name}:{number}: {line.strip()}"


def version(root: Path) -> str:
    """The version in pyproject.toml."""
    found = re.search(r'^version = "([^"]+)"$', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, "pyproject.toml has no version"
    return found[1]


def disagreements(root: Path, tag: str) -> Iterator[str]:
    """What contradicts the version in pyproject.toml."""
    wanted = version(root)
    if tag != f"v{wanted}":
        yield f"the tag is {tag}, but pyproject.toml has version {wanted}; tag v{wanted}, or change the version"
    if f"version: {wanted}\n" not in (root / "CITATION.cff").read_text(encoding="utf-8"):
        yield f"CITATION.cff has another version than {wanted}"
    if not re.search(rf"^## {re.escape(wanted)}\b", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE):
        yield f"CHANGELOG.md has no heading for {wanted}: rename «Unreleased», and add the date"


def main() -> int:
    """Return the exit code: 0 if nothing is left to do, or if nothing was to be published."""
    parser = argparse.ArgumentParser(description="Say what a person must still fill in before a release.")
    parser.add_argument("--tag", help="the tag to publish; without it, the placeholders are only listed")
    options = parser.parse_args()
    found = list(placeholders(ROOT))
    if found:
        print(f"A person fills in, before the release ({len(found)}):", *found, sep="\n  ")
    if options.tag is None:
        return 0
    wrong = list(disagreements(ROOT, options.tag))
    print(*wrong, sep="\n")
    return 1 if found or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
