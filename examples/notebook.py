# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Ranks behind a notebook
#
# `ringfort.local(2)` starts two ranks as processes of this machine. `group.run(fn, ...)` calls `fn(ctx, ...)` on each
# of them and returns a list of their results. `jupytext --to notebook notebook.py` makes a notebook of this file; it
# also runs as a plain script.

# %%
import numpy as np

import ringfort
from ringfort.training import average_gradients

group = ringfort.local(2)

# %% [markdown]
# What a rank prints appears here, with its rank in front.


# %%
def hello(ctx):
    x = np.full(2, ctx.rank + 1.0)
    ctx.all_reduce(x)
    print("rank", ctx.rank, "of", ctx.world_size, "has", x)
    return ctx.rank


ranks = group.run(hello)
print(ranks)

# %% [markdown]
# A function can use what the cells above have defined: modules, other functions, classes, numbers and arrays. The ranks
# get copies. Here they fit a line, each with its own share of the data.

# %%
TRUTH = np.array([2.0, -1.0, 0.5])
RATE = 0.1


def batch(rank, step, size=64):
    random = np.random.default_rng((rank, step))
    x = random.normal(size=(size, len(TRUTH)))
    return x, x @ TRUTH + 0.01 * random.normal(size=size)


def train(ctx, steps):
    weights = np.zeros(len(TRUTH))
    for step in range(steps):
        x, y = batch(ctx.rank, step)
        gradients = {"w": 2 * x.T @ (x @ weights - y) / len(y)}
        average_gradients(ctx, gradients)  # in place
        weights -= RATE * gradients["w"]
    return weights


weights = group.run(train, steps=100)
print("error of the fit:", np.abs(weights[0] - TRUTH).max())
assert all((other == weights[0]).all() for other in weights)  # the same bits on every rank

# %% [markdown]
# An exception of a rank comes back with the rank and its traceback, even if the others wait for it. The next call has
# new ranks.


# %%
def fail(ctx):
    if ctx.rank == 1:
        raise ValueError("no data here")
    ctx.barrier()


try:
    group.run(fail)
except ringfort.LocalRunError as error:
    print(error)

# %%
group.close()
