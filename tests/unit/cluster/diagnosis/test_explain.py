"""What a program is told when nobody comes."""

from __future__ import annotations

from ringfort.cluster.core.events import DiskTrouble
from ringfort.cluster.diagnosis.explain import MAX_LISTED, in_words
from ringfort.errors import RendezvousTimeoutError


def words(**found: object) -> list[str]:
    nothing = {
        "seen": (),
        "gone": (),
        "refused": (),
        "no_answer": (),
        "other_clusters": (),
        "waiting_for": "",
        "troubles": (),
        "listening": "eth0 (10.0.0.1)",
        "port": 52415,
    }
    return in_words(**{**nothing, **found}).splitlines()  # pyright: ignore[reportArgumentType]


def test_who_saw_nobody_is_told_where_it_listens_and_what_to_try() -> None:
    first, listens, *advice = words(waiting_for="0 of at least 1 other peers are here")
    assert first == "no other peer was seen"
    assert listens == "this machine listens on eth0 (10.0.0.1), port 52415"
    assert advice[0].startswith("to try: start the same program on the other machines; `ringfort doctor`")


def test_a_viewer_says_where_it_looks() -> None:
    assert words(port=0)[1] == "this command looks on eth0 (10.0.0.1)"


def test_one_that_was_here_and_left_was_seen() -> None:
    lines = words(gone=["study (it left)"])
    assert lines[0] == "was here and is gone: study (it left)"
    assert "no other peer was seen" not in lines


def test_a_machine_of_another_cluster_comes_with_the_two_commands() -> None:
    lines = words(other_clusters=["10.0.0.2"])
    told = lines.index("1 machine of another cluster announces itself here (10.0.0.2)")
    assert lines[told + 1].endswith("`ringfort key show` on one machine, `ringfort key join CODE` on the others")
    assert "`ringfort doctor`" in lines[-2]  # the other machine may be a neighbour's


def test_who_comes_while_a_run_goes_on_is_told_to_wait() -> None:
    assert words(seen=["study (leader)"], is_running=True)[-1].startswith("to try: wait; they are a group already")
    assert "on more machines" in words(seen=["study (waiting)"])[-2]


def test_long_lists_have_a_line_for_each_and_an_end() -> None:
    lines = words(seen=["study at 10.0.0.2:1 (waiting, healthy)"], refused=[f"10.0.0.{n}:1: no" for n in range(8)])
    assert lines[0] == "seen: study at 10.0.0.2:1 (waiting, healthy)"
    begin = lines.index("refused:")
    assert lines[begin + 1] == "  10.0.0.0:1: no"
    assert lines[begin + 1 + MAX_LISTED] == "  and 2 more"


def test_in_the_error_what_failed_is_a_line_of_its_own() -> None:
    error = str(RendezvousTimeoutError("waiting for 2 machines", 5.0, state="\n".join(words(no_answer=["a:1 (shut)"]))))
    lines = error.splitlines()
    assert lines[:3] == [
        "Exceeded the timeout of 5 s: waiting for 2 machines",
        "  no other peer was seen",
        "  no answer from: a:1 (shut)",
    ]
    assert all(len(line) <= 100 for line in lines)
    short = RendezvousTimeoutError("waiting for rank 0", 5.0, state="rank 1: refused")
    assert str(short) == "Exceeded the timeout of 5 s: waiting for rank 0; rank 1: refused"


def test_who_waits_for_an_earlier_group_is_told_so_though_nobody_was_seen() -> None:
    why = "an earlier process of this machine was in a group with study, which may still be at work. Start it there too"
    lines = words(waiting_for=why)
    told = lines.index(
        "no group yet: an earlier process of this machine was in a group with study, which may still be at work"
    )
    assert lines[told + 1] == "  Start it there too"


def test_a_disk_that_fails_is_told_in_lines() -> None:
    lines = words(seen=["study"], disk=str(DiskTrouble("/home/a/votes/x", "No space left on device")))
    told = lines.index("cannot write /home/a/votes/x: No space left on device")
    assert lines[told + 1 : told + 3] == [
        "  This peer joins no group until it can",
        "  Free space on that disk, or set RINGFORT_HOME to a folder on another disk",
    ]
