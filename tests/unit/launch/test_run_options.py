"""What a person may ask of `ringfort run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringfort.errors import BackendUnavailableError, InvalidArgumentError
from ringfort.launch.run_options import ElasticOptions, RunOptions, parse_endpoint

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
        ({"tee": ""}, "tee=''"),
        ({"tee": "0;1"}, "must be ranks such as 0,2-3"),
        ({"tee": "3-1"}, "tee='3-1'"),
        ({"tee": "-1"}, "tee='-1'"),
        ({"tee": "2000000", "nodes": "2"}, "each below 1,048,576"),
        ({"tee": "0,2", "local": 2}, "tee='0,2': the ranks are 0 to 1; see -n"),
        ({"tee": "1"}, "the only rank is 0"),
        ({"metrics": "many"}, "metrics_port='many': must be host:port"),
        ({"metrics": "127.0.0.1:70000"}, "must have a port from 0 to 65535"),
        ({"script": str(Path(__file__).parent)}, "is a folder"),
        ({"torch_backend": "gloo"}, "torch_backend='gloo': the only choice is ringfort"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        RunOptions(**{"script": SCRIPT, **wrong})
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("tee", "printed"), [("all", {0, 1, 2, 3}), ("none", set()), ("2", {2}), ("0, 2-3", {0, 2, 3}), ("1,1", {1})]
)
def test_the_ranks_that_are_printed_can_be_chosen(tee: str, printed: set[int]) -> None:
    for options in (RunOptions(script=SCRIPT, local=4, tee=tee), ElasticOptions(script=SCRIPT, local=4, tee=tee)):
        assert {rank for rank in range(4) if options.is_printed(rank)} == printed


def test_ranks_of_other_machines_may_be_named_too() -> None:
    assert RunOptions(script=SCRIPT, nodes="2", local=1, tee="0,7").is_printed(7)
    with pytest.raises(InvalidArgumentError, match="the only rank is 0"):
        ElasticOptions(script=SCRIPT, local=1, tee="7")


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [("9464", ("127.0.0.1", 9464)), ("0.0.0.0:1", ("0.0.0.0", 1)), ("[::1]:80", ("::1", 80)), ("nas:5", ("nas", 5))],
)
def test_metrics_are_served_on_this_machine_alone_unless_an_address_is_named(
    text: str, endpoint: tuple[str, int]
) -> None:
    assert parse_endpoint(text) == endpoint


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
        ({"tee": ""}, "tee=''"),
        ({"tee": "0;1"}, "must be ranks such as 0,2-3"),
        ({"tee": "3-1"}, "tee='3-1'"),
        ({"tee": "-1"}, "tee='-1'"),
        ({"tee": "2000000", "nodes": "2"}, "each below 1,048,576"),
        ({"tee": "0,2", "local": 2}, "tee='0,2': the ranks are 0 to 1; see -n"),
        ({"tee": "1"}, "the only rank is 0"),
        ({"metrics": "many"}, "metrics_port='many': must be host:port"),
        ({"metrics": "127.0.0.1:70000"}, "must have a port from 0 to 65535"),
    ],
    ids=str,
)
def test_what_an_elastic_run_cannot_be_is_refused_by_name(wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ElasticOptions(**{"script": SCRIPT, **wrong})
    assert complaint in str(caught.value)


def test_an_elastic_run_may_have_no_upper_limit() -> None:
    assert ElasticOptions(script=SCRIPT, nodes="2:", local=9).nodes == "2:"


def test_a_program_whose_torch_groups_exist_before_it_runs_is_run_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfort.launch.run_options.find_spec", lambda _: object())
    options = RunOptions(script=SCRIPT, arguments=["--lr", "1"], torch_backend="ringfort")
    assert options.command == ["-m", "ringfort.launch.torch_program", SCRIPT, "--lr", "1"]
    module = RunOptions(script="a.b", module=True, torch_backend="ringfort")
    assert module.command == ["-m", "ringfort.launch.torch_program", "-m", "a.b"]
    monkeypatch.setattr("ringfort.launch.run_options.find_spec", lambda _: None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'ringfort\[torch\]'"):
        RunOptions(script=SCRIPT, torch_backend="ringfort")
