"""The rules for every backend, as checks that you can run on yours. No test framework is needed.

    for check in BACKEND_CHECKS + COLLECTIVE_CHECKS:
        check.run(my_group_factory)

See groups.py for group factories, and processes.py to run the checks with one process per rank.
"""

from __future__ import annotations

from types import ModuleType

from ringfort.testing import ending_checks, message_checks, mismatch_checks, result_checks, usage_checks
from ringfort.testing.check import Check


def _checks_of(*modules: ModuleType) -> list[Check]:
    return [value for module in modules for value in vars(module).values() if isinstance(value, Check)]


BACKEND_CHECKS: list[Check] = _checks_of(message_checks, ending_checks)
"""The rules of `Backend`."""

COLLECTIVE_CHECKS: list[Check] = _checks_of(result_checks, usage_checks, mismatch_checks)
"""The rules of collectives, which work over any backend."""

ALL_CHECKS: dict[str, Check] = {check.name: check for check in BACKEND_CHECKS + COLLECTIVE_CHECKS}
"""Every check by its name."""
