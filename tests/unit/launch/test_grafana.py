"""The dashboard for Grafana asks for metrics that are served, by labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ringfort.launch.metrics_server import LABELS, METRICS, RankCollector
from ringfort.telemetry.records import Header
from ringfort.telemetry.trace_file import TraceWriter

FILE = Path(__file__).parents[3] / "docs" / "grafana" / "ringfort.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
GIVEN = {"__rate_interval", "__interval", "__all"}
"""Variables that Grafana has by itself."""


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable)
    yield from (annotation["expr"] for annotation in DASHBOARD["annotations"]["list"])


@pytest.fixture
def served(tmp_path: Path) -> dict[str, set[str]]:
    """The names of the metrics as Prometheus has them, each with its labels."""
    with closing(TraceWriter(tmp_path / "1.trace")) as writer:
        writer.describe(Header(1, 0.0, rank=0))
        with closing(RankCollector(tmp_path, "mine", "study")) as collector:
            suffix = {metric.name: "_total" if metric.type == "counter" else "" for metric in collector.collect()}
    return {name + suffix[name]: {*LABELS, *labels} for _, name, _, labels, _ in METRICS}


def test_its_queries_use_the_names_and_labels_that_are_served(served: dict[str, set[str]]) -> None:
    found = list(queries())
    assert len(found) > 10
    for query in found:
        names = re.findall(r"\bringfort_\w+", query)
        assert names, query
        for name in names:
            assert name in served, query
        for name, selector in re.findall(r"(ringfort_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)\s*=~?", selector)) <= served[name], query
        known = set().union(*(served[name] for name in names))
        for labels in re.findall(r"(?:by|without|ignoring) \(([^)]*)\)", query):
            assert set(re.split(r",\s*", labels)) <= known, query


def test_each_metric_is_shown_somewhere_but_those_for_alerts(served: dict[str, set[str]]) -> None:
    shown = {name for query in queries() for name in re.findall(r"\bringfort_\w+", query)}
    assert served.keys() - shown == {"ringfort_info", "ringfort_world_size"}


def test_its_variables_and_legends_are_known() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", FILE.read_text())) <= variables | GIVEN
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            labels = {"run", "host", "rank", "name", "phase", "kind"}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
