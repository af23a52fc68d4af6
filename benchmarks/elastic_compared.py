"""Elastic training under faults, Ringfort against torchft 0.2.0: `python -m benchmarks.elastic_compared`.

    python -m benchmarks.elastic_compared --seconds 1200 --folder out
    python -m benchmarks.elastic_compared --figures out

Each system trains the same model with the same batch on the same data (compared/job.py), on loopback, on the CPU, with
one thread per member. First calm, then a storm of kills by one timetable, then the coordinator dies: the lighthouse of
torchft, the leader of Ringfort. Members write a line per step; the figures are made of these lines
(compared/figures.py), and `--figures` makes them again. torchft comes from the Python that runs this, from
`--torchft-python`, or from a folder that `--torchft-path` names: `pip install torch torchft==0.2.0 torchdata`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.compared.figures import all_figures
from benchmarks.compared.model_options import add_options
from benchmarks.compared.records import lines_of, read
from benchmarks.compared.storm import Runner
from benchmarks.compared.systems import SYSTEMS, USUAL, Plain

SETTING = (
    "members",
    "batch",
    "microbatch",
    "calm",
    "seconds",
    "every",
    "away",
    "seed",
    "power",
    "together",
    "width",
    "layers",
    "pause",
)


def measure_plain(folder: Path, given: argparse.Namespace, cores: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the samples per second of a plain loop and its processor time per sample, beside others of its kind: as
    many as there are members on each share of the cores."""
    system, lines = Plain(folder, given), []
    processes: list[subprocess.Popen[bytes]] = []
    for share in {tuple(share) for share in cores}:
        os.sched_setaffinity(0, share)
        for member in range(given.members):
            lines.append(folder / f"plain-{len(lines)}.jsonl")
            processes.append(system.start(member, lines[-1], lines[-1].with_suffix(".txt")))
    for process in processes:
        process.wait()
    found = [line for file in lines for line in lines_of(file.read_text())]
    return {name: mean(line[name] for line in found) for name in ("samples_per_s", "cpu_ms_per_sample")}


def cores_of(systems: int, *, together: bool, waits: bool = False) -> list[list[int]]:
    """Return the cores of each system: the same number for each, their own if all run at the same time. Where a member
    `waits` for most of its time, all systems have all cores."""
    cores = sorted(os.sched_getaffinity(0))
    if not together or waits:
        return [cores] * systems
    share = len(cores) // systems
    if share == 0:
        sys.exit(
            f"{systems} systems at the same time need as many cores; there are {len(cores)}. Leave --together out, "
            "or let the members wait (--pause)."
        )
    return [cores[number * share : (number + 1) * share] for number in range(systems)]


def measure(folder: Path, given: argparse.Namespace) -> None:
    """Run all systems; write what they say into the folder."""
    cores = cores_of(len(given.systems), together=given.together, waits=given.pause > 0)
    plain = measure_plain(folder, given, cores)
    setting = {name: getattr(given, name) for name in SETTING}
    setting |= {"plain": plain, "systems": given.systems, "cores": os.cpu_count(), "cores_each": len(cores[0])}
    (folder / "setting.json").write_text(json.dumps(setting))
    print(
        f"a plain loop computes {plain['samples_per_s']:.1f} samples/s beside others, with "
        f"{plain['cpu_ms_per_sample']:.2f} ms of processor time per sample",
        flush=True,
    )
    threads: list[threading.Thread] = []
    stop = threading.Event()
    try:
        for name, own in zip(given.systems, cores, strict=True):
            home = folder / name
            home.mkdir()
            runner = Runner(SYSTEMS[name](home, given), home, given, own, stop)
            threads.append(threading.Thread(target=runner.run, name=name))
            threads[-1].start()
            if not given.together:
                threads[-1].join()
    finally:
        if sys.exc_info()[0] is not None:
            stop.set()
        for thread in threads:
            thread.join()


def report(folder: Path) -> dict[str, Any]:
    """Return the figures of all systems in a folder, and print them."""
    setting = json.loads((folder / "setting.json").read_text())
    found: dict[str, Any] = {}
    for name in setting["systems"]:
        if (folder / name / "events.jsonl").exists():
            record = read(folder / name)
            found[name] = all_figures(record, setting["plain"]["samples_per_s"])
            found[name]["errors"] = [event["why"] for event in record.of("error")]
            show(name, found[name])
    (folder / "figures.json").write_text(json.dumps({"setting": setting, **found}, indent=1))
    return found


def show(name: str, found: dict[str, Any]) -> None:
    """Print the figures of a system."""
    print(f"{name}")
    for phase in ("calm", "storm"):
        figures = found[phase]
        if figures is None:
            print(f"  {phase}: not reached")
            continue
        recovery, join = _times(figures["recovery"]), _times(figures["join"])
        print(
            f"  {phase}, {figures['seconds']:.0f} s: {figures['sealed']} samples sealed in {figures['steps']} steps "
            f"({figures['samples_per_s']:.1f} samples/s, {figures['mean_batch']:.1f} per step), "
            f"{figures['lost']} lost, {figures['twice']} applied twice, {figures['computed_again']} computed again\n"
            f"    goodput {figures['goodput']:.1%}, {figures['present']:.2f} members present, "
            f"longest gap {figures['longest_gap_s']:.2f} s, loss {figures['loss']}\n"
            f"    {figures['kills']} kills ({figures['left_out']} left out); to the next step without the killed one: "
            f"{recovery}\n"
            f"    joins, imports to first step: {join}; {figures['died_before_joining']} died before, "
            f"{figures['ended_by_themselves']} members ended by themselves, "
            f"{figures['steps_with_two_results']} steps had two results"
        )
        if figures["cpu_ms_per_sample"] is not None:
            print(f"    {figures['cpu_ms_per_sample']:.2f} ms of processor time per sealed sample")
    if found["storm"] and "of_calm" in found["storm"]:
        print(f"  {found['storm']['of_calm']:.1%} of the samples per second of calm")
    print(f"  coordinator: {found['coordinator']}", flush=True)


def _times(found: dict[str, Any]) -> str:
    never = f", {found['never']} never" if found["never"] else ""
    if not found["count"]:
        return f"none{never}"
    return f"median {found['median_s']:.2f} s, worst {found['worst_s']:.2f} s of {found['count']}{never}"


def _systems(text: str) -> list[str]:
    names = text.split(",")
    unknown = set(names) - set(SYSTEMS)
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown system {', '.join(unknown)}; choose from {', '.join(SYSTEMS)}")
    return names


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Return what was given on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic_compared",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--systems", type=_systems, default=USUAL, help=f"some of {', '.join(SYSTEMS)} [{','.join(USUAL)}]")
    add("--together", action="store_true", help="all systems at the same time, each on its own share of the cores")
    add("--seconds", type=float, default=1200.0, help="of the storm [%(default)s]")
    add("--every", type=float, default=29.0, help="seconds between two kills [%(default)s]")
    add("--away", type=float, default=5.0, help="seconds before a killed one is started again [%(default)s]")
    add("--power", action="store_true", help="kill all processes of a member at once, as a power cut does; without it "
        "the one that trains")  # fmt: skip
    add("--calm", type=float, default=60.0, help="seconds of calm before the storm [%(default)s]")
    add("--coordinator", type=float, default=60.0, help="seconds of the phase in which the coordinator dies; torchft "
        "has no lighthouse for half of them; 0: no such phase [%(default)s]")  # fmt: skip
    add("--plain", type=float, default=20.0, help="seconds for which plain loops are measured [%(default)s]")
    add("--members", type=int, default=4, help="members [%(default)s]")
    add("--batch", type=int, default=64, help="samples per step of all members together [%(default)s]")
    add("--microbatch", type=int, default=4, help="samples that Ringfort deals at once [%(default)s]")
    add_options(parser)
    add("--patience", type=float, help="seconds, of Ringfort [its default]")
    add("--seed", type=int, default=1, help="of the choice of those who are killed [%(default)s]")
    add("--folder", help="where lines and logs go; it must not exist [a temporary one]")
    add("--figures", metavar="FOLDER", help="measure nothing: the figures of an earlier run, or of one that goes on")
    add("--torchft-python", default=sys.executable, help="a Python that has torch, torchft and torchdata [this one]")
    add("--torchft-path", default="", metavar="FOLDER", help="a folder with torchft and what it needs beside torch")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    given = arguments(words)
    if given.figures:
        report(Path(given.figures))
        return
    # Threads start and stop processes: an interrupt that ends this one must not leave them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if given.folder is None:
        folder = Path(tempfile.mkdtemp(prefix="ringfort-compared-"))
    else:
        folder = Path(given.folder).resolve()
        folder.mkdir(parents=True)
    print(f"lines and logs are in {folder}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    measure(folder, given)
    report(folder)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
