"""Does compression learn as well? Real training by four workers, with each strategy and without, over several seeds.

    python -m benchmarks.learning --out benchmarks/results/learning.json    (PYTHONPATH=src where it is not installed)

Two tasks: a character model of 1.4 million parameters on Python's own help texts (final validation loss), and
scikit-learn's digits (accuracy). The four workers of a run live in one process: their gradients are averaged by
`average_gradients` over a `SimulatedBackend`, so codecs, error feedback and collective are the real ones, and bytes are
counted by the real metrics. Each worker's share of the batch is its own; the averaged gradient is the same at all, so
one copy of the weights stands for four. Runs of one seed start from the same weights and see the same batches.

Each run is a process with one thread, as many at once as there are cores: some 5 minutes on 16. Needs torch and what
Ringfort itself needs, and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before NumPy and torch are imported, here and in the processes to come

import numpy as np  # noqa: E402

from ringfort import GradientCompressor, SimulatedBackend  # noqa: E402
from ringfort.context import DistributedContext  # noqa: E402
from ringfort.demo.text import load_corpus, windows  # noqa: E402
from ringfort.training import average_gradients  # noqa: E402

WORKERS = 4
SEEDS = 3
DIGIT_SEEDS = 8
"""More, because of 359 test digits each is a third of a point."""
STRATEGIES = ("none", "int8", "int4", "topk(0.01)+int4", "powersgd(4)", "onebit")
WITHOUT_FEEDBACK = ("topk(0.01)+int4", "powersgd(4)", "onebit")
LIMITS = {"int8": 1.0, "int4": 1.0, "topk(0.01)+int4": 2.0, "powersgd(4)": 2.0, "onebit": 3.0}
"""Per cent that the final validation loss may be above the one without compression."""
DIGIT_LIMIT = 0.5
"""Points of accuracy, likewise."""
CONTEXT, EMBEDDING, HIDDEN = 32, 32, 768
TEXT_STEPS, TEXT_BATCH, TEXT_RATE = 600, 64, 0.25
DIGIT_STEPS, DIGIT_BATCH, DIGIT_RATE = 600, 32, 0.3
"""Steps, samples of each worker in a step, and the highest rate. There is no momentum: what a codec sends late it would
go on adding, and with 0.9 one bit did not learn the digits. The text's rate is half of one where some runs jumped."""
WARM_UP = 0.05
"""The share of the steps in which the rate rises; then it falls as a cosine to nothing."""
LOOKS = 20
"""How often the validation loss is looked at."""
LOOK_SAMPLES = 4096
DIGITS = Path(__file__).parent / "data" / "digits.csv.gz"


@dataclass(frozen=True)
class Job:
    """One run."""

    task: str
    strategy: str
    feedback: bool
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """As the tables call it."""
        return self.strategy if self.feedback else f"{self.strategy} without error feedback"


class Group:
    """The four workers' contexts, and a thread for each."""

    def __init__(self, job: Job) -> None:
        self._contexts = [DistributedContext(backend) for backend in SimulatedBackend.create_group(WORKERS)]
        self._compressors = (
            None
            if job.strategy == "none"
            else [GradientCompressor(job.strategy, error_feedback=job.feedback) for _ in range(WORKERS)]
        )
        self._pool = ThreadPoolExecutor(WORKERS)
        self.seconds = 0.0

    def average(self, gradients: list[dict[str, Any]]) -> dict[str, Any]:
        """The workers' gradients, averaged; all must have the same bits."""
        start = time.perf_counter()
        results = list(self._pool.map(self._one, range(WORKERS), gradients))
        self.seconds += time.perf_counter() - start
        for other in results[1:]:
            for name, array in other.items():
                assert np.array_equal(array, results[0][name]), f"the ranks differ in {name}"
        return results[0]

    def _one(self, rank: int, tree: dict[str, Any]) -> dict[str, Any]:
        compression = None if self._compressors is None else self._compressors[rank]
        return average_gradients(self._contexts[rank], tree, compression=compression)

    @property
    def bytes_sent(self) -> int:
        """By one worker, so far."""
        return self._contexts[0].metrics_snapshot().bytes_sent

    @property
    def codec_seconds(self) -> float:
        """Of one worker."""
        return sum(one.codec_seconds for one in self._contexts[0].metrics_snapshot().compression.values())

    def close(self) -> None:
        """Ends the group."""
        for context in self._contexts:
            context.close()
        self._pool.shutdown()


def run(job: Job) -> dict[str, Any]:
    """One job, in a process of its own."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    start = time.perf_counter()
    task = {"text": Text, "digits": Digits}[job.task](job.seed)
    model, group = task.model, Group(job)
    names = [name for name, _ in model.named_parameters()]
    steps, looks = job.steps, []
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step / steps))
    computing = 0.0
    for step in range(steps):
        began = time.perf_counter()
        trees: list[dict[str, Any]] = []
        for worker in range(WORKERS):
            model.zero_grad()
            task.loss(step, worker).backward()
            trees.append({name: p.grad.numpy().copy() for name, p in zip(names, model.parameters(), strict=True)})
        computing += time.perf_counter() - began
        mean = group.average(trees)
        for name, parameter in zip(names, model.parameters(), strict=True):
            parameter.grad.copy_(torch.from_numpy(mean[name]))
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, steps // LOOKS) == 0:
            looks.append((step + 1, task.look(), group.bytes_sent))
    final = task.final()
    found = {
        **asdict(job),
        "name": job.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        **final,
        "curve": looks,
        "bytes_sent": group.bytes_sent,
        "codec_seconds": group.codec_seconds,
        "averaging_seconds": group.seconds,
        "computing_seconds": computing / WORKERS,
        "seconds": time.perf_counter() - start,
    }
    group.close()
    return found


def _rate(share: float) -> float:
    if share < WARM_UP:
        return (share + 1e-3) / WARM_UP
    return 0.5 * (1 + float(np.cos(np.pi * (share - WARM_UP) / (1 - WARM_UP))))


class Text:
    """The next character, from the 32 before it: embedding, two hidden layers."""

    rate = TEXT_RATE

    def __init__(self, seed: int) -> None:
        import torch

        self._torch, self._seed = torch, seed
        self._corpus = load_corpus()
        letters = len(self._corpus.vocabulary)
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(letters, EMBEDDING),
            torch.nn.Flatten(),
            torch.nn.Linear(CONTEXT * EMBEDDING, HIDDEN),
            torch.nn.Tanh(),
            torch.nn.Linear(HIDDEN, HIDDEN),
            torch.nn.Tanh(),
            torch.nn.Linear(HIDDEN, letters),
        )
        held = self._corpus.validation
        self._starts = np.arange(len(held) - CONTEXT)
        self._look = np.random.default_rng(0).choice(self._starts, LOOK_SAMPLES, replace=False)

    def loss(self, step: int, worker: int) -> Any:
        """Of one worker's samples in one step."""
        train = self._corpus.train
        starts = np.random.default_rng([self._seed, step, worker]).integers(0, len(train) - CONTEXT, TEXT_BATCH)
        return self._cross_entropy(train, starts)

    def look(self) -> float:
        """The validation loss on some samples."""
        return self._mean(self._look)

    def final(self) -> dict[str, float]:
        """The validation loss on all samples."""
        return {"loss": self._mean(self._starts)}

    def _mean(self, starts: Any) -> float:
        with self._torch.no_grad():
            parts = [starts[i : i + 2048] for i in range(0, len(starts), 2048)]
            losses = [float(self._cross_entropy(self._corpus.validation, part)) * len(part) for part in parts]
        return sum(losses) / len(starts)

    def _cross_entropy(self, codes: Any, starts: Any) -> Any:
        inputs, targets = windows(codes, CONTEXT, starts)
        logits = self.model(self._torch.from_numpy(inputs))
        return self._torch.nn.functional.cross_entropy(logits, self._torch.from_numpy(targets))


class Digits:
    """Which digit it is: one hidden layer."""

    rate = DIGIT_RATE

    def __init__(self, seed: int) -> None:
        import torch

        self._torch, self._seed = torch, seed
        pixels, digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits))
        self._pixels = torch.from_numpy((pixels / 16).astype(np.float32))[order]
        self._digits = torch.from_numpy(digits.astype(np.int64))[order]
        self._train = len(digits) * 4 // 5
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, 256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, 10),
        )

    def loss(self, step: int, worker: int) -> Any:
        """Of one worker's samples in one step."""
        places = np.random.default_rng([self._seed, step, worker]).integers(0, self._train, DIGIT_BATCH)
        return self._torch.nn.functional.cross_entropy(self.model(self._pixels[places]), self._digits[places])

    def look(self) -> float:
        """The test loss."""
        with self._torch.no_grad():
            logits = self.model(self._pixels[self._train :])
            return float(self._torch.nn.functional.cross_entropy(logits, self._digits[self._train :]))

    def final(self) -> dict[str, float]:
        """Accuracy on the test digits, in per cent, and the loss."""
        with self._torch.no_grad():
            right = self.model(self._pixels[self._train :]).argmax(1) == self._digits[self._train :]
        return {"accuracy": 100 * float(right.float().mean()), "loss": self.look()}


def load_digits() -> tuple[Any, Any]:
    """Pixels and digits: from scikit-learn, or the copy that lies here."""
    try:
        from sklearn.datasets import load_digits as load  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    except ImportError:
        table = np.loadtxt(DIGITS, delimiter=",")
        return table[:, :-1], table[:, -1]
    found: Any = load()
    return found.data, found.target


# --- all of them ------------------------------------------------------------------------------------------------------


def jobs(only: str | None, quick: bool, seeds: int | None) -> list[Job]:
    """The long ones first, so that the last to end is a short one."""
    found: list[Job] = []
    for task, count, steps in (("text", SEEDS, TEXT_STEPS), ("digits", DIGIT_SEEDS, DIGIT_STEPS)):
        if only is not None and task != only:
            continue
        for seed in range(seeds or count):
            found += [Job(task, strategy, True, seed, 40 if quick else steps) for strategy in STRATEGIES]
            if task == "digits" or seed == 0:
                found += [Job(task, strategy, False, seed, 40 if quick else steps) for strategy in WITHOUT_FEEDBACK]
    return found


def summarize(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each task and strategy the mean over the seeds, beside the one without compression, and whether it holds."""
    rows: list[dict[str, Any]] = []
    for task, figure in (("text", "loss"), ("digits", "accuracy")):
        runs = [run for run in results if run["task"] == task]
        plain = [run for run in runs if run["strategy"] == "none"]
        if not plain:
            continue
        base = float(np.mean([run[figure] for run in plain]))
        for name in dict.fromkeys(run["name"] for run in runs):
            same = [run for run in runs if run["name"] == name]
            mean = float(np.mean([run[figure] for run in same]))
            worse = 100 * (mean / base - 1) if task == "text" else base - mean
            limit = LIMITS.get(name) if task == "text" else DIGIT_LIMIT if name in LIMITS else None
            rows.append(
                {
                    "task": task,
                    "name": name,
                    figure: mean,
                    "each": [run[figure] for run in same],
                    "worse": worse,
                    "limit": limit,
                    "holds": None if limit is None else worse <= limit,
                    "times_fewer_bytes": plain[0]["bytes_sent"] / same[0]["bytes_sent"],
                }
            )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The summary, for people."""
    for row in rows:
        figure = f"loss {row['loss']:.4f}" if row["task"] == "text" else f"accuracy {row['accuracy']:.2f}%"
        unit = "%" if row["task"] == "text" else " points"
        verdict = "" if row["holds"] is None else f"(at most {row['limit']:g}: {'holds' if row['holds'] else 'FAILS'})"
        print(
            f"{row['task']:7} {row['name']:40} {figure:18} {row['worse']:+7.2f}{unit} worse {verdict}"
            f"  {row['times_fewer_bytes']:.0f} times fewer bytes"
        )


def main() -> int:
    """The command line. Ends with 1 if a limit is not kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once [%(default)s]")
    parser.add_argument("--only", choices=("text", "digits"))
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--quick", action="store_true", help="40 steps: to see that everything runs")
    given = parser.parse_args()
    start = time.perf_counter()
    results: list[dict[str, Any]] = []
    todo = jobs(given.only, given.quick, given.seeds)
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run, job) for job in todo]):
            results.append(done.result())
            last = results[-1]
            print(
                f"{len(results)}/{len(todo)} after {time.perf_counter() - start:.0f} s: {last['task']} {last['name']} "
                f"seed {last['seed']}: loss {last['loss']:.4f} in {last['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            # Kept at once, so that a run that is broken off is not lost.
            _write(given.out, results, time.perf_counter() - start)
    rows = summarize(results)
    show(rows)
    return 1 if any(row["holds"] is False for row in rows) and not given.quick else 0


def _write(path: Path, results: list[dict[str, Any]], seconds: float) -> None:
    ordered = sorted(results, key=lambda run: (run["task"], run["strategy"], not run["feedback"], run["seed"]))
    found = {"seconds": seconds, "workers": WORKERS, "summary": summarize(ordered), "runs": ordered}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
