"""The sentence on top: which cause it names, and that what it predicts comes true when its advice is followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import pytest
from hypothesis import given, strategies as st

from ringfort.telemetry.step_model import LATE, RATIOS, StepModel
from ringfort.telemetry.verdict import judge, why_nothing
from ringfort.telemetry.view import LinkView, RankView, Split


@dataclass(frozen=True)
class Rank:
    """What a rank does in each step by itself."""

    name: str
    compute: float = 0.1
    data: float = 0.0
    codec: float = 0.0
    samples: float = 32.0
    host: str = ""


def step_of(ranks: Sequence[Rank], wire: float, seal: float = 0.0) -> float:
    """The seconds of a step."""
    return max(rank.compute + rank.data + rank.codec for rank in ranks) + wire + seal


def views(
    ranks: Sequence[Rank], wire: float = 0.01, *, seal: float = 0.0, turns: float = 0.0, compression: str = ""
) -> list[RankView]:
    """What is seen of ranks whose steps end together."""
    step, found = step_of(ranks, wire, seal) + turns, list[RankView]()
    for number, rank in enumerate(ranks):
        waiting = step - rank.compute - rank.data - rank.codec - wire - seal
        found.append(
            RankView(
                f"{rank.host or rank.name}:{number}",
                number,
                rank.name,
                rank.host or rank.name,
                split=Split(rank.compute, rank.data, waiting, wire, rank.codec, seal),
                steps_per_second=1 / step,
                samples_per_second=rank.samples / step,
                compression=compression,
            )
        )
    return found


def links(speeds: dict[tuple[str, str], float], round_trip: float | None = None) -> list[LinkView]:
    """Links with so many bytes per second, both ways."""
    return [
        LinkView(a, b, measured=speed, round_trip=round_trip)
        for pair, speed in speeds.items()
        for a, b in (pair, pair[::-1])
    ]


# --- predictions come true --------------------------------------------------------------------------------------------

SECONDS = st.floats(0.02, 1.0)
RANKS = st.lists(
    st.builds(Rank, st.just(""), SECONDS, st.just(0.0) | SECONDS, samples=st.floats(1, 64)), min_size=2, max_size=5
).map(lambda ranks: [replace(rank, name=f"machine{number}") for number, rank in enumerate(ranks)])


@given(RANKS, st.floats(0.001, 1.0))
def test_shares_by_speed_save_what_was_predicted(ranks: list[Rank], wire: float) -> None:
    model = StepModel(views(ranks, wire))
    if model.longest_wait <= LATE * model.seconds:
        assert model.imbalance() == 0
        return
    speeds = [rank.samples / (rank.compute + rank.data) for rank in ranks]
    scale = [sum(r.samples for r in ranks) * s / sum(speeds) / r.samples for r, s in zip(ranks, speeds, strict=True)]
    dealt = [replace(r, compute=r.compute * x, data=r.data * x) for r, x in zip(ranks, scale, strict=True)]
    assert model.imbalance() == pytest.approx(step_of(ranks, wire) - step_of(dealt, wire), abs=1e-6)


@given(RANKS, st.floats(0.001, 1.0))
def test_loaders_that_are_mended_save_what_was_predicted(ranks: list[Rank], wire: float) -> None:
    most = max(rank.data for rank in ranks)
    mended = [replace(rank, data=0.0) if rank.data >= most / 2 else rank for rank in ranks]
    saved = step_of(ranks, wire) - step_of(mended, wire)
    assert StepModel(views(ranks, wire)).data() == pytest.approx(saved, abs=1e-6)


@given(RANKS, st.floats(0.001, 1.0), st.sampled_from(sorted(RATIOS)), st.floats(0.0, 0.1))
def test_compression_saves_what_was_predicted(ranks: list[Rank], wire: float, codec: str, seconds: float) -> None:
    encoding = [replace(rank, codec=seconds) for rank in ranks]
    saved = step_of(ranks, wire) - step_of(encoding, wire / RATIOS[codec])
    assert StepModel(views(ranks, wire)).saved_by(codec, None, seconds) == pytest.approx(saved, abs=1e-6)
    # And once it is in use, it is said to save as much.
    using = StepModel(views(encoding, wire / RATIOS[codec], compression=codec))
    assert using.gained_by_compression(None) == pytest.approx(saved, abs=1e-6)


@given(RANKS, st.floats(0.001, 1.0))
def test_no_advice_saves_more_than_the_step(ranks: list[Rank], wire: float) -> None:
    found = judge(views(ranks, wire))
    assert 0 <= found.saving < step_of(ranks, wire)
    assert found.cause != "well" or found.saving == 0


# --- who is named -----------------------------------------------------------------------------------------------------


def test_all_that_came_last_are_named() -> None:
    found = judge(views([Rank("study"), Rank("laptop", 0.3), Rank("attic", 0.3), Rank("cellar", 0.11)]))
    assert found.sentence.startswith(
        "study and cellar wait 65% of each step for laptop and attic, which compute 3.0 times as long"
    )
    many = [Rank("laptop", 0.3), *(Rank(f"machine{number}") for number in range(7))]
    assert judge(views(many)).sentence.startswith(
        "The others wait 65% of each step for laptop, which computes 3.0 times"
    )


def test_a_machine_with_several_ranks_is_named_as_a_whole() -> None:
    ranks = [Rank(name, seconds, host=name) for name, seconds in (("study", 0.1), ("laptop", 0.3)) for _ in range(4)]
    found = judge(views(ranks))
    assert found.culprit == "laptop"
    assert found.sentence.startswith("study waits 65% of each step for laptop, which computes 3.0 times as long")


def test_one_slow_rank_of_several_is_named_with_its_machine() -> None:
    ranks = [Rank(name, 0.1, host=name) for name in ("study", "laptop") for _ in range(2)]
    ranks[3] = replace(ranks[3], compute=0.3)
    found = judge(views(ranks))
    assert found.culprit == "laptop"
    assert "for rank 3 (laptop), which computes" in found.sentence


def test_on_one_machine_the_rank_is_the_culprit() -> None:
    found = judge(views([Rank("study", host="h"), Rank("study", 0.3, host="h")]))
    assert found.culprit == "rank 1"
    assert "Rank 0 waits 65% of each step for rank 1" in found.sentence


def test_machines_of_the_same_name_are_told_apart() -> None:
    found = judge(views([Rank("pi", host="a"), Rank("pi", 0.3, host="b")]))
    assert "pi (rank 0) waits 65% of each step for pi (rank 1)" in found.sentence


def test_a_slow_machine_that_is_hot_and_on_battery_is_told() -> None:
    ranks = views([Rank("study"), Rank("laptop", 0.3)])
    ranks[1] = msgspec.structs.replace(ranks[1], vitals={"plugged": 0.0, "temperature": 94.0})
    assert "for laptop (on battery, 94 °C), which" in judge(ranks).sentence


# --- shares that are dealt by speed -----------------------------------------------------------------------------------


def test_shares_that_fit_the_speeds_are_no_cause() -> None:
    assert judge(views([Rank("study", 0.1, samples=96), Rank("laptop", 0.1, samples=32)], seal=0.002)).cause == "well"


def test_elastic_training_is_advised_smaller_parts() -> None:
    ranks = [Rank("study", 0.1, samples=32), Rank("laptop", 0.2, samples=32)]
    found = judge(views(ranks, seal=0.002))
    assert found.cause == "slow_machine"
    assert "if this stays, smaller micro-batches would save up to 67 ms" in found.sentence


def test_a_member_without_a_part_in_a_step_is_no_cause() -> None:
    ranks = [Rank("study", 0.2, samples=64), Rank("laptop", 0.001, samples=0)]
    assert judge(views(ranks, seal=0.002)).cause == "well"


def test_the_seal_may_take_long() -> None:
    found = judge(views([Rank("study"), Rank("laptop")], 0.02, seal=0.05))
    assert found.cause == "seal"
    assert found.sentence.startswith("29% of each step is spent on agreeing that it counts")


# --- links ------------------------------------------------------------------------------------------------------------

HOME = {("study", "laptop"): 10e6, ("attic", "laptop"): 12e6, ("study", "attic"): 120e6}
THREE = [Rank("study"), Rank("laptop"), Rank("attic")]


def test_the_machine_whose_links_are_slow_is_named() -> None:
    found = judge(views(THREE, 0.3), links(HOME))
    assert found.culprit == "laptop"
    assert found.sentence.startswith("75% of each step is spent on the link of laptop (96 Mbit/s)")


@pytest.mark.parametrize("fast", [500e6, 31e6])
def test_a_link_that_was_busy_while_it_was_measured_does_not_hide_the_slow_machine(fast: float) -> None:
    busy = {("study", "laptop"): 12e6, ("attic", "laptop"): 4e6, ("study", "attic"): fast}
    found = judge(views(THREE, 0.3), links(busy))
    assert found.culprit == "laptop"
    assert "the link of laptop (96 Mbit/s)" in found.sentence


def test_two_slow_machines_are_both_named() -> None:
    speeds = {("study", "cellar"): 500e6, ("laptop", "attic"): 6e6}
    speeds |= {(slow, fast): 11e6 for slow in ("laptop", "attic") for fast in ("study", "cellar")}
    found = judge(views([*THREE, Rank("cellar")], 0.3), links(speeds))
    assert "the links of attic and laptop (88 Mbit/s)" in found.sentence


def test_one_slow_link_is_named_by_its_ends_and_nobody_is_blamed() -> None:
    found = judge(views(THREE, 0.3), links({**HOME, ("attic", "laptop"): 120e6}))
    assert found.culprit == ""
    assert "the link between laptop and study (80 Mbit/s)" in found.sentence


def test_a_network_that_is_slow_everywhere_is_not_blamed_on_one() -> None:
    found = judge(views(THREE, 0.3), links(dict.fromkeys(HOME, 10e6)))
    assert found.culprit == ""
    assert "75% of each step is spent on the network (80 Mbit/s)" in found.sentence


def test_without_measured_links_nobody_is_blamed() -> None:
    found = judge(views(THREE, 0.3))
    assert (found.cause, found.culprit) == ("slow_link", "")
    assert "spent on the network; compression int8" in found.sentence


def test_round_trips_are_not_shortened_by_compression() -> None:
    found = judge(views([Rank("study"), Rank("cloud")], 0.3), links({("study", "cloud"): 100e6}, round_trip=0.29))
    assert (found.cause, found.saving) == ("slow_link", 0)
    assert "compression would not save time; larger batches would: most of it is round trips" in found.sentence


def test_a_busy_link_is_not_taken_for_a_long_one() -> None:
    # 0.3 s at 10 MB/s are 3 MB in each step; heartbeats wait behind them.
    ranks = views([Rank("study"), Rank("laptop")], 0.3)
    busy = [msgspec.structs.replace(rank, sent=3e6 / 0.4) for rank in ranks]
    found = judge(busy, links({("study", "laptop"): 10e6}, round_trip=0.2))
    assert found.saving == pytest.approx(0.3 * (1 - 1 / RATIOS["int8"]))


def test_inside_one_machine_compression_is_not_advised() -> None:
    found = judge(views([Rank("study", host="h"), Rank("study", host="h")], 0.3))
    assert (found.cause, found.saving) == ("exchange", 0)
    assert "75% of each step is spent on exchange inside the machine" in found.sentence


def test_a_learner_that_copies_the_state_explains_a_busy_link() -> None:
    found = judge(views(THREE, 0.3), links(HOME), learners=["cellar"])
    assert found.saving == 0
    assert "while cellar copies the state of the run" in found.sentence


# --- compression ------------------------------------------------------------------------------------------------------


def test_compression_that_pays_is_told_where_all_is_well() -> None:
    found = judge(views([Rank("study", 0.5, codec=0.01), Rank("laptop", 0.5, codec=0.01)], 0.03, compression="int8"))
    assert (found.cause, found.saving) == ("well", 0)
    assert "compression int8 saves about 79 ms" in found.sentence


def test_compression_that_costs_more_than_it_saves_is_a_cause() -> None:
    ranks = [Rank("study", codec=0.05), Rank("laptop", codec=0.06)]
    found = judge(views(ranks, 0.002, compression="int8"))
    assert found.cause == "codec"
    assert found.saving == pytest.approx(0.06 - 0.002 * (RATIOS["int8"] - 1))
    assert "compression int8 costs more than it saves, none would save about 54 ms" in found.sentence


def test_a_codec_whose_gain_is_unknown_is_named_without_a_figure() -> None:
    found = judge(views([Rank("study", codec=0.05), Rank("laptop", codec=0.05)], 0.002, compression="powersgd(4)"))
    assert (found.cause, found.saving) == ("codec", 0)
    assert "a cheaper codec" in found.sentence


def test_instead_of_16_bits_int8_is_advised() -> None:
    found = judge(views([Rank("study", codec=0.01), Rank("laptop", codec=0.01)], 0.3, compression="bf16"))
    assert found.saving == pytest.approx(0.3 * (1 - 2 / RATIOS["int8"]) + 0.01)
    assert "compression int8 instead of bf16 would save about" in found.sentence


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_ranks_that_wait_in_turn_are_not_blamed() -> None:
    found = judge(views([Rank("study"), Rank("laptop")], turns=0.05))
    assert (found.cause, found.culprit) == ("uneven", "")
    assert found.sentence.startswith("The ranks wait for each other in turn, 31% of each step")


def test_one_rank_alone_is_well_or_waits_for_its_data() -> None:
    assert judge(views([Rank("study")], 0.0)).sentence == "All well: 1 rank computes 100% of each step."
    found = judge(views([Rank("study", data=0.1)], 0.0))
    assert (found.cause, found.culprit) == ("data", "study")


def test_a_machine_that_is_silent_is_named_while_the_others_wait() -> None:
    ranks = [RankView("a:1", 0, "study", "a", "paused"), RankView("b:1", 1, "laptop", "b", "silent", heard=8.0)]
    assert why_nothing(ranks) == "All wait: nothing has been heard of laptop for 8 s."
    ranks[1] = RankView("b:1", 1, "laptop", "b", "lost")
    assert why_nothing(ranks) == "Paused: no rank has made a step for a while. laptop has ended."
