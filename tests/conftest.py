"""What holds for every test: nothing is left behind, this user's own keys are not touched, hypothesis repeats itself,
stress tests are marked by folder."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.helpers.leaks import no_leaks

STRESS = Path(__file__).parent / "stress"
CONFORMANCE = Path(__file__).parent / "conformance"

# Here and not in a fixture: processes that tests start inherit it, and nothing is loaded before.
HOME = Path(tempfile.mkdtemp(prefix="ringfort-tests-"))
os.environ["RINGFORT_HOME"] = str(HOME / "home")
os.environ["XDG_RUNTIME_DIR"] = str(HOME)  # where traces are
for _name in ("KEY", "CLUSTER", "ENCRYPTION", "SHM", "INTERFACES", "PEERS", "MASTER", "BACKEND", "TELEMETRY"):
    os.environ.pop(f"RINGFORT_{_name}", None)

# Whoever started this in the background of a shell has it ignored, and so would all processes that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No deadline: the machines that run this are shared, and a slow example is no failure.
hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_unconfigure() -> None:
    shutil.rmtree(HOME, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if STRESS in item.path.parents:
            item.add_marker(pytest.mark.stress)
    # One of the processes of `make test` is busy with these for most of the time.
    items.sort(key=lambda item: CONFORMANCE not in item.path.parents)


@pytest.fixture(autouse=True, scope="session")
def _session_leaves_nothing_behind() -> Iterator[None]:
    """For what fixtures of a wider scope than a test have opened."""
    with no_leaks("the tests"):
        yield


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up before a test's own fixtures and so torn down after them: what they opened must be closed by then."""
    with no_leaks(request.node.name):
        yield
