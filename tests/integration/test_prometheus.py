"""A real Prometheus scrapes `ringfort run --metrics-port`, and answers the queries of the Grafana dashboard. Its tool
`promtool` finds no fault in the names and the format."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from ringfort.launch.metrics_server import MetricsServer, RankCollector
from ringfort.telemetry.records import Event, Header, Sent, Step, Values
from ringfort.telemetry.trace_file import TraceWriter

ROOT = Path(__file__).parents[2]
WORKER = str(ROOT / "tests" / "workers" / "run.py")
PATIENCE = 60.0
"""Seconds for what takes one or two; the machines that run this are shared."""
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs: [{{job_name: ringfort, static_configs: [{{targets: ['{target}']}}]}}]
"""
STARTED = re.compile(r"TLS is disabled\..* address=(\S+)|msg=\"Listening on\" address=(127\S+:[1-9]\d*)")

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian: prometheus)")


@contextmanager
def started(command: list[str], pattern: re.Pattern[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A program, and what `pattern` finds in its errors; it is ended afterwards."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    try:
        assert process.stderr is not None
        lines: list[str] = []
        while (found := pattern.search(lines[-1] if lines else "")) is None:
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        yield process, next(group for group in found.groups() if group)
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


def ask(server: str, query: str) -> list[dict[str, Any]]:
    with urlopen(f"http://{server}/api/v1/query?{urlencode({'query': query})}", timeout=PATIENCE) as answer:
        found = json.load(answer)
    assert found["status"] == "success", found
    return found["data"]["result"]


def is_ready(server: str) -> bool:
    """Whether it has opened its database; before that it answers no queries."""
    try:
        urlopen(f"http://{server}/-/ready", timeout=PATIENCE).close()
    except HTTPError as exc:
        exc.close()
        return False
    return True


def wait_for(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (result := found()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)
    return result


def test_prometheus_has_the_steps_of_all_ranks_and_answers_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    end = tmp_path / "end"
    run = [sys.executable, "-m", "ringfort.cli", "run", "-n", "2", "--name", "mine", "--metrics-port", "0"]
    with started([*run, WORKER, "step", str(end)], re.compile("metrics for Prometheus are at http://(.*)/metrics")) as (
        launcher,
        target,
    ):
        (tmp_path / "prometheus.yml").write_text(CONFIG.format(target=target))
        prometheus = [
            "prometheus",
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            "--web.listen-address=127.0.0.1:0",
        ]
        with started(prometheus, STARTED) as (_, server):
            wait_for(lambda: is_ready(server))
            query = "rate(ringfort_steps_total[1m]) > 0"
            rates = wait_for(lambda: found if len(found := ask(server, query)) == 2 else None)
            assert {(one["metric"]["run"], one["metric"]["rank"]) for one in rates} == {("mine", "0"), ("mine", "1")}
            dashboard = json.loads((ROOT / "docs" / "grafana" / "ringfort.json").read_text())
            for panel in dashboard["panels"]:
                for query in panel["targets"]:
                    text = query["expr"].replace("$__rate_interval", "1m").replace("$run", "mine")
                    found = ask(server, text.replace("$host", ".*").replace("$value", ".*"))
                    is_empty = panel["title"] in ("Time left", "Events per minute")  # of this run
                    assert found or is_empty, (panel["title"], text)
        end.touch()
        assert launcher.wait(PATIENCE) == 0


def test_promtool_finds_no_fault(tmp_path: Path) -> None:
    with (
        closing(TraceWriter(tmp_path / "1.trace")) as writer,
        closing(MetricsServer("127.0.0.1", 0, RankCollector(tmp_path, "mine", "study"))) as server,
    ):
        writer.describe(Header(1, 1.7e9, rank=0, world_size=2, program='a "b"\\\n', total_steps=50, codec="int8"))
        writer.write(Step(4, 1.0, 0.5, data=0.125, exchange=0.25, samples=32))
        writer.write(Values(4, 1.0, {"loss": 0.5, "größe/µs": float("inf")}))
        writer.write(Event(1.0, "lost", "rank 1 is lost"))
        writer.write(Sent(1.0, {1: 1000, 2: 5}, 2000))
        with urlopen(server.url, timeout=PATIENCE) as answer:
            text = answer.read()
    assert b"ringfort_steps_total" in text
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
