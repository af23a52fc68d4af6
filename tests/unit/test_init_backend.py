"""`init(backend=...)`: which backend a program gets, by keyword or from the environment."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

import ringfort
from ringfort import (
    BackendUnavailableError,
    ConfigError,
    GlooBackend,
    HybridBackend,
    MpiBackend,
    NcclBackend,
    TcpBackend,
)
from ringfort.backends.engines import mpi


@pytest.mark.parametrize(("name", "kind"), [("tcp", TcpBackend), ("hybrid", HybridBackend), (None, TcpBackend)])
def test_a_backend_is_chosen_by_keyword(name: str | None, kind: type[ringfort.Backend]) -> None:
    with ringfort.init(rank=0, world_size=1, backend=name) as context:
        assert type(context.backend) is kind


def test_a_backend_is_chosen_by_the_environment_and_the_keyword_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFORT_BACKEND", "hybrid")
    with ringfort.init(rank=0, world_size=1) as context:
        assert type(context.backend) is HybridBackend
    with ringfort.init(rank=0, world_size=1, backend="tcp") as context:
        assert type(context.backend) is TcpBackend


def test_gloo_works_in_a_world_of_one() -> None:
    pytest.importorskip("torch")
    with ringfort.init(rank=0, world_size=1, backend="gloo") as context:
        assert type(context.backend) is GlooBackend
        assert context.all_gather_object("alone") == ["alone"]


def test_a_name_that_is_none_says_which_there_are() -> None:
    with pytest.raises(ConfigError, match="backend='gpu': unknown backend; use one of: gloo, hybrid, mpi, nccl, tcp"):
        ringfort.init(backend="gpu")


@pytest.mark.parametrize("backend", ["gloo", "hybrid", "nccl"])
def test_a_list_of_nodes_is_for_tcp(backend: str) -> None:
    with pytest.raises(ConfigError, match="only backend='tcp' has nodes"):
        ringfort.init(nodes=["127.0.0.1:1"], rank=0, backend=backend)


@pytest.mark.parametrize(
    ("backend", "module", "words"),
    [
        ("gloo", "torch", "pip install 'ringfort[torch]'"),
        ("nccl", "torch", "a torch built for CUDA"),
        ("mpi", "mpi4py.MPI", "pip install 'ringfort[mpi]'"),
    ],
)
def test_an_engine_that_is_not_installed_says_how_to_get_it(
    backend: str, module: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    if backend == "mpi":
        from ringfort.backends.engines import mpi

        mpi._mpi.cache_clear()
    with pytest.raises(BackendUnavailableError) as caught:
        ringfort.init(rank=0, world_size=1, backend=backend)
    assert words in str(caught.value)
    assert caught.value.backend == backend


# --- what there is ----------------------------------------------------------------------------------------------------


def test_each_backend_says_whether_its_engine_is_here_and_imports_nothing() -> None:
    """In a process of its own: here torch may be loaded, and then it is asked itself."""
    program = (
        "import sys, ringfort as r\n"
        "names = ('TcpBackend', 'HybridBackend', 'GlooBackend', 'MpiBackend', 'NcclBackend')\n"
        "found = [getattr(r, name).is_available() for name in names]\n"
        "assert not {'torch', 'mpi4py.MPI'} & set(sys.modules)\n"
        "print(*found)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert said[:2] == ["True", "True"]
    assert said[2] == str(find_spec("torch") is not None)
    assert said[4] == "False" or find_spec("torch") is not None


@pytest.mark.parametrize(
    ("backend", "module"), [(GlooBackend, "torch"), (MpiBackend, "mpi4py"), (NcclBackend, "torch")]
)
def test_an_engine_that_is_not_installed_is_not_available(
    backend: type[ringfort.Backend], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "torch._C._distributed_c10d", raising=False)
    mpi._has_mpi.cache_clear()
    try:
        assert not backend.is_available()
    finally:
        mpi._has_mpi.cache_clear()


def test_gloo_measures_its_links_as_tcp_does() -> None:
    assert GlooBackend(0, 1).group.is_measured
    assert TcpBackend(0, 1).group.is_measured
