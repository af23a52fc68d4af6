"""Who a process is in its cluster, and what it takes from the environment."""

from __future__ import annotations

import numpy as np
import pytest

from ringfort.cluster.net.host import clock, host_id
from ringfort.cluster.net.setup import Setup
from ringfort.config import AutoDiscoveryConfig
from ringfort.errors import ConfigError, InvalidArgumentError, JoinCodeError
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.namespace import NetworkNamespace
from ringfort.training.elastic.dealing import Data
from ringfort.training.elastic.run_note import note_of
from ringfort.training.elastic.state_tree import StateTree


def credentials() -> Credentials:
    return Credentials(NodeIdentity.ephemeral(), NetworkNamespace.generate("test"))


def test_every_process_has_a_name_of_its_own_and_its_nodes_id() -> None:
    ours = credentials()
    one, two = Setup.make(None, 1, ours), Setup.make(None, 1, ours)
    assert one.peer != two.peer
    assert one.peer.rpartition(".")[0] == two.peer.rpartition(".")[0] == ours.identity.peer_id
    assert one.member().host == two.member().host


def test_the_environment_fills_in_what_was_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFORT_INTERFACES", "eth0, 10.0.0.0/8")
    monkeypatch.setenv("RINGFORT_PEERS", "mac.local,10.0.0.2:5000")
    monkeypatch.setenv("RINGFORT_ENCRYPTION", "off")
    told = Setup.make(None, 1, credentials())
    assert told.config.interfaces == ("eth0", "10.0.0.0/8")
    assert told.config.peers == ("mac.local", "10.0.0.2:5000")
    assert told.wall is None
    said = Setup.make(AutoDiscoveryConfig(interfaces=["lo"], peers=["a"]), 1, credentials())
    assert (said.config.interfaces, said.config.peers) == (["lo"], ["a"])


def test_a_configuration_that_asks_for_encryption_is_not_overruled_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RINGFORT_ENCRYPTION", "off")
    with pytest.raises(ConfigError, match="encryption='on': contradicts RINGFORT_ENCRYPTION=off;"):
        Setup.make(AutoDiscoveryConfig(encryption="on"), 1, credentials())
    assert Setup.make(AutoDiscoveryConfig(encryption="on"), 1, credentials(), "on").wall is not None
    assert Setup.make(None, 1, credentials(), "on").wall is not None


def test_a_key_that_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFORT_KEY", "ringfort-nonsense")
    with pytest.raises(JoinCodeError):
        Setup.make(None, 1, None)


@pytest.mark.parametrize("slots", [-1, 4097, 1.5, True])
def test_a_wrong_number_of_slots_is_refused(slots: int) -> None:
    with pytest.raises(InvalidArgumentError, match="slots="):
        Setup.make(None, slots, credentials())


def test_an_encryption_that_is_neither_on_nor_off_is_refused() -> None:
    with pytest.raises(ConfigError, match="encryption='maybe'"):
        AutoDiscoveryConfig(encryption="maybe")  # type: ignore[arg-type]


def test_a_host_has_another_name_in_every_cluster() -> None:
    assert host_id(b"one") == host_id(b"one")
    assert host_id(b"one") != host_id(b"two")


def test_the_clock_never_goes_back() -> None:
    times = [clock() for _ in range(100)]
    assert times == sorted(times)


def test_runs_of_one_cluster_keep_their_votes_apart() -> None:
    ours = credentials()
    none, one, other = (
        Setup.make(AutoDiscoveryConfig(run=run), 1, ours).vote_scope for run in ("", "one", "o/t h\0er")
    )
    assert none == ours.namespace.network_id.hex()
    assert len({none, one, other}) == 3
    assert all(scope.startswith(none) and scope.replace(".", "").isalnum() for scope in (one, other))


def test_an_elastic_run_that_is_started_with_another_choice_is_bound_by_its_votes() -> None:
    ours, manifest = credentials(), StateTree({"w": np.zeros(2)}).manifest()

    def scope(batch: int = 4, name: str = "a#b/c", **rules: str) -> str:
        run = note_of(name, Data(samples=8, batch=batch, microbatch=2), rules, manifest, "attic").run
        return Setup.make(AutoDiscoveryConfig(run=run, elastic=True), 1, ours).vote_scope

    assert scope() == scope(nonfinite="skip") == scope(clip_norm="0.5", scheduler_per="pass")
    assert len({scope(), scope(batch=8), scope(name="a#c/c")}) == 3
