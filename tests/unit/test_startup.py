"""Who decides on encryption: the keyword, then configuration and environment, which must not contradict each other. And
what a process says that is alone."""

from __future__ import annotations

import logging

import pytest

import ringfort
from ringfort import startup
from ringfort.cluster import backend as backend_module
from ringfort.cluster.net.setup import Setup
from ringfort.config import AutoDiscoveryConfig, DistributedConfig, choose_encryption
from ringfort.errors import ConfigError
from tests.helpers.handshakes import member

CASES = [
    (None, None, None, "on"),
    (None, None, "off", "off"),
    (None, None, "on", "on"),
    (None, "on", None, "on"),
    (None, "off", None, "off"),
    (None, "off", "off", "off"),
    (None, "on", "on", "on"),
    ("on", None, "off", "on"),
    ("on", "off", "off", "on"),
    ("off", "on", "on", "off"),
    ("off", None, None, "off"),
]
"""Keyword, configuration, environment, and what follows."""
CONTRADICTIONS = [("on", "off"), ("off", "on")]
"""Configuration and environment."""


@pytest.mark.parametrize(("keyword", "configured", "told", "expected"), CASES)
def test_what_was_said_decides(keyword: str | None, configured: str | None, told: str | None, expected: str) -> None:
    assert choose_encryption(keyword, configured, told) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("configured", "told"), CONTRADICTIONS)
def test_a_contradiction_of_configuration_and_environment_names_both(configured: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"encryption='{configured}': contradicts RINGFORT_ENCRYPTION={told};"):
        choose_encryption(None, configured, told)  # type: ignore[arg-type]


def say(monkeypatch: pytest.MonkeyPatch, told: str | None) -> None:
    if told is None:
        monkeypatch.delenv("RINGFORT_ENCRYPTION", raising=False)
    else:
        monkeypatch.setenv("RINGFORT_ENCRYPTION", told)


@pytest.mark.parametrize(("keyword", "configured", "told", "expected"), CASES)
def test_init_goes_by_it(
    monkeypatch: pytest.MonkeyPatch, keyword: str | None, configured: str | None, told: str | None, expected: str
) -> None:
    say(monkeypatch, told)
    config = DistributedConfig(encryption=configured)  # type: ignore[arg-type]
    with ringfort.init(rank=0, world_size=1, config=config, encryption=keyword) as context:
        assert context.config.encryption == expected


@pytest.mark.parametrize(("configured", "told"), CONTRADICTIONS)
def test_init_refuses_a_contradiction(monkeypatch: pytest.MonkeyPatch, configured: str, told: str) -> None:
    say(monkeypatch, told)
    with pytest.raises(ConfigError, match="RINGFORT_ENCRYPTION"):
        ringfort.init(rank=0, world_size=1, config=DistributedConfig(encryption=configured))  # type: ignore[arg-type]


class MadeError(Exception):
    """What `join` would start with."""


@pytest.mark.parametrize(
    ("keyword", "told", "expected"),
    [("on", "off", "on"), (None, "off", "off"), (None, None, "on"), ("off", "on", "off")],
)
def test_join_goes_by_it(monkeypatch: pytest.MonkeyPatch, keyword: str | None, told: str | None, expected: str) -> None:
    def make(config: AutoDiscoveryConfig, *, group: object, encryption: str | None) -> None:
        raise MadeError(Setup.make(config, 1, member(), encryption).config.encryption)

    say(monkeypatch, told)
    monkeypatch.setattr(backend_module, "AutoDiscoveryBackend", make)
    with pytest.raises(MadeError, match=expected):
        ringfort.join(**({} if keyword is None else {"encryption": keyword}))


def test_join_under_ringfort_run_passes_its_keyword_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "RINGFORT_MASTER": "127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    say(monkeypatch, "off")
    with ringfort.join(0, encryption="on") as context:
        assert context.config.encryption == "on"


def test_a_group_that_asks_for_encryption_is_not_overruled_by_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "off")
    with pytest.raises(ConfigError, match="encryption='on': in `group`, but the node has encryption off"):
        ringfort.AutoDiscoveryBackend(
            AutoDiscoveryConfig(), group=DistributedConfig(encryption="on"), credentials=member()
        )


def test_a_process_without_a_launcher_says_once_that_it_is_alone_and_how_to_get_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    startup._say_alone.cache_clear()
    with caplog.at_level(logging.INFO, "ringfort"):
        with ringfort.init(rank=0, world_size=1):
            assert not caplog.records
        for _ in range(2):
            with ringfort.init() as context:
                assert context.world_size == 1
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "a group of one rank, because RANK and WORLD_SIZE are not set" in record.message
    assert "`ringfort run -n 2 SCRIPT`" in record.message
    assert "`ringfort.local(2)` in a notebook" in record.message
