"""Each layer imports only layers below it. The order is DESIGN's, and this test is where it is written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.source import PACKAGE, imports, module_name

# Bottom to top. The modules of one line do not know each other.
# "ringfort" is the package's own __init__, which gathers the public names; what stands above it uses them.
LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(line.split())
    for line in (
        "errors launchers",
        "config",
        "telemetry",
        "identity",
        "transport",
        "bootstrap",
        "backends",
        "collectives",
        "compression",
        "cluster",
        "context",
        "startup",
        "rpc",
        "training",
        "torch",
        "integrations",
        "ringfort",
        "autoload",
        "launch",
        "dashboard",
        "demo bench testing",
        "cli",
        "__main__",
    )
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Shipped for users' tests and ours; the library itself must work without it.
IMPORTED_BY_NOTHING = frozenset({"testing"})


def layer_of(module: str) -> str:
    """The layer a module of the package belongs to: its second part, or the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "ringfort"


def violations(root: Path) -> list[str]:
    """Everything under the package folder `root` that breaks the order, in words."""
    found: list[str] = []
    for path in sorted(root.rglob("*.py")):
        where = path.relative_to(root.parent)
        importer = layer_of(module_name(path, root))
        if importer not in LEVEL:
            found.append(f"{where}: {importer!r} has no place in LAYERS; give it one")
            continue
        if path == root / "__init__.py":
            continue
        for item in imports(path, root):
            if item.module.split(".")[0] != root.name:
                continue
            # `from ringfort import config` names a layer, `from ringfort import init` the package's __init__.
            imported = layer_of(item.module)
            if imported == "ringfort" and item.name in LEVEL:
                imported = item.name
            if imported == importer:
                continue
            if imported not in LEVEL:
                found.append(f"{where}:{item.line}: imports {imported!r}, which has no place in LAYERS")
            elif imported in IMPORTED_BY_NOTHING:
                found.append(f"{where}:{item.line}: imports {imported}, which is for tests alone")
            elif LEVEL[imported] >= LEVEL[importer]:
                found.append(f"{where}:{item.line}: {importer} imports {imported}, which is not below it")
    return found


def test_every_layer_imports_only_layers_below_it() -> None:
    assert len(list(PACKAGE.rglob("*.py"))) > 3, "the package was not found, so nothing was checked"
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("backends/tcp.py", "from ringfort.collectives import ring", "backends imports collectives"),
        ("backends/tcp.py", "from ringfort import collectives", "backends imports collectives"),
        ("backends/tcp.py", "from ..collectives.ring import plan", "backends imports collectives"),
        ("backends/__init__.py", "from .. import collectives", "backends imports collectives"),
        ("backends/tcp.py", "import numpy, ringfort.context as c", "backends imports context"),
        ("backends/tcp.py", "def f():\n    import ringfort.context", "backends imports context"),
        (
            "config.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ringfort.context import DistributedContext",
            "config imports context",
        ),
        ("context.py", "import importlib\nimportlib.import_module('ringfort.torch')", "context imports torch"),
        ("context.py", "from ringfort import init", "context imports ringfort"),
        ("bench/run.py", "import ringfort.demo", "bench imports demo"),
        ("bench/run.py", "from ringfort.testing import VirtualClock", "imports testing"),
        ("cli/main.py", "from ringfort.helpers import f", "imports 'helpers', which has no place"),
        ("helpers.py", "", "'helpers' has no place in LAYERS"),
    ],
)
def test_a_violation_is_found_and_named(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    path = tmp_path / "ringfort" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    found = violations(tmp_path / "ringfort")
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("collectives/ring.py", "from ringfort.backends.base import Backend\nfrom ringfort import errors"),
        ("collectives/ring.py", "from ringfort.collectives.algorithms import Step\nfrom .ops import ReduceOp"),
        ("torch/process_group.py", "import torch.distributed\nimport numpy"),
        ("testing/conformance.py", "from ringfort.training import average_gradients"),
        ("demo.py", "import ringfort\nfrom ringfort.launch.local_ranks import launch"),
        ("__init__.py", "from ringfort.context import DistributedContext\nfrom ringfort.cli import main"),
    ],
)
def test_imports_of_lower_layers_are_allowed(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / "ringfort" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert violations(tmp_path / "ringfort") == []
