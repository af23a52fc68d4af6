"""All-reduce and broadcast of tensors on GPUs, host by host: NCCL inside, our links between the first ranks of the
hosts, through the memory of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringfort.backends.engines.native import ByHost, Native, Pending
from ringfort.backends.group import Group
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.collectives.plan import Operation, Plan
from ringfort.collectives.reduction import ElementType
from ringfort.collectives.tensors import scale_after, scale_before
from ringfort.transport.messages import Envelope


def all_reduce(group: Group, native: Native, hosts: ByHost, op: Op, kind: ElementType, name: str, call: bytes) -> Plan:
    """Reduce every rank's tensor in place."""
    from ringfort.collectives.all_reduce import all_reduce  # which asks here first

    def run(tensor: Any, timeout: float | None = None) -> None:
        envelope = group.envelope(call, timeout)
        group.meet(envelope)
        scale_before(op, kind, tensor)
        _inside(native, hosts, lambda: native.reduce(tensor, 0, name), envelope)
        _between(hosts, tensor, lambda between, x: all_reduce(between, x, ReduceOp[name], timeout=timeout))
        _inside(native, hosts, lambda: native.broadcast(tensor, 0), envelope)
        scale_after(op, kind, tensor, group.world_size)

    return Plan(run)


def broadcast(group: Group, native: Native, hosts: ByHost, root: int, call: bytes) -> Plan:
    """Copy the root's tensor to every rank's, in place."""
    from ringfort.collectives.broadcast import broadcast  # which asks here first

    def run(tensor: Any, timeout: float | None = None) -> None:
        envelope = group.envelope(call, timeout)
        group.meet(envelope)
        if group.hosts[root] == group.hosts[group.rank]:
            place = hosts.local.members.index(group.members[root])
            _inside(native, hosts, lambda: native.broadcast(tensor, place), envelope)
        first = sorted(set(group.hosts)).index(group.hosts[root])
        _between(hosts, tensor, lambda between, x: broadcast(between, x, first, timeout=timeout))
        _inside(native, hosts, lambda: native.broadcast(tensor, 0), envelope)

    return Plan(run)


def _inside(native: Native, hosts: ByHost, begin: Callable[[], Pending], envelope: Envelope) -> None:
    if hosts.local.world_size > 1:
        native.carry(begin, envelope)


def _between(hosts: ByHost, tensor: Any, prepare: Callable[[Group, Any], Operation]) -> None:
    """Do what `prepare` prepares for the first ranks of the hosts, with a copy in the memory of the CPU."""
    if hosts.between is not None and hosts.between.world_size > 1:
        copy = tensor.cpu()
        prepare(hosts.between, copy).run()
        tensor.copy_(copy)
