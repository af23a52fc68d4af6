"""What elasticity costs a torch program where nothing fails: `python -m benchmarks.elastic_torch_price`.

Two members of `ringfort.torch.elastic` and two ranks of DistributedDataParallel over the backend `ringfort` train the
same model and take turns on one machine, with the same optimizer and batch, through shared memory or, with `--tcp`,
over encrypted TCP. The model is a stack of square layers; `--rows` says how long a step takes.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import ringfort.torch
from benchmarks.elastic_price import FOREVER, Rounds, compared, pair
from ringfort.config import AutoDiscoveryConfig

MODULE = "benchmarks.elastic_torch_price"


class Rows:
    """A data set whose samples are blocks of rows, so that one sample is the work of a rank."""

    def __init__(self, rows: int, width: int) -> None:
        import torch

        self._rows = torch.randn(rows, width)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Any:
        return self._rows


def model_of(given: argparse.Namespace) -> Any:
    """Return the model: `--layers` of `--size` times `--size`."""
    import torch

    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(given.size, given.size) for _ in range(given.layers)]
    return torch.nn.Sequential(*layers).to(given.device)


def plain(given: argparse.Namespace) -> None:
    """The loop of DistributedDataParallel."""
    import torch
    import torch.distributed as dist

    ringfort.torch.register()  # by itself where Ringfort is installed
    dist.init_process_group(
        "ringfort", init_method=f"tcp://127.0.0.1:{given.port}", rank=given.rank, world_size=2
    )  # fmt: skip
    model = torch.nn.parallel.DistributedDataParallel(model_of(given), gradient_as_bucket_view=True)
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=1e-4), Rows(given.rows, given.size)[0].to(given.device)
    rounds = Rounds()
    while True:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        if given.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), given.clip_norm)
        optimizer.step()
        finish(given)
        rounds.step_ended()


def elastic(given: argparse.Namespace) -> None:
    """The same loop, as a run that survives."""
    import torch

    model = model_of(given)
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=1e-4), Rows(given.rows, given.size)[0].to(given.device)
    rounds, config = Rounds(), AutoDiscoveryConfig(interfaces=["127.0.0.1"])

    def step_ended(*_: Any) -> None:
        finish(given)
        with run.aside():
            rounds.step_ended()

    optimizer.register_step_post_hook(step_ended)  # not in the loop: a member may have no micro-batch in a step
    run = ringfort.torch.elastic(
        model, optimizer, batch=2, nodes="2:2", name="price", config=config, overlap=not given.no_overlap,
        clip_norm=given.clip_norm, on_step=(lambda *_: None) if given.on_step else None,
    )  # fmt: skip
    for _ in run.loader(list(range(4096)), microbatch=1, steps=FOREVER):
        run.backward(model(rows).square().mean())
        run.step()


def finish(given: argparse.Namespace) -> None:
    """Wait for the device: a step has ended when its update has."""
    import torch

    if given.device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    for hidden in ("--kind", "--port"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--rank", "--batch"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=2040, help="width of a layer [%(default)s]")
    parser.add_argument("--layers", type=int, default=6, help="layers [%(default)s: 25 M parameters]")
    parser.add_argument("--rows", type=int, default=256, help="rows that a rank computes [%(default)s]")
    parser.add_argument(
        "--threads", type=int, default=max(1, (os.cpu_count() or 2) // 4), help="of torch [%(default)s]"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda [%(default)s]")
    parser.add_argument("--tcp", action="store_true", help="over encrypted TCP, not through shared memory")
    parser.add_argument("--clip-norm", type=float, help="both clip gradients to this norm")
    parser.add_argument("--on-step", action="store_true", help="the run has an on_step, which does nothing")
    parser.add_argument("--no-overlap", action="store_true", help="the run reduces after backward, not during it")
    parser.add_argument("--rounds", type=int, default=10, help="rounds [%(default)s]")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round [%(default)s]")
    given = parser.parse_args()
    if given.kind:
        (plain if given.kind == "plain" else elastic)(given)
        return
    if given.tcp:
        os.environ["RINGFORT_SHM"] = "off"
    millions = given.layers * given.size**2 / 1e6
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {millions:.1f} M parameters")
    options = tuple(
        word for name in ("layers", "rows", "threads", "device") for word in (f"--{name}", str(getattr(given, name)))
    )
    if given.clip_norm is not None:
        options += ("--clip-norm", str(given.clip_norm))
    own = (*["--no-overlap"] * given.no_overlap, *["--on-step"] * given.on_step)
    with (
        pair("plain", given.size, (0.0, 0.0), module=MODULE, options=options) as without,
        pair("elastic", given.size, (0.0, 0.0), module=MODULE, options=(*options, *own)) as with_it,
    ):
        print(compared(without, with_it, given.rounds, given.steps))


if __name__ == "__main__":
    main()
