"""Process groups over several hosts, which are network namespaces: no launcher, torch's own store."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.helpers.namespaces import lan, needs_namespaces
from tests.torch.zygote import Zygote

pytestmark = needs_namespaces


@pytest.mark.parametrize("addresses", ["ipv4", "ipv6", "link-local"])
def test_a_group_forms_over_hosts_with_one_kind_of_address(
    zygote: Zygote, addresses: Literal["ipv4", "ipv6", "link-local"]
) -> None:
    with lan(2, addresses=addresses) as net:
        first, second = net.hosts
        host = first.address() if addresses == "ipv4" else f"[{first.address()}]"
        if addresses == "link-local":
            host = f"[{first.address()}%eth0]"
        places = [first.namespace, first.namespace, second.namespace]  # one of them beside rank 0
        found = zygote.run("torch.network_scenarios.hosts", 3, places, f"{host}:29511", patience=60)
        assert found == [6.0, 6.0, 6.0]
