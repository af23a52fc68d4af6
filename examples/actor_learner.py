"""A small actor-learner: actors play with their latest policy, and the learner trains on games as they arrive.

    ringfort run -n 3 examples/actor_learner.py

The game is a corridor with a slippery floor and a reward at its end. The policy is a table, trained by policy
gradients. With a network as the policy and a real game, the calls would be the same.
"""

from __future__ import annotations

import argparse
import threading
from dataclasses import dataclass

import numpy as np

import ringfort

LENGTH, LONGEST, SLIP, STEP_COST, RATE = 8, 60, 0.1, 0.02, 0.5


@dataclass
class Episode:
    """One game of an actor. The type is annotated, so that the learner gets a `Game` and not a dict."""

    states: list[int]
    actions: list[int]
    total: float


def chances(table: np.ndarray) -> np.ndarray:
    """The probability of each action in each state."""
    raised = np.exp(table - table.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def play(table: np.ndarray, chance: np.random.Generator) -> Episode:
    """Play one walk: action 1 goes forward, 0 goes back, and sometimes a step goes the wrong way."""
    policy, place, episode = chances(table), 0, Episode([], [], 0.0)
    for _ in range(LONGEST):
        action = int(chance.random() < policy[place, 1])
        episode.states.append(place)
        episode.actions.append(action)
        slipped = chance.random() < SLIP
        place = max(0, place + (1 if bool(action) != slipped else -1))
        episode.total -= STEP_COST
        if place == LENGTH:
            episode.total += 1
            break
    return episode


def learn_from_others(ctx: ringfort.DistributedContext, agent: ringfort.RpcAgent, episodes: int) -> None:
    """Run the learner, at rank 0."""
    table, lock = np.zeros((LENGTH, 2)), threading.Lock()
    seen, recent = 0, 0.0

    @agent.rpc
    def policy() -> np.ndarray | None:
        """The latest policy; None when the training is over."""
        with lock:
            return table.copy() if seen < episodes else None

    @agent.rpc
    def learn(episode: Episode) -> None:
        nonlocal seen, recent
        with lock:
            advantage = episode.total - recent
            likely = chances(table)
            for state, action in zip(episode.states, episode.actions, strict=True):
                slope = -likely[state]
                slope[action] += 1
                table[state] += RATE * advantage * slope / len(episode.states)
            recent += 0.05 * (episode.total - recent)
            seen += 1
            if seen % 100 == 0:
                print(f"episode {seen} return {recent:.4f}", flush=True)

    ctx.barrier()  # the functions are registered
    agent.join()


def act(ctx: ringfort.DistributedContext, agent: ringfort.RpcAgent) -> None:
    """Run an actor, at every other rank. It sends a game while it plays the next one."""
    chance, told = np.random.default_rng(agent.rank), None
    ctx.barrier()  # the learner has registered its functions
    while (table := agent.rpc_sync("learner", "policy")) is not None:
        episode = play(table, chance)
        if told is not None:
            told.result()
        told = agent.rpc_async("learner", "learn", episode)
    if told is not None:
        told.result()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=2000)
    episodes = parser.parse_args().episodes
    with (
        ringfort.init() as ctx,
        ringfort.RpcAgent(ctx, name="learner" if ctx.rank == 0 else f"actor{ctx.rank}") as agent,
    ):
        if ctx.rank == 0:
            learn_from_others(ctx, agent, episodes)
        else:
            act(ctx, agent)


if __name__ == "__main__":
    main()
