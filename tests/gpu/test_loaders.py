"""Batches in pinned memory, from the loaders of elastic runs; the GPU is in use before workers are forked."""

from __future__ import annotations

import subprocess
import sys

import pytest

PATIENCE = 60.0
"""Seconds for a program: CUDA alone takes a few to start."""

PROGRAM = """
import sys, torch
from ringfort.torch.training.part_loader import PartLoader
from ringfort.torch.training.prefetch_plan import Request
from ringfort.torch.training.stream_loader import StreamLoader, StreamRequest
from ringfort.training.elastic.dealing import Span

torch.ones(4, device="cuda").sum().item()
torch.cuda.manual_seed(3)
before = torch.cuda.get_rng_state()
options = {"pin_memory": True, "num_workers": int(sys.argv[1])}
if options["num_workers"]:
    options["multiprocessing_context"] = "fork"
samples = [(torch.full((2,), float(i)), i) for i in range(40)]
requests = [Request(0, part, (2 * part, 2 * part + 1), part) for part in range(6)]
loader = PartLoader(samples, lambda: requests[:4], **options)
stream = StreamLoader(samples, **options)
for request in requests:
    for x, y in (
        loader.get(request),
        stream.get(StreamRequest(0, request.part, Span(0, 0, 40), 2 * request.part, 2 * request.part + 2, 0)),
    ):
        assert x.is_pinned() and y.is_pinned()
        assert y.to("cuda", non_blocking=True).tolist() == list(request.indices)
loader.close()
stream.close()
assert torch.equal(torch.cuda.get_rng_state(), before), "loading has moved the generator of the GPU"
"""


@pytest.mark.parametrize("num_workers", ["0", "1"])
def test_batches_are_pinned_and_the_generator_of_the_gpu_stays(num_workers: str) -> None:
    command = [sys.executable, "-c", PROGRAM, num_workers]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 0, run.stderr
