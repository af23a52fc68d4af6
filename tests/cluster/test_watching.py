"""A slow machine and a slow link, provoked on real hosts: the sentence on top names what is the matter.

All five pictures, with what following the advice saves: `python -m benchmarks.watching`.
"""

from __future__ import annotations

from contextlib import closing

from benchmarks.watching_run import Machine, Setup, running
from tests.helpers.namespaces import needs_namespaces

pytestmark = needs_namespaces


def test_a_slow_machine_and_then_a_slow_link_are_named() -> None:
    setup = Setup((Machine("study", compute=0.05), Machine("laptop", compute=0.15)), parameters=100_000)
    with running(setup) as run, closing(run.views()) as views:
        # Of the first steps one may be slow for any reason: what settles counts.
        seen = (view.verdict for view in views)
        verdict = next(one for one in seen if (one.cause, one.culprit) == ("slow_machine", "laptop"))
        assert verdict.sentence.startswith("study waits ")
        assert "for laptop, which computes" in verdict.sentence
        run.limit(run.net.hosts[1], 4)  # 0.8 s for the gradients of a step
        verdict = next(one for one in seen if one.cause == "slow_link")
        assert "of each step is spent on the link between laptop and study" in verdict.sentence
        assert "compression int8 would save about" in verdict.sentence
