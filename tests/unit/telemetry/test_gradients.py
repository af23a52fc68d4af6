"""How large the gradients are, and how they are compressed."""

from __future__ import annotations

from msgspec.structs import replace

from ringfort.compression.auto import NOMINAL, codec_seconds
from ringfort.compression.strategy import CompressionStrategy
from ringfort.telemetry.gradients import Gradients
from ringfort.telemetry.records import Header

HEADER = Header(1, 2.0, world_size=4)


def test_two_steps_alike_say_how_large_gradients_are() -> None:
    gradients = Gradients()
    gradients.price = lambda nbytes, ranks: {"int8": nbytes * ranks / 1e6}
    assert gradients.step_done(400, HEADER) is None
    found = gradients.step_done(400, HEADER)
    assert found == {"gradient_bytes": 400, "codec_seconds": {"int8": 0.0016}}
    known = replace(HEADER, **found)
    assert gradients.step_done(400, known) is None
    assert gradients.step_done(404, known) is None  # with a loss that is reduced in every tenth step
    assert gradients.step_done(400, known) is None
    assert gradients.step_done(0, known) is None


def test_the_compression_of_a_step_is_told_when_it_changes() -> None:
    gradients = Gradients()
    for used, before, change in (
        (None, "", None),
        ("none", "", None),  # `auto`, where it does not pay
        ("int8", "", {"codec": "int8"}),
        ("int8", "int8", None),
        (None, "int8", None),  # a step without gradients
        ("none", "int8", {"codec": ""}),
    ):
        gradients.codec = used
        assert gradients.step_done(0, replace(HEADER, codec=before)) == change


def test_codecs_are_priced_without_measuring_them() -> None:
    found = codec_seconds(4_000_000, 2)
    int8 = NOMINAL[CompressionStrategy.parse("int8")]
    assert list(found) == ["int8", "int4"]
    if found["int8"] != 1e6 * (int8.write + 1.5 * int8.read):  # another test of this process has measured
        assert 1e-4 < found["int8"] < 1
    assert codec_seconds(0, 0) == {"int8": 0.0, "int4": 0.0}
