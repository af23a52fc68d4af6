"""`Feed`: one run as messages for a page: everything at first, then what has changed. Pure.

A message is JSON:

    {"seq": 2, "now": ..., "ranks": [...], "events": {"drop": 1, "keep": 199, "add": [...]}, ...}

It has a section only if that has changed. Long lists that mostly grow at one end (events, the points of each curve, the
steps of each rank) say which part of the list before stays, and what follows it. Of the links, which may be many, those
are sent that have changed. With `"full": true`, the page starts from nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ringfort.telemetry.view import Curve, RunView, ShownStep

_encoder = msgspec.json.Encoder()


class Playback(msgspec.Struct, frozen=True):
    """Where a recording is."""

    position: float
    duration: float
    playing: bool
    speed: float


class Feed:
    """The messages about one run, for any number of pages that get all of them."""

    def __init__(self) -> None:
        self._number = 0
        self._plain: dict[str, Any] = {}
        self._links: dict[str, Any] = {}
        self._lists: dict[str, dict[str, Sequence[Any]]] = {}
        """By section and key. Events have the key ''."""

    def take(self, view: RunView, playback: Playback | None = None) -> bytes:
        """Return what has changed since the view before."""
        self._number += 1
        plain, links, lists = _plain(view, playback), _links(view), _lists(view)
        message = {name: value for name, value in plain.items() if self._plain.get(name) != value or name == "now"}
        if links != self._links:
            gone = dict.fromkeys(key for key in self._links if key not in links)
            message["links"] = gone | {key: link for key, link in links.items() if self._links.get(key) != link}
        for section, new in lists.items():
            changes = _changes(self._lists.get(section, {}), new)
            if changes is not None:
                message[section] = changes
        self._plain, self._links, self._lists = plain, links, lists
        return _encoder.encode({"seq": self._number, **message})

    def everything(self) -> bytes:
        """Return what a page needs that begins now: the latest view."""
        lists = {section: _changes({}, new) or {} for section, new in self._lists.items()}
        return _encoder.encode({"seq": self._number, "full": True, **self._plain, "links": self._links, **lists})


def _plain(view: RunView, playback: Playback | None) -> dict[str, Any]:
    """The sections that are sent as a whole."""
    return {
        "now": view.now,
        "run": view.run,
        "program": view.program,
        "verdict": _short(view.verdict),
        "ranks": [_short(rank) for rank in view.ranks],
        "seen": view.seen,
        "world_size": view.world_size,
        "runs": list(view.runs),
        "notice": view.notice,
        "recording": view.is_recording,
        "playback": None if playback is None else msgspec.to_builtins(playback),
    }


def _links(view: RunView) -> dict[str, Any]:
    return {f"{link.source}|{link.target}": _short(link) for link in view.links}


def _lists(view: RunView) -> dict[str, dict[str, Sequence[Any]]]:
    """The sections that grow."""
    return {
        "events": {"": view.events},
        "curves": {curve.name: _points(curve) for curve in view.curves},
        "timeline": {str(rank): steps for rank, steps in view.timeline.items()},
    }


def _points(curve: Curve) -> list[tuple[float, int, float | None]]:
    return list(zip(curve.at, curve.steps, curve.values, strict=True))


def _changes(old: Mapping[str, Sequence[Any]], new: Mapping[str, Sequence[Any]]) -> dict[str, Any] | None:
    """How the lists of a section have changed, by key; null for one that is gone. None if all are the same."""
    found: dict[str, Any] = dict.fromkeys(key for key in old if key not in new)
    for key, items in new.items():
        before = old.get(key)
        if before is None or before != items:
            drop, keep = overlap(before or (), items)
            found[key] = {"drop": drop, "keep": keep, "add": [_item(item) for item in items[keep:]]}
    return found or None


def overlap(old: Sequence[Any], new: Sequence[Any]) -> tuple[int, int]:
    """Return (drop, keep) such that `new` begins with `old[drop : drop + keep]`."""
    if not new:
        return 0, 0
    try:
        drop = old.index(new[0])
    except ValueError:
        return 0, 0
    keep = 0
    for before, now in zip(old[drop:], new, strict=False):
        if before != now:
            break
        keep += 1
    return drop, keep


def _item(item: Any) -> Any:
    """An item of a list, short. A step is [number, start, compute, data, waiting, wire, codec, seal]."""
    if isinstance(item, ShownStep):
        split = item.split
        parts = (split.compute, split.data, split.waiting, split.wire, split.codec, split.seal)
        return [item.number, round(item.start, 4), *(round(part, 6) for part in parts)]
    return item


def _short(item: msgspec.Struct) -> Any:
    """A struct as plain values, with as many digits as people can see."""
    return _rounded(msgspec.to_builtins(item))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return value
