"""A driver of Ray: `python -m tests.workers.ray_driver CASES FOLDER`. Two machines of one Ray cluster, on this machine.

It prints lines of JSON. CASES is `trainings`: how trainings and an elastic run have ended, while machines came and
went; or `blocks`: which blocks of the document have run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ringfort.errors import DistributedError
from ringfort.integrations.ray import RingfortConfig, run_elastic
from tests.helpers.documents import blocks
from tests.workers.elastic import DATA, fresh, gradient, update
from tests.workers.launched import digest, say

ARRAYS = ("numpy", "jax.numpy", "mlx.core")
STORE = 10**8
TOTAL = 250
PATIENCE = 300.0
SPREAD = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="STRICT_SPREAD")


def train(config: dict[str, Any]) -> None:
    """Join the group of the workers, and average gradients of each library."""
    import ringfort
    from ringfort.training import average_gradients

    node = ray.get_runtime_context().get_node_id()
    with ringfort.init() as context:
        for library in config["libraries"]:
            array = import_module(library)
            total = context.all_reduce(array.full((1000,), 2.0**context.rank))
            means = average_gradients(context, {"w": array.full((10,), float(context.rank))})
            said = [context.rank, context.world_size, float(total[0]), float(means["w"][0]), os.environ["LOCAL_RANK"]]
            same = type(total) is type(means["w"]) is type(array.full((1,), 0.0))
            Path(config["folder"], f"{library}{context.rank}").write_text(json.dumps([*said, same, node]))


def train_torch(config: dict[str, str]) -> None:
    """Train a step of a model as Ray's documentation does."""
    import torch
    import torch.distributed as dist
    from ray.train.torch import prepare_model

    model = prepare_model(torch.nn.Linear(3, 1))
    model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
    said = [dist.get_rank(), dist.get_backend(), model.module.weight.grad[0, 0].item(), type(dist.group.WORLD).__name__]
    Path(config["folder"], f"torch{dist.get_rank()}").write_text(json.dumps(said))


def take_part(folder: str) -> dict[str, Any]:
    """Be a member of an elastic run, and tell how far it is."""
    import ringfort

    state = fresh()
    own = ray.get_runtime_context().get_node_id()[:8]
    with ringfort.elastic(state, patience=5.0) as run:
        for step in run.steps(
            TOTAL, samples=DATA.samples, batch=DATA.batch, microbatch=DATA.microbatch, seed=DATA.seed
        ):
            for part in step:
                time.sleep(0.0 if Path(folder, "hurry").exists() else 0.03)
                step.add(gradient(part))
            update(state, step.mean())
            Path(folder, f"at-{own}").write_text(f"{step.number} {len(run.members)}")
    return {"done": run.step, "state": digest(state)}


def fail(folder: str) -> None:
    """Fail, and count it."""
    path = Path(folder, f"failures-{ray.get_runtime_context().get_node_id()[:8]}")
    path.write_text(str(int(path.read_text() if path.exists() else "0") + 1))
    raise RuntimeError("no such data")


def change_machines(cluster: Cluster, second: Any, folder: Path) -> None:
    """Add a machine while the run goes on, take one away without a warning, and add another one."""
    until(folder, lambda step, members: members == 2 and step >= 5)
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    until(folder, lambda step, members: members == 3)
    say(grown=True)
    cluster.remove_node(second, allow_graceful=False)
    until(folder, lambda step, members: members == 2)
    say(shrunk=True)
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    until(folder, lambda step, members: members == 3)
    say(again=True)
    (folder / "hurry").touch()


def until(folder: Path, wanted: Any) -> None:
    """Wait until a member tells a step and a number of members as wanted, from now on."""
    for path in folder.glob("at-*"):
        path.unlink(missing_ok=True)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for path in folder.glob("at-*"):
            said = path.read_text().split()
            if said and wanted(*map(int, said)):
                return
        time.sleep(0.1)
    say(waited="in vain", seen=[path.read_text() for path in folder.glob("at-*")])
    (folder / "hurry").touch()


def run_blocks(cluster: Cluster, second: Any, folder: Path) -> None:
    """Run what the document shows."""
    os.environ["HOME"] = str(folder)  # where trainers keep their results by default
    for block in blocks():
        if block.needs == ("a Ray cluster",):
            exec(compile(block.code, block.where, "exec"), {"__name__": "__main__"})
            say(ran=block.where)


def run_trainings(cluster: Cluster, second: Any, folder: Path) -> None:
    """Run all other cases."""
    told = {"folder": str(folder)}
    stored = RunConfig(storage_path=str(folder / "ray"))
    libraries = [name for name in ARRAYS if find_spec(name.partition(".")[0]) is not None]
    DataParallelTrainer(
        train, train_loop_config=told | {"libraries": libraries}, backend_config=RingfortConfig(timeout=120),
        scaling_config=SPREAD, run_config=stored,
    ).fit()  # fmt: skip
    say(arrays={name: [json.loads((folder / f"{name}{rank}").read_text()) for rank in range(2)] for name in libraries})
    TorchTrainer(
        train_torch, train_loop_config=told, torch_config=TorchConfig(backend="ringfort"), scaling_config=SPREAD,
        run_config=stored,
    ).fit()  # fmt: skip
    say(torch=[json.loads((folder / f"torch{rank}").read_text()) for rank in range(2)])
    running = Thread(target=lambda: say(elastic=run_elastic(take_part, str(folder), nodes="1:4", name="in-ray")))
    running.start()
    change_machines(cluster, second, folder)
    running.join(PATIENCE)
    try:
        run_elastic(fail, str(folder), nodes="1", max_failures=2)
    except DistributedError as exc:
        failures = [int(path.read_text()) for path in folder.glob("failures-*")]
        say(failed=str(exc).splitlines()[0], cause=type(exc.__cause__).__name__, failures=failures)


CASES = {"trainings": run_trainings, "blocks": run_blocks}


def main(cases: str, folder: Path) -> None:
    """Run cases in one cluster: to start one takes longer than a case."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": STORE}
    )
    try:
        second = cluster.add_node(num_cpus=2, object_store_memory=STORE)
        ray.init(address=cluster.address, log_to_driver=False)
        CASES[cases](cluster, second, folder)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
