"""`SubBackend`: some ranks of a group, as a group."""

from __future__ import annotations

from collections.abc import Iterable

from ringfort.backends.base import Backend
from ringfort.backends.group import Group
from ringfort.errors import InvalidRankError


class SubBackend(Backend):
    """A group over the links of another. Every member must make it, with the same members, in the same order among the
    sub-groups of those members. It works at the same time as its parent and its siblings, from any threads.

    Ranks are this group's own, 0 to `world_size - 1` in the order of the parent's ranks; errors name a lost peer by its
    rank in the outermost group, which is what a person knows it by.
    """

    def __init__(
        self,
        parent: Backend,
        members: Iterable[int],
        *,
        is_ordered: bool = False,
        label: str | None = None,
        is_brief: bool = False,
    ) -> None:
        """`members` are ranks of `parent`; repetition does not matter, nor does order unless `is_ordered`: then it is
        that of the ranks here. With a `label`, which must be the same at all members and no other group's of theirs,
        their sub-groups may be made in any order. A group that `is_brief`, made for a few collectives, spends no time
        on measuring links and on shared memory of its own.

        Raises `InvalidWorldSizeError` without members, `InvalidRankError` if this rank is not among them or one is no
        rank of the parent."""
        self.config = parent.config
        self.parent = parent  # whose links end with its last reference
        group = parent.group  # a group that follows it has other ranks, and sub-groups of its own
        self._group = group.sub_group(members, is_ordered=is_ordered, label=label, is_brief=is_brief)
        self._in_parent = tuple(group.members.index(member) for member in self._group.members)

    @property
    def group(self) -> Group:
        return self._group

    def to_global(self, rank: int) -> int:
        """Return the parent's rank of this group's `rank`. Raises `InvalidRankError`."""
        self._group.check_rank(rank)
        return self._in_parent[rank]

    def to_local(self, rank: int) -> int:
        """Return this group's rank of the parent's `rank`. Raises `InvalidRankError` if it is not a member."""
        if isinstance(rank, bool) or rank not in self._in_parent:
            raise InvalidRankError(rank, self.world_size, members=self._in_parent)
        return self._in_parent.index(rank)

    def close(self) -> None:
        """Do nothing: the links are the parent's."""
