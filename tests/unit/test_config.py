"""Settings of the cluster: what can never work is refused where it is written."""

from __future__ import annotations

from contextlib import suppress

import pytest

from ringfort.cluster.core.health import JITTER_ROOM
from ringfort.config import (
    CLUSTER_PATIENCE,
    AutoDiscoveryConfig,
    DistributedConfig,
    ElectionConfig,
    Environment,
    HealthConfig,
    hidden,
)
from ringfort.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (HealthConfig, "interval", 0),
        (HealthConfig, "patience", 0.3),
        (HealthConfig, "patience", float("inf")),
        (DistributedConfig, "patience", 0),
        (HealthConfig, "caution", float("nan")),
        (ElectionConfig, "settle", -1),
        (ElectionConfig, "timeout", True),
        (AutoDiscoveryConfig, "min_peers", -1),
        (AutoDiscoveryConfig, "max_peers", -1),
        (AutoDiscoveryConfig, "timeout", float("inf")),
        (AutoDiscoveryConfig, "on_partition", "hope"),
        (AutoDiscoveryConfig, "port", 65536),
        (AutoDiscoveryConfig, "peers", "10.0.0.1"),
        (AutoDiscoveryConfig, "interfaces", "eth0"),
    ],
)
def test_a_setting_that_cannot_work_is_named(kind: type, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        kind(**{field: value})


def test_wifi_waits_longer_than_a_cable() -> None:
    lan, wifi = HealthConfig.lan(), HealthConfig.wifi()
    assert lan == HealthConfig()
    assert wifi.patience is not None
    assert wifi.patience > CLUSTER_PATIENCE + JITTER_ROOM


def test_hidden_variables_come_back_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("RANK", raising=False)
    with suppress(KeyError), hidden("LOCAL_RANK", "RANK"):
        assert Environment.from_mapping().local_rank is None
        raise KeyError
    assert Environment.from_mapping().local_rank == 3
    assert Environment.from_mapping().rank is None
