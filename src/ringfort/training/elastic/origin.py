"""`Origin`: the state with which a program could begin a branch of its run."""

from __future__ import annotations

from collections.abc import Callable

from ringfort.training.elastic.protocol import FOUNDING, Mark, Result
from ringfort.training.elastic.run_checkpoints import RunCheckpoints
from ringfort.training.elastic.state_tree import StateTree


class Origin:
    """The newest of three: the state in memory of a run that has ended, the newest checkpoint, and what the program
    began with."""

    def __init__(self, state: StateTree, checkpoints: RunCheckpoints, say: Callable[[str], None]) -> None:
        """Look for a checkpoint that fits the program's state."""
        checkpoints.look(state)
        self._state = state
        self._checkpoints = checkpoints
        self._say = say
        self._ended: Mark | None = None
        """Where the run was whose state is in memory, if that run has ended."""

    @property
    def step(self) -> int:
        """The step of that state; `FOUNDING` for what the program began with. `result` has this step."""
        return max(self._checkpoints.step, FOUNDING if self._ended is None else self._ended.step)

    def run_ended(self, mark: Mark) -> None:
        """The run of the state in memory has ended at `mark`. Its state is as good as a checkpoint."""
        self._ended = mark if mark.branch else None

    def has_copy(self) -> None:
        """The state in memory is that of another run now."""
        self._ended = None

    def has_founded(self) -> None:
        """A branch has begun with a state that is at least as new, which is in memory now."""
        self._ended = self._checkpoints.saved = None

    def result(self, branch: str) -> Result:
        """Return that state as the first result of `branch`."""
        ended, saved = self._ended, self._checkpoints.saved
        if ended is not None and (saved is None or ended.step >= saved.stamp.step):
            return Result(branch, ended.step, ended.cursor, self._state.image(), is_state=True)
        if saved is not None:
            image = saved.read()
            self._say(f"The run continues with {saved.path}")
            return Result(branch, saved.stamp.step, saved.stamp.cursor, image, is_state=True)
        return Result(branch, 0, 0, self._state.image(), is_state=True)
