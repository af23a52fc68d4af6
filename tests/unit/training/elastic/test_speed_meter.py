from ringfort.training.elastic.speed_meter import SpeedMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_speed_is_unknown_until_a_micro_batch_was_computed() -> None:
    assert SpeedMeter(Clock()).speed() == 0


def test_the_speed_is_samples_per_second_and_forgets_earlier_steps() -> None:
    clock = Clock()
    meter = SpeedMeter(clock)
    speeds = list[int]()
    for seconds in (1.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0):
        meter.begin(1000)
        clock.now += seconds
        meter.end()
        speeds.append(meter.speed())
    assert speeds[0] == 1000
    assert speeds == sorted(speeds, reverse=True)
    assert 250 <= speeds[-1] < 260


def test_time_that_the_program_spends_aside_does_not_count() -> None:
    clock = Clock()
    meter = SpeedMeter(clock)
    meter.begin(100)
    clock.now += 11.0
    meter.aside(10.0)
    meter.end()
    assert meter.speed() == 100


def test_the_slowest_speed_that_is_known_is_one() -> None:
    clock = Clock()
    meter = SpeedMeter(clock)
    meter.begin(1)
    clock.now += 1000.0
    meter.end()
    assert meter.speed() == 1
