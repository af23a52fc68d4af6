"""Machines that were asked to run different things: which one, and in what."""

from __future__ import annotations

from typing import Any

from ringfort.launch.agreement_messages import Ticket
from ringfort.launch.differences import MAX_SHOWN, machine_names, mistake, warnings
from ringfort.launch.failure_report import USAGE_ERROR


def tickets(*changes: dict[str, Any]) -> dict[str, Ticket]:
    hosts = ("attic", "laptop", "study", "workshop")
    same = {"arguments": "--lr 0.1", "arguments_digest": "same", "nodes": "3", "python": "3.11", "version": "1.0"}
    return {
        f"n{i}.{i}abcdef": Ticket(**{"host": hosts[i], "script": "train.py", **same, **change})
        for i, change in enumerate(changes)
    }


def why(*changes: dict[str, Any]) -> str:
    failure = mistake(tickets(*changes))
    assert failure is not None
    assert (failure.exit_code, failure.is_final) == (USAGE_ERROR, True)
    return failure.why


def test_the_same_everywhere_is_no_mistake_and_needs_no_warning() -> None:
    assert mistake(tickets({}, {}, {})) is None
    assert warnings(tickets({}, {}, {})) == ()


def test_of_three_the_one_that_differs_is_named_with_what_it_has() -> None:
    other = {"arguments": "--lr 0.2", "arguments_digest": "other"}
    words = why({}, other, {})
    assert words.startswith(
        "laptop differs from attic and study in the arguments: --lr 0.2, not --lr 0.1. Type the same"
    )
    assert why({}, {"nodes": "2"}, {}).startswith("laptop differs from attic and study in --nodes: 2, not 3")
    assert why({}, {"max_restarts": 3}, {}).startswith(
        "laptop differs from attic and study in --max-restarts: 3, not 0"
    )
    assert why({}, {"torch_backend": "ringfort"}, {}).startswith(
        "laptop differs from attic and study in --torch-backend: ringfort, not none"
    )
    assert why({"script": "-m other"}, {}, {}).startswith(
        "attic differs from laptop and study in the script: -m other, not"
    )


def test_where_nobody_has_the_majority_each_is_named() -> None:
    other = {"arguments": "", "arguments_digest": "none"}
    assert why({}, other).startswith("the machines differ in the arguments: --lr 0.1 on attic; none on laptop")
    assert why({}, {"nodes": "2"}).startswith("the machines differ in --nodes: 3 on attic; 2 on laptop")
    assert "a.py on attic; b.py on laptop; train.py on study" in why({"script": "a.py"}, {"script": "b.py"}, {})


def test_long_arguments_are_shown_where_they_differ() -> None:
    long = " ".join(f"--option-{i} {i}" for i in range(60))
    one, other = f"{long} --lr 0.1", f"{long} --lr 0.2"
    words = why({"arguments": one, "arguments_digest": "1"}, {"arguments": other, "arguments_digest": "2"})
    assert "--lr 0.1 on attic" in words
    assert "--lr 0.2 on laptop" in words
    assert len(words) < 3 * MAX_SHOWN + 100


def test_another_copy_of_the_script_is_a_warning_with_both_times() -> None:
    (line,) = warnings(
        tickets(
            {"script_digest": "a", "modified": 86400.0}, {"script_digest": "b", "modified": 1e9}, {"script_digest": "a"}
        )
    )
    assert line.startswith("warning: laptop differs from attic and study in the content of train.py: changed 2001-09-0")
    assert ", not changed 1970-01-0" in line


def test_other_versions_and_patience_are_warnings() -> None:
    found = warnings(tickets({}, {"version": "0.9", "python": "3.13", "patience": 2.5}, {}))
    assert found == (
        "warning: laptop differs from attic and study in the version of Ringfort: 0.9, not 1.0",
        "warning: laptop differs from attic and study in the version of Python: 3.13, not 3.11",
        "warning: laptop differs from attic and study in --patience: 2.5, not 0",
    )


def test_machines_of_one_name_are_told_apart() -> None:
    assert list(machine_names(tickets({"host": "pi"}, {"host": "pi"}, {})).values()) == [
        "pi (0abc)",
        "pi (1abc)",
        "study",
    ]
