"""The state of a run goes from donors to a learner over real sockets, whatever happens to some of the donors."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ringfort.bootstrap.connection import Connection
from ringfort.cluster.core.peer_messages import Epoch, Member
from ringfort.cluster.node import ClusterNode
from ringfort.config import AutoDiscoveryConfig, ElectionConfig
from ringfort.errors import InvalidArgumentError, OperationTimeoutError, StateTransferError
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.namespace import NetworkNamespace
from ringfort.training.elastic import donor as donor_module
from ringfort.training.elastic.digests import digest_share
from ringfort.training.elastic.donor import HISTORY_RESULTS, Donor
from ringfort.training.elastic.learner import Fetched, Learner
from ringfort.training.elastic.local_sum import Gradient, Layout
from ringfort.training.elastic.protocol import Mark, Result
from ringfort.training.elastic.spare_memory import SpareMemory
from ringfort.training.elastic.state_tree import BLOCK, Image, StateTree, hashed
from ringfort.training.elastic.transfer_link import PURPOSE
from tests.helpers.agents import until
from tests.helpers.sealed_pairs import sealed_pair

PATIENCE = 20.0
"""Seconds for something that takes one on an idle machine."""
LIMIT = 1 << 30
LARGE = 1 << 18
"""Elements of a result whose memory is used again."""
EPOCH = Epoch(3, "a.1", (Member("a.1", addresses=("10.0.0.1:1",)), Member("b.2")), lineages=("a.1#1",))
LAYOUT = Layout(
    (Gradient("gradients['w']", "float32", (1000,)), Gradient("gradients['b'][0]", "float16", (3,))),
    {"w": None, "b": [None]},
)
MARK = Mark("a.1#1@3", 7, b"chain", 700)


def state_of(nbytes: int, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {"w": random.integers(0, 256, nbytes, np.uint8), "steps": [7, 0.5, None, "adam"]}


def image_of(nbytes: int, seed: int = 0) -> Image:
    return StateTree(state_of(nbytes, seed)).image()


def anything(_: Fetched) -> None:
    """Accepts every image."""


class Members:
    """Donors, each with a connection to one learner."""

    def __init__(self) -> None:
        self.donors: dict[str, Donor] = {}
        self.sockets: dict[str, socket.socket] = {}
        self.learners: list[Learner] = []

    def connect(self, name: str, donor: Donor) -> Connection:
        ours, theirs = sealed_pair()
        self.donors[name] = donor
        self.sockets[name] = theirs.sock
        donor.serve("learner", theirs)
        return ours

    def learner(self, donors: Mapping[str, Donor], **options: Any) -> Learner:
        made = Learner({name: self.connect(name, donor) for name, donor in donors.items()}, limit=LIMIT, **options)
        self.learners.append(made)
        return made

    def cut(self, name: str) -> None:
        """What a machine does that dies, as far as the kernel tells."""
        self.sockets[name].shutdown(socket.SHUT_RDWR)


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    for learner in made.learners:
        learner.close()
    for donor in made.donors.values():
        donor.close()


@contextmanager
def in_thread(action: Callable[[], object]) -> Iterator[None]:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as exc:
            failures.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(PATIENCE)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def donor_that(on_block: Callable[[int], object] = lambda number: None, **options: Any) -> Donor:
    """A donor that calls `on_block` with the number of each block before it sends it."""
    count = [0]

    def busy() -> bool:
        count[0] += 1
        on_block(count[0])
        return False

    return Donor(lambda: LAYOUT, busy=busy, timeout=PATIENCE, **options)


def result_of(mark: Mark, seed: int, size: int = 1000) -> tuple[Result, int]:
    random = np.random.default_rng(seed)
    payload = {"float32": random.random(size, np.float32), "float64": random.random(3)}
    return Result(mark.branch, mark.step + 1, mark.cursor + 10, payload), digest_share(payload, 0, 1)


def seal(donors: list[Donor], mark: Mark, count: int) -> list[Mark]:
    """Seals so many results after `mark` at all donors; returns the marks, the first one included."""
    marks = [mark]
    for _ in range(count):
        result, digest = result_of(marks[-1], marks[-1].step)
        for donor in donors:
            donor.sealed(marks[-1], result, digest, sums=(0.5, 2.0))
        marks.append(marks[-1].after(result, digest))
    return marks


# --- the image --------------------------------------------------------------------------------------------------------


def test_100_megabytes_come_from_two_donors_one_of_which_is_cut_in_the_middle(
    members: Members, record_property: Callable[[str, object], None]
) -> None:
    image = image_of(100 * 1000 * 1000)
    donors = {"a": donor_that(), "b": donor_that(lambda number: number == 20 and members.cut("b"))}
    learner = members.learner(donors)
    for donor in donors.values():
        donor.offer(image, MARK, EPOCH)
    begun = time.perf_counter()
    fetched = learner.fetch(anything, timeout=PATIENCE)
    seconds = time.perf_counter() - begun
    record_property("seconds", seconds)
    assert np.array_equal(fetched.image.data, image.data)
    assert (fetched.mark, fetched.epoch, fetched.layout) == (MARK, EPOCH, LAYOUT)
    assert learner.donors == ("a",)
    assert set(learner.lost) == {"b"}
    loaded = state_of(100 * 1000 * 1000, seed=1)
    StateTree(loaded).load(fetched.image)
    assert loaded["steps"] == [7, 0.5, None, "adam"]
    print(f"100 MB in {seconds:.2f} s")


def test_the_run_is_asked_for_an_image_and_all_donors_take_part(members: Members) -> None:
    image, sent = image_of(20 * BLOCK), {"a": 0, "b": 0}
    both = threading.Barrier(2)

    def note(name: str, number: int) -> None:
        sent[name] = number
        if number == 1:
            both.wait(PATIENCE)  # each waits for the other one's first block

    donors = {name: donor_that(lambda number, name=name: note(name, number)) for name in sent}
    learner = members.learner(donors)
    assert not any(donor.wants_image for donor in donors.values())

    def offer() -> None:
        for donor in donors.values():
            until(lambda donor=donor: donor.wants_image, "a learner asks")
            donor.offer(image, MARK, EPOCH)

    with in_thread(offer):
        fetched = learner.fetch(anything, timeout=PATIENCE)
    assert np.array_equal(fetched.image.data, image.data)
    assert min(sent.values()) > 0
    assert not donors["a"].wants_image


def test_one_donor_hashes_its_image_for_all(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = list[Image]()
    both = threading.Barrier(2)

    def count(image: Image) -> Image:
        hashes.append(image)
        return hashed(image)

    monkeypatch.setattr(donor_module, "hashed", count)
    wait = [lambda number: number == 1 and both.wait(PATIENCE)] * 2  # each waits for the other one's first block
    donors = {name: donor_that(on_block) for name, on_block in zip("ab", wait, strict=True)}
    images = {name: image_of(12 * BLOCK) for name in donors}
    learner = members.learner(donors)
    for name, donor in donors.items():
        donor.offer(images[name], MARK, EPOCH)
    assert np.array_equal(learner.fetch(anything, timeout=PATIENCE).image.data, images["a"].data)
    assert len(hashes) == 1


def test_a_donor_that_could_not_hash_its_image_tries_again(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of memory or of threads. No other image is made as long as this one can be used, so the learner would
    ask for it for ever."""
    image, tries = image_of(3 * BLOCK), list[int]()

    def fail_once(image: Image) -> Image:
        tries.append(1)
        if len(tries) == 1:
            raise MemoryError
        return hashed(image)

    monkeypatch.setattr(donor_module, "hashed", fail_once)
    donor = donor_that()
    learner = members.learner({"a": donor})
    donor.offer(image, MARK, EPOCH)
    assert np.array_equal(learner.fetch(anything, timeout=PATIENCE).image.data, image.data)
    assert len(tries) == 2


def test_if_the_donor_that_is_to_hash_its_image_is_lost_another_one_does(members: Members) -> None:
    first, second = donor_that(), donor_that()
    learner = members.learner({"a": first})

    def lose_the_first() -> None:
        until(lambda: first.wants_image, "it asks")
        learner.add("b", members.connect("b", second))
        second.offer(image_of(2 * BLOCK), MARK, EPOCH)
        members.cut("a")

    with in_thread(lose_the_first):
        assert learner.fetch(anything, timeout=PATIENCE).mark == MARK


def test_what_a_second_attempt_or_a_returning_process_has_is_not_sent_again(members: Members) -> None:
    image, sent = image_of(10 * BLOCK), [0]
    known = hashed(image_of(10 * BLOCK))
    known.data[4 * BLOCK] ^= 1
    donor = donor_that(sent.append)
    learner = members.learner({"a": donor})
    donor.offer(image, MARK, EPOCH)
    fetched = learner.fetch(anything, known=[hashed(known)], timeout=PATIENCE)
    assert np.array_equal(fetched.image.data, image.data)
    assert sent[-1] == 1


def test_if_the_donor_of_an_image_dies_that_of_another_donor_is_fetched(members: Members) -> None:
    """The second one offers a later step, and shares most of the blocks."""
    image, later = image_of(10 * BLOCK), image_of(10 * BLOCK)
    later.data[::BLOCK] ^= 1
    mark = MARK.after(*result_of(MARK, 1))
    donors = {"a": donor_that(), "b": donor_that(), "c": donor_that()}
    for name in ("a", "b"):
        donors[name] = donor_that(lambda number, name=name: number == 2 and members.cut(name))
    learner = members.learner(donors)
    donors["a"].offer(image, MARK, EPOCH)
    donors["b"].offer(image, MARK, EPOCH)
    donors["c"].offer(later, mark, EPOCH)
    fetched = learner.fetch(anything, timeout=PATIENCE)
    assert fetched.mark == mark
    assert np.array_equal(fetched.image.data, later.data)


def test_without_any_donor_left_the_error_says_why_each_has_gone(members: Members) -> None:
    names = ("a", "b")
    donors = {name: donor_that(lambda number, name=name: number == 3 and members.cut(name)) for name in names}
    learner = members.learner(donors)
    for donor in donors.values():
        donor.offer(image_of(20 * BLOCK), MARK, EPOCH)
    with pytest.raises(StateTransferError, match="No member is left") as raised:
        learner.fetch(anything, timeout=PATIENCE)
    assert set(raised.value.reasons) == set(names)
    # Another member comes, and the learner goes on.
    donor = donor_that()
    learner.add("c", members.connect("c", donor))
    donor.offer(image_of(20 * BLOCK), MARK, EPOCH)
    assert learner.fetch(anything, timeout=PATIENCE).mark == MARK


def test_a_donor_with_damaged_memory_is_left_out(members: Members) -> None:
    image, damaged = hashed(image_of(12 * BLOCK)), hashed(image_of(12 * BLOCK))
    damaged.data[::BLOCK] ^= 1
    donors = {"a": donor_that(), "damaged": donor_that()}
    learner = members.learner(donors)
    donors["a"].offer(image, MARK, EPOCH)
    donors["damaged"].offer(damaged, MARK, EPOCH)
    fetched = learner.fetch(anything, timeout=PATIENCE)
    assert np.array_equal(fetched.image.data, image.data)
    assert "damaged" in learner.lost["damaged"]


def test_a_state_that_this_process_cannot_use_or_that_is_too_large_is_refused_before(members: Members) -> None:
    donor = donor_that()
    learner = members.learner({"a": donor})
    donor.offer(image_of(BLOCK), MARK, EPOCH)

    def check(fetched: Fetched) -> None:
        assert fetched.image.data.size == 0
        why = StateTree({"w": np.zeros(3)}).manifest().differences(fetched.image.manifest)
        raise InvalidArgumentError("state", "the run's", why)

    with pytest.raises(InvalidArgumentError, match=r"is float64\(3,\) here and uint8"):
        learner.fetch(check, timeout=PATIENCE)
    donor = donor_that()
    small = Learner({"b": members.connect("b", donor)}, limit=BLOCK - 1)
    members.learners.append(small)
    donor.offer(image_of(BLOCK), MARK, EPOCH)
    with pytest.raises(StateTransferError, match="the limit is"):
        small.fetch(anything, timeout=PATIENCE)


def test_every_wait_has_a_deadline(members: Members) -> None:
    learner = members.learner({"a": donor_that()})  # offers nothing
    with pytest.raises(OperationTimeoutError, match="waiting for a member to offer"):
        learner.fetch(anything, timeout=0.05)
    ours, theirs = sealed_pair()  # nobody answers
    silent = Learner({"silent": ours}, limit=LIMIT, timeout=0.05)
    members.learners.append(silent)
    with theirs.sock, pytest.raises(StateTransferError, match="too long"):
        silent.fetch(anything, timeout=PATIENCE)


def test_closing_ends_a_fetch(members: Members) -> None:
    donor = donor_that()
    learner = members.learner({"a": donor})
    closing = in_thread(lambda: (until(lambda: donor.wants_image, "it asks"), learner.close()))
    with closing, pytest.raises(StateTransferError, match="closed"):
        learner.fetch(anything, timeout=PATIENCE)


# --- results ----------------------------------------------------------------------------------------------------------


def follow_in_vain(members: Members, donor: Donor) -> tuple[Learner, Mark, Mark]:
    """Have a learner follow without coming nearer. Return where it and the run are."""
    donor.offer(image_of(BLOCK), MARK, EPOCH)
    learner = members.learner({"a": donor})
    after = learner.fetch(anything, timeout=PATIENCE).mark
    newest = seal([donor], after, 6)[-1]
    assert donor.rest(0.0) == 0  # too early to say
    for _ in range(5):
        replayed = learner.next_result(after, timeout=PATIENCE)
        assert replayed is not None
        after, newest = replayed.after, seal([donor], newest, 1)[-1]
    return learner, after, newest


def test_a_run_rests_for_a_learner_that_does_not_come_nearer_until_it_has_caught_up(members: Members) -> None:
    donor = donor_that()
    learner, after, newest = follow_in_vain(members, donor)
    assert donor.rest(0.0) > 0
    assert donor.rest(PATIENCE, lambda: True) < PATIENCE  # there is something else to do

    def catch_up() -> None:
        mark = after
        for one in learner.results(mark, timeout=0.5):
            mark = one.after
        assert mark == newest

    with in_thread(catch_up):
        assert donor.rest(PATIENCE) < PATIENCE
    assert donor.has_caught_up


def test_a_run_does_not_rest_for_a_learner_that_has_everything_and_wants_no_seat_yet(members: Members) -> None:
    donor = donor_that()
    learner, after, newest = follow_in_vain(members, donor)

    def catch_up() -> None:
        mark = after
        while (one := learner.next_result(mark, timeout=0, wants_seat=False)) is not None:
            mark = one.after
        assert mark == newest

    with in_thread(catch_up):
        assert donor.rest(PATIENCE) < PATIENCE
    assert not donor.has_caught_up


def test_a_run_rests_for_a_learner_for_a_bounded_time(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    donor = donor_that()
    follow_in_vain(members, donor)
    monkeypatch.setattr(donor_module, "MOST_REST", 0.05)
    assert donor.rest(0.06) > 0
    assert donor.rest(PATIENCE) == 0


def test_the_results_that_follow_are_replayed_in_order_also_when_a_donor_is_lost(members: Members) -> None:
    donors = {"a": donor_that(), "b": donor_that()}
    learner = members.learner(donors)
    for donor in donors.values():
        donor.offer(image_of(BLOCK), MARK, EPOCH)
    mark = learner.fetch(anything, timeout=PATIENCE).mark
    marks = seal(list(donors.values()), mark, 5)
    found = []
    for replayed in learner.results(mark, timeout=0):
        found.append(replayed.after)
        assert replayed.sums == (0.5, 2.0)
        expected, _ = result_of(replayed.before, replayed.before.step)
        assert all(np.array_equal(replayed.result.payload[kind], expected.payload[kind]) for kind in expected.payload)
        if replayed.result.step == 9:
            assert replayed.behind == 3
            members.cut(learner.donors[0])
    assert found == marks[1:]
    with in_thread(lambda: seal(list(donors.values()), marks[-1], 1)):
        replayed = learner.next_result(marks[-1], timeout=PATIENCE)
    assert replayed is not None
    assert replayed.result.step == marks[-1].step + 1


def test_the_history_is_bounded_and_a_learner_that_is_too_late_is_told(members: Members) -> None:
    donor = donor_that(history_bytes=3 * 4100)
    learner = members.learner({"a": donor})
    donor.offer(image_of(BLOCK), MARK, EPOCH)
    learner.fetch(anything, timeout=PATIENCE)
    marks = seal([donor], MARK, 6)
    with pytest.raises(StateTransferError, match="after step 7"):
        learner.next_result(MARK, timeout=PATIENCE)
    assert [one.after for one in learner.results(marks[2], timeout=0)] == marks[3:]
    # What is offered leads nowhere any more, so the run is asked for another image.
    with in_thread(
        lambda: (until(lambda: donor.wants_image, "it asks"), donor.offer(image_of(BLOCK), marks[-1], EPOCH))
    ):
        assert learner.fetch(anything, timeout=PATIENCE).mark == marks[-1]


def test_a_learner_that_only_follows_is_not_waited_for(members: Members) -> None:
    donor = donor_that()
    learner = members.learner({"a": donor})
    donor.offer(image_of(BLOCK), MARK, EPOCH)
    learner.fetch(anything, timeout=PATIENCE)
    assert learner.next_result(MARK, timeout=0, wants_seat=False) is None
    assert not donor.has_caught_up
    assert learner.next_result(MARK, timeout=0) is None
    assert donor.has_caught_up
    assert learner.next_result(MARK, timeout=0, wants_seat=False) is None
    assert not donor.has_caught_up


def test_a_learner_that_gets_the_last_result_counts_as_caught_up(members: Members) -> None:
    """The members pause for it a step later, so that it need not ask first and wait for another step."""
    donor = donor_that()
    learner = members.learner({"a": donor})
    donor.offer(image_of(BLOCK), MARK, EPOCH)
    learner.fetch(anything, timeout=PATIENCE)
    marks = seal([donor], MARK, 3)
    assert learner.next_result(marks[0], timeout=0) is not None
    assert not donor.has_caught_up
    assert learner.next_result(marks[2], timeout=0, wants_seat=False) is not None
    assert not donor.has_caught_up
    assert learner.next_result(marks[2], timeout=0) is not None
    assert donor.has_caught_up


def test_results_that_no_learner_needs_are_not_kept_for_longer(members: Members) -> None:
    donor = donor_that(kept_bytes=3 * 4100)
    donor.begin(MARK)
    marks = seal([donor], MARK, 3)
    learner = members.learner({"a": donor})
    until(lambda: bool(donor.learners), "the learner is there")
    with in_thread(
        lambda: (until(lambda: donor.wants_image, "it asks"), donor.offer(image_of(BLOCK), marks[3], EPOCH))
    ):
        learner.fetch(anything, timeout=PATIENCE)
    marks += seal([donor], marks[3], 2)[1:]
    with pytest.raises(StateTransferError):
        members.learner({"a": donor}).next_result(marks[1], timeout=0)
    marks += seal([donor], marks[5], 4)[1:]
    assert [one.after for one in learner.results(marks[3], timeout=0)] == marks[4:]


def test_a_result_stays_as_long_as_somebody_has_it(members: Members) -> None:
    """A program may keep means, which are views of results."""
    donor = donor_that()
    learner = members.learner({"a": donor})
    donor.begin(MARK)
    marks = [MARK]
    for _ in range(4):
        result, digest = result_of(marks[-1], marks[-1].step, 1 << 16)
        donor.sealed(marks[-1], result, digest)
        marks.append(marks[-1].after(result, digest))
    kept = list[Any]()
    for replayed in learner.results(MARK, timeout=0):
        kept.append(replayed.result.payload["float32"][7:])
    for mark, mean in zip(marks[:-1], kept, strict=True):
        assert np.array_equal(mean, result_of(mark, mark.step, 1 << 16)[0].payload["float32"][7:])
    places = set[int]()
    for replayed in learner.results(MARK, timeout=0):
        kept = [replayed.result.payload["float32"]]
        places.add(kept[0].ctypes.data)
    assert len(places) < 4


def test_dismissed_learners_lose_the_donor(members: Members) -> None:
    donor = donor_that()
    learner = members.learner({"a": donor})
    donor.offer(image_of(BLOCK), MARK, EPOCH)
    learner.fetch(anything, timeout=PATIENCE)
    donor.dismiss()
    with pytest.raises(StateTransferError):
        learner.next_result(MARK, timeout=PATIENCE)
    until(lambda: not donor.learners, "the learner has gone")
    again = members.learner({"a": donor})
    with in_thread(lambda: (until(lambda: donor.wants_image, "it asks"), donor.offer(image_of(BLOCK), MARK, EPOCH))):
        assert again.fetch(anything, timeout=PATIENCE).mark == MARK


def test_a_process_that_was_away_for_a_moment_gets_only_the_results_that_it_missed(members: Members) -> None:
    """Members keep a few of them, although there is no learner."""
    donors = {"a": donor_that(kept_bytes=3 * 4100), "b": donor_that(kept_bytes=3 * 4100)}
    for donor in donors.values():
        donor.begin(MARK)
    marks = seal(list(donors.values()), MARK, 5)
    learner = members.learner(donors)
    first = learner.next_result(marks[2], timeout=0)
    assert first is not None
    assert (first.after, first.behind) == (marks[3], 2)
    assert [one.after for one in learner.results(marks[3], timeout=0)] == marks[4:]
    with pytest.raises(StateTransferError, match="after step 8"):
        learner.next_result(marks[1], timeout=0)
    assert learner.next_result(marks[5], timeout=0) is None  # one that missed nothing
    other = Mark("another", 9)
    with pytest.raises(StateTransferError, match="after step 9"):
        learner.next_result(other, timeout=0)


def test_when_the_last_learner_has_gone_the_image_is_dropped_and_most_of_the_history(members: Members) -> None:
    donor = donor_that(kept_bytes=3 * 4100)
    learner = members.learner({"a": donor})
    donor.offer(image_of(BLOCK), MARK, EPOCH)
    marks = seal([donor], MARK, 5)
    assert learner.next_result(MARK, timeout=PATIENCE).after == marks[1]
    learner.close()
    until(lambda: not donor.learners, "the learner has gone")
    again = members.learner({"a": donor})
    with pytest.raises(OperationTimeoutError):
        again.fetch(anything, timeout=0.05)
    assert [one.after for one in again.results(marks[2], timeout=0)] == marks[3:]


def test_a_large_result_is_in_use_until_it_was_sent(members: Members) -> None:
    """The run does not copy it, and must not reduce into its memory, although the history has no room for it."""
    is_about_to, may_go, memory = threading.Event(), threading.Event(), SpareMemory()

    def busy() -> bool:
        is_about_to.set()
        return not may_go.wait(PATIENCE)

    donor = Donor(lambda: LAYOUT, history_bytes=5 * LARGE, busy=busy, timeout=PATIENCE)
    learner = members.learner({"a": donor})
    donor.begin(MARK)
    places = list[int]()

    def seal_one(mark: Mark, step: int) -> Mark:
        array = memory.take("float32", LARGE)
        array.fill(step)
        places.append(array.ctypes.data)
        payload = {"float32": array, "sums": np.ones(2)}
        result = Result(mark.branch, mark.step + 1, mark.cursor + 10, payload)
        donor.sealed(mark, result, digest_share(payload, 0, 1))
        return mark.after(result, digest_share(payload, 0, 1))

    def ask() -> None:
        replayed = learner.next_result(MARK, timeout=PATIENCE)
        assert np.array_equal(replayed.result.payload["float32"], np.full(LARGE, 1, np.float32))

    with in_thread(ask):
        until(lambda: donor.has_caught_up, "it waits for the result")
        mark = seal_one(MARK, 1)
        assert is_about_to.wait(PATIENCE)
        for step in range(2, 4 + 2 * HISTORY_RESULTS):
            mark = seal_one(mark, step)
        assert places.count(places[0]) == 1
        assert len(set(places)) < len(places)
        may_go.set()
    for step in range(20, 30):
        mark = seal_one(mark, step)
    assert len(set(places[-10:])) < 10


def test_a_learner_that_asks_another_member_first_finds_the_image_here_too(members: Members) -> None:
    """All members make an image at the same step; the streams of a learner come one after the other."""
    image, sent = image_of(8 * BLOCK), {"a": 0, "b": 0}
    both = threading.Barrier(2)

    def note(name: str, number: int) -> None:
        sent[name] = number
        if number == 1:
            both.wait(PATIENCE)

    donors = {name: donor_that(lambda number, name=name: note(name, number)) for name in sent}
    learner = members.learner({"a": donors["a"]})
    for donor in donors.values():
        donor.offer(image, MARK, EPOCH)
    with in_thread(lambda: learner.add("b", members.connect("b", donors["b"]))):
        fetched = learner.fetch(anything, timeout=PATIENCE)
    assert np.array_equal(fetched.image.data, image.data)
    assert min(sent.values()) > 0


def test_an_image_that_is_older_than_its_size_in_results_is_made_again(members: Members) -> None:
    donor = donor_that()
    first = members.learner({"a": donor})
    donor.offer(image_of(BLOCK), MARK, EPOCH)
    assert first.fetch(anything, timeout=PATIENCE).mark == MARK
    marks = seal([donor], MARK, BLOCK // 4024 + 2)
    second = Learner({"a": members.connect("a", donor)}, limit=LIMIT)
    members.learners.append(second)
    with in_thread(
        lambda: (until(lambda: donor.wants_image, "it asks"), donor.offer(image_of(BLOCK), marks[-1], EPOCH))
    ):
        assert second.fetch(anything, timeout=PATIENCE).mark == marks[-1]


def test_sending_waits_for_the_training_no_longer_than_it_takes_itself(members: Members) -> None:
    donor = Donor(lambda: LAYOUT, busy=lambda: True, timeout=PATIENCE)
    learner = members.learner({"a": donor})
    donor.offer(image_of(30 * BLOCK), MARK, EPOCH)
    learner.fetch(anything, timeout=PATIENCE)
    (pace,) = donor._paces.values()
    assert 0 < pace.waited <= pace.sent + 0.05


def test_a_result_that_does_not_fit_its_digest_is_not_taken(members: Members) -> None:
    donor = donor_that()
    learner = members.learner({"a": donor})
    donor.offer(image_of(BLOCK), MARK, EPOCH)
    learner.fetch(anything, timeout=PATIENCE)
    result, digest = result_of(MARK, 1)
    donor.sealed(MARK, result, digest ^ 1)
    with pytest.raises(StateTransferError, match="is damaged"):
        learner.next_result(MARK, timeout=PATIENCE)


# --- between nodes ----------------------------------------------------------------------------------------------------


def test_a_node_learns_the_state_from_another_through_their_control_processes() -> None:
    namespace = NetworkNamespace.generate("test")
    config = AutoDiscoveryConfig(interfaces=["127.0.0.1"], settle=0.15, election=ElectionConfig(settle=0.1))
    nodes = [ClusterNode(config, credentials=Credentials(NodeIdentity.ephemeral(), namespace)) for _ in range(2)]
    image, donor = image_of(5 * BLOCK + 100), donor_that()
    try:
        member, joiner = [node.start() for node in nodes]
        member.on_stream(lambda peer, purpose, connection: donor.serve(peer, connection))
        epoch = joiner.wait_for_peers(1, PATIENCE)
        member.wait_for_peers(1, PATIENCE)
        stream = joiner.open_stream(member.peer_id, PURPOSE, PATIENCE)
        learner = Learner({member.peer_id: stream}, limit=LIMIT)
        assert donor.learners == (joiner.peer_id,)
        donor.offer(image, MARK, epoch)
        fetched = learner.fetch(anything, timeout=PATIENCE)
        learner.close()
        assert fetched.epoch == epoch
        assert np.array_equal(fetched.image.data, image.data)
    finally:
        donor.close()
        for node in nodes:
            node.close()
