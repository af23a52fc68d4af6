"""Arrays of more than 2 GiB: no count of bytes on the way is kept in 31 or 32 bits, and memory stays bounded."""

from __future__ import annotations

import psutil
import pytest

from ringfort.config import GIB, MIB
from ringfort.launch.local_ranks import LocalRanks

NBYTES = 9 * GIB // 4
"""Above 2**31; all that is gathered by a rank is above 2**32."""
WAYS = {
    "encrypted": {"RINGFORT_SHM": "off"},
    "plain": {"RINGFORT_SHM": "off", "RINGFORT_ENCRYPTION": "off"},
    "shared memory": {"RINGFORT_SHM": "on"},
}


@pytest.mark.skipif(psutil.virtual_memory().available < 7 * NBYTES, reason="two ranks need 6 such arrays")
@pytest.mark.parametrize("variables", WAYS.values(), ids=WAYS)
def test_more_than_2_gib_arrives_whole_in_memory_that_does_not_grow(variables: dict[str, str]) -> None:
    with LocalRanks("tests.workers.huge", 2, [str(NBYTES)], variables=variables) as group:
        found = [message for _, message in group.messages()]
    assert len(found) == 2
    for name, seconds in found[0]["seconds"].items():
        print(f"{name}: {seconds:.2f} s, {NBYTES / seconds / 1e9:.2f} GB/s")
    assert max(message["grown"] for message in found) < 32 * MIB
