"""Which ranks of a group share hosts, for collectives that compress only between hosts. Pure.

The data are cut into lanes, as many as the smallest host has ranks. The i-th rank of every host holds lane i: it adds
up what its host has of the lane, exchanges that with the i-th ranks of the other hosts, and hands the result out. So
all ranks of a host encode, and each byte crosses to another host as often as with one leader per host.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringfort.backends.group import Group
from ringfort.collectives import algorithms
from ringfort.collectives.algorithms import Span


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group of which at least one has several ranks.

    The groups are only numberings of some ranks: messages over them have the envelope of the whole group. So whatever
    ends a collective for one rank ends it for all.
    """

    inside: Group
    """The ranks of this host."""
    between: Group | None
    """The ranks of all hosts that hold this rank's lane; None if this rank holds none."""
    lanes: int
    """How many lanes there are."""
    ranks: list[list[int]]
    """For each rank of this host the ranks of all hosts at the same place, if all hosts have as many; else nothing."""

    def spans(self, count: int) -> list[Span]:
        """For each rank of this host its lane of `count` elements: an empty one if it holds none."""
        lanes = algorithms.split(count, self.lanes)
        return [*lanes, *[(count, count)] * (self.inside.world_size - self.lanes)]


def compresses_by_hosts(hosts: tuple[int, ...]) -> bool:
    """Whether ranks of one host add up before they compress. Not if all are on one: then nothing would be compressed,
    and who asks for compression there wants to see what it does."""
    return 1 < len(set(hosts)) < len(hosts)


class _Found:
    """What `hosts_of` has found for a group."""

    def __init__(self, hosts: Hosts | None) -> None:
        self.hosts = hosts


def hosts_of(group: Group) -> Hosts | None:
    """Return the hosts of `group`; None if its ranks exchange compressed data with each other directly."""
    return group.part(_Found, lambda: _Found(_find(group))).hosts


def _find(group: Group) -> Hosts | None:
    if not compresses_by_hosts(group.hosts):
        return None
    groups = algorithms.groups_of(group.hosts)
    own = next(members for members in groups if group.rank in members)
    lanes, place = min(map(len, groups)), own.index(group.rank)
    between = None
    if place < lanes:  # in the order of the hosts, as `ranks`
        between = group.sub_group([members[place] for members in groups], is_ordered=True, label="lane")
    is_even = all(len(members) == lanes for members in groups)
    ranks = [[members[one] for members in groups] for one in range(lanes)] if is_even else []
    return Hosts(group.sub_group(own, label="host"), between, lanes, ranks)
