"""The example for torchrun, of whose workers one is killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import psutil
import pytest

from ringfort.config import AutoDiscoveryConfig
from ringfort.dashboard.source import LiveSource
from tests.torch.test_examples import EXAMPLES, assert_same, curve, curve_in

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: pip install torch")


@pytest.mark.timeout(300)  # two agents start twice: 20 seconds of processor time before the first step
def test_under_torchrun_a_killed_worker_costs_a_pause(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
    command += ["--rdzv-backend=ringfort", "--rdzv-id=example", "--rdzv-conf=join_timeout=60"]
    command += [str(EXAMPLES / "torchrun.py"), "--snapshot", str(tmp_path / "snapshot.pt")]
    command += ["--save-every", "2", "--steps", "30"]
    # Their traces are where the viewer does not look, as if they were on another machine.
    elsewhere = tmp_path / "run"
    elsewhere.mkdir(mode=0o700)
    variables = {**os.environ, "RINGFORT_INTERFACES": "127.0.0.1", "XDG_RUNTIME_DIR": str(elsewhere)}
    said: list[list[str]] = [[], []]
    seen: dict[int, int] = {}

    def listen(number: int) -> None:
        for line in agents[number].stdout or ():
            said[number].append(line)
            seen.update({rank.rank: rank.step for rank in viewer.view("example").ranks})
            if line.startswith("step 3 ") and "resumed" not in "".join(said[number]):
                psutil.Process(agents[1 - number].pid).children()[-1].kill()

    with ExitStack() as stack:
        viewer = stack.enter_context(LiveSource(AutoDiscoveryConfig(interfaces=["127.0.0.1"])))
        agents = [
            stack.enter_context(
                subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
            for _ in range(2)
        ]
        listeners = [Thread(target=listen, args=(number,)) for number in range(2)]
        for listener in listeners:
            listener.start()
        for listener in listeners:
            listener.join()
    words = "".join("".join(lines) for lines in said)
    assert [agent.returncode for agent in agents] == [0, 0], words
    assert "Error waiting on exit barrier" not in words
    assert set(seen) == {0, 1}, "a viewer in the cluster sees the workers of torchrun"
    assert all(step > 0 for step in seen.values()), seen
    assert not list(elsewhere.glob("ringfort/*")), "the agents leave no trace behind"
    resumed = re.findall(r"resumed after step (\d+)", words)
    assert len(resumed) == 1, words
    losses = curve_in(words.partition("resumed")[2])
    assert list(losses) == list(range(int(resumed[0]) + 1, 31)), words
    reference = dict(enumerate(curve("ddp"), start=1))
    both = sorted(losses.keys() & reference.keys())
    assert_same([losses[step] for step in both], [reference[step] for step in both])
