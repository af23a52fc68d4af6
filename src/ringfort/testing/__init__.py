"""Tests for any `Backend`: conformance checks, a virtual clock, faults by timetable, a simulated network.

clock.py            VirtualClock: time moves when the test says so
faults.py           FaultTimetable and FaultyBackend: which rank fails how and when
ranks.py            run_ranks: one thread per rank; a hang becomes an error with stacks
groups.py           groups over memory and loopback TCP
processes.py        ProcessRanks: the same checks with one process per rank
check.py            Check: a rule as a program that every rank runs
*_checks.py         the rules
conformance.py      BACKEND_CHECKS and COLLECTIVE_CHECKS: all rules
reference.py        expected results, computed by NumPy
network.py          SimulatedNetwork: whole clusters in virtual time
histories.py        History: random histories of a cluster, and the rules that hold in all of them
"""

from ringfort.testing.check import Check, CheckFailedError, check
from ringfort.testing.clock import VirtualClock
from ringfort.testing.conformance import ALL_CHECKS, BACKEND_CHECKS, COLLECTIVE_CHECKS
from ringfort.testing.faults import Fault, FaultKind, FaultTimetable, FaultyBackend, RankKilled
from ringfort.testing.groups import GroupFactory, ring_group, simulated_group, sub_group_of, tcp_group
from ringfort.testing.histories import History, RuleBroken, Rules, Violation
from ringfort.testing.network import SimulatedNetwork, SimulatedPeer
from ringfort.testing.processes import ProcessRanks
from ringfort.testing.ranks import HangError, at_once, results, run_ranks

__all__ = [
    "ALL_CHECKS",
    "BACKEND_CHECKS",
    "COLLECTIVE_CHECKS",
    "Check",
    "CheckFailedError",
    "Fault",
    "FaultKind",
    "FaultTimetable",
    "FaultyBackend",
    "GroupFactory",
    "HangError",
    "History",
    "ProcessRanks",
    "RankKilled",
    "RuleBroken",
    "Rules",
    "SimulatedNetwork",
    "SimulatedPeer",
    "Violation",
    "VirtualClock",
    "at_once",
    "check",
    "results",
    "ring_group",
    "run_ranks",
    "simulated_group",
    "sub_group_of",
    "tcp_group",
]
