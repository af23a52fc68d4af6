"""The package as users meet it: its public names, its import, and rules that no file under src may break."""

from __future__ import annotations

import ast
import importlib.resources
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ringfort
from ringfort import errors
from tests.helpers.source import PACKAGE, imports, parse

# The public surface. A name that is added or removed here is a line in CHANGELOG.md.
PUBLIC = [
    "AbortedError",
    "AllReduceStrategy",
    "AutoDiscoveryBackend",
    "AutoDiscoveryConfig",
    "Backend",
    "BackendUnavailableError",
    "BroadcastStrategy",
    "ChannelClosedError",
    "CheckpointError",
    "ClusterTopology",
    "CollectiveConfig",
    "CollectiveMismatchError",
    "CompressionStrategy",
    "ConfigError",
    "ConnectionProfile",
    "ControlLostError",
    "DistributedConfig",
    "DistributedContext",
    "DistributedError",
    "DistributedMetrics",
    "DivergedError",
    "ElasticRun",
    "ElectionConfig",
    "ElectionEvent",
    "ElectionManager",
    "ElectionState",
    "EncryptionMismatchError",
    "EpochEndedError",
    "FunctionNotFoundError",
    "GlooBackend",
    "GradientCompressor",
    "GradientLayoutError",
    "GradientMismatchError",
    "HandshakeError",
    "HealthConfig",
    "HealthEvent",
    "HealthMonitor",
    "HealthStatus",
    "HealthSummary",
    "HybridBackend",
    "IdentityError",
    "InboxFullError",
    "InvalidArgumentError",
    "InvalidKeyError",
    "InvalidMessageError",
    "InvalidRankError",
    "InvalidWorldSizeError",
    "JoinCodeError",
    "MetricsSnapshot",
    "MpiBackend",
    "LocalGroup",
    "LocalSteps",
    "LocalRankLostError",
    "LocalRunError",
    "NamespaceMismatchError",
    "NcclBackend",
    "NetworkNamespace",
    "NoConnectionError",
    "NodeIdentity",
    "NodeProfile",
    "NonFiniteError",
    "NonFiniteStepError",
    "NotEstablishedError",
    "ObjectTooLargeError",
    "OperationTimeoutError",
    "PeerLostError",
    "ProtocolError",
    "QuantizationType",
    "RRef",
    "RankTakenError",
    "ReduceOp",
    "ReduceStrategy",
    "RefusedError",
    "RemoteError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "RingBackend",
    "RpcAgent",
    "RpcConfig",
    "RpcError",
    "RpcNoConnectionError",
    "RpcOverloadedError",
    "RpcPeerLostError",
    "RpcTimeoutError",
    "SelfSendError",
    "SimulatedBackend",
    "SizeMismatchError",
    "StateTransferError",
    "Step",
    "SubBackend",
    "TamperedError",
    "TcpBackend",
    "TransportError",
    "UnsupportedArrayError",
    "UnsupportedOpError",
    "VersionMismatchError",
    "Work",
    "WorldSizeMismatchError",
    "elastic",
    "init",
    "join",
    "loading",
    "local",
    "log",
    "log_to",
]

IMPORT_LIMIT = 0.200
"""Seconds that `import ringfort` may add to an interpreter: under what a person notices before a command answers."""

PICKLES = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"})


def in_new_interpreter(code: str) -> str:
    """What `code` prints in an interpreter of its own."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_the_public_names_are_the_documented_ones_in_order() -> None:
    assert list(ringfort.__all__) == sorted(PUBLIC)


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in ringfort.__all__ if not hasattr(ringfort, name)] == []


def test_every_exception_is_public() -> None:
    found = {name for name, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, Exception)}
    assert sorted(found - set(ringfort.__all__)) == []


def test_importing_the_package_does_not_import_torch() -> None:
    heavy = "('torch', 'matplotlib', 'ringfort.cli', 'ringfort.testing')"
    assert in_new_interpreter(f"import sys, ringfort; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_importing_the_package_is_quick() -> None:
    code = "from time import perf_counter as now; start = now(); import ringfort; print(now() - start)"
    # The best of several: other work on the machine can only make an import look slower than it is.
    best = float("inf")
    for _ in range(10):
        best = min(best, float(in_new_interpreter(code)))
        if best < IMPORT_LIMIT:
            break
    assert best < IMPORT_LIMIT


def test_type_information_is_shipped() -> None:
    assert importlib.resources.files(ringfort).joinpath("py.typed").is_file()


# --- rules for every file under src ----------------------------------------------------------------------------------


def environment_reads(path: Path, root: Path) -> Iterator[str]:
    """Where a file touches the environment, by whatever name."""
    names = {"environ", "environb", "getenv", "getenvb"}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute) and node.attr in names:
            yield f"{path.relative_to(root)}:{node.lineno}: .{node.attr}"
    for item in imports(path, root):
        if item.module == "os" and item.name in names:
            yield f"{path.relative_to(root)}:{item.line}: from os import {item.name}"


def pickle_uses(path: Path, root: Path) -> Iterator[str]:
    """Where a file imports a module that runs code from data, or asks NumPy or torch to."""
    for item in imports(path, root):
        if item.module.split(".")[0] in PICKLES:
            yield f"{path.relative_to(root)}:{item.line}: import of {item.module}"
    for node in ast.walk(parse(path)):
        match node:
            case ast.keyword(arg="allow_pickle", value=value) if not _is_constant(value, False):
                yield f"{path.relative_to(root)}:{value.lineno}: allow_pickle"
            case ast.keyword(arg="weights_only", value=value) if not _is_constant(value, True):
                yield f"{path.relative_to(root)}:{value.lineno}: weights_only"
            case _:
                pass


def _is_constant(node: ast.expr, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_only_config_reads_the_environment() -> None:
    found = [where for path in sorted(PACKAGE.rglob("*.py")) for where in environment_reads(path, PACKAGE)]
    assert [where for where in found if where.startswith("config.py:")], (
        "the reader was not found, so the check is broken"
    )
    assert [where for where in found if not where.startswith("config.py:")] == []


def test_nothing_is_pickled() -> None:
    assert [where for path in sorted(PACKAGE.rglob("*.py")) for where in pickle_uses(path, PACKAGE)] == []


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (environment_reads, "import os\nos.environ['A']"),
        (environment_reads, "import os as system\nsystem.getenv('A')"),
        (environment_reads, "def f():\n    from os import environ"),
        (pickle_uses, "import pickle"),
        (pickle_uses, "from marshal import loads"),
        (pickle_uses, "import importlib\nimportlib.import_module('cloudpickle')"),
        (pickle_uses, "import numpy\nnumpy.load('x', allow_pickle=True)"),
        (pickle_uses, "import torch\ntorch.load('x', weights_only=False)"),
    ],
)
def test_a_file_that_breaks_a_rule_is_found(
    tmp_path: Path, check: Callable[[Path, Path], Iterator[str]], source: str
) -> None:
    (tmp_path / "bad.py").write_text(source)
    assert len(list(check(tmp_path / "bad.py", tmp_path))) == 1
