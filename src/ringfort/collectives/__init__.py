"""Collectives over any backend.

Each function here prepares one: it checks every argument and returns an `Operation`, and no byte moves until its `run`
is called. `DistributedContext` runs them, at once or in order in the background.
"""
