"""A replica group of torchft 0.2.0 with one process, written as torchft's own train_ddp.py is.

Manager, DistributedDataParallel, Optimizer and DistributedSampler are torchft's, with one repair, and the position of
the data loader is saved after every step, as its documentation advises, so that a replica that is started again
continues there.
"""

from __future__ import annotations

import argparse
import logging
import os
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchdata.stateful_dataloader import StatefulDataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing import HTTPTransport

from benchmarks.compared.job import SEED, Sequences, digest, make, samples_in, say
from benchmarks.compared.model_options import add_options

HOST = "127.0.0.1"
COLLECTIVE, QUORUM, CONNECT = timedelta(seconds=2), timedelta(seconds=60), timedelta(seconds=5)
"""The timeouts that suit it. A survivor may wait for another one that has given up already, until the first of them has
passed: about ten times a step here; train_ddp.py has 5 s. torchft's documentation asks for a high timeout of the
quorum, because the process ends when it has passed."""
RETRIES = 20
"""Of the quorum, for a lighthouse that is started again."""
DEFAULT = timedelta(seconds=60)
"""torchft's own timeout wherever none is given."""


class RepairedDataParallel(DistributedDataParallel):
    """torchft's wrapper with another hook. That of 0.2.0 asks for the future of a failed all-reduce. With Gloo there is
    none, and an AssertionError ends every replica when one is lost."""

    @staticmethod
    def _comm_hook(state, bucket):  # torch refuses annotations that are strings
        state.allreduce(bucket.buffer()).wait()  # an error is in the manager then, and the step is given up
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


class LoopbackTransport(HTTPTransport[Any]):
    """Names an address instead of the host's name, which need not resolve."""

    def address(self) -> str:
        return f"http://{HOST}:{self._server.socket.getsockname()[1]}/checkpoint/"


def manager_of(given: argparse.Namespace, store: TCPStore, states: dict[str, Any]) -> Manager:
    """Return the manager of this replica group."""
    suited = {} if given.defaults else {"timeout": COLLECTIVE, "quorum_timeout": QUORUM, "connect_timeout": CONNECT}
    if not given.defaults:
        suited["quorum_retries"] = RETRIES
    return Manager(
        pg=ProcessGroupGloo() if given.defaults else ProcessGroupGloo(timeout=COLLECTIVE),
        min_replica_size=1,
        use_async_quorum=False,  # a replica that returns computes its first step with the weights of the others
        replica_id=f"member_{given.number}",
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        hostname=HOST,
        lighthouse_addr=given.lighthouse,
        checkpoint_transport=LoopbackTransport(DEFAULT if given.defaults else COLLECTIVE, num_chunks=0),
        **states,
        **suited,
    )


class Position:
    """The place in the data of this replica group, on its disk."""

    def __init__(self, file: Path, sampler: Any, loader: Any) -> None:
        self._file, self._sampler, self._loader = file, sampler, loader
        self.number = 0
        """Of the pass over the data."""
        if file.exists():
            saved = torch.load(file)
            self.number = saved["pass"]
            loader.load_state_dict(saved["loader"])
        sampler.set_epoch(self.number)

    def next_pass(self) -> None:
        self.number += 1
        self._sampler.set_epoch(self.number)
        self.save()

    def save(self) -> None:
        new = self._file.with_suffix(".new")
        torch.save({"pass": self.number, "loader": self._loader.state_dict()}, new)
        new.replace(self._file)


def train(given: argparse.Namespace) -> None:
    """Train for ever, and print a line of JSON for what is drawn, committed and given up."""
    model, adam = make(given)
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)

    def load_state_dict(state: dict[str, Any]) -> None:
        wrapped.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    def state_dict() -> dict[str, Any]:
        return {"model": wrapped.state_dict(), "optim": optimizer.state_dict()}

    manager = manager_of(given, store, {"load_state_dict": load_state_dict, "state_dict": state_dict})
    wrapped = (DistributedDataParallel if given.as_published else RepairedDataParallel)(manager, model)
    optimizer = Optimizer(manager, adam)
    share = given.batch // given.members
    sampler = DistributedSampler(
        Sequences(),
        replica_rank=given.number,
        num_replica_groups=given.members,
        group_rank=0,
        num_replicas=1,
        shuffle=True,
        seed=SEED,
    )
    loader = StatefulDataLoader(sampler.dataset, batch_size=share, sampler=sampler)
    position = Position(Path(given.folder) / "position.pt", sampler, loader)
    while True:
        for indices, codes in loader:
            say(drew=indices.tolist(), number=position.number)
            optimizer.zero_grad()  # the quorum, and the state of another replica where this one is behind
            loss = wrapped(indices, codes)
            loss.backward()
            step, before = manager.current_step(), digest(model)
            optimizer.step()
            if manager.current_step() > step:
                members = manager.num_participants()
                say(
                    step=manager.current_step(),
                    applied=samples_in(model.marks.grad, share * members),
                    members=members,
                    group=manager._quorum_id,
                    loss=loss.item(),
                    before=before,
                    weights=digest(model),
                    leads=False,
                )
            else:
                say(gave_up=step + 1)
            position.save()
        position.next_pass()


def main() -> None:
    """Run the command line."""
    say(ready=True)
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int)
    parser.add_argument("--members", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--folder")
    parser.add_argument("--lighthouse")
    parser.add_argument("--defaults", action="store_true", help="torchft's own timeouts")
    parser.add_argument("--as-published", action="store_true", help="torchft's own hook")
    add_options(parser)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    try:
        train(given)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # threads of the manager would keep the process, and nobody would start another


if __name__ == "__main__":
    main()
