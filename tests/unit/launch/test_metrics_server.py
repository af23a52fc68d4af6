"""Metrics for Prometheus: names, labels, counts between questions, and clients that misbehave."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ringfort.errors import TransportError
from ringfort.launch.metrics_server import READ_SECONDS, MetricsServer, RankCollector
from ringfort.telemetry.records import Event, Header, Sent, Step, Values
from ringfort.telemetry.trace_file import SLOTS, TraceWriter

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TraceWriter]:
    with closing(TraceWriter(tmp_path / "1.trace")) as writer:
        writer.describe(Header(1, 1.7e9, rank=0, world_size=2, program='a "b"\\\n', total_steps=50, codec="int8"))
        yield writer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(tmp_path: Path, clock: Clock) -> Iterator[MetricsServer]:
    collector = RankCollector(tmp_path, "mine", "study", clock)
    with closing(MetricsServer("127.0.0.1", 0, collector)) as server:
        yield server


def ask(server: MetricsServer, method: str = "GET", path: str = "/metrics") -> tuple[int, str]:
    with closing(http.client.HTTPConnection(*server.address, timeout=30)) as client:
        client.request(method, path)
        answer = client.getresponse()
        return answer.status, answer.read().decode()


def samples(server: MetricsServer) -> Samples:
    status, text = ask(server)
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Samples, metric: str, **labels: str) -> float:
    return found[metric, frozenset({"run": "mine", "host": "study", "rank": "0", **labels}.items())]


def train(writer: TraceWriter, steps: int) -> None:
    for number in range(1, steps + 1):
        writer.write(Step(number, 1.0, 0.5, data=0.125, exchange=0.25, samples=32))
        writer.set_step(number)


def test_each_rank_has_its_metrics_under_names_that_prometheus_people_expect(
    writer: TraceWriter, server: MetricsServer
) -> None:
    train(writer, 4)
    writer.write(Values(4, 1.0, {"loss": 0.5, "grad norm": float("nan")}))
    writer.write(Event(1.0, "lost", "rank 1 is lost"))
    writer.write(Sent(1.0, {1: 1000}, 2000))
    found = samples(server)
    assert value(found, "ringfort_up") == 1
    assert value(found, "ringfort_info", program='a "b"\\\n', compression="int8") == 1
    assert value(found, "ringfort_start_time_seconds") == 1.7e9
    assert (value(found, "ringfort_step"), value(found, "ringfort_last_step")) == (4, 50)
    assert value(found, "ringfort_world_size") == 2
    assert (value(found, "ringfort_steps_total"), value(found, "ringfort_samples_total")) == (4, 128)
    phases = {
        phase: value(found, "ringfort_step_seconds_total", phase=phase) for phase in ("compute", "data", "exchange")
    }
    assert phases == {"compute": 0.5, "data": 0.5, "exchange": 1.0}
    assert value(found, "ringfort_value", name="loss") == 0.5
    assert str(value(found, "ringfort_value", name="grad norm")) == "nan"
    assert value(found, "ringfort_events_total", kind="lost") == 1
    assert value(found, "ringfort_sent_bytes_total", peer="1") == 1000
    assert value(found, "ringfort_received_bytes_total") == 2000
    assert value(found, "ringfort_lost_records_total") == 0


def test_the_programs_own_name_of_the_run_is_used(writer: TraceWriter, server: MetricsServer) -> None:
    writer.describe(Header(1, 0.0, rank=3, run="theirs"))
    assert value(samples(server), "ringfort_up", rank="3", run="theirs") == 1


def test_nothing_is_read_before_the_first_question_and_nothing_is_lost_after_it(
    writer: TraceWriter, server: MetricsServer, clock: Clock
) -> None:
    train(writer, SLOTS + 10)
    clock.now += 2 * READ_SECONDS
    server.collector.tick()
    found = samples(server)
    assert (value(found, "ringfort_steps_total"), value(found, "ringfort_lost_records_total")) == (SLOTS, 10)
    for _ in range(3):
        train(writer, SLOTS)
        server.collector.tick()  # not due yet
        clock.now += READ_SECONDS
        server.collector.tick()
    found = samples(server)
    assert (value(found, "ringfort_steps_total"), value(found, "ringfort_lost_records_total")) == (4 * SLOTS, 10)


def test_a_rank_that_has_ended_stays_with_its_counts(tmp_path: Path, server: MetricsServer) -> None:
    writer = TraceWriter(tmp_path / "2.trace")
    writer.describe(Header(2, 0.0, rank=0))
    train(writer, 3)
    assert value(samples(server), "ringfort_up") == 1
    train(writer, 3)
    writer.close()
    found = samples(server)
    assert (value(found, "ringfort_up"), value(found, "ringfort_steps_total")) == (0, 6)


def test_without_a_folder_there_are_no_ranks_and_no_error() -> None:
    with closing(MetricsServer("127.0.0.1", 0, RankCollector(None, "mine", "study"))) as server:
        assert samples(server) == {}


def test_a_port_that_another_program_has_is_an_error_that_names_it(server: MetricsServer) -> None:
    port = server.address[1]
    wanted = rf"cannot serve metrics at 127\.0\.0\.1:{port}: Address already in use\. Choose another port"
    with pytest.raises(TransportError, match=wanted):
        MetricsServer("127.0.0.1", port, RankCollector(None, "mine", "study"))


def test_an_address_that_is_not_this_machines_is_an_error() -> None:
    for address in ("192.0.2.1", "too-long" * 10):  # the second fails before anybody is asked for it
        with pytest.raises(TransportError, match=rf"cannot serve metrics at {address}:0: "):
            MetricsServer(address, 0, RankCollector(None, "mine", "study"))


def test_ipv6_is_served_too(writer: TraceWriter, tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with closing(MetricsServer("::1", 0, RankCollector(tmp_path, "mine", "study"))) as server:
        assert server.url.startswith("http://[::1]:")
        assert value(samples(server), "ringfort_up") == 1


def test_clients_that_misbehave_are_nobodys_concern(
    writer: TraceWriter, server: MetricsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in (b"", b"\x16\x03\x01nonsense", b"GET / HTTP/1.1\r\n", b"GET /" + b"x" * 100_000):
        with socket.create_connection(server.address) as client:
            client.sendall(words)
    assert ask(server, "POST")[0] == 405
    assert value(samples(server), "ringfort_up") == 1
    assert capfd.readouterr() == ("", "")
