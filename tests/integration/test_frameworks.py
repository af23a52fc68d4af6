"""The Trainer of Hugging Face with what Ringfort has for it, and the pages of frameworks, with the real libraries."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from ringfort.identity.namespace import NetworkNamespace
from tests.cluster import test_documents
from tests.helpers.namespaces import Host, lan, needs_namespaces
from tests.integration.test_unchanged_scripts import LOSS, PATIENCE, SCRIPTS

NEEDED = ("transformers", "accelerate", "lightning")
_missing = " ".join(name for name in NEEDED if find_spec(name) is None)
pytestmark = [
    pytest.mark.skipif(bool(_missing), reason=f"needs {_missing}: pip install {_missing}"),
    pytest.mark.timeout(900),
]


def ringfort_run(*arguments: str) -> str:
    """What a script of two ranks on this machine says."""
    run = subprocess.run(
        [sys.executable, "-m", "ringfort", "run", "-n", "2", *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    return run.stdout


def test_a_trainer_whose_rank_is_killed_continues_with_the_same_losses(tmp_path: Path) -> None:
    script, found = str(SCRIPTS / "hf_restarts.py"), []
    for fatal in ("0", "8"):
        (tmp_path / fatal).mkdir()
        options = ["--max-restarts", "2", "--torch-backend", "ringfort"]
        words = ringfort_run(*options, script, str(tmp_path / fatal), fatal)
        assert ("it was killed by SIGKILL" in words) == (fatal != "0")
        found.append(LOSS.findall(words))
    plain, killed = found
    assert [int(step) for step, _ in plain] == list(range(1, 13))
    assert dict(killed) == dict(plain)  # also of the steps that were computed twice
    assert len(killed) > len(plain)


def trained_on_two_disks(folder: Path, *orders: str) -> tuple[list[tuple[str, str]], str]:
    """The losses of a Trainer with checkpoints on two hosts, each with a disk of its own, and all that was said. A host
    that stops is killed, and comes back with its newest checkpoint but one, and the newest one damaged."""
    (folder / "told").mkdir(parents=True)
    for order in orders:
        (folder / "told" / order).touch()
    command = [sys.executable, "-m", "ringfort", "run", "--nodes", "2", "--max-restarts", "3", "--timeout", "120"]
    command += ["--torch-backend", "ringfort", str(SCRIPTS / "hf_checkpoints.py"), str(folder / "told")]
    key = NetworkNamespace.generate().join_code()
    with lan(2, machine_ids=True) as net:

        def start(host: Host) -> None:
            with (folder / f"said-{host.number}").open("a") as said:
                variables = {
                    "RINGFORT_KEY": key,
                    "RINGFORT_HOME": str(folder / f"home-{host.number}"),
                    "DISK": str(folder / f"disk-{host.number}"),
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": "1",
                }
                host.start(*command, variables=variables, stdout=said, stderr=subprocess.STDOUT)

        for host in net.hosts:
            start(host)
        stopped, deadline = folder / "told" / "stopped", time.monotonic() + PATIENCE
        while any(host.running[-1].poll() is None for host in net.hosts):
            assert time.monotonic() < deadline, said_by_all(folder)
            if stopped.exists():
                disk = Path(stopped.read_text())
                host = net.hosts[int(disk.name.removeprefix("disk-"))]
                stopped.unlink()
                host.running[-1].kill()
                host.running[-1].wait()
                assert {path.name for path in disk.iterdir()} == {"checkpoint-3", "checkpoint-6"}
                with (disk / "checkpoint-6" / "optimizer.pt").open("r+b") as file:
                    file.seek(-100, os.SEEK_END)
                    file.write(b"damaged")
                start(host)
            time.sleep(0.1)
        said = said_by_all(folder)
        assert [host.running[-1].returncode for host in net.hosts] == [0, 0], said
    return LOSS.findall(said), said


def said_by_all(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("said-*")))


@needs_namespaces
def test_a_trainer_continues_from_the_newest_checkpoint_that_any_machine_has(tmp_path: Path) -> None:
    plain, said = trained_on_two_disks(tmp_path / "plain")
    assert [int(step) for step, _ in plain] == list(range(1, 13))
    assert "Continuing after" not in said
    lost, said = trained_on_two_disks(tmp_path / "lost", "kill-5", "stop-8")
    assert "it was killed by SIGKILL" in said
    assert re.findall(r"Continuing after step (\d+); its checkpoint was at rank (.*)", said) == [("3", "0"), ("6", "1")]
    assert re.search(r"checkpoint-6: optimizer\.pt is damaged or missing", said)
    assert dict(lost) == dict(plain)  # also of the steps that were computed twice
    assert sorted(lost) != sorted(plain)
    for number in (0, 1):
        disk = tmp_path / "lost" / f"disk-{number}"
        assert {path.name for path in disk.iterdir()} == {"checkpoint-9", "checkpoint-12"}
        assert {"rng_state_0.pth", "rng_state_1.pth", "ringfort.json"} < {
            path.name for path in (disk / "checkpoint-12").iterdir()
        }


def test_those_who_watch_see_what_the_trainer_logs(tmp_path: Path) -> None:
    words = ringfort_run(str(SCRIPTS / "hf_callback.py"), str(tmp_path))
    assert words.count("backend ringfort of 2") == 2
    seen = re.search(r"seen (.*)", words)
    assert seen is not None, words
    total, samples, logged = json.loads(seen[1])
    assert total == 6
    assert samples == {str(step): 8 for step in range(1, 7)}
    assert list(logged) == ["2", "4", "6"]
    assert all({"loss", "learning_rate"} <= set(names) for names in logged.values())


def test_an_accelerate_that_chooses_backends_in_another_way_is_named_with_the_command() -> None:
    program = (
        "from accelerate.state import PartialState; del PartialState._prepare_backend; "
        "import ringfort.integrations.transformers"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.stderr.splitlines()[-1] == (
        "ringfort.errors.BackendUnavailableError: accelerate with PartialState._prepare_backend is not available here: "
        f"this is {version('accelerate')}, which chooses backends in another way; pip install 'accelerate==1.15.*'"
    )


@needs_namespaces
def test_every_block_of_the_pages_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that need the libraries of this file too, which `make test` leaves out."""
    monkeypatch.setattr(test_documents, "PATIENCE", PATIENCE)
    test_documents.test_two_ranks_run_every_block(tmp_path)
