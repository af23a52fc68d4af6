"""What to call ranks and machines in a sentence. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from ringfort.telemetry.view import RankView

MANY: Final = 3
"""So many are named one by one."""


class RankNames:
    """Names of the ranks of a run: that of the machine if it means all of its ranks, else with the rank."""

    def __init__(self, ranks: Sequence[RankView]) -> None:
        self._ranks = ranks
        self._hosts: dict[str, list[RankView]] = {}
        for rank in ranks:
            self._hosts.setdefault(rank.host or rank.key, []).append(rank)

    def machine(self, host: str) -> str:
        """The name of a machine; with its ranks if another one has the same name."""
        ranks = self._hosts.get(host)
        if not ranks:
            return "another machine"
        name, numbers = ranks[0].name, listed([str(rank.rank) for rank in ranks])
        of = "rank" if len(ranks) == 1 else "ranks"
        if not name:
            return f"{of} {numbers}"
        is_unique = sum(others[0].name == name for others in self._hosts.values()) == 1
        return name if is_unique else f"{name} ({of} {numbers})"

    def title(self, rank: RankView) -> str:
        """The name of one rank."""
        host = rank.host or rank.key
        if len(self._hosts[host]) == 1:
            return self.machine(host)
        return f"rank {rank.rank}" if len(self._hosts) == 1 or not rank.name else f"rank {rank.rank} ({rank.name})"

    def titles(self, ranks: Collection[RankView]) -> list[str]:
        """The names of some ranks: of a machine, if all of its ranks are among them."""
        keys = {rank.key for rank in ranks}
        found: list[str] = []
        for host, of_host in self._hosts.items():
            named = [rank for rank in of_host if rank.key in keys]
            if len(named) == len(of_host) and len(self._hosts) > 1:
                found.append(self.machine(host))
            else:
                found += [self.title(rank) for rank in named]
        return found

    def culprit(self, rank: RankView) -> str:
        """What makes the others wait: a machine, or a rank where there is only one machine."""
        return self.title(rank) if len(self._hosts) == 1 else rank.name or self.title(rank)


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`, or `a, b and 4 others`."""
    if len(names) > MANY:
        names = [*names[: MANY - 1], f"{len(names) - MANY + 1} others"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "nobody"
