"""Check the documents: every relative link, anchor, `make` target, `ringfort` command and option that they name exists.

Code blocks in Python are run by tests/cluster/test_documents.py.

Run by `make docs`, which then builds the site (scripts/build_site.py). Prints each fault as file:line and exits with 1
if there is any. It never touches the network, so links to other sites are not followed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]

FENCE = re.compile(r"^\s*(```|~~~)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
LINK = re.compile(
    r"""
      \]\(<?([^)\s>]+)>?(?:\s+"[^"]*")?\)  # [text](target "title"), whose text may begin on the line before
    | ^\[[^\]]+\]:\s+(\S+)                          # [name]: target
    | <(?:a|img)\s[^>]*(?:href|src)="([^"]+)"        # HTML, as for a picture with a width
    """,
    re.VERBOSE,
)
CODE = re.compile(r"`([^`]+)`")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")
PROSE = re.compile(r"[^\s#|<>-]")
COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S* )*(?:\S*/)?(ringfort|make)(?: ([a-z][a-z-]*))?(?=\s|$)")


def documents(root: Path) -> list[Path]:
    """The documents: those at the root, and everything under docs, examples and benchmarks."""
    folders = (root / name for name in ("docs", "examples", "benchmarks"))
    return sorted([*root.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))])


def prose_and_code(path: Path) -> Iterator[tuple[int, str, bool]]:
    """The lines of a document: number, text, and whether it lies in a fenced block."""
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if FENCE.match(line):
            fenced = not fenced
        else:
            yield number, line, fenced


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors that a Markdown page has, as GitHub makes them from its headings."""
    found: list[str] = []
    for _, line, fenced in prose_and_code(path):
        heading = HEADING.match(line)
        if heading and not fenced:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            repeats = sum(re.fullmatch(re.escape(slug) + r"(-\d+)?", other) is not None for other in found)
            found.append(f"{slug}-{repeats}" if repeats else slug)
        found += re.findall(r"<a (?:id|name)=\"([^\"]+)\"", line)
    return frozenset(found)


@cache
def command_exists(program: str, verb: str) -> bool:
    """Whether `make VERB` or `ringfort VERB` is something that can be run."""
    if program == "make":
        return (
            re.search(rf"^{re.escape(verb)}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            is not None
        )
    return bool(help_of(verb))


@cache
def help_of(*verbs: str) -> str:
    """What `ringfort VERBS --help` prints; empty if there is no such command."""
    cli = [sys.executable, "-c", "from ringfort.cli import main; main()", *verbs, "--help"]
    done = subprocess.run(cli, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout if done.returncode == 0 else ""


def command_fault(line: str) -> str | None:
    """What is wrong with the verbs and options of a `ringfort` command in a block, or None. What comes after a script
    is the script's."""
    words = re.sub(r"^(?:\$ )?(?:[A-Z_]+=\S* )*", "", line).partition(" #")[0].split()
    if len(words) < 2 or words[0] != "ringfort" or words[1].startswith("-"):
        return None
    verbs = words[1:3] if words[1] in ("key", "checkpoint") else words[1:2]
    known = help_of(*verbs)
    if not known:
        return f"no such command: ringfort {' '.join(verbs)}"
    for word in words[1 + len(verbs) :]:
        option = re.match(r"\[?(--?[a-z][a-z-]*)", word)
        if word.endswith(".py") or word in ("|", "&&"):
            return None
        if option and not re.search(rf"(?<![\w-]){re.escape(option[1])}(?![\w-])", known):
            return f"no such option: ringfort {' '.join(verbs)} {option[1]}"
    return None


def link_fault(page: Path, target: str) -> str | None:
    """What is wrong with a link of `page`, or None."""
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None
    name, _, anchor = target.partition("#")
    aim = (page.parent / unquote(name)).resolve() if name else page
    if not aim.exists():
        return f"no such file: {target}"
    if anchor and aim.suffix == ".md" and anchor not in anchors(aim):
        return f"no such heading: {target}"
    return None


def faults(page: Path) -> Iterator[str]:
    """Everything that is wrong with one page."""
    before = ""
    for number, line, fenced in prose_and_code(page):
        where = f"{page.relative_to(ROOT)}:{number}"
        if not fenced:
            if ITEM.match(line) and PROSE.match(before) and not ITEM.match(before):
                yield f"{where}: a list needs an empty line before it: the site shows it as a part of the paragraph"
            before = line
            for match in LINK.finditer(CODE.sub("", line)):
                fault = link_fault(page, next(group for group in match.groups() if group))
                if fault:
                    yield f"{where}: {fault}"
        for text in [line.strip()] if fenced else CODE.findall(line):
            command = COMMAND.match(text)
            if command and command[2] and not command_exists(command[1], command[2]):
                yield f"{where}: no such command: {command[1]} {command[2]}"
            elif command and command[2] and fenced and (fault := command_fault(text)):
                yield f"{where}: {fault}"


def main() -> int:
    pages = documents(ROOT)
    found = [fault for page in pages for fault in faults(page)]
    print(*found, f"{len(pages)} documents, {len(found)} faults", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
