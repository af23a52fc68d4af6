"""How fast a program computes, by a clock that it moves itself."""

from ringfort.training.elastic.speed_meter import SpeedMeter


class Program:
    def __init__(self) -> None:
        self.now = 100.0
        self.meter = SpeedMeter(lambda: self.now)
        self.meter.end_step()

    def compute(self, samples: int, seconds: float, *, aside: float = 0.0, before: float = 0.0) -> None:
        self.meter.resume()
        self.now += before
        self.meter.begin(samples)
        self.now += seconds + aside
        if aside:
            self.meter.aside(aside)
        self.meter.end()
        self.meter.called()

    def apply(self, seconds: float, *, aside: float = 0.0) -> None:
        self.meter.resume()
        self.now += seconds + aside
        if aside:
            self.meter.aside(aside)
        self.meter.called()

    def wait(self, seconds: float) -> None:
        """The members communicate."""
        self.now += seconds


def test_the_speed_is_unknown_until_a_micro_batch_was_computed() -> None:
    meter = Program().meter
    meter.end_step()
    assert (meter.speed, meter.overhead, meter.period) == (0, 0, 0)


def test_the_speed_is_samples_per_second_and_forgets_earlier_steps() -> None:
    program = Program()
    speeds = list[int]()
    for seconds in (1.0, *(4.0,) * 11):
        program.compute(1000, seconds)
        speeds.append(program.meter.speed)
        program.meter.end_step()
    assert speeds[0] == 1000
    assert speeds == sorted(speeds, reverse=True)
    assert 250 <= speeds[-1] < 260


def test_what_the_program_does_outside_micro_batches_is_its_overhead() -> None:
    program = Program()
    for _ in range(40):
        program.apply(0.5)
        program.compute(100, 1.0, before=0.25)
        program.compute(100, 1.0)
        program.wait(3.0)
        program.meter.end_step()
    assert program.meter.speed == 100
    assert program.meter.overhead == 750_000
    assert program.meter.period == 5_750_000


def test_time_that_the_program_spends_aside_does_not_count() -> None:
    program = Program()
    program.compute(100, 1.0, aside=10.0)
    program.apply(0.5, aside=20.0)
    program.meter.end_step()
    assert (program.meter.speed, program.meter.overhead, program.meter.period) == (100, 500_000, 1_500_000)


def test_the_slowest_speed_that_is_known_is_one() -> None:
    program = Program()
    program.compute(1, 1000.0)
    assert program.meter.speed == 1


def test_a_warm_up_can_be_forgotten() -> None:
    program = Program()
    program.compute(10, 100.0, before=5.0)
    program.meter.forget()
    assert program.meter.speed == 0
    program.compute(10, 1.0)
    program.meter.end_step()
    assert (program.meter.speed, program.meter.overhead) == (10, 0)


def test_a_member_that_is_dealt_nothing_hopes_to_be_faster_and_is_measured_again() -> None:
    program = Program()
    program.compute(100, 10.0)
    program.meter.end_step()
    for _ in range(100):
        program.wait(1.0)
        program.meter.end_step()
    # 100 s without work, a twentieth of that per micro-batch: 5 s instead of 10 s.
    assert program.meter.speed == 20
    program.compute(100, 10.0)
    program.meter.end_step()
    assert program.meter.speed == 10


def test_hope_has_a_limit_and_a_long_step_or_replay_is_no_reason_for_it() -> None:
    program = Program()
    program.compute(100, 1.0)
    program.meter.end_step()
    program.wait(3600.0)
    program.meter.end_step()
    assert 100 <= program.meter.speed <= 112
    for _ in range(10_000):
        program.wait(1.0)
        program.meter.end_step(is_replayed=True)
    assert 100 <= program.meter.speed <= 112
    program.compute(100, 1.0)
    assert program.meter.speed == 100
    program.meter.end_step()
    for _ in range(10_000):
        program.wait(1.0)
        program.meter.end_step()
    assert 99_000 <= program.meter.speed <= 100_000


def test_time_between_two_epochs_is_no_step() -> None:
    program = Program()
    program.compute(100, 1.0)
    program.meter.end_step()
    program.wait(1000.0)
    program.meter.start()
    program.meter.end_step()
    program.compute(100, 1.0)
    program.meter.end_step()
    assert program.meter.period == 1_000_000
