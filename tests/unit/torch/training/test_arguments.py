"""The arguments of `ringfort.torch.elastic()` and `TorchRun.loader()`: invalid ones are named at the call."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from ringfort.errors import InvalidArgumentError, UnsupportedArrayError
from ringfort.torch.training.run import elastic

Linear = torch.nn.Linear


def make(model: Any = None, kind: Any = torch.optim.SGD, **options: Any) -> Any:
    model = Linear(2, 1) if model is None else model
    return elastic(model, kind(model.parameters(), lr=0.1), **{"batch": 4, **options})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("batch", 0, "must be the number of samples per step of the whole run"),
        ("batch", 2.5, "must be a whole number"),
        ("batch", True, "must be a whole number"),
        ("seed", "x", "must be a whole number"),
        ("scheduler_per", "epoch", "must be step or pass"),
        ("clip_norm", 0, "must be a number above 0"),
        ("clip_norm", float("inf"), "must be a number above 0"),
        ("clip_norm", "1", "must be a number above 0"),
        ("clip_norm", True, "must be a number above 0"),
        ("scaler", True, "must be a torch.amp.GradScaler"),
        ("on_step", 3, "must be a function of the gradients and the step"),
        ("state", [1], "must be a dict with names as keys"),
        ("state", {1: 2}, "must be a dict with names as keys"),
        ("state", {"x": object()}, "use tensors, numbers, strings, dicts and lists"),
        ("state", {"x": {"y": {1, 2}}}, "use tensors, numbers, strings, dicts and lists"),
        ("scheduler", "cosine", "must be a scheduler of torch.optim"),
        ("nonfinite", "ignore", "must be error or skip"),
        ("nodes", "3:2", "1 <= MIN <= MAX"),
        ("machine_class", 3, "must be a text"),
        ("checkpoint_every", 0, "must be a whole number of at least 1"),
    ],
)
def test_invalid_arguments_are_named(name: str, value: object, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name) as raised:
        make(**{name: value})
    assert words in str(raised.value)


def test_models_that_cannot_be_trained_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"model='function': must be a torch\.nn\.Module"):
        elastic(make, torch.optim.SGD(Linear(2, 1).parameters()), batch=4)
    with pytest.raises(InvalidArgumentError, match=r"optimizer='Linear': must be a torch\.optim\.Optimizer"):
        elastic(Linear(2, 1), Linear(2, 1), batch=4)
    with pytest.raises(InvalidArgumentError, match=r"model='DataParallel': pass the model itself"):
        make(torch.nn.DataParallel(Linear(2, 1)))
    with pytest.raises(InvalidArgumentError, match=r"model='weight': has no shape yet; run the model once"):
        make(torch.nn.LazyLinear(1))
    with pytest.raises(InvalidArgumentError, match=r"model='weight': is on the device meta; materialize it"):
        make(Linear(2, 1, device="meta"))
    with pytest.raises(InvalidArgumentError, match=r"model='weight': is complex64; only"):
        make(Linear(2, 1, dtype=torch.complex64))


def test_optimizers_that_cannot_be_used_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"LBFGS.*several times per step"):
        make(kind=torch.optim.LBFGS)
    with pytest.raises(InvalidArgumentError, match=r"SparseAdam.*dense; use Adam or SGD"):
        make(torch.nn.Embedding(3, 2, sparse=True), kind=torch.optim.SparseAdam)
    with pytest.raises(InvalidArgumentError, match=r"not the model's; put all modules into one nn.Module"):
        elastic(Linear(2, 1), torch.optim.SGD(Linear(2, 1).parameters()), batch=4)
    with pytest.raises(InvalidArgumentError, match="no parameter is trained"):
        make(Linear(2, 1).requires_grad_(False))
    model = Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(InvalidArgumentError, match="needs a metric: step it in on_step, and pass it in state="):
        elastic(model, optimizer, batch=4, scheduler=plateau)


def test_what_cannot_be_part_of_the_state_is_named() -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> object:
            return {"a": 1}

        def set_extra_state(self, state: object) -> None: ...

    with pytest.raises(InvalidArgumentError, match="_extra_state is a dict; only parameters and buffers"):
        make(Extra(2, 1))
    sparse = Linear(2, 1)
    sparse.register_buffer("table", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedArrayError, match=r"state\['model'\]\['table'\]"):
        make(sparse)


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "epochs=None: pass either epochs= or steps="),
        ({"epochs": 1, "steps": 2}, "epochs=1: pass either epochs= or steps="),
        ({"epochs": -1}, "epochs=-1: must be a whole number of at least 0"),
        ({"epochs": 1.5}, "epochs=1.5: must be a whole number"),
        ({"steps": -2}, "steps=-2: must be a whole number of at least 0"),
        ({"steps": True}, "steps=True: must be a whole number"),
        ({"steps": 1, "microbatch": 0}, "microbatch=0: must be a whole number of at least 1"),
        ({"steps": 1, "samples": 8}, "samples=8: is for iterable data sets; this one has a length"),
        ({"steps": 1, "dataset": 3}, "dataset='int': must have indices and a length, or be one that can be iterated"),
        ({"steps": 1, "dataset": []}, "samples=0: must be a whole number of at least 1"),
        ({"steps": 1, "per": "epoch"}, "per='epoch': must be run or pass"),
        ({"epochs": 1, "dataset": iter([1])}, "dataset='list_iterator': can be read only once"),
        ({"epochs": 1, "dataset": Stream()}, "samples=None: say how many samples a pass over the stream has"),
    ],
)
def test_invalid_arguments_of_the_loader_are_named(given: dict[str, Any], words: str) -> None:
    run = make()
    options = {"microbatch": 2, "dataset": Rows(), **given}
    with pytest.raises(InvalidArgumentError) as raised:
        run.loader(options.pop("dataset"), **options)
    assert words in str(raised.value)
    run.close()
    with pytest.raises(InvalidArgumentError, match="a run has one loop"):
        run.loader(Rows(), microbatch=2, steps=1)


class Lines:
    """Has an `iter` that starts anew, and nothing else."""

    def __iter__(self) -> Any:
        return iter([torch.zeros(2)] * 8)


class CountedStream(Stream):
    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize(
    ("dataset", "given", "length"),
    [
        (Rows(), {"epochs": 3}, 12),
        (Rows(), {"epochs": 3, "per": "pass"}, 4),
        (Rows(), {"epochs": 3, "microbatch": 3}, 12),  # of 4 samples, 3 and 1
        ([torch.zeros(2)] * 9, {"epochs": 2, "per": "pass"}, 5),  # the last step has one sample
        ([torch.zeros(2)] * 9, {"steps": 5}, 9),
        (CountedStream(), {"epochs": 2}, 8),
        (CountedStream(), {"epochs": 2, "samples": 4}, 4),
        (Lines(), {"epochs": 2, "samples": 8}, 8),
        (Lines(), {"steps": 3}, 6),
    ],
)
def test_a_loader_knows_its_data_set_and_its_length(dataset: Any, given: dict[str, Any], length: int) -> None:
    with make() as run:
        loader = run.loader(dataset, **{"microbatch": 2, **given})
        assert (len(loader), loader.dataset, loader.batch_size) == (length, dataset, given.get("microbatch", 2))


def test_schedulers_for_the_stand_in_of_the_optimizer_are_refused_with_the_way_out() -> None:
    with make() as run:
        assert isinstance(run.optimizer, torch.optim.Optimizer)
        for kind in (torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.CosineAnnealingLR):
            with pytest.raises(InvalidArgumentError, match="pass it as scheduler="):
                kind(run.optimizer, 3)


def test_outside_a_run_nothing_is_known_and_leaving_does_nothing() -> None:
    with make() as run:
        assert (run.number, run.epoch, run.loss, run.members, run.is_first, run.goodput) == (0, 0, 0.0, (), False, 0.0)
        with run.aside():
            run.leave()
        assert run.optimizer.param_groups[0]["lr"] == 0.1
        run.optimizer.zero_grad()
