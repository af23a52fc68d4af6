"""Build the documentation site from the documents of the repository.

    python -m scripts.build_site            writes build/site
    python -m scripts.build_site --address  prints the address of the site, if a person has filled it in

The documents stay as a repository shows them. `stage` copies them to build/site-source: pages of the site side by side,
links rewritten, the reference of the commands filled in, and a page for each file that a document links to. Zensical
turns that into HTML; a warning ends the build. At last the result is checked: every public name has its place, every
link arrives, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

from scripts.check_site import faults
from scripts.command_reference import command_reference

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "site-source"
SITE = ROOT / "build" / "site"
PROJECT = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
COMMANDS = "<!-- commands -->"
"""Where the reference of the commands goes."""

_TARGET = re.compile(r'(\]\(<?|^\[[^\]]+\]:\s+|<(?:a|img)\s[^>]*(?:href|src)=")([^)\s>"]+)', re.MULTILINE)
_KEPT = re.compile(r"^ *(```|~~~).*?^ *\1 *$|(`+)(?!`).+?(?<!`)\2(?!`)|<!--.*?-->", re.MULTILINE | re.DOTALL)
"""Code, in blocks and in lines, and comments: nothing in there is a link."""
_CONTENTS = re.compile(r"(?:^- \[[^\]\n]+\]\(#[^)\n]+\)\n)+\n?", re.MULTILINE)
"""A page's own table of contents, which the site shows at its side."""
_REPOSITORY = re.compile(r"<!-- repository -->\n.*?<!-- /repository -->\n", re.DOTALL)
"""What only readers of the repository need."""
_NESTED = re.compile(r"^ {2,3}(?=[-*] |\d+\. )", re.MULTILINE)
_FOREIGN = re.compile(r"[a-z][a-z0-9+.-]*:|#", re.IGNORECASE)


def place(path: PurePosixPath) -> PurePosixPath:
    """Where the site has a file of the repository: documents side by side, other files as pages under source/."""
    if path == PurePosixPath("README.md"):
        return PurePosixPath("index.md")
    if path.parts[0] == "docs" and (path.suffix == ".md" or path.parts[1] in ("images", "site")):
        return path.relative_to("docs")
    if str(path) in PROJECT:
        return PurePosixPath("project", path.name.lower())
    return PurePosixPath("source", f"{str(path).lstrip('.')}.md")  # the builder leaves hidden folders out


class Stage:
    """The pages, while they are copied from `root` to `to`."""

    def __init__(self, root: Path, to: Path) -> None:
        self.root = root
        self.to = to
        self.shown: set[PurePosixPath] = set()
        """Files and folders that documents link to and that are no pages by themselves."""

    def everything(self) -> None:
        """Copy the documents, and show what they link to."""
        docs = self.root / "docs"
        documents = [self.root / name for name in ("README.md", *PROJECT)]
        documents += [path for path in sorted(docs.rglob("*.md")) if docs / "site" not in path.parents]
        for path in documents:
            relative = PurePosixPath(path.relative_to(self.root))
            self._write(place(relative), self.page(relative, path.read_text(encoding="utf-8")))
        for name in ("images", "site"):
            shutil.copytree(docs / name, self.to / name)
        for path in sorted(self.shown):
            self._write(place(path), self._source(path))

    def page(self, path: PurePosixPath, text: str) -> str:
        """A document as the site has it."""
        text = _CONTENTS.sub("", _REPOSITORY.sub("", text))
        kept: list[str] = []

        def keep(match: re.Match[str]) -> str:
            kept.append(match[0])
            return f"\x00{len(kept) - 1}\x00"

        text = _KEPT.sub(keep, text)
        text = _NESTED.sub("    ", text)  # Python-Markdown's lists; a repository page takes both
        text = _TARGET.sub(lambda match: match[1] + self._target(path, match[2]), text)
        text = re.sub("\x00(\\d+)\x00", lambda match: kept[int(match[1])], text)
        return text.replace(COMMANDS, command_reference()) if COMMANDS in text else text

    def _target(self, page: PurePosixPath, target: str) -> str:
        if _FOREIGN.match(target):
            return target
        name, hash_, anchor = target.partition("#")
        aim = PurePosixPath(os.path.normpath(page.parent / name))
        found = place(aim)
        if found.parts[0] == "source":
            self.shown.add(aim)
        return os.path.relpath(found, place(page).parent) + hash_ + anchor

    def _source(self, path: PurePosixPath) -> str:
        """A page that shows a file, or the files of a folder. The search leaves it out."""
        here = self.root / path
        head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
        if here.is_dir():
            return head + "".join(
                f"- `{child.name}`\n" for child in sorted(here.iterdir()) if child.name[0] not in "_."
            )
        return f"{head}````{here.suffix.removeprefix('.')}\n{here.read_text(encoding='utf-8').rstrip()}\n````\n"

    def _write(self, place: PurePosixPath, text: str) -> None:
        path = self.to / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def address(name: str) -> str:
    """The address in pyproject.toml, [project.urls]; empty while it waits for a person (scripts/check_release.py)."""
    found = re.search(rf'^{name} = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found and "FILL-IN" not in found[1] else ""


def configuration() -> str:
    """docs/site/zensical.toml, with the addresses that are known."""
    text = (ROOT / "docs" / "site" / "zensical.toml").read_text(encoding="utf-8")
    if url := address("Documentation"):
        text = text.replace("[project]\n", f'[project]\nsite_url = "{url}"\n', 1)
    if url := address("Repository"):
        # A link in the footer: the theme's own `repo_url` makes the reader's browser ask the host about the repository.
        text += f'\n[[project.extra.social]]\nicon = "lucide/git-branch"\nname = "Repository"\nlink = "{url}"\n'
    # Zensical starts in build/.
    for path in ("src", "scripts/reference_extension.py"):
        text = text.replace(f'["{path}"]', f'["{ROOT / path}"]')
    return text


def build() -> list[str]:
    """Build the site, and return what is wrong with it."""
    for folder in (SOURCE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    Stage(ROOT, SOURCE).everything()
    settings = SOURCE.parent / "zensical.toml"
    settings.write_text(configuration(), encoding="utf-8")
    program = Path(sys.executable).with_name("zensical")
    command = [program, "build", "--strict", "--clean", "--config-file", settings]
    done = subprocess.run(
        command, cwd=SITE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False
    )
    print(done.stdout)
    if done.returncode or re.search("warning|griffe:", done.stdout, re.IGNORECASE):
        return ["zensical, or griffe, which reads the docstrings, has complained: see above"]
    return list(faults(SITE))


def main() -> int:
    """Return the exit code: 0 if the site is as it should be."""
    parser = argparse.ArgumentParser(description="Build the documentation site in build/site.")
    parser.add_argument("--address", action="store_true", help="print the site's address, if it is filled in, and end")
    if parser.parse_args().address:
        print(address("Documentation"))
        return 0
    found = build()
    pages = len(list(SITE.rglob("*.html")))
    print(*found, f"{SITE.relative_to(ROOT)}: {pages} pages, {len(found)} faults", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
