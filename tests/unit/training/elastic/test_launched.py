"""The arguments of `elastic()` and the options of `ringfort run --elastic` together."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfort.config import MAX_ELASTIC_NAME
from ringfort.errors import ConfigError
from ringfort.training.elastic.launched import with_launcher


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """Nothing is told, and the logger of elastic runs is as it was afterwards."""
    for name in ("RINGFORT_ELASTIC_NODES", "RINGFORT_ELASTIC_NAME", "RINGFORT_ELASTIC_FILE", "RINGFORT_PATIENCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    logger = logging.getLogger("ringfort.elastic")
    level = logger.level
    yield logger
    logger.handlers.clear()
    logger.setLevel(level)


def test_without_a_launcher_a_run_has_the_scripts_name_and_any_number_of_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["/home/me/train.py"])
    assert with_launcher(None, None, None) == ("1:", "train.py", 10.0)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/there/tool/__main__.py", "tool"),
        ("-c", "elastic"),
        ("", "elastic"),
        ("a\nb.py", "elastic"),
        ("x" * 100, "x" * MAX_ELASTIC_NAME),
    ],
)
def test_a_program_without_a_usual_script_has_a_name_too(path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [path])
    assert with_launcher(None, None, None).name == name


def test_the_launcher_decides_what_the_program_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFORT_ELASTIC_NODES", "2:8")
    monkeypatch.setenv("RINGFORT_ELASTIC_NAME", "mine")
    monkeypatch.setenv("RINGFORT_PATIENCE", "3")
    assert with_launcher(None, None, None) == ("2:8", "mine", 3.0)


def test_the_program_decides_what_the_launcher_leaves_open() -> None:
    assert with_launcher("2:", "mine", 3.0) == ("2:", "mine", 3.0)
    assert with_launcher(4, None, None).nodes == 4


def test_the_same_in_other_words_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFORT_ELASTIC_NODES", "2:2")
    assert with_launcher(2, None, None).nodes == 2


@pytest.mark.parametrize(
    ("told", "value", "given", "complaint"),
    [
        ("ELASTIC_NODES", "2:8", ("2:4", None, None), "nodes='2:4': contradicts RINGFORT_ELASTIC_NODES=2:8"),
        ("ELASTIC_NAME", "mine", (None, "yours", None), "name='yours': contradicts RINGFORT_ELASTIC_NAME=mine"),
        ("PATIENCE", "3", (None, None, 4.0), "patience=4.0: contradicts RINGFORT_PATIENCE=3.0"),
    ],
)
def test_a_contradiction_is_an_error_that_names_both(
    told: str,
    value: str,
    given: tuple[str | None, str | None, float | None],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RINGFORT_ELASTIC_FILE", str(tmp_path / "gone"))
    monkeypatch.setenv(f"RINGFORT_{told}", value)
    with pytest.raises(ConfigError) as caught:
        with_launcher(*given)
    assert complaint in str(caught.value)
    assert "leave one of the two out" in str(caught.value)


def test_without_a_launcher_the_programs_patience_wins_over_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFORT_PATIENCE", "3")
    assert with_launcher(None, None, 4.0).patience == 4.0


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (("3:2", None, None), "nodes='3:2'"),
        (("0", None, None), "nodes='0'"),
        (("many", None, None), "nodes='many'"),
        ((None, "", None), "name=''"),
        ((None, "x" * (MAX_ELASTIC_NAME + 1), None), "1 to 55"),
        ((None, None, 0.0), "patience=0.0"),
    ],
    ids=str,
)
def test_what_is_invalid_is_named(given: tuple[str | None, str | None, float | None], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_launcher(*given)
    assert name in str(caught.value)


def test_an_invalid_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFORT_ELASTIC_NODES", "few")
    with pytest.raises(ConfigError, match="RINGFORT_ELASTIC_NODES='few'"):
        with_launcher(None, None, None)


def test_the_launcher_learns_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    monkeypatch.setenv("RINGFORT_ELASTIC_FILE", str(mark))
    with_launcher(None, None, None)
    assert mark.stat().st_size


def test_a_launcher_that_is_gone_is_told_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFORT_ELASTIC_FILE", str(tmp_path / "gone"))
    with_launcher(None, None, None)
    assert not list(tmp_path.iterdir())


def test_under_a_launcher_one_rank_prints_events_unless_the_program_has_its_own_logging(
    tmp_path: Path, events: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with_launcher(None, None, None)
    assert not events.handlers
    monkeypatch.setenv("RINGFORT_ELASTIC_FILE", str(tmp_path / "mark"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    with_launcher(None, None, None)
    assert not events.handlers
    monkeypatch.setenv("LOCAL_RANK", "0")
    for _ in range(2):
        with_launcher(None, None, None)
    events.info("laptop joined")
    assert capsys.readouterr().err[8:] == " laptop joined\n"
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    events.info("laptop left")
    assert capsys.readouterr().err == ""
