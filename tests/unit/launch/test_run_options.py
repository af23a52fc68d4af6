"""What a person may ask of `ringfort run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringfort.errors import InvalidArgumentError
from ringfort.launch.run_options import ElasticOptions, RunOptions

SCRIPT = __file__


@pytest.mark.parametrize(("nodes", "found"), [("1", (1, 1)), ("3", (3, 3)), ("2:4", (2, 4)), ("1:256", (1, 256))])
def test_nodes_are_a_number_or_a_range(nodes: str, found: tuple[int, int]) -> None:
    assert RunOptions(script=SCRIPT, nodes=nodes).node_range == found


def test_only_one_machine_asked_for_is_alone() -> None:
    assert RunOptions(script=SCRIPT).is_alone
    assert not RunOptions(script=SCRIPT, nodes="1:2").is_alone


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"nodes": "3:2"}, "nodes='3:2'"),
        ({"nodes": "0"}, "nodes='0'"),
        ({"nodes": "2:"}, "nodes='2:'"),
        ({"nodes": "many"}, "nodes='many'"),
        ({"nodes": "1:257"}, "nodes='1:257'"),
        ({"local": 0}, "local=0"),
        ({"local": 5000}, "local=5000"),
        ({"timeout": 0.0}, "timeout=0.0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"patience": -1.0}, "patience=-1.0"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"name": ""}, "name=''"),
        ({"name": "a\nb"}, "printable"),
        ({"name": 65 * "x"}, "1 to 64"),
        ({"script": "no_such.py"}, "file not found"),
        ({"script": str(Path(__file__).parent)}, "is a folder"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        RunOptions(**{"script": SCRIPT, **wrong})
    assert name in str(caught.value)


def test_the_command_is_pythons_with_the_scripts_own_arguments() -> None:
    assert RunOptions(script=SCRIPT, arguments=["-n", "x"]).command == [SCRIPT, "-n", "x"]
    assert RunOptions(script="json.tool", module=True).command == ["-m", "json.tool"]


def test_the_title_does_not_depend_on_the_folder() -> None:
    assert RunOptions(script=SCRIPT).title == "test_run_options.py"
    assert RunOptions(script="json.tool", module=True).title == "-m json.tool"


def test_a_run_has_the_scripts_name_unless_it_is_given_one() -> None:
    assert RunOptions(script=SCRIPT).run_name == "test_run_options.py"
    assert RunOptions(script=SCRIPT, name="mine").run_name == "mine"


def test_patience_is_what_was_given_else_the_variable_else_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGFORT_PATIENCE", raising=False)
    assert RunOptions(script=SCRIPT).patience_seconds == 10.0
    monkeypatch.setenv("RINGFORT_PATIENCE", "4")
    assert RunOptions(script=SCRIPT).patience_seconds == 4.0
    assert RunOptions(script=SCRIPT, patience=3.0).patience_seconds == 3.0


# --- with --elastic ---------------------------------------------------------------------------------------------------


def test_an_elastic_run_leaves_to_the_program_what_was_not_typed() -> None:
    found = ElasticOptions(script=SCRIPT)
    assert (found.nodes, found.name, found.patience, found.max_restarts) == (None, None, None, 3)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"nodes": "3:2"}, "nodes='3:2'"),
        ({"nodes": "0:2"}, "nodes='0:2'"),
        ({"nodes": "many"}, "nodes='many'"),
        ({"local": 3, "nodes": "1:2"}, "local=3: each rank is a member, and --nodes 1:2 allows 2"),
        ({"local": 2, "nodes": "1"}, "--nodes 1 allows 1"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"name": 56 * "x"}, "1 to 55"),
        ({"restart_without": ["a,b"]}, "restart_without='a,b': must not contain a comma"),
        ({"script": "no_such.py"}, "file not found"),
    ],
    ids=str,
)
def test_what_an_elastic_run_cannot_be_is_refused_by_name(wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ElasticOptions(**{"script": SCRIPT, **wrong})
    assert complaint in str(caught.value)


def test_an_elastic_run_may_have_no_upper_limit() -> None:
    assert ElasticOptions(script=SCRIPT, nodes="2:", local=9).nodes == "2:"
