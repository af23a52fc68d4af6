"""The viewer of `python -m benchmarks.watching`: looks at a run from one of its machines until it is killed, and prints
each view as a line of JSON."""

from __future__ import annotations

import sys
import time

import msgspec

from ringfort.dashboard.source import LiveSource

EVERY = 0.25
"""Seconds between two looks."""


def main() -> None:
    with LiveSource() as source:
        while True:
            sys.stdout.buffer.write(msgspec.json.encode(source.view()) + b"\n")
            sys.stdout.buffer.flush()
            time.sleep(EVERY)


if __name__ == "__main__":
    main()
