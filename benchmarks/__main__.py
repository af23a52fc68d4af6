"""Measure everything and write docs/performance.md. Each section's numbers are kept as JSON in a folder of
benchmarks/results for this machine."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console

from benchmarks.page import write_page
from benchmarks.sections import SECTIONS, Section
from ringfort.bench.machine import describe_machine
from ringfort.bench.tables import Watcher
from ringfort.transport.machine import cores

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
"""What is a name of a folder, of a picture and of a heading alike."""


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes, folders and namespaces are removed
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes and few calls, to check that everything runs")
    parser.add_argument("--only", metavar="NAMES", help=f"sections, with commas: {', '.join(names)}")
    parser.add_argument(
        "--machine",
        default=f"{cores()}-cores",
        help="what the page calls this machine: results of different machines stand beside each other [%(default)s]",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of all results [%(default)s]")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the page [%(default)s]")
    parser.add_argument(
        "--page-only", action="store_true", help="measure nothing; write the page from the saved results"
    )
    given = parser.parse_args()
    wanted = names if given.only is None else given.only.split(",")
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        parser.error(f"--only: unknown section {unknown[0]!r}; choose from: {', '.join(names)}")
    if given.quick and given.results == RESULTS:
        # A quick run is not a measurement, and must not replace one.
        given.results = given.docs = ROOT / "build" / "benchmarks"
    if not NAME.fullmatch(given.machine):
        parser.error(f"--machine: {given.machine!r} must be of small letters, digits and hyphens")
    folder = given.results / given.machine
    given.results.mkdir(parents=True, exist_ok=True)
    if not given.page_only:
        folder.mkdir(exist_ok=True)
        measure([section for section in SECTIONS if section.name in wanted], folder, quick=given.quick)
    print(f"wrote {write_page(given.results, given.docs)}")


def measure(sections: Sequence[Section], folder: Path, *, quick: bool) -> None:
    """Run each section and save its result at once: an interrupted run loses at most one section."""
    console = Console(stderr=True)
    for section in sections:
        console.print(section.title, style="bold")
        start = time.monotonic()
        watcher = Watcher(console)
        with watcher.bar:
            result = section.run(quick, watcher.step)
        result["seconds"] = round(time.monotonic() - start, 1)
        result.setdefault("machine", describe_machine(["numpy", "ringfort", "torch"]))
        result.setdefault("date", datetime.now(timezone.utc).date().isoformat())
        path = folder / f"{section.name}.json"
        if "skipped" in result and path.exists():
            console.print(f"not measured here: {result['skipped']}; what was found before stays")
            continue
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
