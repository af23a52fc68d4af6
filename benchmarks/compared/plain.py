"""A plain loop without any system: what a process computes if nothing holds it up. `benchmarks.elastic_compared`
starts as many of them side by side as there are members."""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.compared.job import Sequences, make, say
from benchmarks.compared.model_options import add_options


def main() -> None:
    """Train for some seconds, and print how many samples per second that were."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, help="per step")
    parser.add_argument("--seconds", type=float)
    add_options(parser)
    given = parser.parse_args()
    model, optimizer = make(given)
    loader = torch.utils.data.DataLoader(Sequences(), batch_size=given.samples, shuffle=True)
    done, begin, used = -2, 0.0, 0.0  # the first two steps warm up
    while True:
        for indices, codes in loader:
            optimizer.zero_grad()
            model(indices, codes).backward()
            optimizer.step()
            done += 1
            now = time.monotonic()
            if done == 0:
                begin, used = now, time.process_time()
            elif done > 0 and now > begin + given.seconds:
                samples = done * given.samples
                cpu = time.process_time() - used
                say(samples_per_s=samples / (now - begin), cpu_ms_per_sample=cpu / samples * 1e3)
                return


if __name__ == "__main__":
    main()
