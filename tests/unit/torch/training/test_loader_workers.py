"""Errors about the workers of a DataLoader."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from ringfort.torch.training.loader_workers import explained


@pytest.mark.parametrize(
    ("torch_says", "advice"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "Killed. If nothing above says why"),
        ("DataLoader worker (pid(s) 7, 8) exited unexpectedly", "unexpectedly. If nothing above says why"),
        ("DataLoader timed out after 5 seconds", "after 5 seconds. A worker is stuck, or slower than timeout= allows"),
    ],
)
def test_an_error_about_workers_says_what_to_do(torch_says: str, advice: str) -> None:
    error = RuntimeError(torch_says)
    assert explained(error) is error
    assert advice in str(error)


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_broken_connection_to_a_worker_is_an_error_about_it(error: Exception) -> None:
    found = explained(error)
    assert isinstance(found, RuntimeError)
    assert str(found).startswith("DataLoader worker exited while it sent a batch. If nothing above says why")
    assert found.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback"),
        FileNotFoundError("Caught FileNotFoundError in DataLoader worker process 0.\nOriginal Traceback"),
        KeyError("DataLoader "),
    ],
)
def test_errors_of_the_data_set_are_left_alone(error: Exception) -> None:
    before = str(error)
    assert explained(error) is error
    assert str(error) == before
