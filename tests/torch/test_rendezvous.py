"""How the ranks of a torch program meet: by discovery, under `ringfort run`, and the agents of torchrun by discovery.

Whole runs of torchrun are in `test_examples.py`.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.torch.zygote import Zygote

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests" / "torch" / "program.py")
LOCAL = {"RINGFORT_INTERFACES": "127.0.0.1"}
PATIENCE = 100
"""Seconds for what takes a few on an idle machine: several interpreters load torch."""


def test_processes_find_each_other_and_share_a_store_that_needs_no_port(zygote: Zygote) -> None:
    found = zygote.run("discovered", 3, **LOCAL)
    assert sorted(found) == [[rank, 6.0, "AutoDiscoveryBackend"] for rank in range(3)]


def test_a_process_that_is_alone_says_what_to_try(zygote: Zygote) -> None:
    assert "ringfort" in zygote.run("nobody", 1, **LOCAL)[0]


def test_a_rank_without_rank_0_gives_up_when_the_time_is_over_and_options_of_nobody_are_refused(zygote: Zygote) -> None:
    missing, options = zygote.run("no_rank_0", 1)[0]
    assert "Exceeded the timeout of 0.3 s: waiting for rank 0" in missing
    assert "must be None; set environment variables such as RINGFORT_SHM" in options


def test_a_member_that_looks_for_rank_0_connects_once_and_is_not_taken_for_a_stranger(zygote: Zygote) -> None:
    assert zygote.run("another_machine", 2) == [[], []]


def test_the_first_plaintext_group_between_machines_is_reported_once(zygote: Zygote) -> None:
    here, there = zygote.run("plaintext", 2)
    assert there == []
    (words,) = here
    assert "gloo sends plaintext between the machines" in words
    assert 'init_process_group("ringfort")' in words


def test_an_address_that_makes_no_sense_is_refused(zygote: Zygote) -> None:
    words = zygote.run("bad_urls", 1)[0]
    assert "must not have an address" in words[0]
    assert "worldsize" in words[1]
    assert "timeout='soon'" in words[2]
    assert "chooses the ranks" in words[4]


@pytest.mark.parametrize("method", ["env://", "ringfort://"])
def test_a_program_under_ringfort_run_needs_no_more_than_the_word(method: str) -> None:
    command = [sys.executable, "-m", "ringfort", "run", "-n", "2", PROGRAM, method]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 error 0.0000" in run.stdout


def test_the_agent_that_owns_the_store_leaves_last(zygote: Zygote) -> None:
    assert max(zygote.run("agents_leave", 2, **LOCAL)) < 4


def test_an_agent_whose_store_is_gone_learns_it_at_once(zygote: Zygote) -> None:
    words = next(words for words in zygote.run("owner_is_lost", 2, **LOCAL) if words)
    assert all("owned the key-value store" in word for word in words)
