"""What a person may ask of `ringfort run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ringfort.errors import InvalidArgumentError
from ringfort.launch.options import RunOptions

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
        ({"script": "no_such.py"}, "there is no such file"),
        ({"script": str(Path(__file__).parent)}, "is a folder"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        RunOptions(**{"script": SCRIPT, **wrong})
    assert name in str(caught.value)


def test_the_command_is_pythons_with_the_scripts_own_arguments() -> None:
    assert RunOptions(script=SCRIPT, arguments=["-n", "x"]).command == [sys.executable, SCRIPT, "-n", "x"]
    assert RunOptions(script="json.tool", module=True).command == [sys.executable, "-m", "json.tool"]


def test_the_title_does_not_depend_on_the_folder() -> None:
    assert RunOptions(script=SCRIPT).title == "test_options.py"
    assert RunOptions(script="json.tool", module=True).title == "-m json.tool"
