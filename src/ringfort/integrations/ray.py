"""Ringfort in Ray: `RingfortConfig`, a backend of Ray Train for NumPy, JAX and MLX, and `run_elastic`, a run whose
machines Ray adds and takes away.

    DataParallelTrainer(train, backend_config=RingfortConfig(), scaling_config=ScalingConfig(num_workers=4)).fit()

PyTorch needs nothing of this: `TorchTrainer(..., torch_config=TorchConfig(backend="ringfort"))`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from ringfort.config import check_timeout, format_address, member_range, set_for_this_process
from ringfort.errors import BackendUnavailableError, DistributedError
from ringfort.integrations.versions import require
from ringfort.transport import tcp

require("ray", "2.51", install="ray[train]")

try:
    ray: Any = import_module("ray")
    train_backend: Any = import_module("ray.train.backend")
    strategies: Any = import_module("ray.util.scheduling_strategies")
except ImportError as exc:  # Ray is there, and what Ray Train needs is not
    raise BackendUnavailableError("ray.train", f"{exc}: pip install 'ray[train]'") from exc

_log = logging.getLogger("ringfort.ray")
LOOK_SECONDS: Final = 1.0
"""Seconds between two looks which machines there are."""

# --- Ray Train --------------------------------------------------------------------------------------------------------


@dataclass
class RingfortConfig(train_backend.BackendConfig):
    """The workers of a Ray trainer are the ranks of one group: `ringfort.init()` in the training function joins it.

    `timeout` is that of `ringfort.init`: seconds for forming the group and for every call. The machines must belong to
    one cluster (`ringfort key join`).
    """

    timeout: float | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an invalid timeout."""
        if self.timeout is not None:
            check_timeout(self.timeout)

    @property
    def backend_cls(self) -> type[Any]:
        """What Ray asks for."""
        return _RingfortBackend


class _RingfortBackend(train_backend.Backend):
    """Tells the workers their places, as a launcher does."""

    def on_start(self, worker_group: Any, backend_config: RingfortConfig) -> None:
        """Run by the controller, once the workers are there."""
        nodes = worker_group.execute(_node_id)
        master, descriptor = worker_group.execute_single(0, _open)
        for rank, node in enumerate(nodes):
            variables = {
                "RANK": rank,
                "WORLD_SIZE": len(nodes),
                "LOCAL_RANK": nodes[:rank].count(node),
                "LOCAL_WORLD_SIZE": nodes.count(node),
                "RINGFORT_MASTER": master,
                "RINGFORT_LISTEN_FD": "" if rank else descriptor,
            }
            if backend_config.timeout is not None:
                variables["RINGFORT_TIMEOUT"] = backend_config.timeout
            told = {name: str(value) for name, value in variables.items()}
            worker_group.execute_single(rank, set_for_this_process, told)


def _node_id() -> str:
    return ray.get_runtime_context().get_node_id()


def _open() -> tuple[str, int]:
    """Open the place where the ranks meet, at the address of this machine in Ray. Return it, and the socket."""
    host = ray.util.get_node_ip_address()
    listener = tcp.listen(host, 0)
    return format_address(host, listener.getsockname()[1]), listener.detach()


# --- elastic runs -----------------------------------------------------------------------------------------------------


@dataclass
class _Node:
    """A machine of Ray, and the member of the run that is there."""

    actor: Any = None
    result: Any = None
    """The reference to what the member returns."""
    failures: int = 0


class _Member:
    """The actor of a member."""

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], variables: Mapping[str, str]) -> Any:
        set_for_this_process(variables)
        return fn(*args)


def run_elastic(
    fn: Callable[..., Any],
    *args: Any,
    nodes: str | int = "1:",
    name: str = "ray",
    resources: Mapping[str, float] | None = None,
    max_failures: int = 3,
) -> list[Any]:
    """Call `fn(*args)`, which calls `ringfort.elastic`, on every machine of the Ray cluster that has room for it, and
    on each that Ray adds while the run goes on. Return what the members return that were there at the end.

    `nodes` and `name` are those of `ringfort.elastic`, and `resources` what one member needs: `{"CPU": 1}`, or
    `{"GPU": 1}`. A machine that Ray takes away costs no step. A member that fails on a machine that is still there is
    started again up to `max_failures` times on each machine; after that, its exception ends the run.

    Raises:
        DistributedError: A member has failed too often; its exception is the cause. Ctrl-C ends all members.
        ConfigError: `nodes` is invalid.
    """
    member_range(nodes)
    if not ray.is_initialized():
        ray.init()
    run = _ElasticRun(fn, args, str(nodes), name, dict(resources or {"CPU": 1}), max_failures)
    try:
        return run.until_end()
    finally:
        run.stop()


@dataclass
class _ElasticRun:
    """The driver's side: starts members where there is room, and waits."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    nodes: str
    name: str
    resources: dict[str, float]
    max_failures: int
    _known: dict[str, _Node] = field(default_factory=dict[str, _Node])
    """By Ray's id of the machine."""
    _results: list[Any] = field(default_factory=list[Any])
    _is_ending: bool = False
    """Whether a member has ended: then the run is over, and nobody else is started."""

    def until_end(self) -> list[Any]:
        while not (self._is_ending and not self._working):
            alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
            if not self._is_ending:
                self._start(alive)
            waiting = [node.result for node in self._working]
            if waiting:
                ray.wait(waiting, num_returns=1, timeout=LOOK_SECONDS)
            else:
                time.sleep(LOOK_SECONDS)
            for key, node in list(self._known.items()):
                if node.result is not None and ray.wait([node.result], timeout=0)[0]:
                    self._ended(key, node)
        return self._results

    @property
    def _working(self) -> list[_Node]:
        return [node for node in self._known.values() if node.result is not None]

    def _start(self, alive: Mapping[str, Mapping[str, Any]]) -> None:
        """Start a member on each machine that has none and is large enough."""
        _, most = member_range(self.nodes)
        addresses = sorted({node["NodeManagerAddress"] for node in alive.values()})
        for key, about in alive.items():
            node = self._known.setdefault(key, _Node())
            is_large = all(about["Resources"].get(what, 0) >= need for what, need in self.resources.items())
            if node.result is not None or not is_large or (most is not None and len(self._working) >= most):
                continue
            others = {what: need for what, need in self.resources.items() if what not in ("CPU", "GPU")}
            kind = ray.remote(
                num_cpus=self.resources.get("CPU", 0), num_gpus=self.resources.get("GPU", 0), resources=others,
                scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(key, soft=False), max_restarts=0,
            )(_Member)  # fmt: skip
            told = {"RINGFORT_ELASTIC_NODES": self.nodes, "RINGFORT_ELASTIC_NAME": self.name}
            node.actor = kind.remote()
            peers = {"RINGFORT_PEERS": ",".join(addresses)} if len(addresses) > 1 else {}
            node.result = node.actor.run.remote(self.fn, self.args, told | peers)
            _log.info("Started a member of %r on %s", self.name, about["NodeManagerHostname"])

    def _ended(self, key: str, node: _Node) -> None:
        """Take up how a member has ended."""
        result, node.result, node.actor = node.result, None, None
        try:
            self._results.append(ray.get(result))
        except Exception as exc:  # of the member's function, or Ray's about its process
            if not any(one["NodeID"] == key and one["Alive"] for one in ray.nodes()):
                _log.info("Ray has taken a machine of %r away; the others go on", self.name)
                return
            node.failures += 1
            if node.failures > self.max_failures:
                why = f"A member of {self.name!r} failed {node.failures} times: {_in_words(exc)}"
                raise DistributedError(why) from exc
            _log.warning("A member of %r failed, and starts again: %s", self.name, _in_words(exc))
        else:
            self._is_ending = True

    def stop(self) -> None:
        """End the members that still run."""
        for node in self._working:
            ray.kill(node.actor)


def _in_words(error: Exception) -> str:
    """What happened, in one line: Ray's own text has the remote traceback."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}".partition("\n")[0]
