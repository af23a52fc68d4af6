"""Local steps: ranks train by themselves, and average their weights now and then.

`run` is what programs use. `outer` moves the global weights, `pace` says how many steps each rank makes and how its
difference counts, `choice` decides how often to reduce and how; these are pure.
"""
