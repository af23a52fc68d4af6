"""The benchmark: measures collectives over sizes and world sizes, and compares them with other engines.

options.py      Options, Case: what to measure
runner.py       run_bench: one run; Schedule: how often and in which order engines are called
workers.py      start_workers: the processes of an engine; worker.py is one of them
explain.py      explain: compares strategies instead of engines
results.py      Report, Row, Timing: the results; tables.py and plot.py show them
patterns.py     known contents of buffers, so that wrong results are found
machine.py      which machine was measured
engines/        the engines
"""
