"""`RunNote`: what the programs of a cluster tell each other about their runs, and what two of them differ in. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, Final

import msgspec

from ringfort.cluster.core.gossip import MAX_NOTE_BYTES
from ringfort.training.elastic.dealing import Data
from ringfort.training.elastic.protocol import Mark
from ringfort.training.elastic.state_tree import Manifest

TOPIC: Final = "elastic run"
_ROOM: Final = MAX_NOTE_BYTES - 2048
"""Bytes of a note for the shapes of the state. Of a larger state the first ones are told."""
USUAL: Final = {"nonfinite": "error", "clip_norm": "None", "scheduler_per": "step"}
"""The defaults of what all members must do alike with each step."""
_Text = Annotated[str, msgspec.Meta(max_length=512)]
_Number = Annotated[int, msgspec.Meta(ge=-1, lt=2**62)]


class RunNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program's run and where in it the program is."""

    name: _Text
    run: _Text
    """The name with a digest of the data and of the shapes of the state, and one of the rules for each step that are
    not `USUAL`: only programs with the same train together."""
    data: Annotated[dict[_Text, _Text], msgspec.Meta(max_length=16)]
    leaves: _Number
    """The number of arrays and values in the state."""
    shapes: dict[_Text, _Text]
    machine: _Text = ""
    branch: _Text = ""
    step: _Number = -1
    is_answer: bool = False
    is_copy: bool = False
    """It has copied the state, and is no member of the run yet."""

    @property
    def rank(self) -> tuple[int, str]:
        """Of two runs of one name, the one that is higher here stays."""
        return self.step, self.branch or self.run


_decoder: msgspec.msgpack.Decoder[RunNote] = msgspec.msgpack.Decoder(RunNote)


def note_of(name: str, data: Data, rules: Mapping[str, str], manifest: Manifest, machine: str) -> RunNote:
    """Return the note of a program that is in no branch yet. `rules` say what it does with each step, by the names in
    `USUAL`, as far as that is not usual: all members must do the same. (Checkpoints and votes do not depend on it: a
    run may be started again with another choice. So they are no part of the digest: see `Setup.vote_scope`.)"""
    own = {**USUAL, **rules}
    settings, shapes = {**data.settings, **own}, manifest.leaves()
    usual = {**data.settings, "nonfinite": USUAL["nonfinite"]}
    digest = blake2b(f"{usual} {sorted(shapes.items())}".encode(), digest_size=4).hexdigest()
    others = ",".join(value for rule, value in own.items() if value != USUAL[rule])
    mark = blake2b(others.encode(), digest_size=4).hexdigest() if others else ""  # so that a long name has room
    run = f"{name}/{digest}#{mark}" if mark else f"{name}/{digest}"
    told, room = dict[str, str](), _ROOM
    for path in sorted(shapes):
        room -= len(path.encode()) + len(shapes[path].encode()) + 8
        if room < 0 or max(len(path), len(shapes[path])) > 512:
            break
        told[path] = shapes[path]
    words = {key: str(value)[:512] for key, value in settings.items()}  # a seed may be a large number
    return RunNote(name, run, words, len(shapes), told, machine[:512])


def at(note: RunNote, mark: Mark, *, is_answer: bool, is_copy: bool = False) -> bytes:
    """Return the note of a program that is at `mark`, as bytes."""
    where = msgspec.structs.replace(note, branch=mark.branch, step=max(mark.step, -1))
    return msgspec.msgpack.encode(msgspec.structs.replace(where, is_answer=is_answer, is_copy=is_copy))


def read(body: bytes) -> RunNote | None:
    """Return the note in `body`; None if it is malformed, for example of another version."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def differences(mine: RunNote, theirs: RunNote) -> str:
    """Return in words what two runs of one name differ in; empty if they are one run."""
    if mine.run == theirs.run:
        return ""
    found = [
        f"{name} is {mine.data.get(name, 'missing')} here and {theirs.data.get(name, 'missing')} there"
        for name in mine.data | theirs.data
        if mine.data.get(name) != theirs.data.get(name)
    ]
    if mine.leaves != theirs.leaves:
        found.append(f"the state has {mine.leaves} arrays and values here and {theirs.leaves} there")
    limit = min((max(note.shapes, default="") for note in (mine, theirs) if len(note.shapes) < note.leaves), default="")
    for path in sorted(mine.shapes | theirs.shapes):
        if mine.shapes.get(path) != theirs.shapes.get(path) and (not limit or path <= limit):
            here, there = mine.shapes.get(path, "missing"), theirs.shapes.get(path, "missing")
            found.append(f"{path} is {here} here and {there} there")
            break
    return "; ".join(found) or "the state has other shapes"
