"""The job of benchmarks/elastic_compared.py: the gradient of `marks` says which samples an update contains."""

from __future__ import annotations

import argparse

import pytest

torch = pytest.importorskip("torch")

from benchmarks.compared import job, model_options  # noqa: E402


@pytest.fixture(autouse=True)
def _threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_gradient_says_which_samples_are_in_the_mean_and_the_marks_stay_zero() -> None:
    model, optimizer = job.make()
    data = job.Sequences()
    before = job.digest(model)
    chosen = torch.tensor([7, 300, 16383])
    model(chosen, data.codes[chosen]).backward()
    assert job.samples_in(model.marks.grad, 3) == [7, 300, 16383]
    optimizer.step()
    assert not model.marks.any()
    assert job.digest(model) != before


def test_a_sample_that_is_in_the_mean_twice_is_named_twice() -> None:
    model, _ = job.make()
    chosen = torch.tensor([5, 5, 9])
    marks = model.marks[chosen]
    (marks - marks.detach()).mean().backward()
    assert job.samples_in(model.marks.grad, 3) == [5, 5, 9]


def test_every_member_begins_with_the_same_weights_and_data() -> None:
    assert job.digest(job.make()[0]) == job.digest(job.make()[0])
    assert torch.equal(job.Sequences().codes, job.Sequences().codes)


def test_a_pause_takes_time_per_sample_and_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(job.time, "sleep", waited.append)
    parser = argparse.ArgumentParser()
    model_options.add_options(parser)
    given = parser.parse_args(["--width", "32", "--layers", "1", "--pause", "7"])
    assert parser.parse_args(model_options.options_of(given)) == given
    chosen = torch.tensor([7, 300, 16383])
    model, data = job.make(given)[0], job.Sequences()
    quick = job.make(argparse.Namespace(**{**vars(given), "pause": 0.0}))[0]
    losses = [one(chosen, data.codes[chosen]) for one in (model, quick)]
    assert waited == [pytest.approx(0.021)]
    assert losses[0] == losses[1]
    assert sum(one.numel() for one in model.parameters()) < 60_000
