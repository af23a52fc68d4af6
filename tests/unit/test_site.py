"""The documentation site: every public name, command, option and variable has its place in the reference, every page is
in the navigation, and links of the repository become links of the site."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path, PurePosixPath

import pytest

import ringfort
from scripts import build_site, check_site
from scripts.build_site import Stage
from scripts.command_reference import command_reference
from tests.helpers.source import PACKAGE
from tests.helpers.surface import BESIDE, KEPT, ROOT

REFERENCE = ROOT / "docs" / "reference"
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)


def described() -> list[str]:
    """The names that the pages of the reference describe."""
    return [name for page in sorted(REFERENCE.glob("*.md")) for name in DIRECTIVE.findall(page.read_text("utf-8"))]


def in_stub(stub: Path) -> set[str]:
    """The public names of an `__init__.pyi`; read, because torch may be missing."""
    found: set[str] = set()
    for node in ast.parse(stub.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def public() -> set[str]:
    found = {f"ringfort.{name}" for name in ringfort.__all__}
    found |= {f"ringfort.torch.{name}" for name in in_stub(PACKAGE / "torch" / "__init__.pyi")}
    for module in ("ringfort.testing", "ringfort.training"):
        found |= {f"{module}.{name}" for name in import_module(module).__all__}
    # Its module has the same name as this function.
    found = found - {"ringfort.testing.check"} | {"ringfort.testing.check.check"}
    found |= {f"{cls.__module__}.{cls.__qualname__}" for cls in BESIDE}
    shown = re.findall(r"^from (ringfort\S*) import (\w+)$", KEPT.read_text("utf-8"), re.MULTILINE)
    places = {f"{module}.{name}" for module, name in shown}
    # Checks are imported from their own module in the documents, and described where `ringfort.testing` has them.
    return found | {place.replace("testing.conformance.", "testing.") for place in places}


def test_every_public_name_is_described_once() -> None:
    names = described()
    assert len(names) == len(set(names))
    missing = sorted(public() - set(names))
    assert not missing, f"add a line `::: NAME` to a page of docs/reference for: {missing}"
    assert set(names) == public(), f"not public: {sorted(set(names) - public())}"


def test_every_command_and_option_is_in_the_reference() -> None:
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", command_reference() + "\n", re.MULTILINE))
    lines = [line.removeprefix("$ ") for line in KEPT.read_text("utf-8").splitlines() if line.startswith("$ ")]
    for path, section in sections.items():
        wanted = [line.removeprefix(path) for line in lines if re.match(rf"{path} (-|<)", line)]
        rows = re.findall(r"^\| (`.*?) \| .+ \|$", section, re.MULTILINE)
        assert len(rows) == len(wanted)  # an argument is shown under another name than in the code
        for option in (part for line in wanted for part in line.strip().split("/") if part.startswith("-")):
            assert any(f"`{option}" in row for row in rows), (path, option)
    assert set(sections) == {line for line in lines if not re.search(r" [-<]", line)}


def test_every_variable_is_described() -> None:
    page = (REFERENCE / "environment.md").read_text("utf-8")
    variables = [line for line in KEPT.read_text("utf-8").splitlines() if line.startswith("RINGFORT_")]
    assert variables
    assert [name for name in variables if f"`{name}`" not in page] == []


def test_every_page_is_in_the_navigation() -> None:
    settings = (ROOT / "docs" / "site" / "zensical.toml").read_text("utf-8")
    listed = re.findall(r'= "([\w/-]+\.md)"', settings)
    documents = [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md") if "site" not in path.parts]
    documents += [Path("README.md"), *map(Path, build_site.PROJECT)]
    pages = [str(build_site.place(PurePosixPath(path))) for path in documents]
    assert sorted(listed) == sorted(pages), "add the page to `nav` in docs/site/zensical.toml"


@pytest.mark.parametrize(
    ("page", "text", "staged"),
    [
        ("README.md", "[a](docs/torch.md#cuda-tensors)", "[a](torch.md#cuda-tensors)"),
        ("README.md", "![a](docs/images/dash.png)", "![a](images/dash.png)"),
        ("docs/torch.md", "[a](../ARCHITECTURE.md#layers)", "[a](project/architecture.md#layers)"),
        ("docs/torch.md", "[a](../README.md) [b](#here)", "[a](index.md) [b](#here)"),
        ("docs/torch.md", "[`a`](../examples/ddp.py)", "[`a`](source/examples/ddp.py.md)"),
        ("docs/reference/rpc.md", "[two\nlines](../rpc.md)", "[two\nlines](../rpc.md)"),
        ("CONTRIBUTING.md", "[a](.github/workflows/test.yml)", "[a](../source/github/workflows/test.yml.md)"),
        ("docs/torch.md", "`[a](b.md)` <!-- [a](b.md) -->", "`[a](b.md)` <!-- [a](b.md) -->"),
        ("docs/torch.md", "```\n[a](b.md)\n```\n[a](https://x.org)", "```\n[a](b.md)\n```\n[a](https://x.org)"),
        ("docs/torch.md", "- [A](#a)\n- [B](#b)\n\n## A", "## A"),
        ("docs/torch.md", "x\n<!-- repository -->\ny\n<!-- /repository -->\nz", "x\nz"),
        ("docs/torch.md", "- a\n  - b\n", "- a\n    - b\n"),
    ],
)
def test_a_page_of_the_repository_becomes_a_page_of_the_site(page: str, text: str, staged: str, tmp_path: Path) -> None:
    assert Stage(ROOT, tmp_path).page(PurePosixPath(page), text) == staged


@pytest.mark.parametrize(
    ("url", "added"), [("https://x.org/", 'site_url = "https://x.org/"\n'), ("https://x.invalid/FILL-IN", "")]
)
def test_the_site_has_its_address_once_a_person_has_filled_it_in(
    url: str, added: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs" / "site").mkdir(parents=True)
    (tmp_path / "docs" / "site" / "zensical.toml").write_text('[project]\nsite_name = "x"\n')
    (tmp_path / "pyproject.toml").write_text(f'Repository = "https://x.invalid/FILL-IN"\nDocumentation = "{url}"\n')
    monkeypatch.setattr(build_site, "ROOT", tmp_path)
    assert build_site.configuration() == f'[project]\n{added}site_name = "x"\n'


def test_a_broken_site_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_site, "documented", lambda site: frozenset(check_site.public_names()[1:]))
    (tmp_path / "other.html").write_text('<h1 id="here">Other</h1>')
    (tmp_path / "index.html").write_text(
        '<script src="https://elsewhere.org/a.js"></script><a href="other.html#here">good</a>'
        '<a href="other.html#there">bad</a><a href="nothing.html">bad</a><a href="https://elsewhere.org">good</a>'
    )
    (tmp_path / "style.css").write_text("@font-face { src: url(//elsewhere.org/a.woff) }")
    assert sorted(check_site.faults(tmp_path)) == [
        "index.html: loads https://elsewhere.org/a.js",
        "index.html: no such anchor: other.html#there",
        "index.html: no such file: nothing.html",
        f"no place in the API reference: {check_site.public_names()[0]}",
        "style.css: loads //elsewhere.org/a.woff",
    ]
