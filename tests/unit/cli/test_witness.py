"""`ringfort witness`: which run it follows, and for how long."""

from __future__ import annotations

from ringfort.cli.witness import GONE, Following, elastic_runs
from ringfort.cluster.core.events import EpochStarted, PeerLost, Waiting
from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.cluster.view import PeerView

RUN, OTHER = "train.py/0123abcd", "train.py/4567abcd"
EPOCH = Epoch(4, "a.1", (Member("a.1", name="study"), Member("b.1", name="workshop"), Member("w.1", slots=0)))


def views(*runs: str) -> list[PeerView]:
    return [PeerView(peer=f"p.{i}", run=run) for i, run in enumerate(runs)]


def test_elastic_runs_have_a_digest_behind_their_name() -> None:
    seen = views(RUN, RUN, OTHER, "", "train.py", "train.py/x", "a/b/89abcdef")
    assert elastic_runs(seen, None) == ["a/b/89abcdef", RUN, OTHER]
    assert elastic_runs(seen, "train.py") == [RUN, OTHER]
    assert elastic_runs(seen, "a/b") == ["a/b/89abcdef"]
    assert elastic_runs([*seen, *views(f"{RUN}#skip")], "train.py") == [RUN, f"{RUN}#skip", OTHER]
    assert (
        elastic_runs([PeerView(peer="w.1", run=RUN, slots=0), PeerView(peer="me", run=RUN, is_self=True)], None) == []
    )


def test_a_run_is_followed_until_all_holders_of_its_state_have_ended() -> None:
    following = Following(RUN, None, 0.0)
    assert following.take(EpochStarted(EPOCH)) == "epoch 4: this machine votes with study, workshop"
    assert following.take(Waiting("too few")) == "waiting: too few"
    following.take(PeerLost("a.1", "it left", died=True, left=True))
    following.take(PeerLost("b.1", "silent", died=False))
    # It may be at work: what this machine has voted for still binds it.
    assert not following.is_over([], GONE + 1)
    following.take(PeerLost("b.1", "it left", died=True))
    assert following.is_over(views(RUN), GONE + 1)


def test_the_same_run_with_other_settings_is_followed_when_nobody_of_the_first_is_left() -> None:
    following = Following(RUN, "train.py", 0.0)
    following.take(EpochStarted(EPOCH))
    assert not following.is_over(views(RUN, OTHER), 1.0)
    assert not following.is_over(views(OTHER), GONE)
    assert not following.is_over(views("b/0123abcd"), GONE + 2)
    assert following.is_over(views(OTHER), GONE + 2)


def test_a_run_that_is_gone_before_it_began_is_forgotten() -> None:
    following = Following(RUN, None, 0.0)
    assert not following.is_over([], GONE - 1)
    assert following.is_over([], GONE)
