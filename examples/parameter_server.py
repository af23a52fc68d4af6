"""An asynchronous parameter server: rank 0 keeps the weights, the others train and never wait for each other.

    ringfort run -n 3 examples/parameter_server.py

Each worker asks for the latest weights, computes gradients on its share of the data, and sends them while it continues.
A slow worker delays only itself, and one that dies loses only its share.
"""

from __future__ import annotations

import argparse
import threading

import numpy as np

import ringfort

Weights = list[np.ndarray]
CLASSES, HIDDEN, BATCH, RATE = 3, 32, 64, 0.3


def spirals(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points on three arms of a spiral, and the arm of each: no straight line separates them."""
    chance = np.random.default_rng(seed)
    labels = chance.integers(0, CLASSES, n)
    radius = chance.uniform(0.05, 1, n)
    angle = 4 * radius + labels * 2 * np.pi / CLASSES + chance.normal(0, 0.1, n)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1), labels


def start(seed: int = 0) -> Weights:
    chance = np.random.default_rng(seed)
    return [
        chance.normal(0, 1, (2, HIDDEN)),
        np.zeros(HIDDEN),
        chance.normal(0, 0.2, (HIDDEN, CLASSES)),
        np.zeros(CLASSES),
    ]


def loss_and_gradients(weights: Weights, x: np.ndarray, labels: np.ndarray) -> tuple[float, Weights]:
    first, bias, second, offset = weights
    hidden = np.tanh(x @ first + bias)
    scores = hidden @ second + offset
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(chances[rows, labels] + 1e-12).mean())
    chances[rows, labels] -= 1
    chances /= len(labels)
    back = chances @ second.T * (1 - hidden**2)
    return loss, [x.T @ back, back.sum(0), hidden.T @ chances, chances.sum(0)]


def serve(ctx: ringfort.DistributedContext, agent: ringfort.RpcAgent) -> None:
    """Run the server, at rank 0: it sends weights and applies gradients in any order."""
    weights, lock, pushes = start(), threading.Lock(), 0
    test = spirals(1000, seed=12345)

    @agent.rpc
    def pull() -> Weights:
        with lock:
            return [weight.copy() for weight in weights]

    @agent.rpc
    def push(gradients: list[np.ndarray]) -> None:
        nonlocal pushes
        with lock:
            for weight, gradient in zip(weights, gradients, strict=True):
                np.subtract(weight, RATE * gradient, out=weight)
            pushes += 1
            if pushes % 50 == 1:
                print(f"step {pushes} loss {loss_and_gradients(weights, *test)[0]:.6f}", flush=True)

    ctx.barrier()  # the functions are registered
    agent.join()  # until the workers have closed their agents
    print(f"end {pushes} loss {loss_and_gradients(weights, *test)[0]:.6f}", flush=True)


def work(ctx: ringfort.DistributedContext, agent: ringfort.RpcAgent, steps: int) -> None:
    """Run a worker, at every other rank: pull, compute, push, and continue during the push."""
    x, labels = spirals(2000, seed=agent.rank)
    chance = np.random.default_rng(agent.rank)
    pushed = None
    ctx.barrier()  # the server has registered its functions
    for _ in range(steps):
        weights = agent.rpc_sync("server", "pull")
        batch = chance.integers(0, len(x), BATCH)
        _, gradients = loss_and_gradients(weights, x[batch], labels[batch])
        if pushed is not None:
            pushed.result()  # at most one push at a time: gradients must not become stale
        pushed = agent.rpc_async("server", "push", gradients)
    if pushed is not None:
        pushed.result()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500, help="of each worker")
    steps = parser.parse_args().steps
    with (
        ringfort.init() as ctx,
        ringfort.RpcAgent(ctx, name="server" if ctx.rank == 0 else f"worker{ctx.rank}") as agent,
    ):
        if ctx.rank == 0:
            serve(ctx, agent)
        else:
            work(ctx, agent, steps)


if __name__ == "__main__":
    main()
