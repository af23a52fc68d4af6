"""Forming a ring in an epoch: an epoch that is over is refused at once, whoever ends first."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ringfort.cluster.forming import MAX_EARLY, Forming
from ringfort.cluster.messages import Epoch, Member
from ringfort.errors import AbortedError
from ringfort.transport.machine import Machine


def epoch_of(number: int) -> Epoch:
    return Epoch(number, "n0.a", (Member("n0.a"), Member("n1.b")))


def forming() -> Forming:
    """Of the first of two members, who only lets the other in."""
    return Forming(cast("Any", SimpleNamespace(peer="n0.a", wall=None)), cast("Any", None))


async def form(what: Forming, epoch: Epoch) -> Any:
    return await what.form(epoch, Machine())


def test_an_epoch_that_ended_before_the_forming_began_is_not_waited_for() -> None:
    what = forming()
    what.ended(epoch_of(3), "contact with n1.b is lost")
    with pytest.raises(AbortedError, match=r"epoch 3 of 2 has ended: contact with n1\.b is lost"):
        asyncio.run(form(what, epoch_of(3)))


def test_an_epoch_that_ends_while_it_forms_is_given_up() -> None:
    what = forming()

    async def run() -> None:
        forms = asyncio.ensure_future(form(what, epoch_of(3)))
        await asyncio.sleep(0)  # it has begun
        assert what.missing() == {1: "it has not come yet"}
        what.ended(epoch_of(2), "an old one")
        what.ended(epoch_of(3), "somebody left")
        await forms

    with pytest.raises(AbortedError, match="epoch 3 of 2 has ended: somebody left"):
        asyncio.run(run())


def test_only_the_latest_ends_are_remembered() -> None:
    what = forming()
    for number in range(1, MAX_EARLY + 10):
        what.ended(epoch_of(number), "over")
    assert len(what._over) == MAX_EARLY
    assert epoch_of(MAX_EARLY + 9).key in what._over
