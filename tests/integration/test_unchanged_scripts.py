"""Scripts of frameworks that make their own groups, unchanged, on two hosts: with `--torch-backend ringfort` they learn
what they learn over Gloo, and nothing of their models can be read on the wire."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.capture import captured
from tests.helpers.namespaces import lan, needs_namespaces

pytestmark = [needs_namespaces, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).parent / "scripts"
NEEDS = {
    "plain_gloo": ["torch"],
    "fsdp2_loop": ["torch"],
    "accelerate_loop": ["accelerate"],
    "lightning_loop": ["lightning"],
    "hf_trainer": ["transformers", "accelerate"],
    "sft": ["trl", "datasets"],
}
MARK = b"rng=frt=mrk=fts="
"""As in scripts/marked.py."""
PATIENCE = 400
"""Seconds for what takes ten on an idle machine."""
LOSS = re.compile(r"loss (\d+) (\d+\.\d+)")


def losses(script: str, folder: Path, *options: str) -> tuple[dict[int, float], bytes, str]:
    """Run a script on two hosts. Returns its losses, what passed the wire, and what it said."""
    key = NetworkNamespace.generate().join_code()
    folder.mkdir()
    with lan(2, machine_ids=True) as net, captured(net, folder / "wire"):
        started = [
            host.start(
                *(sys.executable, "-m", "ringfort", "run", "--nodes", "2", *options, str(SCRIPTS / f"{script}.py")),
                variables={
                    "RINGFORT_KEY": key,
                    "RINGFORT_HOME": str(folder / host.namespace),
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(SCRIPTS.parents[2] / "src")]),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in net.hosts
        ]
        said = [process.communicate(timeout=PATIENCE)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    found = [(int(step), float(loss)) for text in said for step, loss in LOSS.findall(text)]
    assert found == sorted(set(found)), said
    return dict(found), (folder / "wire").read_bytes(), "\n".join(said)


@pytest.mark.parametrize("script", NEEDS)
def test_an_unchanged_script_learns_the_same_and_nothing_can_be_read(script: str, tmp_path: Path) -> None:
    missing = [package for package in NEEDS[script] if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {' '.join(missing)}: pip install {' '.join(missing)}")
    theirs, plain, _ = losses(script, tmp_path / "gloo")
    ours, sealed, said = losses(script, tmp_path / "ringfort", "--torch-backend", "ringfort")
    worst = max(abs(ours.get(step, 0.0) - loss) for step, loss in theirs.items())
    first, last = theirs[min(theirs)], theirs[max(theirs)]
    print(f"{script}: {len(theirs)} losses, {first} to {last}, differ by {worst} at most; {len(sealed)} bytes sealed")
    assert len(theirs) >= 6
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert last < first
    assert MARK in plain  # so it would be found
    assert MARK not in sealed
    assert len(sealed) > 100_000
    for word in (b"ringfort/place", b"default_pg", b"init/", b"gloo"):  # of torch's own store
        assert word not in sealed
    assert "sends plaintext" not in said
