"""Every code block of the documents runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.documents import NEEDS, PAGES, blocks, python_fences
from tests.helpers.namespaces import Host, lan, needs_namespaces

ADDRESSES = ("192.168.1.20", "192.168.1.21")
"""Those of the machines in the documents."""
PATIENCE = 240
"""Seconds for all blocks; they take some twenty on a machine that has nothing else to do."""


def test_every_block_compiles() -> None:
    found = list(blocks())
    assert len(found) > 15
    for block in found:
        compile(block.code, block.where, "exec")


def test_no_block_is_overlooked() -> None:
    fences = [code for page in PAGES for code in python_fences(page.read_text(encoding="utf-8"))]
    assert fences == [block.code for block in blocks()]
    assert {need for block in blocks() for need in block.needs} <= set(NEEDS)  # another need would never be met


@pytest.mark.parametrize("fence", ["```python", "``` py", "~~~python", "```", "  ```", "````"])
def test_python_is_found_in_any_fence(fence: str) -> None:
    end = fence.rstrip("python ")
    page = f"text\n{fence}\nfrom x import y\n{end}\n\n```\nmake docs\nRANK=0 python train.py\n```\n```sh\nx=1\n```\n"
    assert list(python_fences(page)) == ["from x import y\n"]


@needs_namespaces
@pytest.mark.timeout(PATIENCE + 30)
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: pip install torch")
def test_two_ranks_run_every_block(tmp_path: Path) -> None:
    with lan(1) as net:
        [host] = net.hosts
        for address in ADDRESSES:
            host.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        ranks = [_rank(host, rank, tmp_path) for rank in range(2)]
        words = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    failed = [f"{rank.returncode}\n{said}" for rank, said in zip(ranks, words, strict=True) if rank.returncode]
    assert not failed, "\n\n".join(words)
    for said in words:
        done = re.findall(r"^(?:ran|left out) (\S+)", said, re.MULTILINE)
        assert done == [block.where for block in blocks()]
    print(*re.findall(r"^left out .*", words[0], re.MULTILINE), sep="\n")  # `make docs` shows it


def _rank(host: Host, rank: int, folder: Path) -> subprocess.Popen[str]:
    (folder / str(rank)).mkdir()
    return host.start(
        sys.executable, "-m", "tests.workers.documents",
        cwd=folder / str(rank), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        variables={
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "RINGFORT_TIMEOUT": "60",
            "RINGFORT_HOME": str(folder / "home"), "RINGFORT_KEY": _KEY,
        },
    )  # fmt: skip


_KEY = NetworkNamespace.generate("documents").join_code()
